"""Ring attention over a sequence that several processes share equals one process's attention over the whole sequence."""

import functools
import itertools
import math
import os
import types

import pytest
import torch
import torch.distributed as dist
from cases import assert_same_bits, check, make_inputs
from ranks import MOST, Ranks
from torch.utils.checkpoint import checkpoint

import stages
from common import ring
from common.measure.reference import assert_correct, plain, truth
from common.ring import ring_attention, shard, unshard
from common.runtime import DEVICE

SIZES = range(2, MOST + 1)
NEWEST = [name for name in stages.names() if not stages.is_dead_end(name)][-1]

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")


def on(size):
    """Return a number of ranks as a test's parameter. The test is skipped if the machine has fewer GPUs."""
    return pytest.param(size, marks=pytest.mark.skipif(size > max(MOST, 2), reason=f"needs {size} GPUs"))


sizes = pytest.mark.parametrize("size", [*map(on, SIZES)])


# --- Functions that the ranks run. They take the group and the test's arguments.


def by_ring(stage, q, k, v, grad_out, *, causal, scale, group):
    """Return all results of ring attention with a stage. Each rank returns them for the whole sequence."""
    q, k, v, grad_out = (shard(tensor, 2, group) for tensor in (q, k, v, grad_out))
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out, lse = ring_attention(stage, *leaves, group=group, causal=causal, scale=scale, return_lse=True)
    results = out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad_out)
    return {name: unshard(result, 2, group) for name, result in zip(("out", "lse", "dq", "dk", "dv"), results, strict=True)}


def as_one(group, name, causal, seq, dtype, shape, again=False):
    """Compare ring attention's results with float64. With `again`, a second call must give equal bits."""
    stage, problem = stages.load(name), make_inputs(seq, seq, dtype=dtype, **shape)
    run = functools.partial(by_ring, group=group)
    first = check(stage, *problem, causal=causal, run=run)
    if again:
        second = check(stage, *problem, causal=causal, run=run)
        assert_same_bits(first, second, getattr(stage, "UNORDERED", ()))


def gradients_with_lse(group, causal, uses):
    """Compare gradients with float64.

    For each rank, `uses` says whether the gradients come through `out`, through the LSE, or through both.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    q, k, v, grad_out = make_inputs(4 * size, 4 * size, dtype=torch.float32)
    grad_lse = torch.randn(q.shape[:3]).to(q)
    of_out, of_lse = torch.ones(2, size * 4, device=q.device)
    for other, use in enumerate(uses):  # the rows of rank `other`
        rows = torch.cat([torch.arange(4 * size).chunk(2 * size)[place] for place in (other, 2 * size - 1 - other)])
        of_out[rows], of_lse[rows] = float("out" in use), float("lse" in use)
    grad_out, grad_lse = grad_out * of_out[:, None], grad_lse * of_lse
    problem = {"causal": causal, "scale": q.shape[-1] ** -0.5, "grad_out": grad_out, "grad_lse": grad_lse}

    parts = [shard(tensor, 2, group).requires_grad_() for tensor in (q, k, v)]
    out, lse = ring_attention(stages.load("v3"), *parts, group=group, causal=causal, return_lse=True)
    every = {"out": (out, shard(grad_out, 2, group)), "lse": (lse, shard(grad_lse, 2, group))}
    used = [every[name] for name in uses[rank]]
    got = torch.autograd.grad([result for result, _ in used], parts, [gradient for _, gradient in used])
    got = {name: unshard(part, 2, group) for name, part in zip(("dq", "dk", "dv"), got, strict=True)}
    assert_correct(got, truth(q, k, v, **problem), plain(q, k, v, **problem))


def attend(group, by_rank):
    """Run a small forward. `by_rank` changes shapes, a dtype, or options on some ranks."""
    other = dict(by_rank.get(dist.get_rank(group), {}))
    shape, kv_heads = other.pop("shape", (1, 2, 6, 16)), other.pop("kv_heads", 2)
    q = torch.ones(shape, dtype=other.pop("dtype", torch.float16), device=DEVICE)
    k = torch.ones(shape[0], kv_heads, *shape[2:], dtype=q.dtype, device=DEVICE)
    q.requires_grad_(other.pop("requires_grad", False))
    stage = stages.load(other.pop("stage", "v3"))
    return tuple(ring_attention(stage, q, k, k, group=group, **{"causal": True, **other})[0, 0, 0].tolist())


def attend_often(group, by_rank, calls):
    for _ in range(calls):
        attend(group, {})
    return attend(group, by_rank)


def unshard_unlike(group):
    return unshard(torch.ones(1, 2 + 2 * dist.get_rank(group), device=DEVICE), 1, group)


def unlike_lengths(group):
    """Without a mask, a rank may have more keys than queries. Both numbers may be odd."""

    def run(stage, *inputs, causal, scale):
        parts = [tensor.chunk(size, 2)[dist.get_rank(group)].contiguous() for tensor in inputs]
        leaves = [tensor.requires_grad_() for tensor in parts[:3]]
        out, lse = ring_attention(stage, *leaves, group=group, causal=causal, scale=scale, return_lse=True)
        results = out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, parts[3])
        return {name: gathered(result) for name, result in zip(("out", "lse", "dq", "dk", "dv"), results, strict=True)}

    def gathered(part):
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, 2)

    size = dist.get_world_size(group)
    check(stages.load("v3"), *make_inputs(3 * size, 5 * size), causal=False, run=run)


def rounds_and_layouts(group):
    """`unshard` undoes `shard` along each dimension. A rank gets the chunks that the docstring of `shard` names."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for dim in (0, 1, -1):
        whole = torch.arange(3 * (4 * size) ** 2, device=DEVICE).view(4 * size, 12 * size).to(torch.float32)
        assert torch.equal(unshard(shard(whole, dim, group), dim, group), whole)
    part = shard(torch.arange(2 * size), 0, group)
    assert part.tolist() == [rank, 2 * size - 1 - rank]
    whole = torch.ones(2 * size, requires_grad=True)
    shard(whole, 0, group).sum().backward()
    assert whole.grad.sum() == 2


