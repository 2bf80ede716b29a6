"""Stages that take lengths on the device are right at every length, and never read what follows a sequence."""

import itertools

import pytest
import torch
import torch._dynamo.testing
from cases import LONG, available, make_inputs, names_in, once, set_names, taking_lengths, usual
from problems import Layout
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import stages
from common import recording
from common.checks import BOTTOM_RIGHT
from common.entry import Lengths
from common.interpreter import schedule
from common.measure.counter import count
from common.measure.reference import assert_correct, plain, truth
from common.runtime import DEVICE, INTERPRETED, Device, interpreted_as

CAPACITY = 300
EDGES = (0, 1, 63, 64, 65, 127, 128, 129, CAPACITY)  # tiles have 64 or 128 keys
SCALE = 0.2
HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.fixture(params=usual(once(list(filter(stages.track, taking_lengths())), "forward")))
def taking(request):
    """A stage that takes lengths."""
    return available(request.param)


def on_device(lengths):
    return torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def poisoned(tensor, lengths):
    """Return a cache with NaN after each sequence, and in memory around the cache."""
    gaps = (0, 1), (1, 0), (3, 5), (8, 8)
    tensor = Layout(gaps=gaps).place(tensor)
    for sequence, length in zip(tensor, lengths, strict=True):
        sequence[:, max(length, 0) :] = torch.nan
    return tensor


def cache(seq_q, lengths, head_dim=64, dtype=HALF, capacity=CAPACITY, **heads):
    """Return q, k and v. k and v are poisoned after each length."""
    q, k, v, _ = make_inputs(seq_q, capacity, head_dim, dtype, batch=len(lengths), **heads)
    return q, poisoned(k, lengths), poisoned(v, lengths)


def assert_right(out, lse, q, k, v, lengths, causal):
    """Compare each sequence with float64. Queries that see no key have zeros, and -inf as their log-sum-exp."""
    seq_q, capacity = q.shape[2], k.shape[2]
    for at, length in enumerate(lengths):
        length = min(max(length, 0), capacity)
        blind = max(seq_q - length, 0) if causal or length == 0 else 0  # the first queries see no key
        assert (out[at, :, :blind] == 0).all() and (lse[at, :, :blind] == -torch.inf).all(), length
        if blind < seq_q:
            of_sequence = q[at : at + 1, :, blind:], k[at : at + 1, :, :length], v[at : at + 1, :, :length]
            options = {"causal": bool(causal), "scale": SCALE, "diagonal": length - seq_q + blind}
            results = {"out": out[at : at + 1, :, blind:], "lse": lse[at : at + 1, :, blind:]}
            assert_correct(results, truth(*of_sequence, **options), plain(*of_sequence, **options))


def check(stage, q, k, v, lengths, causal=True):
    out, lse = stage.attention(q, k, v, causal=causal, scale=SCALE, return_lse=True, cache_seqlens=on_device(lengths))
    assert_right(out, lse, q, k, v, lengths, causal)
    return out


# (queries, heads, K/V heads, D, Dv, dtype, causal)
PROBLEMS = [
    (1, 8, 1, 64, 64, BRAIN, False),
    (1, 4, 4, 128, 128, HALF, True),  # one query sees all keys, with a mask or without
    (2, 2, 2, 256, 256, BRAIN, BOTTOM_RIGHT),
    (5, 16, 1, 64, 32, HALF, True),
    (7, 3, 1, 128, 128, BRAIN, True),  # three heads are not packed
    (17, 4, 1, 64, 64, HALF, True),
    (64, 4, 2, 64, 64, HALF, False),
    (64, 2, 1, 128, 64, BRAIN, True),
    (200, 2, 1, 64, 64, HALF, True),
    (400, 1, 1, 64, 64, HALF, True),  # more queries than the cache has room for keys
    (66, 1, 1, 64, 64, HALF, True),  # with 129 keys, 63 rows before query 0 leave only the last row to the second tile
]
SPLITS = (1, 2, 3, 9)


def numbers_of_splits():
    """Yield (problem, number of splits). The interpreter's default run takes one number for each problem."""
    for place, problem in enumerate(PROBLEMS):
        for splits in SPLITS:
            marks = [pytest.mark.long] if INTERPRETED and splits != SPLITS[place % len(SPLITS)] else []
            yield pytest.param(problem, splits, id=f"{problem}-{splits}", marks=marks)


