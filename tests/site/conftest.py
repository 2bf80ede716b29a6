"""The site, built once for all processes of a test run."""

import fcntl

import pytest

import stages


@pytest.fixture(scope="session")
def site(tmp_path_factory, worker_id):
    """The folder with all pages."""
    from common.site.pages import build  # needs packages that may not be installed

    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "site" / "complete").exists():
            build(shared / "site", stages.names())
            (shared / "site" / "complete").touch()
    return shared / "site"
