"""The measured workloads have the right FLOPs, labels, records and inputs."""

import pytest
import torch

from common.measure.workloads import Workload


@pytest.mark.parametrize(("pass_", "dims"), [("fwd", 64 + 16), ("bwd", 3 * 64 + 2 * 16), ("fwd+bwd", 4 * 64 + 3 * 16)])
def test_flops_count_both_head_dimensions_all_query_heads_and_each_query_with_each_key(pass_, dims):
    """With a causal mask, half of the FLOPs count."""
    shared = {"kv_heads": 2, "value_dim": 16}
    assert Workload(pass_, 2, 6, 3, 64, False, "float16", kv_len=100, **shared).flops == 2 * 2 * 6 * 3 * 100 * dims
    assert Workload(pass_, 2, 6, 100, 64, True, "float16", **shared).flops == 2 * 6 * 100**2 * dims


def test_usual_heads_lengths_and_dimensions_are_numbers_and_not_in_the_label():
    usual = Workload("fwd", 2, 6, 100, 64, True, "float16")
    assert usual == Workload("fwd", 2, 6, 100, 64, True, "float16", kv_heads=6, value_dim=64, kv_len=100)
    assert [usual.record()[name] for name in ("kv_heads", "value_dim", "kv_len")] == [6, 64, 100]
    assert usual.label == "fwd B=2 H=6 S=100 D=64 causal float16"
    others = {"kv_heads": 2, "value_dim": 128, "kv_len": 100, "sink": 12.0, "sink_key": 7, "sink_head": 1}
    other = Workload("fwd", 2, 6, 1, 64, False, "float16", **others)
    assert other.label == "fwd B=2 H=6 Hkv=2 S=1 Sk=100 D=64 Dv=128 full float16 sink=12@7 in head 1"


@pytest.mark.parametrize(("wrong", "message"), [
    ({"kv_len": 4}, "a causal workload of 64 queries must have as many keys, not 4"), ({"sink_key": 64}, "there is no key"),
    ({"kv_heads": 4}, "4 K/V heads do not divide 6 heads"), ({"kv_heads": 2, "sink_head": 2}, "there is no key"),
])  # fmt: skip
def test_a_workload_that_does_not_exist_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Workload("fwd", 1, 6, 64, 16, True, "float16", **wrong)


def test_an_old_record_without_kv_heads_and_lengths_is_the_same_workload():
    workload = Workload("bwd", 2, 6, 100, 64, True, "float16")
    old = workload.record()
    del old["kv_heads"], old["value_dim"], old["kv_len"]
    assert Workload.of(old | {"impl": "v0_a", "ms": 1.0}) == workload
    other = Workload("bwd", 2, 6, 100, 64, False, "float16", kv_heads=3, value_dim=32, kv_len=7)
    assert Workload.of(other.record()) == other


def test_inputs_are_the_same_each_time_and_have_the_shapes_and_scores_asked_for():
    shape = {"kv_heads": 3, "value_dim": 32, "kv_len": 50}
    workload = Workload("fwd", 2, 6, 33, 16, False, "bfloat16", score_std=4.0, **shape)
    inputs = q, k, v, grad_out = workload.inputs()
    assert (q.shape, k.shape, v.shape, grad_out.shape) == ((2, 6, 33, 16), (2, 3, 50, 16), (2, 3, 50, 32), (2, 6, 33, 32))
    assert all(tensor.dtype == torch.bfloat16 and tensor.float().std() > 0.5 for tensor in inputs)
    assert all(map(torch.equal, inputs, workload.inputs()))
    assert (q.float() @ k.repeat_interleave(2, 1).float().mT / 4).std().item() == pytest.approx(4, rel=0.1)


def test_a_sink_has_its_score_for_every_query():
    shape = {"kv_heads": 2, "score_std": 4, "sink": 12.0, "sink_key": 37, "sink_head": 1}
    q, k, *_ = Workload("fwd", 1, 4, 60, 64, False, "float32", **shape).inputs()
    scores = q @ k.repeat_interleave(2, 1).mT / 8
    torch.testing.assert_close(scores[:, 2:, :, 37], torch.full((1, 2, 60), 12.0).to(scores))
    others = torch.cat([scores[..., :37], scores[..., 38:]], -1)
    assert others.std().item() == pytest.approx(4, rel=0.1) == scores[:, :2].std().item()
