"""Baselines have right results and FLOPs for shared K/V heads. A library may refuse a workload."""

import pytest
import torch

from common.entry import Unavailable
from common.measure.baselines import BASELINES, refusal, timed_call
from common.measure.counter import count
from common.measure.workloads import Workload
from common.runtime import DEVICE


@pytest.mark.parametrize("impl", BASELINES)
def test_query_heads_share_kv_heads_in_groups(impl):
    """Shared K/V heads give the same results as a copy of the K/V head for each query head."""
    shape = (1, 4, 128, 64, True, "float16")
    q, k, v, grad_out = inputs = Workload("fwd", *shape, kv_heads=2).inputs()
    every = q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), grad_out
    out, expected = (timed_call(impl, Workload("fwd", *shape), tensors)() for tensors in (inputs, every))
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
    dq, dk, dv = timed_call(impl, Workload("bwd", *shape, kv_heads=2), inputs)()
    every_dq, every_dk, every_dv = timed_call(impl, Workload("bwd", *shape), every)()
    torch.testing.assert_close(dq, every_dq, atol=2e-3, rtol=2e-3)
    for shared, own in ((dk, every_dk), (dv, every_dv)):
        torch.testing.assert_close(shared.float(), own.float().unflatten(1, (2, 2)).sum(2), atol=5e-3, rtol=5e-3)


@pytest.mark.skipif(DEVICE == "cuda", reason="calls are counted on the CPU")
@pytest.mark.parametrize("value_dim", [32, 64])
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_flops_of_sdpa_agree_with_the_workload(pass_, value_dim):
    """The counted FLOPs equal the workload's. But for Dv = 64, SDPA's backward reads the scores that its forward has kept."""
    workload = Workload(pass_, 1, 4, 64, 32, False, "float32", kv_heads=2, value_dim=value_dim)
    call = timed_call("sdpa", workload, workload.inputs())
    recomputed = 0 if value_dim == 32 or pass_ == "fwd" else 2 * 4 * 64**2 * 32
    assert count(call).flops == workload.flops - recomputed


@pytest.mark.parametrize(("impl", "error", "said"), [
    ("sdpa-flash", RuntimeError("No available kernel. Aborting execution."),
     "this backend of SDPA does not support this workload"),
    ("sdpa-cudnn", RuntimeError("cuDNN Frontend error: no plan"), "cuDNN Frontend error: no plan"),
    ("sdpa-cudnn", RuntimeError("an illegal memory access"), None),
    ("flash-3", RuntimeError("V headdim"), "V headdim"), ("flash-4", AssertionError("head_dim_v"), "head_dim_v"),
    ("flash-4", TypeError("missing argument"), None), ("v7_some", RuntimeError("No available kernel"), None),
    ("v7_some", Unavailable("needs sm_80"), "needs sm_80"),
])  # fmt: skip
def test_refusals_and_failures_are_told_apart(impl, error, said):
    assert refusal(impl, error) == said
