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


OURS = {*"A B ABORT CONTINUE SINCE FROM NAME FILE GRID PROSE EXACT GAIN PYTHON STAGE TRACK ARGS GPUS TESTED".split()}
OURS |= {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL"}  # what an outer `make test` has set
CLEAN = {name: value for name, value in os.environ.items() if name not in OURS}


def make(directory, *arguments, **environment):
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, env=CLEAN | environment, check=False)


@pytest.mark.parametrize(("arguments", "missing", "example"), [
    (["diff", "A=v4"], "B", "make diff A=v3 B=v4"), (["diff", "A=", "B=v4"], "A", "make diff A=v3 B=v4"),
    (["reference", "GRID=x", "FILE= "], "FILE", "make reference GRID=forward-d64 FILE=results/forward-d64-h200.json"),
    (["carry", "CONTINUE="], "FROM", "make carry FROM=v3"),
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
    command = ["diff", "A=v4", "B=v5", "GAIN=yes", f"PYTHON={sys.executable}"]
    whole = make(ROOT, *command, PYTHONIOENCODING="ascii")
    assert whole.returncode == 0 and whole.stdout.isascii() and "speed: ?" in whole.stdout and not whole.stderr
    piped = ["bash", "-c", f"set -o pipefail; make --no-print-directory {' '.join(command)} | head -1"]
    first = subprocess.run(piped, cwd=ROOT, capture_output=True, text=True, check=False, env=CLEAN)
    assert first.returncode == 0 and first.stdout == whole.stdout.splitlines()[0] + "\n" and not first.stderr


@pytest.mark.parametrize(("asked", "chosen"), [("v3", "-k v3_ "), ("v3x_mine", "-k v3x_mine "), ("", '-m "not long" ')])
def test_the_tests_of_a_stage_are_chosen_by_its_name(asked, chosen):
    shown = make(ROOT, "--dry-run", "test", f"STAGE={asked}", f"PYTHON={sys.executable}").stdout
    assert chosen in shown and ("tests/stages tests/interpreter/test_deletions.py" in shown) == bool(asked)


def test_help_lists_every_target():
    listed = [
        line.split()[1] for line in make(ROOT, "help", PYTHON="python3").stdout.splitlines() if line.startswith("  make ")
    ]
    assert sorted(listed) == sorted(TARGETS)