def with_checkpoint_and_autocast(group):
    """With checkpointing, gradients have equal bits. Under autocast, results have autocast's dtype."""
    q, k, v, grad_out = (shard(t, 2, group) for t in make_inputs(16, 16, dtype=torch.float32))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    attention = functools.partial(ring_attention, stages.load("v3"), group=group, causal=True)
    plain = torch.autograd.grad(attention(*leaves), leaves, grad_out)
    again = torch.autograd.grad(checkpoint(attention, *leaves, use_reentrant=False), leaves, grad_out)
    assert all(map(torch.equal, plain, again))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert attention(*leaves).dtype == torch.bfloat16


def end_at_step(group, who, backward):
    """Run a forward or a backward during which rank `who` ends."""

    def forward(q, k, v, *, causal, scale):
        if dist.get_rank(group) == who and not causal and not backward:
            os._exit(1)
        return torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=torch.float32)

    def gradients(grad_out, q, k, v, out, lse, *, causal, scale):
        if dist.get_rank(group) == who and not causal:
            os._exit(1)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    stage = types.SimpleNamespace(__name__="ends", forward=forward, backward=gradients)
    q = torch.ones(1, 1, 8, 16, device=DEVICE, requires_grad=True)
    ring_attention(stage, q, q, q, group=group, causal=True).sum().backward()
    return q.grad[0, 0, 0, 0].item()


def come_late(group, who):
    if dist.get_rank(group) != who:
        attend(group, {})


# --- The tests.


SHAPES = {"own heads": {"batch": 1, "heads": 2}, "shared heads": {"batch": 2, "heads": 4, "kv_heads": 2, "value_dim": 16}}


