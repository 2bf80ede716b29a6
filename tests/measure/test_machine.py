"""Where a number is from, as far as the machine can tell."""

from common.measure import machine


def test_without_git_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.facts()["commit"] == "unknown"