@pytest.mark.parametrize("problem, splits", list(numbers_of_splits()))
def test_every_length_is_right_in_one_batch(taking, problem, splits, monkeypatch):
    seq_q, heads, kv_heads, head_dim, value_dim, dtype, causal = problem
    monkeypatch.setattr(recording, "is_watched", lambda: True)  # recorded launches would not have this number of splits
    if splits > 1:
        set_names(monkeypatch, taking.__name__.removeprefix("stages."), splits_of=lambda *_: splits)
    check(taking, *cache(seq_q, EDGES, head_dim, dtype, heads=heads, kv_heads=kv_heads, value_dim=value_dim), EDGES, causal)


@pytest.mark.parametrize("seed", range(6 if LONG else 1))
@pytest.mark.parametrize("seq_q, capacity, few_squares", [(3, 40, 8), (150, 200, 8), (150, 200, 0), (70, 1, 8)])
def test_lengths_outside_the_cache_count_as_its_ends(taking, seq_q, capacity, few_squares, seed, monkeypatch):
    """With FEW_SQUARES = 0, 150 rows use the tiles of many rows. Threads run in other orders with other seeds."""
    schedule.restart_seeds(seed)
    monkeypatch.setattr(recording, "is_watched", lambda: True)
    set_names(monkeypatch, taking.__name__.removeprefix("stages."), FEW_SQUARES=few_squares)
    lengths = (-5, capacity + 5, capacity // 2, 2**31 - 1, -(2**31))
    check(taking, *cache(seq_q, lengths, capacity=capacity, heads=2, kv_heads=1), lengths)


@pytest.mark.parametrize("seq_q, causal", [(1, False), (40, True)])
def test_a_full_cache_is_like_no_lengths(taking, seq_q, causal):
    """The mask aligned to the length is then the mask that is aligned bottom right. A scale may be negative."""
    q, k, v = cache(seq_q, [CAPACITY] * 2, heads=2, kv_heads=1)
    bottom_right = {"causal": causal and BOTTOM_RIGHT, "scale": SCALE, "return_lse": True}
    aligned = {"causal": causal, "return_lse": True, "cache_seqlens": on_device([CAPACITY] * 2)}
    results = [
        taking.attention(q, k, v, **bottom_right),
        taking.attention(q, k, v, **aligned, scale=SCALE),
        taking.attention(-q, k, v, **aligned, scale=-SCALE),
    ]
    for out, lse in results:
        assert_right(out, lse, q, k, v, [CAPACITY] * 2, causal)


@pytest.mark.parametrize("seq_q", [30, 70])
def test_queries_that_see_no_key_are_zero_beside_infinite_values(taking, seq_q):
    q, k, v = cache(seq_q, [3, 100], heads=2, kv_heads=1)
    v[:, :, 1] = torch.inf
    out = taking.attention(q, k, v, causal=True, cache_seqlens=on_device([3, 100]))
    assert (out[0, :, : seq_q - 3] == 0).all() and out[0, :, seq_q - 1].isinf().all()


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has its own number of SMs")
@pytest.mark.parametrize("num_sms", [7, 24, 132])
def test_a_head_of_many_ctas_is_right_beside_short_ones(taking, num_sms):
    """Even shares of a list: 24 CTAs make 12 parts of the longest head, and 132 CTAs have shares of 1 or 2 key tiles."""
    lengths = [2000] + [3] * 7 if num_sms == 24 else [1000, 0, 63, 64, 65, 129]
    with interpreted_as(Device(num_sms=num_sms)):
        check(taking, *cache(2, lengths, capacity=2000, heads=2, kv_heads=1), lengths)


def keys_read(stage, seq_q, lengths):
    """Return the number of keys that a stage reads from K and from V, each with one head of 64 columns."""
    q, k, v = cache(seq_q, lengths, heads=2, kv_heads=1)
    given = on_device(lengths)
    with interpreted_as(Device(num_sms=2)):  # few programs, so that no sequence is split
        counted = count(lambda: stage.attention(q, k, v, causal=True, cache_seqlens=given))
    (launch,) = [launch for launch in counted.launches if launch.name == "_forward_kernel"]
    nbytes = k.untyped_storage().nbytes()
    return [each.read / (64 * k.itemsize) for each in launch.operands if each.nbytes == nbytes]


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter counts the bytes")
def test_what_is_read_depends_on_the_lengths(taking):
    """Tiles read only keys of their sequence. The last tile ends with the sequence, so it may overlap the tile before.

    64 queries of two heads, with a mask, may need two tiles of 128 rows. Here the second has no rows. It reads one key tile.
    """
    tile = names_in(taking.__name__.removeprefix("stages.")).get("BLOCK_N", 128)  # keys, where rows are few
    expected = [tile * -(-length // tile) if length >= tile else length for length in EDGES]
    assert keys_read(taking, 1, EDGES) == [sum(expected)] * 2
    assert keys_read(taking, 64, [64 + 7 * 32]) == [3 * 128 + 128] * 2


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has more SMs than this problem has tiles")
@pytest.mark.parametrize("seq_q", [1, 20])
def test_ctas_with_short_sequences_take_more_tiles(taking, seq_q):
    """With more tiles than SMs, a counter balances sequences of different lengths. It costs a launch, to set it to 0."""

    def is_counted(programs):
        tensors, lengths = cache(seq_q, EDGES[:2], heads=2, kv_heads=2), Lengths(on_device(EDGES[:2]))
        with interpreted_as(Device(num_sms=programs)):
            counted = count(lambda: taking.forward(*tensors, causal=True, scale=SCALE, lengths=lengths))
        return any(launch.name == "aten.new_zeros" for launch in counted.launches)

    counting = "NextTiles" in names_in(taking.__name__.removeprefix("stages."))  # other stages have no counter
    assert (is_counted(3), is_counted(10_000)) == (counting, False)
    with interpreted_as(Device(num_sms=3)):
        check(taking, *cache(seq_q, EDGES, heads=2, kv_heads=2), EDGES)


class Unread(TorchDispatchMode):
    """Refuse operators that read a value from the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "equal", "is_nonzero"), func
        return func(*args, **(kwargs or {}))


def test_the_host_never_reads_the_lengths(taking):
    q, k, v = cache(2, EDGES, heads=2, kv_heads=1)
    lengths = on_device(EDGES)
    with Unread():
        taking.attention(q, k, v, causal=True, cache_seqlens=lengths)
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            taking.attention(q, k, v, causal=True, cache_seqlens=lengths)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("calls", [1, 3])
def test_a_captured_graph_is_right_for_later_lengths(taking, calls):
    q, k, v = cache(2, [CAPACITY] * len(EDGES), heads=8, kv_heads=2)
    lengths = on_device([7] * len(EDGES))
    for _ in range(calls):
        taking.attention(q, k, v, causal=True, scale=SCALE, cache_seqlens=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = taking.attention(q, k, v, causal=True, scale=SCALE, return_lse=True, cache_seqlens=lengths)
    for values in (EDGES, EDGES[::-1]):
        lengths.copy_(on_device(values))
        graph.replay()
        assert_right(out, lse, q, k, v, values, True)


def test_repeated_calls_take_new_lengths(taking):
    """On a GPU, later calls replay the second call's launches with their own lengths, also where one tensor is overwritten."""
    kept, overwritten = [], on_device(EDGES[:4])
    for lengths in (EDGES[:4], EDGES[4:8], EDGES[1:5], EDGES[3:7]):
        q, k, v = cache(2, lengths, heads=2, kv_heads=1)
        kept.append((q, k, v, on_device(lengths)))  # keeps the tensors, so that each call gets other memory
        check(taking, q, k, v, lengths)
        overwritten.copy_(on_device(lengths))
        out, lse = taking.attention(q, k, v, causal=True, scale=SCALE, return_lse=True, cache_seqlens=overwritten)
        assert_right(out, lse, q, k, v, lengths, True)


def test_compiled_without_a_graph_break(taking):
    compilations = torch._dynamo.testing.CompileCounterWithBackend("inductor" if DEVICE == "cuda" else "aot_eager")

    def model(q, k, v, lengths):
        return taking.attention(q * 2, k, v, causal=True, cache_seqlens=lengths + 1)

    compiled = torch.compile(model, fullgraph=True, backend=compilations)
    for lengths in ([0, 30], [40, 7]):
        q, k, v = cache(3, [length + 1 for length in lengths], capacity=50, heads=2, kv_heads=1)
        torch.testing.assert_close(compiled(q, k, v, on_device(lengths)), model(q, k, v, on_device(lengths)))
    assert compilations.frame_count == 1
    torch._dynamo.reset()


def test_as_an_operator_of_pytorch(taking):
    """The dispatcher, which a profiler uses, gives the same. So does autocast."""
    lengths = on_device([2, 30])
    q, k, v = cache(3, [2, 30], capacity=40, heads=2, kv_heads=1)
    operator = getattr(torch.ops.kernel_evolution, f"{taking.__name__.removeprefix('stages.')}_forward").default
    torch.library.opcheck(operator, (q, k, v, True, SCALE, 0, lengths))
    expected = taking.attention(q, k, v, causal=True, scale=SCALE, cache_seqlens=lengths)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch.equal(taking.attention(q, k, v, causal=True, scale=SCALE, cache_seqlens=lengths), expected)
    with torch.autocast(DEVICE, HALF):
        cast = taking.attention(q.float(), k.float(), v.float(), causal=True, scale=SCALE, cache_seqlens=lengths)
    assert torch.equal(cast, expected)


@pytest.mark.parametrize("stride", [0, 1, 2])
def test_lengths_may_have_any_stride(taking, stride):
    """vmap folds lengths into the batch without a copy, so a stage would get their stride: 0 if all share one length."""
    values = [30, 30] if stride == 0 else [2, 30]
    lengths = on_device([values[0], *[CAPACITY] * (stride - 1), values[1]]).as_strided((2,), (stride,))
    q, k, v = cache(3, values, capacity=40, heads=2, kv_heads=1)
    expected = check(taking, q, k, v, values)
    options = {"causal": True, "scale": SCALE}
    assert torch.equal(taking.attention(q, k, v, cache_seqlens=lengths, **options), expected)
    mapped, dim = (lengths[:1], None) if stride == 0 else (lengths[:, None], 0)
    each = vmap(
        lambda *one: taking.attention(*(t[None] for t in one[:3]), cache_seqlens=one[3], **options)[0], in_dims=(0, 0, 0, dim)
    )
    torch.testing.assert_close(each(q, k, v, mapped), expected)


GOOD = {**dict(zip("qkv", make_inputs(2, 5, 16, batch=2)[:3], strict=True)), "cache_seqlens": on_device([1, 5])}
ELSEWHERE = "cpu" if DEVICE == "cuda" else "meta"  # a device on which no kernel runs
BAD = {
    "a list": ([1, 5], TypeError, "cache_seqlens must be a torch.Tensor, got list"),
    "a number": (5, TypeError, "cache_seqlens must be a torch.Tensor, got int"),
    "sparse": (on_device([1, 5]).to_sparse(), TypeError, "cache_seqlens must be a dense tensor"),
    "int64": (on_device([1, 5]).long(), TypeError, "cache_seqlens must be int32, got torch.int64"),
    "float": (on_device([1, 5]).float(), TypeError, "cache_seqlens must be int32, got torch.float32"),
    "another batch": (on_device([1]), ValueError, r"cache_seqlens must have the shape \(2,\), .* got \(1,\)"),
    "a number in a tensor": (on_device(1), ValueError, r"cache_seqlens must have the shape \(2,\), .* got \(\)"),
    "two dimensions": (on_device([[1, 5]]), ValueError, r"cache_seqlens must have the shape \(2,\), .* got \(1, 2\)"),
    "elsewhere": (on_device([1, 5]).to(ELSEWHERE), ValueError, f"cache_seqlens must be on the device of q.* got {ELSEWHERE}"),
}


@pytest.mark.parametrize("value, error, message", BAD.values(), ids=BAD.keys())
def test_bad_lengths_are_refused(value, error, message):
    with pytest.raises(error, match=message):
        stages.load(taking_lengths()[0]).attention(**GOOD | {"cache_seqlens": value})


def test_other_stages_refuse_lengths():
    for name in (stages.names()[0], stages.resolve("v3")):
        with pytest.raises(NotImplementedError, match=f"{name} takes no cache_seqlens"):
            stages.load(name).attention(**GOOD)
        assert stages.load(name).attention(**GOOD | {"cache_seqlens": None}).isfinite().all()


def test_float32_is_refused(taking):
    with pytest.raises(TypeError, match="with cache_seqlens, q, k and v must be float16 or bfloat16, got torch.float32"):
        taking.attention(**{name: tensor.float() if name in "qkv" else tensor for name, tensor in GOOD.items()})


@pytest.mark.parametrize("which", "qkv")
def test_gradients_are_refused(taking, which):
    inputs = GOOD | {which: GOOD[which].clone().requires_grad_()}
    operator = getattr(torch.ops.kernel_evolution, f"{taking.__name__.removeprefix('stages.')}_forward").default
    for call in (
        lambda: taking.attention(**inputs),
        lambda: operator(*itertools.islice(inputs.values(), 3), False, SCALE, 0, inputs["cache_seqlens"]),
        lambda: grad(lambda one: taking.attention(**GOOD | {which: one}).sum())(GOOD[which]),
    ):
        with pytest.raises(NotImplementedError, match="cache_seqlens has no gradients"):
            call()
    with torch.no_grad():
        assert not taking.attention(**inputs).requires_grad
