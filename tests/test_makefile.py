"""The Makefile asks for the variables that a target needs, and sets up the right Python."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


OURS = {*"A B ABORT CONTINUE SINCE FROM NAME FILE GRID PROSE PYTHON STAGE ARGS GPUS".split()}
OURS |= {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL"}


def make(directory, *arguments, **environment):
    """Run make without the variables that an outer `make test` has set."""
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments], cwd=directory, capture_output=True, text=True, env=clean | environment,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("arguments", "missing", "example"), [
    (["diff", "A=v4"], "B", "make diff A=v3 B=v4"), (["diff", "A=", "B=v4"], "A", "make diff A=v3 B=v4"),
    (["reference", "GRID=x", "FILE= "], "FILE", "make reference GRID=forward-d64 FILE=results/forward-d64-h100.json"),
    (["carry", "CONTINUE="], "FROM", "make carry FROM=v11"),
])  # fmt: skip
def test_a_missing_variable_is_named_before_anything_is_installed(arguments, missing, example, tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    done = make(tmp_path, *arguments)  # without PYTHON, make would create the environment first
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count("\n") == 1 and f"{missing}=… is missing, as in: {example}." in done.stderr
    assert not (tmp_path / ".venv").exists()


TARGETS = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()


@pytest.mark.parametrize("target", ["test", "example"])
def test_examples_alone_install_what_examples_need(target, tmp_path):
    (tmp_path / "examples").mkdir()
    for name in ("Makefile", "requirements.txt", "examples/requirements.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    assert ("examples/requirements.txt" in make(tmp_path, "--dry-run", target).stdout) == (target == "example")
    done = make(tmp_path, "--dry-run", target, f"PYTHON={sys.executable}")
    assert done.returncode == 0 and "pip" not in done.stdout


def test_packages_that_an_interpreter_lacks_are_named(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    done = make(ROOT, "story", f"PYTHON={bare}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout
    assert f"{bare} lacks torch triton numpy" in done.stderr
    assert f"run {bare} -m pip install --requirement requirements.txt" in done.stderr


@pytest.mark.long
def test_output_goes_into_any_encoding_and_to_readers_that_stop_early():
    target = ["diff", "A=v4", "B=v5"]
    whole = make(ROOT, *target, f"PYTHON={sys.executable}", PYTHONIOENCODING="ascii")
    assert whole.returncode == 0 and whole.stdout.isascii() and "speed: ?" in whole.stdout and not whole.stderr
    command = " ".join(["make", "--no-print-directory", *target, f"PYTHON={sys.executable}", "| head -1"])
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    command = ["bash", "-c", f"set -o pipefail; {command}"]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=clean)
    assert first.returncode == 0 and first.stdout == whole.stdout.splitlines()[0] + "\n" and not first.stderr


def test_help_lists_every_target():
    listed = [
        line.split()[1] for line in make(ROOT, "help", PYTHON="python3").stdout.splitlines() if line.startswith("  make ")
    ]
    assert sorted(listed) == sorted(TARGETS)


FAKE = """#!{python}
import sys
if sys.argv[1] == "-c":
    sys.version_info = {version}
    exec(sys.argv[2])
elif sys.argv[1] == "--version":
    print("Python", *{version}[:2])
else:  # -m venv .venv: make an environment whose python does nothing
    import os, pathlib
    pathlib.Path(".venv/bin").mkdir(parents=True)
    os.symlink("/bin/true", ".venv/bin/python")
"""


@pytest.mark.parametrize(("python3", "other", "found"), [
    ((3, 10), None, False), ((3, 15), None, False), ((3, 14), None, True), ((3, 10), (3, 13), True),
])  # fmt: skip
def test_environment_takes_the_versions_that_all_packages_have_wheels_for(python3, other, found, tmp_path):
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    commands = tmp_path / "bin"
    commands.mkdir()
    fakes = {"python3": python3} | ({f"python{other[0]}.{other[1]}": other} if other else {})
    for name, version in fakes.items():
        (commands / name).write_text(FAKE.format(python=sys.executable, version=(*version, 0)))
        (commands / name).chmod(0o755)
    for name in ("sh", "touch", "make"):
        (commands / name).symlink_to(shutil.which(name))
    done = make(tmp_path, ".venv/installed", PATH=str(commands))
    assert (done.returncode == 0) == found == (tmp_path / ".venv" / "installed").exists(), done.stdout + done.stderr
    if not found:
        assert f"Python 3.11 to 3.14 is needed, and python3 is Python {python3[0]} {python3[1]}" in done.stderr
