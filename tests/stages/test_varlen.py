"""Stages that take packed sequences are right for each sequence, and touch no other sequence's rows."""

import itertools
import random

import pytest
import torch
import torch._dynamo.testing
from cases import LONG, available, names_in, once, taking_lengths, usual
from test_lengths import Unread, on_device
from test_memory import PoisonedMemory
from torch.func import grad, vmap

import stages
from common import recording
from common.checks import BOTTOM_RIGHT
from common.entry import Starts, entry
from common.interpreter import schedule
from common.measure.reference import assert_correct, plain, truth
from common.runtime import DEVICE, INTERPRETED, Device, interpreted_as

SCALE = 0.2
HALF, BRAIN = torch.float16, torch.bfloat16
# (queries, keys) of each sequence. Tiles have 128 or 256 queries, and 64 or 128 keys.
EDGES = [
    (0, 0), (1, 1), (63, 64), (0, 5), (129, 128), (64, 63), (5, 0), (128, 127), (200, 9), (65, 260), (257, 257), (1, 129),
    (0, 0),
]  # fmt: skip
NEIGHBOUR = (3, 70)  # a sequence of NaN


@pytest.fixture(params=usual(once([name for name in taking_lengths("starts") if stages.track(name) == "lengths"], "forward")))
def taking(request):
    """A stage that takes packed sequences. Other tracks and the newest stage import its forward."""
    return available(request.param)


def starts(lengths):
    """Return where sequences of these lengths start, on the device."""
    return on_device([0, *itertools.accumulate(lengths)])


class Packed:
    """q, k and v of packed sequences. Behind the last tokens there is NaN, in rows that belong to no sequence."""

    def __init__(self, pairs, heads=2, kv_heads=1, head_dim=64, value_dim=None, dtype=HALF, behind=0):
        self.pairs, (queries, keys) = pairs, ([*lengths] for lengths in zip(*pairs, strict=True))
        self.starts = starts(queries), starts(keys)
        shapes = (heads, sum(queries), head_dim), (kv_heads, sum(keys), head_dim), (kv_heads, sum(keys), value_dim or head_dim)
        self.tensors = []
        for heads, tokens, size in shapes:
            memory = torch.full((tokens + behind, heads, size), torch.nan, dtype=dtype, device=DEVICE)
            memory[:tokens] = torch.randn(tokens, heads, size)
            self.tensors.append(memory)

    def __iter__(self):
        return iter((*self.tensors, *self.starts))

    def of_sequence(self, number):
        """Return q, k and v of one sequence, [1, H, tokens, D]."""
        bounds = [each[number : number + 2].tolist() for each in (self.starts[0], self.starts[1], self.starts[1])]
        return [tensor[start:end].transpose(0, 1)[None] for tensor, (start, end) in zip(self.tensors, bounds, strict=True)]


def assert_right(out, lse, packed, causal, numbers=None):
    """Compare sequences with float64. Queries that see no key have zeros, and -inf as their log-sum-exp."""
    ends = packed.starts[0].tolist()
    for number in range(len(packed.pairs)) if numbers is None else numbers:
        queries, keys = packed.pairs[number]
        blind = max(queries - keys, 0) if causal or keys == 0 else 0  # the first queries see no key
        first, last = ends[number], ends[number + 1]
        assert (out[first : first + blind] == 0).all() and (lse[:, first : first + blind] == -torch.inf).all(), number
        if blind < queries:
            q, k, v = packed.of_sequence(number)
            of_sequence, options = (q[:, :, blind:], k, v), {"causal": bool(causal), "scale": SCALE}
            options["diagonal"] = keys - queries + blind
            results = {"out": out[first + blind : last].transpose(0, 1)[None], "lse": lse[None, :, first + blind : last]}
            assert_correct(results, truth(*of_sequence, **options), plain(*of_sequence, **options))


def check(stage, packed, causal=True, numbers=None):
    options = {"causal": causal, "scale": SCALE, "return_lse": True}
    out, lse = stage.attention_varlen(*packed, **options)
    assert_right(out, lse, packed, causal, numbers)
    return out


