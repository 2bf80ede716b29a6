"""Where Hopper's kernels can run."""

import pytest

from common.kernels import hopper


@pytest.mark.parametrize(
    ("arch", "reason"),
    [(None, None), (90, None), (80, "this one is sm_80"), (100, "one is sm_100"), (120, "sm_120"), ("gfx942", "one is gfx942")],
)
def test_other_gpus_are_named(monkeypatch, arch, reason):
    monkeypatch.setattr(hopper, "architecture", lambda: arch)
    said = hopper.unavailable()
    assert said is None if reason is None else reason in said
