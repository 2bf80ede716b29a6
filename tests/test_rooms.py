"""Packages import only in one direction, and all files have one format."""

import ast
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
ROOMS = ("common/**/*.py", "stages/**/*.py", "bench.py", "examples/**/*.py")
ORDER = (  # a package imports only from itself and from packages before it in this list
    "common.interpreter", "common.runtime", "common.layout", "common.launching", "common.recording", "common.entry",
    "common.checks", "common.eight_bits", "common.operator", "common.kernels", "common.ring", "stages", "common.measure",
    "common.show", "common.site", "bench", "examples",
)  # fmt: skip


def rank(module):
    """Return the place of a dotted name in ORDER. Return None for other projects, and for the package `common` itself."""
    return next((place for place, room in enumerate(ORDER) if f"{module}.".startswith(f"{room}.")), None)


def imported(path):
    """Return the dotted names of all imports in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_run_one_way():
    for path in sorted(path for room in ROOMS for path in ROOT.glob(room)):
        mine = rank(".".join(path.relative_to(ROOT).with_suffix("").parts))
        back = [name for name in imported(path) if mine is not None and (rank(name) or 0) > mine]
        assert not back, path


def test_every_module_has_a_room():
    rooms = {room.removeprefix("common.") for room in ORDER if room.startswith("common.")}
    assert {path.stem for path in ROOT.glob("common/*") if path.stem not in ("__init__", "__pycache__")} == rooms


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_is_clean(command):
    ruff = shutil.which("ruff", path=pathlib.Path(sys.executable).parent) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    run = subprocess.run([ruff, *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
