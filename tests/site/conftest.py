"""Build a small site once for all processes of a test run."""

import fcntl

import pytest

import stages

BUILT = [stages.resolve(name) for name in ("v3", "v25")]  # v25 has a model of an SM and changes one pass


@pytest.fixture(scope="session")
def site(tmp_path_factory, worker_id):
    """The folder with the start page, the documents and the pages of `BUILT`."""
    from common.site.pages import build  # imported here, because packages that `build` needs may be missing

    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "site" / "complete").exists():
            build(shared / "site", BUILT)
            (shared / "site" / "complete").touch()
    return shared / "site"
