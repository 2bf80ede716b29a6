"""Build the site once for all processes of a test run."""

import fcntl

import pytest

import stages

RECORDED = [*(stages.resolve(name) for name in ("v0", "v3", "v7", "v25")), stages.names()[-1]]


@pytest.fixture(scope="session")
def site(tmp_path_factory, worker_id):
    """The folder with all pages. Only some pages have traces. `test_everything_is_built_in_time` builds all traces."""
    from common.site.pages import build  # imported here, because packages that `build` needs may be missing

    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "site" / "complete").exists():
            build(shared / "site", stages.names(), RECORDED)
            (shared / "site" / "complete").touch()
    return shared / "site"
