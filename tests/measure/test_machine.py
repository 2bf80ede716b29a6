"""A saved measurement names the commit of its code."""

import re
import shutil

import pytest

from common.measure import machine


def test_commit_is_the_repository_s():
    if shutil.which("git") is None or machine.facts()["commit"] == "unknown":
        pytest.skip("this is no git checkout")
    assert re.fullmatch(r"[0-9a-f]{40}(\+dirty)?", machine.facts()["commit"])


def test_commit_is_unknown_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert machine.facts()["commit"] == "unknown"


def test_commit_is_unknown_outside_of_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    assert machine.facts()["commit"] == "unknown"
