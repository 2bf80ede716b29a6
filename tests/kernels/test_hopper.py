"""Hopper kernels run on sm_90 and on the interpreter. On other GPUs, the error names a stage to use instead."""

import pytest
from cases import make_inputs

import stages
from common.entry import Unavailable
from common.kernels import hopper


@pytest.mark.parametrize(
    ("arch", "reason"),
    [(None, None), (90, None), (80, "this GPU is sm_80"), (100, "GPU is sm_100"), (120, "sm_120"), ("gfx942", "GPU is gfx942")],
)
def test_other_gpus_are_named(monkeypatch, arch, reason):
    monkeypatch.setattr(hopper, "architecture", lambda: arch)
    said = hopper.unavailable()
    assert said is None if reason is None else reason in said


HOPPER_ONLY = [name for name in stages.names() if hasattr(stages.load(name), "unavailable")]


@pytest.mark.parametrize(("arch", "version"), [(75, "v3"), (80, "v3"), (89, "v3"), (100, "v7"), (120, "v7"), ("gfx942", "v3")])
def test_the_stage_to_use_instead_is_named(monkeypatch, arch, version):
    for module in (hopper, stages):
        monkeypatch.setattr(module, "architecture", lambda: arch)
    expected = f"use stages.{stages.resolve(version)}"
    for name in HOPPER_ONLY if arch == 80 else HOPPER_ONLY[-1:]:
        stage = stages.load(name)
        q, k, v, grad_out = make_inputs(1, 1, 16)
        for call in (stage.forward, stage.backward):
            inputs = (q, k, v) if call is stage.forward else (grad_out, q, k, v, q, q[..., 0].float())
            with pytest.raises(Unavailable) as refused:
                call(*inputs, causal=False, scale=1.0)
            assert str(refused.value).startswith(f"stages.{name} needs a Hopper GPU") and str(refused.value).endswith(expected)


@pytest.mark.parametrize("arch", [None, 90])
def test_the_newest_stage_is_recommended_where_all_run(monkeypatch, arch):
    for module in (hopper, stages):
        monkeypatch.setattr(module, "architecture", lambda: arch)
    assert stages.recommended() == [name for name in stages.names() if not stages.is_dead_end(name)][-1]
