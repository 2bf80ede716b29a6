"""Build a small site once for all processes of a test run."""

import fcntl

import pytest
from built import FIRST, LAST


@pytest.fixture(scope="session")
def site(tmp_path_factory, worker_id):
    """The folder with the start page, the documents and the pages of `FIRST` and `LAST`."""
    from common.site.pages import build  # imported here, because packages that `build` needs may be missing

    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "site" / "complete").exists():
            build(shared / "site", [FIRST, LAST])
            (shared / "site" / "complete").touch()
    return shared / "site"
