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


def test_a_causal_workload_has_as_many_keys_as_queries():
    with pytest.raises(ValueError, match="a causal workload of 3 queries must have as many keys, not 4"):
        Workload("fwd", 1, 6, 3, 16, True, "float16", kv_len=4)
    assert Workload("fwd", 1, 6, 3, 16, True, "float16", kv_len=3).causal


def test_kv_heads_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(ValueError, match="4 K/V heads do not divide 6 heads"):
        Workload("fwd", 1, 6, 64, 16, True, "float16", kv_heads=4)


def test_an_old_record_without_kv_heads_and_lengths_is_the_same_workload():
    workload = Workload("bwd", 2, 6, 100, 64, True, "float16")
    old = workload.record()
    del old["kv_heads"], old["value_dim"], old["kv_len"]
    assert Workload.of(old | {"impl": "v0_a", "ms": 1.0}) == workload
    other = Workload("bwd", 2, 6, 100, 64, False, "float16", kv_heads=3, value_dim=32, kv_len=7)
    assert Workload.of(other.record()) == other
    with pytest.raises(TypeError, match="seq_len"):
        Workload.of({name: value for name, value in old.items() if name != "seq_len"})


def test_inputs_are_the_same_each_time_differ_from_each_other_and_are_no_zeros():
    workload = Workload("fwd", 1, 2, 33, 16, False, "bfloat16")
    inputs = workload.inputs()
    assert [t.shape for t in inputs] == [(1, 2, 33, 16)] * 4
    assert all(t.dtype == torch.bfloat16 and t.float().std() > 0.5 for t in inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, workload.inputs(), strict=True))
    assert not torch.equal(inputs[0], inputs[1])


def test_inputs_have_the_shapes_of_their_heads_lengths_and_dimensions():
    q, k, v, grad_out = Workload("fwd", 2, 6, 33, 16, False, "float16", kv_heads=3, value_dim=32, kv_len=50).inputs()
    assert (q.shape, k.shape, v.shape, grad_out.shape) == ((2, 6, 33, 16), (2, 3, 50, 16), (2, 3, 50, 32), (2, 6, 33, 32))


def test_scores_have_the_standard_deviation_asked_for():
    q, k, *_ = Workload("fwd", 1, 2, 512, 64, False, "float32", score_std=4.0).inputs()
    assert (q @ k.mT / 8).std().item() == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize(("key", "head"), [(0, None), (37, None), (37, 1)])
@pytest.mark.parametrize("score_std", [1, 4])
def test_a_sink_has_its_score_for_every_query(score_std, key, head):
    workload = Workload(
        "fwd", 1, 4, 60, 64, False, "float32", kv_heads=2, score_std=score_std, sink=12.0, sink_key=key, sink_head=head
    )
    q, k, *_ = workload.inputs()
    scores = q @ k.repeat_interleave(2, 1).mT / 8
    with_sink = scores if head is None else scores[:, 2 * head : 2 * head + 2]
    torch.testing.assert_close(with_sink[..., key], torch.full_like(with_sink[..., key], 12.0))
    others = torch.cat([with_sink[..., :key], with_sink[..., key + 1 :]], -1)
    assert others.std().item() == pytest.approx(score_std, rel=0.1)
    if head is not None:
        assert scores[:, :2].std().item() == pytest.approx(score_std, rel=0.1)  # the other K/V head has no sink


@pytest.mark.parametrize("wrong", [{"sink_key": 64}, {"sink_head": 2}])
def test_a_sink_that_is_not_there_is_refused(wrong):
    with pytest.raises(ValueError, match="there is no key"):
        Workload("fwd", 1, 6, 64, 16, True, "float16", kv_heads=2, sink=12.0, **wrong)
