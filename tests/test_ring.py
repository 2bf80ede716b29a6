"""Ring attention over a sequence that several processes share equals one process's attention over the whole sequence."""

import functools
import itertools
import math
import types

import pytest
import torch
import torch.distributed as dist
from cases import assert_same_bits, check, make_inputs
from ranks import MOST
from torch.utils.checkpoint import checkpoint

import stages
from common import ring
from common.ring import Ring, ring_attention, shard, unshard
from common.runtime import DEVICE

SIZES = range(2, MOST + 1)
NEWEST = stages.newest()

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


def as_one(group, name, causal, queries, keys, dtype, shape, again=False):
    """Compare ring attention's results with float64. With `again`, a second call must give equal bits."""
    stage, problem = stages.load(name), make_inputs(queries, keys, dtype=dtype, **shape)
    run = functools.partial(by_ring, group=group)
    first = check(stage, *problem, causal=causal, run=run)
    if again:
        second = check(stage, *problem, causal=causal, run=run)
        assert_same_bits(first, second, getattr(stage, "UNORDERED", ()))


def attend(group, by_rank):
    """Run a small forward. `by_rank` changes shapes, a dtype, or options on some ranks."""
    other = dict(by_rank.get(dist.get_rank(group), {}))
    shape, kv_heads = other.pop("shape", (1, 2, 6, 16)), other.pop("kv_heads", 2)
    q = torch.ones(shape, dtype=other.pop("dtype", torch.float16), device=DEVICE)
    k = torch.ones(shape[0], kv_heads, *shape[2:], dtype=q.dtype, device=DEVICE)
    q.requires_grad_(other.pop("requires_grad", False))
    stage = stages.load(other.pop("stage", "v3"))
    return tuple(ring_attention(stage, q, k, k, group=group, **{"causal": True, **other})[0, 0, 0].tolist())


def unshard_unlike(group):
    return unshard(torch.ones(1, 2 + 2 * dist.get_rank(group), device=DEVICE), 1, group)


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
    (unused,) = torch.autograd.grad(_WithoutGradient.apply(attention(*leaves)).sum(), leaves[:1])
    assert not unused.any()


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def use_the_lse_on_rank_0(group):
    q = torch.randn(1, 2, 8, 16, device=DEVICE, requires_grad=True)
    out, lse = ring_attention(stages.load("v3"), q, q, q, group=group, return_lse=True)
    (out.sum() + lse.sum() if dist.get_rank(group) == 0 else out.sum()).backward()


def of_negated_views(group):
    """Return whether tensors with PyTorch's negative bit and negated tensors have equal results."""
    x, grad_out = torch.randn(2, 1, 2, 4, 16, device=DEVICE)
    leaf, attention = x.clone().requires_grad_(), functools.partial(ring_attention, stages.load("v3"), group=group)
    out = attention(leaf, leaf, leaf)
    pairs = []
    for negate in (torch.neg, torch._neg_view):
        of_q, of_kv = attention(negate(x), x, x), attention(x, negate(x), negate(x))
        pairs.append((of_q, of_kv, *torch.autograd.grad(out, leaf, negate(grad_out), retain_graph=True)))
    return [torch.equal(one, other) for one, other in zip(*pairs, strict=True)]


def batch_of_gradients(group):
    x = torch.randn(1, 2, 4, 16, device=DEVICE, requires_grad=True)
    out = ring_attention(stages.load("v3"), x, x, x, group=group)
    torch.autograd.grad(out, x, torch.randn(3, *out.shape, device=DEVICE), is_grads_batched=True)


def fail_in_a_step(group, step):
    """Call a stage that fails on all ranks in a step of the ring."""
    v3, calls = stages.load("v3"), []

    def forward(*tensors, **options):
        calls.append(1)
        if len(calls) > step:
            raise MemoryError("no memory is left")
        return v3.forward(*tensors, **options)

    stage = types.SimpleNamespace(__name__="stages.failing", forward=forward, backward=v3.backward)
    q = torch.ones(1, 2, 4, 16, device=DEVICE)
    ring_attention(stage, q, q, q, group=group)


