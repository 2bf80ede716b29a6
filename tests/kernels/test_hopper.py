"""Hopper kernels run on sm_90 and on the interpreter. On other GPUs, the error names a stage to use instead."""

import functools

import pytest
from cases import make_inputs, needs_hopper

import stages
from common.entry import Unavailable
from common.kernels import hopper
from common.runtime import INTERPRETED, Device, interpreted_as

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a GPU has its own architecture")
NEWEST = stages.newest()


@pytest.mark.parametrize(("arch", "instead"), [(75, "v3"), (80, "v3"), (100, "v6"), (120, "v6"), ("gfx942", "v3")])
def test_other_gpus_and_the_stage_to_use_instead_are_named(monkeypatch, arch, instead):
    monkeypatch.setattr(stages, "recommended", functools.cache(stages.recommended))  # it takes long, and each call asks
    q, k, v, grad_out = make_inputs(1, 1, 16)
    reason = f"needs a Hopper GPU (sm_90), and this GPU is {arch if arch == 'gfx942' else f'sm_{arch}'}"
    with interpreted_as(Device(architecture=arch)):
        for name in filter(needs_hopper, stages.names()) if arch == 80 else [NEWEST]:
            stage = stages.load(name)
            calls = {"forward": (q, k, v), "backward": (grad_out, q, k, v, q, q[..., 0].float())}
            if "require_hopper" not in stages.source(name, "backward.py"):
                del calls["backward"]  # it is in Triton, and runs on other GPUs; its stage's forward does not
            for pass_, inputs in calls.items():
                with pytest.raises(Unavailable) as error:
                    getattr(stage, pass_)(*inputs, causal=False, scale=1.0)
                needing = stages.home(name, pass_)
                assert str(error.value) == f"stages.{needing} {reason}; use stages.{stages.resolve(instead)}"
    assert hopper.unavailable() is None, "the interpreter is no other GPU any more"


@pytest.mark.parametrize("arch", [None, 90])
def test_the_newest_stage_is_recommended_where_all_run(arch):
    with interpreted_as(Device(architecture=arch)):
        assert hopper.unavailable() is None and stages.recommended() == NEWEST


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_uses_of_a_ring_take_slots_in_turn_and_each_round_changes_the_phase(slots):
    found = [hopper.slot_and_phase.fn(n, slots) for n in range(4 * slots)]
    assert found == [(slot, phase) for phase in (0, 1, 0, 1) for slot in range(slots)]
