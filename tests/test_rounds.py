"""`make test` runs pytest once without a GPU, and twice with a GPU. A stand-in for Python records the runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

PYTHON = f"""#!{sys.executable}
import os, sys
if sys.argv[1] == "-c":
    sys.exit(("xdist" if "import xdist" in sys.argv[2] else "gpu") not in os.environ["THERE"])
assert sys.argv[1:3] == ["-m", "pytest"]
with open(os.environ["LOG"], "a") as log:
    print(*sys.argv[3:], sep="|", file=log)
marks = sys.argv[4]
sys.exit(int(os.environ["ALONE" if "alone" in marks and "not alone" not in marks else "OTHERS"]))
"""


@pytest.fixture
def make(tmp_path):
    """Run a target. Return its exit status, and the arguments of each run of pytest."""
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run(target, arguments="", there="gpu xdist", others=0, alone=0):
        log.write_text("")
        environment = {"THERE": there, "LOG": str(log), "OTHERS": str(others), "ALONE": str(alone)}
        environment = {
            name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")
        } | environment
        done = subprocess.run(
            ["make", target, f"PYTHON={python}", f"ARGS={arguments}"],
            cwd=Path(__file__).parents[1], env=environment, capture_output=True, check=False,
        )  # fmt: skip
        return done.returncode, log.read_text().splitlines()

    return run


SPREAD = "--numprocesses=auto|--dist=worksteal"


def test_without_a_gpu_there_is_one_round(make):
    assert make("test", "-k x", there="xdist") == (0, [f"-m|not long|{SPREAD}|-k|x"])
    assert make("test-long", there="xdist") == (0, [f"-m||{SPREAD}"])
    assert make("test", there="", others=1) == (2, ["-m|not long"])


def test_on_a_gpu_some_run_alone_after_the_others(make):
    assert make("test", "-k x") == (0, [f"-m|not long and not alone|{SPREAD}|-k|x", "-m|not long and alone|-k|x"])
    assert make("test-long", there="gpu") == (0, ["-m|not alone", "-m|alone"])


@pytest.mark.parametrize(
    ("others", "alone", "fails"), [(0, 5, False), (5, 0, False), (5, 5, True), (1, 0, True), (0, 1, True), (1, 5, True)]
)
def test_either_round_can_fail_and_one_may_be_empty(make, others, alone, fails):
    status, rounds = make("test", others=others, alone=alone)
    assert (status != 0) == fails and len(rounds) == 2