def nameless_on_rank_1(group):
    v3, q = stages.load("v3"), torch.ones(1, 2, 4, 16, device=DEVICE)
    nameless = types.SimpleNamespace(forward=v3.forward, backward=v3.backward)
    ring_attention(nameless if dist.get_rank(group) else v3, q, q, q, group=group)


def unshard_without_dimension(group):
    unshard(torch.ones((1, 4) if dist.get_rank(group) else (1, 2, 4, 16), device=DEVICE), 2, group)


# --- The tests.


SHAPES = {"own heads": {"batch": 1, "heads": 2}, "shared heads": {"batch": 1, "heads": 4, "kv_heads": 2, "value_dim": 16}}


causals = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@sizes
@causals
def test_parts_together_are_the_whole(ranks, size, causal):
    ranks.call(size, as_one, "v3", causal, *[2 * size * 5] * 2, torch.float16, SHAPES["shared heads"], causal and size == 3)


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_newest_stage(ranks, causal):
    if reason := stages.unavailable(NEWEST):
        pytest.skip(f"{NEWEST} {reason}")
    shape = {"batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 16}
    ranks.call(2, as_one, NEWEST, causal, 2 * 2 * 9, 2 * 2 * 9, torch.bfloat16, shape, True)


@pytest.mark.long
@sizes
@causals
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_stage(ranks, size, causal, dtype, stage):
    name = stage.__name__.rpartition(".")[2]
    for shape in SHAPES.values():
        ranks.call(size, as_one, name, causal, *[2 * size * 33] * 2, dtype, shape, True)


@pytest.mark.parametrize(("size", "causal", "queries", "keys", "dtype"), [
    (2, True, 36, 36, torch.bfloat16), (2, True, 36, 36, torch.float32),
    (1, True, 37, 37, torch.float16), (2, False, 12, 20, torch.float16),
], ids=["bfloat16", "float32", "one rank", "more keys"])  # fmt: skip
def test_other_dtypes_and_lengths(ranks, size, causal, queries, keys, dtype):
    ranks.call(size, as_one, "v3", causal, queries, keys, dtype, SHAPES["own heads"])


@sizes
def test_a_sequence_comes_back_as_it_was(ranks, size):
    ranks.call(size, rounds_and_layouts)


def test_checkpointing_and_autocast(ranks):
    ranks.call(2, with_checkpoint_and_autocast)


@pytest.mark.parametrize(("other", "message"), [
    ({"shape": (1, 2, 8, 16)}, r"q \(1, 2, 8, 16\)"), ({"kv_heads": 1}, r"k \(1, 1, 6, 16\)"),
    ({"dtype": torch.bfloat16}, "torch.bfloat16"), ({"causal": False}, "causal=False"), ({"scale": 0.5}, "scale=0.5"),
    ({"return_lse": True}, "return_lse=True"), ({"stage": "v2"}, "v2_"), ({"requires_grad": True}, "gradients of q"),
])  # fmt: skip
def test_ranks_with_different_arguments_all_raise(ranks, other, message):
    for outcome in ranks.outcomes(2, attend, {1: other}):
        with pytest.raises(ValueError, match=rf"ranks of the group differ: rank 0 has v3.*; rank 1 has .*{message}"):
            raise outcome
    assert len(set(ranks.call(2, attend, {}))) == 1, "a message of the failed call was left over"


@pytest.mark.parametrize(("other", "kind"), [
    ({"dtype": torch.float64}, TypeError), ({"shape": (1, 2, 5, 16)}, ValueError), ({"causal": "bottom-right"}, TypeError),
    ({"scale": math.nan}, ValueError), ({"return_lse": 1}, TypeError),
])  # fmt: skip
def test_an_error_on_one_rank_ends_the_call_on_all(ranks, other, kind):
    fine, wrong = ranks.outcomes(2, attend, {1: other})
    assert type(wrong) is kind
    assert type(fine) is ValueError and f"rank 1 has {kind.__name__}: {wrong}" in str(fine)


def test_a_gradient_of_the_lse_on_one_rank_ends_the_backward_on_all(ranks):
    wrong, fine = ranks.outcomes(2, use_the_lse_on_rank_0)
    assert isinstance(wrong, NotImplementedError) and "no gradient of the log-sum-exp" in str(wrong)
    assert isinstance(fine, ValueError) and "rank 0 has NotImplementedError" in str(fine)


def test_negated_views_count_as_negated(ranks):
    assert ranks.call(2, of_negated_views) == [[True] * 3] * 2


@pytest.mark.parametrize(("function", "kind", "message", "arguments"), [
    (batch_of_gradients, NotImplementedError, "no batches of gradients", ()),
    (fail_in_a_step, MemoryError, "no memory is left", (0,)), (fail_in_a_step, MemoryError, "no memory is left", (1,)),
], ids=["batch of gradients", "step 0", "step 1"])  # fmt: skip
def test_an_error_on_all_ranks_leaves_the_group_usable(ranks, function, kind, message, arguments):
    """Transfers have begun when the error is raised. No later call gets their data, or waits for them."""
    for outcome in ranks.outcomes(3, function, *arguments):
        with pytest.raises(kind, match=message):
            raise outcome
    assert len(set(ranks.call(3, attend, {}))) == 1


@pytest.mark.parametrize(("function", "kind", "message"), [
    (nameless_on_rank_1, TypeError, "stage must be a stage's module"),
    (unshard_without_dimension, IndexError, "dim must be a dimension of tensor"),
])  # fmt: skip
def test_an_unusual_error_on_rank_1_ends_the_call_on_all(ranks, function, kind, message):
    fine, wrong = ranks.outcomes(2, function)
    assert type(wrong) is kind and message in str(wrong)
    assert type(fine) is ValueError and f"rank 1 has {kind.__name__}: {message}" in str(fine)


def test_unlike_parts_are_no_sequence(ranks):
    for outcome in ranks.outcomes(2, unshard_unlike):
        assert isinstance(outcome, ValueError) and "ranks of the group differ" in str(outcome)


@pytest.mark.parametrize(("function", "kind", "message"), [
    (lambda q: shard(q, 2), ValueError, r"2 × 2 \(two chunks for each rank\), got 6"),
    (lambda q: unshard(q[:, :, :5], 2), ValueError, r"must be even \(two chunks\), got 5"),
    (lambda q: ring_attention("v3", q, q, q), TypeError, "stage must be a stage's module, as stages.load returns it, got str"),
])  # fmt: skip
def test_lengths_that_cannot_be_cut_and_names(function, kind, message, monkeypatch):
    monkeypatch.setattr(ring, "Ring", lambda group: place(0, 2))
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)  # in a group of one, no other rank is asked
    with pytest.raises(kind, match=message):
        function(torch.ones(1, 2, 6, 16, device=DEVICE))


def place(rank, size):
    ring_ = object.__new__(Ring)
    ring_.group, ring_.rank, ring_.size, ring_.begun = None, rank, size, []
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

    def backward(grad_out, q, k, v, out, lse, *, causal, scale, diagonal=0):
        assert q.shape[1] == out.shape[1] == lse.shape[1] == 2 * k.shape[1]
        seen.append(k.shape[1])
        return tuple(torch.zeros_like(tensor) for tensor in (q, k, v))

    monkeypatch.setattr(ring.Ring, "pass_on", lambda self, tensors, into: [seen.append("send")][:0])
    monkeypatch.setattr(ring, "add", lambda *tensors: None)  # `pass_on` sends nothing here, so there is nothing to add
    q, k = (torch.ones(1, heads, 4, 16, dtype=torch.bfloat16, device=DEVICE) for heads in (2 * kv_heads, kv_heads))
    options = {"stage": types.SimpleNamespace(backward=backward), "ring": place(0, size), "causal": True, "scale": 1.0}
    ring._backward(q, q, k, k, q, q[..., 0].float(), **options)
    assert seen == events