@sizes
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_parts_together_are_the_whole(ranks, size, causal):
    ranks.call(size, as_one, "v3", causal, 2 * size * 9, torch.float16, SHAPES["shared heads"], size == 3)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_newest_stage(ranks, causal):
    if reason := stages.unavailable(NEWEST):
        pytest.skip(f"{NEWEST} {reason}")
    shape = {"batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 16}
    ranks.call(2, as_one, NEWEST, causal, 2 * 2 * 9, torch.bfloat16, shape, True)


@pytest.mark.long
@sizes
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_stage(ranks, size, causal, dtype, stage):
    name = stage.__name__.rpartition(".")[2]
    for shape in SHAPES.values():
        ranks.call(size, as_one, name, causal, 2 * size * 33, dtype, shape, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes(ranks, dtype):
    ranks.call(2, as_one, "v3", True, 36, dtype, SHAPES["own heads"])


def test_one_rank_is_the_stage_alone(ranks):
    ranks.call(1, as_one, "v3", True, 37, torch.float16, SHAPES["shared heads"])


BOTH = ("out", "lse")


@pytest.mark.parametrize(("size", "causal", "uses"), [
    (3, True, [BOTH, BOTH, BOTH]), (2, False, [BOTH, BOTH]), (2, True, [("lse",), ("lse",)]), (2, True, [("out",), ("lse",)]),
    (2, True, [("out",), BOTH]),
])  # fmt: skip
def test_gradients_of_the_log_sum_exp(ranks, size, causal, uses):
    if size > MOST:
        pytest.skip(f"needs {size} GPUs")
    ranks.call(size, gradients_with_lse, causal, uses)


@sizes
def test_a_sequence_comes_back_as_it_was(ranks, size):
    ranks.call(size, rounds_and_layouts)


def test_queries_and_keys_may_differ_without_a_mask(ranks):
    ranks.call(2, unlike_lengths)


def test_checkpointing_and_autocast(ranks):
    ranks.call(2, with_checkpoint_and_autocast)


DIFFERENT = {
    "length": ({"shape": (1, 2, 8, 16)}, r"q \(1, 2, 8, 16\)"), "batch": ({"shape": (2, 2, 6, 16)}, r"q \(2, 2, 6, 16\)"),
    "head_dim": ({"shape": (1, 2, 6, 32)}, r"q \(1, 2, 6, 32\)"), "heads": ({"kv_heads": 1}, r"k \(1, 1, 6, 16\)"),
    "dtype": ({"dtype": torch.bfloat16}, "torch.bfloat16"), "causal": ({"causal": False}, "causal=False"),
    "scale": ({"scale": 0.5}, "scale=0.5"), "return_lse": ({"return_lse": True}, "return_lse=True"),
    "stage": ({"stage": "v2"}, "v2_"), "gradients": ({"requires_grad": True}, "gradients of q"),
}  # fmt: skip


@pytest.mark.parametrize(("other", "message"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_ranks_with_different_arguments_all_raise(ranks, other, message):
    for outcome in ranks.outcomes(2, attend, {1: other}):
        assert isinstance(outcome, ValueError), outcome
        with pytest.raises(ValueError, match=rf"ranks of the group differ: rank 0 has v3.*; rank 1 has .*{message}"):
            raise outcome
    assert len(set(ranks.call(2, attend, {}))) == 1, "a message of the failed call was left over"


def test_a_rank_that_differs_after_many_calls(ranks):
    assert all(isinstance(outcome, ValueError) for outcome in ranks.outcomes(MOST, attend_often, {MOST - 1: {"scale": 1.0}}, 5))


WRONG = {
    "dtype": ({"dtype": torch.float64}, TypeError), "odd length": ({"shape": (1, 2, 5, 16)}, ValueError),
    "causal": ({"causal": "bottom-right"}, TypeError), "scale": ({"scale": math.nan}, ValueError),
    "heads": ({"kv_heads": 3}, ValueError), "return_lse": ({"return_lse": 1}, TypeError),
}  # fmt: skip


@pytest.mark.parametrize(("other", "kind"), WRONG.values(), ids=WRONG.keys())
def test_an_error_on_one_rank_ends_the_call_on_all(ranks, other, kind):
    fine, wrong = ranks.outcomes(2, attend, {1: other})
    assert type(wrong) is kind
    assert type(fine) is ValueError and f"rank 1 has {kind.__name__}: {wrong}" in str(fine)
    assert all(type(outcome) is kind for outcome in ranks.outcomes(2, attend, {0: other, 1: other}))


def test_unlike_parts_are_no_sequence(ranks):
    for outcome in ranks.outcomes(2, unshard_unlike):
        assert isinstance(outcome, ValueError) and "ranks of the group differ" in str(outcome)


@pytest.mark.parametrize(("function", "message"), [
    (functools.partial(shard, torch.ones(1, 2, 6, 16), 2), r"2 × 2 \(two chunks for each rank\), got 6"),
    (functools.partial(unshard, torch.ones(1, 2, 5, 16), 2), r"must be even \(two chunks\), got 5"),
])  # fmt: skip
def test_lengths_that_cannot_be_cut(function, message, monkeypatch):
    monkeypatch.setattr(ring, "_place", lambda group: (0, 2))
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)  # in a group of one, no other rank is asked
    with pytest.raises(ValueError, match=message):
        function()


def test_a_name_is_no_stage(monkeypatch):
    monkeypatch.setattr(ring, "_place", lambda group: (0, 1))
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    q = torch.ones(1, 1, 2, 16, device=DEVICE)
    with pytest.raises(TypeError, match="stage must be a stage's module, as stages.load returns it, got str"):
        ring_attention("v3", q, q, q)


def place(rank, size):
    ring_ = object.__new__(ring.Ring)
    ring_.group, ring_.rank, ring_.size = None, rank, size
    return ring_


@pytest.mark.parametrize("size", range(1, 7))
def test_all_steps_are_equally_long_and_meet_every_score_once(size):
    chunk = 3
    length, whole = 2 * chunk, 2 * chunk * size
    positions = [[*range(r * chunk, (r + 1) * chunk), *range(whole - (r + 1) * chunk, whole - r * chunk)] for r in range(size)]
    met = torch.zeros(whole, whole, dtype=torch.int64)
    for rank, step in itertools.product(range(size), range(size)):
        rows, keys, masked = place(rank, size).meet(step, True, length)
        rows, keys = (torch.tensor(positions[at % size])[some] for at, some in ((rank, rows), (rank - step, keys)))
        block = torch.ones(len(rows), len(keys), dtype=torch.int64)
        block = block.tril() if masked else block
        assert block.sum() == (chunk * (2 * chunk + 1) if step == 0 else 2 * chunk**2)
        met[rows[:, None], keys] += block
    assert torch.equal(met, torch.ones_like(met).tril())


def test_two_blocks_are_held_beside_the_own_one(monkeypatch):
    monkeypatch.setattr(ring.Ring, "pass_on", lambda self, tensors, into: [])
    k = torch.ones(1, 1, 4, 16)
    held = [tensor.data_ptr() for block in place(1, 6).blocks(k, k.clone()) for tensor in block]
    assert len(held) == 12 and len(set(held)) == 2 * 3


@pytest.mark.parametrize(("size", "kv_heads", "events"), [
    (2, 6, ["send", 3, 6, "send", 3]), (3, 6, ["send", 2, "send", 6, "send", 6, "send", 4]), (2, 1, ["send", 1, 1, "send"]),
])  # fmt: skip
def test_sends_of_a_backward_run_while_heads_are_computed(size, kv_heads, events, monkeypatch):
    """Transfers run while the stage computes. `events` lists the sends, and the number of K/V heads in each call of the
    backward."""
    seen = []

    def backward(grad_out, q, k, v, out, lse, *, causal, scale):
        assert q.shape[1] == out.shape[1] == lse.shape[1] == 2 * k.shape[1]
        seen.append(k.shape[1])
        return tuple(torch.zeros_like(tensor) for tensor in (q, k, v))

    monkeypatch.setattr(ring.Ring, "pass_on", lambda self, tensors, into: [seen.append("send")][:0])
    monkeypatch.setattr(ring, "add", lambda *tensors: None)  # `pass_on` sends nothing here, so there is nothing to add
    q, k = (torch.ones(1, heads, 4, 16, dtype=torch.bfloat16, device=DEVICE) for heads in (2 * kv_heads, kv_heads))
    options = {"stage": types.SimpleNamespace(backward=backward), "ring": place(0, size), "causal": True, "scale": 1.0}
    ring._backward(q, q, k, k, q, q[..., 0].float(), **options)
    assert seen == events


def test_heads_are_shared_out_like_bytes():
    assert [ring.first_heads(heads, 2, 2) for heads in (1, 2, 8, 16)] == [1, 1, 4, 8]
    assert [ring.first_heads(heads, 2, 4) for heads in (1, 2, 8, 16)] == [1, 1, 3, 5]
    assert [ring.first_heads(heads, 4, 4) for heads in (1, 2, 8, 16)] == [1, 1, 4, 8]


@pytest.mark.parametrize(
    "backward", [pytest.param(False, marks=pytest.mark.long, id="forward"), pytest.param(True, id="backward")]
)
def test_a_rank_that_ends_ends_the_others(backward):
    if MOST < 2:
        pytest.skip("needs two GPUs")
    ranks = Ranks(2, timeout_s=20)
    other, gone = ranks.outcomes(2, end_at_step, 1, backward)
    ranks.end()
    assert isinstance(gone, EOFError)
    # With NCCL the GPU waits for the ended rank, and the process waits for the GPU. NCCL's watchdog then ends the process.
    assert isinstance(other, RuntimeError if DEVICE == "cpu" else (RuntimeError, EOFError)), other


@pytest.mark.long
def test_a_missing_rank_is_waited_for_until_the_groups_timeout():
    if MOST < 2:
        pytest.skip("needs two GPUs")
    ranks = Ranks(2, timeout_s=3)
    other, _ = ranks.outcomes(2, come_late, 1)
    ranks.end()
    assert isinstance(other, RuntimeError) and "time" in str(other).lower(), other