def forward(stage, q, k, v, *starts):
    """Call a stage's forward itself, because a mode of PyTorch does not see what happens inside of an operator."""
    of_batch = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    out, lse = entry(stage.forward)(*of_batch, causal=True, scale=SCALE, starts=Starts(*starts))
    return out[0].transpose(0, 1), lse[0]


# (heads, K/V heads, D, Dv, dtype, causal)
PROBLEMS = [
    (2, 2, 64, 64, HALF, True),
    (4, 1, 128, 128, BRAIN, True),
    (2, 1, 256, 256, HALF, BOTTOM_RIGHT),
    pytest.param((16, 1, 64, 64, BRAIN, False), marks=pytest.mark.long),
    pytest.param((4, 1, 64, 64, BRAIN, False), marks=pytest.mark.long),
    (2, 2, 128, 64, HALF, False),
    (2, 1, 64, 128, BRAIN, True),
    pytest.param((3, 1, 256, 64, BRAIN, False), marks=pytest.mark.long),
    (2, 2, 16, 32, HALF, True),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_sequence_is_right_beside_nan(taking, problem):
    """Every second sequence is NaN, in q, k and v."""
    heads, kv_heads, head_dim, value_dim, dtype, causal = problem
    pairs = [NEIGHBOUR, *itertools.chain(*((pair, NEIGHBOUR) for pair in EDGES))]
    packed = Packed(pairs, heads, kv_heads, head_dim, value_dim, dtype, behind=2)
    for number in range(0, len(pairs), 2):
        for tensor in packed.of_sequence(number):
            tensor.fill_(torch.nan)
    check(taking, packed, causal, range(1, len(pairs), 2))


UNEVEN = [
    [(10, 10), (1000, 1000)], [(1000, 1000), (10, 10)], [(1, 1)], [(0, 0), (0, 3), (2, 0)], [(1, 700)] * 3, [(700, 1), (1, 1)],
    [(1, 1), (2, 2), (3, 3)] * 7,
]  # fmt: skip


@pytest.mark.parametrize(
    "pairs, seed",
    [(pairs, seed) for place, pairs in enumerate(UNEVEN) for seed in (range(6) if LONG else [place % 2])],
    ids=str,
)
def test_uneven_batches_on_few_sms(taking, pairs, seed):
    """A CTA takes several tiles. Threads run in other orders with other seeds."""
    schedule.restart_seeds(seed)
    with interpreted_as(Device(num_sms=1 + seed)):
        check(taking, Packed(pairs), causal=seed % 2 == 0)


def test_only_rows_of_sequences_are_written(taking):
    """Rows of `out` and `lse` behind the last sequence keep what was in memory, and so does what surrounds them."""
    packed = Packed([(70, 90), (130, 40)], behind=200)
    with PoisonedMemory() as memory:
        out, lse = forward(taking, *packed)
    memory.check()
    assert out[200:].isnan().all() and lse[:, 200:].isnan().all()
    assert_right(out, lse, packed, True)


def test_strides(taking):
    """q, k and v may be parts of one tensor, and rows that are not aligned are copied. Starts may have any stride."""
    packed = Packed([(40, 40), (90, 90)], heads=2, kv_heads=2)
    expected = check(taking, packed)
    q, k, v = packed.tensors
    together = torch.stack((q, k, v), 1)  # [tokens, 3, H, D]
    spread = [torch.stack((each, each + 7), 1)[:, 0] for each in packed.starts]
    for tensors in (together.unbind(1), [torch.cat((t, t), -1)[..., 3:67].copy_(t) for t in (q, k, v)]):
        assert torch.equal(taking.attention_varlen(*tensors, *spread, causal=True, scale=SCALE), expected)
    negative = taking.attention_varlen(-q, k, v, *packed.starts, causal=True, scale=-SCALE)
    torch.testing.assert_close(negative, expected)


LISTING = [name for name in taking_lengths("starts") if "list_tiles" in names_in(name)]  # other stages fall back to these
LISTING = LISTING if LONG else LISTING[-1:]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", LISTING)
def test_the_list_has_every_tile_once_and_the_longest_first(name, seed):
    """Starts may also lie outside of the tokens, or fall. Then the list still has only tiles inside of the tensors."""
    rng = random.Random(seed)
    tokens_q, tokens_k, sequences, causal = rng.randint(1, 900), rng.randint(1, 900), rng.randint(1, 9), seed % 2 == 0
    lowest, highest = (0, 0) if seed < 10 else (-50, 50)  # limits of starts outside of the tokens
    drawn = [[rng.randint(lowest, each + highest) for _ in range(sequences + 1)] for each in (tokens_q, tokens_k)]
    drawn = [sorted(each) for each in drawn] if seed < 15 else drawn
    q, k = (torch.empty(1, 1, each, 16) for each in (tokens_q, tokens_k))
    listed = names_in(name)["list_tiles"](Starts(*map(on_device, drawn)), q, k, 128, causal)
    (taken, number), entries = listed[0, :2].tolist(), listed[1:, :5].tolist()
    assert taken == 0 and number <= len(entries)
    spans = [[(min(max(a, 0), end), min(b, end)) for a, b in itertools.pairwise(each)]
             for each, end in zip(drawn, (tokens_q, tokens_k), strict=True)]  # fmt: skip
    expected = []
    for (first_q, end_q), (first_k, end_k) in zip(*spans, strict=True):
        queries, keys = max(end_q - first_q, 0), max(end_k - first_k, 0)
        before = (keys - queries) % 64 if causal else 0
        rows = range(-before, queries, 128) if queries else ()
        expected += [[start, first_q, queries, first_k, keys] for start in rows]
    assert sorted(entries[:number]) == sorted(expected) or (seed >= 15 and number == len(entries))
    keys_of_entries = [entry[4] for entry in entries[:number]]
    assert keys_of_entries == sorted(keys_of_entries, reverse=True)
    for (start, *sequence), (other, *other_sequence) in itertools.pairwise(entries[:number]):
        assert sequence != other_sequence or start > other


@pytest.mark.parametrize("values", [(-3, 20, 500), (0, 90, 30), (50, 2**31 - 1, -(2**31)), (90, 0, 90)], ids=str)
def test_wrong_starts_write_only_inside_of_the_tensors(taking, values):
    q, k, v, *_ = Packed([(90, 90)])
    with PoisonedMemory() as memory:
        for of_q, of_k in itertools.product((on_device(values), on_device([0, 40, 90])), repeat=2):
            forward(taking, q, k, v, of_q, of_k)
    memory.check()


def test_starts_outside_of_the_tokens_count_as_its_ends(taking):
    q, k, v, *_ = Packed([(90, 90)])
    expected = taking.attention_varlen(q, k, v, *[on_device([0, 20, 90])] * 2, causal=True)
    for values in ([-3, 20, 500], [-(2**31), 20, 2**31 - 1]):
        got = taking.attention_varlen(q, k, v, *[on_device(values)] * 2, causal=True)
        assert torch.equal(got, expected)


def test_the_host_never_reads_the_starts(taking):
    packed = Packed(EDGES)
    with Unread():
        taking.attention_varlen(*packed, causal=True)
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            taking.attention_varlen(*packed, causal=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


OTHERS = [(70, 130), (0, 0), (129, 1), (1, 69)]  # as many sequences and tokens as in SAME, in other places
SAME = [(50, 50), (100, 100), (0, 30), (50, 20)]


def test_repeated_calls_take_new_starts(taking):
    """On a GPU, later calls replay the second call's launches with their own starts, also where one tensor is overwritten."""
    overwritten, kept = Packed(SAME), []
    for pairs in (SAME, OTHERS, SAME[::-1], OTHERS[::-1]):
        kept.append(Packed(pairs))  # keeps the tensors, so that each call gets other memory
        check(taking, kept[-1])
        overwritten.pairs = pairs
        for own, new in zip((*overwritten.tensors, *overwritten.starts), kept[-1], strict=True):
            own.copy_(new)
        check(taking, overwritten)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("calls", [1, 3])
def test_a_captured_graph_is_right_for_later_starts(taking, calls):
    packed = Packed(SAME)
    for _ in range(calls):
        taking.attention_varlen(*packed, causal=True, scale=SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = taking.attention_varlen(*packed, causal=True, scale=SCALE, return_lse=True)
    for pairs in (OTHERS, SAME[::-1]):
        packed.pairs = pairs
        for own, new in zip((*packed.tensors, *packed.starts), Packed(pairs), strict=True):
            own.copy_(new)
        graph.replay()
        assert_right(out, lse, packed, True)


def test_compiled_without_a_graph_break(taking):
    compilations = torch._dynamo.testing.CompileCounterWithBackend("inductor" if DEVICE == "cuda" else "aot_eager")

    def model(q, k, v, starts_q, starts_k):
        return taking.attention_varlen(q * 2, k, v, starts_q + 0, starts_k, causal=True)

    compiled = torch.compile(model, fullgraph=True, backend=compilations)
    for pairs in (SAME, OTHERS):
        packed = Packed(pairs)
        torch.testing.assert_close(compiled(*packed), model(*packed))
    assert compilations.frame_count == 1
    torch._dynamo.reset()


def test_as_an_operator_of_pytorch(taking):
    """The dispatcher, which a profiler uses, gives the same. So does autocast."""
    packed = Packed(SAME)
    operator = getattr(torch.ops.kernel_evolution, f"{taking.__name__.removeprefix('stages.')}_varlen").default
    torch.library.opcheck(operator, (*packed, True, SCALE))
    expected = taking.attention_varlen(*packed, causal=True, scale=SCALE)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch.equal(taking.attention_varlen(*packed, causal=True, scale=SCALE), expected)
    with torch.autocast(DEVICE, HALF):
        wide = [tensor.float() for tensor in packed.tensors]
        assert torch.equal(taking.attention_varlen(*wide, *packed.starts, causal=True, scale=SCALE), expected)


@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0, 0), (1, None, None, 1, None)])
def test_vmap(taking, in_dims):
    """Batches under vmap do not see each other's tokens, even if starts lie outside of a batch's tokens."""
    first, second = ([*Packed(SAME, behind=2)] for _ in range(2))
    first[4][-1] += 1000  # counts as the end of k: NaN for the last sequence
    first = [two if dim is None else one for one, two, dim in zip(first, second, in_dims, strict=True)]
    pairs = zip(first, second, in_dims, strict=True)
    stacked = [two if dim is None else torch.stack((one, two), dim) for one, two, dim in pairs]

    def call(*one):
        return taking.attention_varlen(*one, causal=True, scale=SCALE, return_lse=True)

    out, lse = vmap(call, in_dims)(*stacked)
    for number, batch in enumerate((first, second)):
        expected_out, expected_lse = call(*batch)
        torch.testing.assert_close(out[number, :200], expected_out[:200], equal_nan=True)
        torch.testing.assert_close(lse[number, :, :200], expected_lse[:, :200], equal_nan=True)


