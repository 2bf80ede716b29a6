"""A saved measurement names the commit of its code."""

import re
import shutil
import subprocess

import pytest

from common.measure import machine


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_run_names_the_commit_and_whether_its_code_was_changed(monkeypatch, tmp_path):
    for folder in ("common", "results"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text("old")
    git = ["git", "-C", tmp_path, "-c", "user.name=name", "-c", "user.email=email"]
    for arguments in (["init"], ["add", "."], ["commit", "--message=first"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "common" / "machine.py"))
    clean = machine.facts()["commit"]
    assert re.fullmatch("[0-9a-f]{40}", clean)
    (tmp_path / "results" / "file").write_text("new")
    assert machine.facts()["commit"] == clean
    (tmp_path / "common" / "file").write_text("new")
    assert machine.facts()["commit"] == f"{clean}+dirty"


def test_commit_is_unknown_outside_of_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    assert machine.facts()["commit"] == "unknown"
