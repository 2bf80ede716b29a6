"""What is measured: the papers' workloads, their FLOPs and inputs."""

import pytest
import torch

from common.measure.workloads import Workload


@pytest.mark.parametrize(
    ("pass_", "causal", "flops"),
    [
        ("fwd", False, 4 * 2 * 3 * 100 * 100 * 64),
        ("fwd", True, 2 * 2 * 3 * 100 * 100 * 64),
        ("bwd", False, 10 * 2 * 3 * 100 * 100 * 64),
        ("fwd+bwd", True, 7 * 2 * 3 * 100 * 100 * 64),
    ],
)
def test_flops(pass_, causal, flops):
    assert Workload(pass_, 2, 3, 100, 64, causal, "float16").flops == flops


def test_inputs_are_the_same_each_time_differ_from_each_other_and_are_no_zeros():
    workload = Workload("fwd", 1, 2, 33, 16, False, "bfloat16")
    inputs = workload.inputs()
    assert [t.shape for t in inputs] == [(1, 2, 33, 16)] * 4
    assert all(t.dtype == torch.bfloat16 and t.float().std() > 0.5 for t in inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, workload.inputs(), strict=True))
    assert not torch.equal(inputs[0], inputs[1])


def test_scores_have_the_standard_deviation_asked_for():
    q, k, *_ = Workload("fwd", 1, 2, 512, 64, False, "float32", score_std=4.0).inputs()
    assert (q @ k.mT / 8).std().item() == pytest.approx(4, rel=0.05)