GOOD = dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), Packed([(2, 3), (4, 2)], 2, 2, 16), strict=True))
ELSEWHERE = "cpu" if DEVICE == "cuda" else "meta"  # a device on which no kernel runs


def changed(names, change):
    """Return some of the good arguments, each changed by `change`."""
    return {name: change(GOOD[name]) for name in names}


OF_Q, OF_K = ["cu_seqlens_q"], ["cu_seqlens_k"]
BAD = {
    "q with a batch": (changed("q", lambda t: t[None]), ValueError, r"q must have 3 dimensions \[tokens, .*\], got 4"),
    "k is a list": ({"k": [1.0]}, TypeError, "k must be a torch.Tensor, got list"),
    "v of another dtype": (changed("v", torch.Tensor.bfloat16), TypeError, "v must have the dtype of q"),
    "k elsewhere": (changed("k", lambda t: t.to(ELSEWHERE)), ValueError, "k must be on the device of q"),
    "no tokens": (changed("q", lambda t: t[:0]), ValueError, "q must not have a dimension of 0"),
    "a strange head dimension": (changed("qk", lambda t: t[..., :8]), ValueError, "head_dim, .*, must be one of"),
    "k of another head dimension": (changed("k", lambda t: t.repeat(1, 1, 2)), ValueError, r"k must be .* q: .* \(5, 2, 32\)"),
    "fewer tokens in v": (changed("v", lambda t: t[1:]), ValueError, r"v must have k's .* \(5, 2\), got \(4, 2\)"),
    "more heads in k": (changed("kv", lambda t: t.repeat(1, 2, 1)), ValueError, "a multiple .* got 2 and 4"),
    "a list of starts": ({"cu_seqlens_q": [0, 1, 5]}, TypeError, "cu_seqlens_q must be a torch.Tensor, got list"),
    "sparse": (changed(OF_K, torch.Tensor.to_sparse), TypeError, "cu_seqlens_k must be a dense tensor"),
    "int64": (changed(OF_K, torch.Tensor.long), TypeError, "cu_seqlens_k must be int32, got torch.int64"),
    "two dimensions": (changed(OF_Q, lambda t: t[None]), ValueError, r"cu_seqlens_q must have .* \(B \+ 1,\) .* \(1, 3\)"),
    "no sequence": (changed(OF_Q, lambda t: t[:1]), ValueError, r"cu_seqlens_q must have .* B >= 1, got \(1,\)"),
    "another batch": (changed(OF_K, lambda t: t[1:]), ValueError, r"cu_seqlens_k must have .* \(3,\), got \(2,\)"),
    "starts elsewhere": (changed(OF_Q, lambda t: t.to(ELSEWHERE)), ValueError, "cu_seqlens_q must be on the device of q"),
    "a length": ({"max_seqlen_q": 4}, TypeError, "max_seqlen_q: not needed; leave it out"),
    "another name": ({"softmax_scale": 1.0}, TypeError, "softmax_scale: this function's name for it is scale"),
    "of SDPA": ({"is_causal": True}, TypeError, "is_causal: this function's name for it is causal"),
    "unknown": ({"window": 4}, TypeError, r"attention_varlen\(\) got an unexpected keyword argument 'window'"),
    "causal": ({"causal": "top-left"}, ValueError, "causal must be a bool or 'bottom-right', got 'top-left'"),
    "scale": ({"scale": "1"}, TypeError, "scale must be a number or None, got str"),
    "return_lse": ({"return_lse": 1}, TypeError, "return_lse must be a bool, got int"),
    "float32": (changed("qkv", torch.Tensor.float), TypeError, "with cu_seqlens, q, k and v must be float16 or bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("wrong, error, message", BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_refused(taking, wrong, error, message):
    with pytest.raises(error, match=message):
        taking.attention_varlen(**GOOD | wrong)


def test_other_stages_refuse_packed_sequences():
    for name in set(stages.names()) - set(taking_lengths("starts")):
        with pytest.raises(NotImplementedError, match=f"{name} takes no packed sequences; the newest stage does"):
            stages.load(name).attention_varlen(**GOOD)


@pytest.mark.parametrize("which", "qkv")
def test_gradients_are_refused(taking, which):
    inputs = GOOD | {which: GOOD[which].clone().requires_grad_()}
    operator = getattr(torch.ops.kernel_evolution, f"{taking.__name__.removeprefix('stages.')}_varlen").default
    for call in (
        lambda: taking.attention_varlen(**inputs),
        lambda: operator(*inputs.values(), False, SCALE),
        lambda: grad(lambda one: taking.attention_varlen(**GOOD | {which: one}).sum())(GOOD[which]),
    ):
        with pytest.raises(NotImplementedError, match="attention_varlen has no gradients"):
            call()
    with torch.no_grad():
        assert not taking.attention_varlen(**inputs).requires_grad


@pytest.mark.skipif(not INTERPRETED, reason="counts the interpreter's programs")
@pytest.mark.parametrize("name", LISTING)
def test_many_short_sequences_take_short_tiles(name, monkeypatch):
    """Sequences of at most 128 queries on average take tiles of 128 queries, at D = 64."""
    stage, taken = available(name), []
    monkeypatch.setattr(recording, "is_watched", lambda: True)
    listing = names_in(name)["list_tiles"]
    monkeypatch.setitem(stage.forward.__globals__, "list_tiles", lambda *args: taken.append(args[3]) or listing(*args))
    for pairs in ([(300, 300), (5, 5)], [(300, 300)] + [(5, 5)] * 3):
        check(stage, Packed(pairs))
    assert taken == [256, 128]
