"""Every test that takes `stage` runs once for each stage found."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch and numpy: on problems this small more threads only wait

import pytest  # noqa: E402
import torch  # noqa: E402

import stages  # noqa: E402
from common import tuning  # noqa: E402


def pytest_collection_modifyitems(items):
    """First the tests that catch a write out of bounds: in any other it may end the process, and with it the report."""
    items.sort(key=lambda item: item.path.name != "test_memory.py")


@pytest.fixture(params=stages.names())
def stage(request):
    """A stage's module: `attention`, `forward`, `backward`."""
    return stages.load(request.param)


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture
def real_tuning():
    """Asked for by a test in which the autotuner compiles and times its configurations, as it does for a user."""


@pytest.fixture(autouse=True)
def _quick_tuning(request, monkeypatch):
    """On a GPU too, the autotuner takes its first sensible configuration: the tests make hundreds of problems to tune for.

    That every configuration is right, the tests of the autotuner show one by one.
    """
    if "real_tuning" not in request.fixturenames:
        monkeypatch.setattr(tuning, "INTERPRETED", True)
        monkeypatch.setattr("triton.runtime.autotuner.Autotuner._bench", lambda self, *args, **kwargs: [0.0, 0.0, 0.0])
