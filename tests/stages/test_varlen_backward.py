"""Gradients of packed sequences are those of each sequence alone. Tokens of no sequence have zeros as gradients."""

import itertools
import random

import pytest
import torch
import torch._dynamo.testing
from cases import LONG, available, names_in, once, taking_lengths
from test_lengths import Unread, on_device
from test_memory import PoisonedMemory
from test_varlen import BRAIN, EDGES, HALF, NEIGHBOUR, OTHERS, SAME, SCALE, Packed
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

import stages
from common.checks import BOTTOM_RIGHT
from common.entry import Starts, entry
from common.interpreter import schedule
from common.measure.reference import assert_correct, plain, truth
from common.runtime import DEVICE, INTERPRETED, Device, interpreted_as

TRAINING = taking_lengths("starts", "backward")
OF_TRACKS = once(list(filter(stages.track, TRAINING)), "backward")


def is_wide(stage):
    """Return whether a stage has kernels for packed sequences with D or Dv = 256. Otherwise it has those for smaller ones."""
    return getattr(stage, "WIDE_PACKED", False)


NARROW, WIDE = ([name for name in OF_TRACKS if is_wide(stages.load(name)) == wide] for wide in (False, True))


@pytest.fixture(params=OF_TRACKS)
def training(request):
    """A stage whose backward takes packed sequences."""
    return available(request.param)


def sizes(stage, head_dim=64):
    """Return D and Dv for a test that runs a stage's own kernels."""
    return (256, head_dim) if is_wide(stage) else (head_dim, head_dim)


class Trained(Packed):
    """Packed sequences that require gradients, and the gradient of the output."""

    def __init__(self, pairs, heads=2, kv_heads=1, head_dim=64, value_dim=None, dtype=HALF, behind=0):
        super().__init__(pairs, heads, kv_heads, head_dim, value_dim, dtype, behind)
        like = Packed(pairs, heads, kv_heads, value_dim or head_dim, None, dtype, behind)
        self.grad_out = like.tensors[0]

    def fill_with_nan(self, number):
        for tensor in (*self.of_sequence(number), self.rows(self.grad_out, number)):
            tensor.fill_(torch.nan)

    def rows(self, tensor, number, of_keys=False):
        """Return the rows of one sequence, [1, H, tokens, D], of a tensor with a row for each query or for each key."""
        start, end = self.starts[of_keys][number : number + 2].tolist()
        return tensor[start:end].transpose(0, 1)[None]

    def gradients(self, stage, causal):
        """Return dq, dk and dv, through PyTorch's autograd."""
        given = [tensor.detach().requires_grad_() for tensor in self.tensors]
        stage.attention_varlen(*given, *self.starts, causal=causal, scale=SCALE).backward(self.grad_out)
        return [tensor.grad for tensor in given]


def assert_gradients(gradients, packed, causal, numbers=None):
    """Compare sequences with float64. Queries that see no key, and keys that no query sees, have zeros."""
    ends = [each[-1] for each in packed.starts]
    for gradient, end in zip(gradients, (ends[0], ends[1], ends[1]), strict=True):
        assert (gradient[end:] == 0).all()
    for number in range(len(packed.pairs)) if numbers is None else numbers:
        queries, keys = packed.pairs[number]
        dq, dk, dv = (packed.rows(each, number, of_keys) for each, of_keys in zip(gradients, (0, 1, 1), strict=True))
        blind = max(queries - keys, 0) if causal or keys == 0 else 0  # the first queries see no key
        assert (dq[:, :, :blind] == 0).all(), number
        if blind == queries:
            assert (dk == 0).all() and (dv == 0).all(), number
            continue
        q, k, v = packed.of_sequence(number)
        grad_out = packed.rows(packed.grad_out, number)
        given = q[:, :, blind:], k, v, bool(causal), SCALE, grad_out[:, :, blind:], keys - queries + blind
        assert_correct({"dq": dq[:, :, blind:], "dk": dk, "dv": dv}, truth(*given), plain(*given))


def check(stage, packed, causal=True, numbers=None):
    assert_gradients(packed.gradients(stage, causal), packed, causal, numbers)


def test_rows_before_a_sequence_do_not_overflow(training):
    """All scores are far below 0. So P of the zeros that fill a sequence's first tile would be infinite."""
    packed = Trained([(5, 5)], 2, 1, *sizes(training, 16))
    packed.tensors[0].fill_(3)
    packed.tensors[1].fill_(-3)
    check(training, packed)


LATER = pytest.mark.long if INTERPRETED else ()
# (heads, K/V heads, D, Dv, dtype, causal)
PROBLEMS = [
    (2, 1, 64, 64, HALF, True),
    pytest.param((2, 2, 128, 64, BRAIN, False), marks=LATER),
    pytest.param((4, 1, 128, 128, BRAIN, BOTTOM_RIGHT), marks=LATER),
    pytest.param((8, 1, 64, 64, BRAIN, False), marks=LATER),
    pytest.param((2, 1, 64, 128, HALF, True), marks=LATER),
    pytest.param((2, 2, 16, 32, HALF, False), marks=LATER),
]
WIDE_PROBLEMS = [
    (2, 1, 256, 64, HALF, True),
    (2, 1, 64, 256, BRAIN, False),
    (1, 1, 256, 256, BRAIN, BOTTOM_RIGHT),
    pytest.param((2, 2, 256, 256, HALF, False), marks=LATER),
    pytest.param((6, 2, 256, 256, HALF, True), marks=LATER),
    pytest.param((8, 1, 256, 16, BRAIN, False), marks=LATER),
    pytest.param((2, 1, 64, 256, HALF, True), marks=LATER),
    pytest.param((2, 2, 16, 256, BRAIN, True), marks=LATER),
    (1, 1, 16, 16, HALF, True),  # falls back
]


@pytest.mark.parametrize("training, problem", [
    pytest.param(name, *getattr(problem, "values", [problem]), marks=getattr(problem, "marks", ()))
    for names, problems in ((NARROW, PROBLEMS), (WIDE, WIDE_PROBLEMS)) for name in names for problem in problems
], indirect=["training"], ids=str)  # fmt: skip
def test_every_sequence_is_right_beside_nan(training, problem):
    """Every second sequence is NaN, in q, k, v and the gradient of the output."""
    heads, kv_heads, head_dim, value_dim, dtype, causal = problem
    pairs = [NEIGHBOUR, *itertools.chain(*((pair, NEIGHBOUR) for pair in (EDGES if LONG else EDGES[1::2])))]
    packed = Trained(pairs, heads, kv_heads, head_dim, value_dim, dtype, behind=2)
    for number in range(0, len(pairs), 2):
        packed.fill_with_nan(number)
    check(training, packed, causal, range(1, len(pairs), 2))


@pytest.mark.parametrize("pairs, seed, head_dim", [
    ([(10, 10), (200, 200), (0, 130), (130, 1)], 0, 128),
    pytest.param([(10, 10), (1000, 1000)], 0, 64, marks=LATER), pytest.param([(1000, 1000), (10, 10)], 1, 64, marks=LATER),
    pytest.param([(0, 0), (0, 3), (2, 0)], 2, 64, marks=LATER), pytest.param([(1, 700)] * 3, 3, 128, marks=LATER),
    pytest.param([(700, 1), (1, 1)], 2, 64, marks=LATER), pytest.param([(1, 1), (2, 2), (3, 3)] * 7, 1, 64, marks=LATER),
    pytest.param([(1000, 1000)] * 2, 4, 128, marks=LATER),
])  # fmt: skip
def test_uneven_batches_on_few_sms(training, pairs, seed, head_dim):
    """A CTA takes several tiles. Threads run in other orders with other seeds."""
    schedule.restart_seeds(seed)
    with interpreted_as(Device(num_sms=1 + seed)):
        check(training, Trained(pairs, 2, 1, *sizes(training, head_dim)), causal=seed % 2 == 0)


def backward(stage, packed, of_q, of_k):
    """Call a stage's passes themselves, because a mode of PyTorch does not see what happens inside of an operator."""
    q, k, v, grad_out = (tensor.transpose(0, 1)[None] for tensor in (*packed.tensors, packed.grad_out))
    options = {"causal": True, "scale": SCALE, "starts": Starts(of_q, of_k)}
    out, lse = entry(stage.forward)(q, k, v, **options)
    return [each[0].transpose(0, 1) for each in entry(stage.backward)(grad_out, q, k, v, out, lse, **options)]


def test_all_rows_are_written_and_nothing_else(training):
    """There are tokens before the first sequence and behind the last one, which are NaN."""
    packed = Trained([(7, 4), (70, 90), (130, 40)], 2, 1, *sizes(training), behind=20)
    packed.fill_with_nan(0)
    with PoisonedMemory() as memory:
        gradients = backward(training, packed, *(each[1:] for each in packed.starts))
    memory.check()
    assert_gradients(gradients, packed, True, [1, 2])
    for gradient, start in zip(gradients, (7, 4, 4), strict=True):
        assert (gradient[:start] == 0).all()


@pytest.mark.parametrize("values", [
    (0, 90, 30), pytest.param((-3, 20, 500), marks=LATER), pytest.param((50, 2**31 - 1, -(2**31)), marks=LATER),
    pytest.param((90, 0, 90), marks=LATER),
], ids=str)  # fmt: skip
def test_wrong_starts_write_only_inside_of_the_tensors(training, values):
    packed = Trained([(90, 90)], 2, 1, *sizes(training))
    with PoisonedMemory() as memory:
        for of_q, of_k in ((values, (0, 40, 90)), ((0, 40, 90), values))[: 2 if LONG else 1]:
            backward(training, packed, on_device(of_q), on_device(of_k))
    memory.check()


def draw_starts(rng, seed):
    """Return numbers of queries, keys and sequences, and two lists of starts. From seed 15 on, starts may fall."""
    tokens_q, tokens_k, sequences = rng.randint(1, 900), rng.randint(1, 900), rng.randint(1, 9)
    lowest, highest = (0, 0) if seed < 10 else (-50, 50)  # limits of starts outside of the tokens
    drawn = [[rng.randint(lowest, each + highest) for _ in range(sequences + 1)] for each in (tokens_q, tokens_k)]
    return tokens_q, tokens_k, sequences, [sorted(each) for each in drawn] if seed < 15 else drawn


def bounds_of(drawn, ends):
    """Return where parts begin and end, inside of the tokens."""
    return [[0, *(min(max(start, 0), end) for start in each), end] for each, end in zip(drawn, ends, strict=True)]


@pytest.mark.parametrize("seed", range(20) if LONG else (0, 9, 12, 19))
@pytest.mark.parametrize("training", NARROW, indirect=True)
def test_the_list_has_every_tile_once(training, seed):
    """Tiles end with their sequence, those of most queries come first, and each sequence has query tiles of its own."""
    rng = random.Random(seed)
    tokens_q, tokens_k, sequences, drawn = draw_starts(rng, seed)
    block_m = rng.choice((64, 128))
    q, k = (torch.empty(1, 3, each, 16) for each in (tokens_q, tokens_k))
    found = names_in(training.__name__.removeprefix("stages."), "backward")["list_tiles"]
    listed, most, head_tiles = found(Starts(*map(on_device, drawn)), q, k, block_m)
    number, entries = listed[0, 0].item(), listed[1:].tolist()
    assert 0 < number <= len(entries) == most // 3
    for start_n, first_k, key, first_q, query, tiles_m, place, _ in entries[:number]:  # inside of the tensors, for any starts
        assert start_n % 128 == 0 and 0 <= first_k <= first_k + key + 128 <= tokens_k and key > -128
        assert 0 <= first_q <= first_q + query + tiles_m * block_m <= tokens_q or tiles_m == 0
        assert query > -block_m or tiles_m == 0
        assert place + tiles_m < head_tiles or tiles_m == 0 and place == head_tiles - 1
    if seed >= 15:
        return
    bounds = bounds_of(drawn, (tokens_q, tokens_k))
    expected, used = [], []
    for part, ((first_q, end_q), (first_k, end_k)) in enumerate(zip(*map(itertools.pairwise, bounds), strict=True)):
        queries, keys = end_q - first_q if 0 < part <= sequences else 0, end_k - first_k
        tiles_m, tiles_n = -(-queries // block_m), -(-keys // 128)
        place = first_q // block_m + part if tiles_m else head_tiles - 1
        used += range(place, place + tiles_m)
        query, diagonal = queries - max(tiles_m, 1) * block_m, tiles_n * 128 - tiles_m * block_m
        expected += [
            [-queries, tile * 128, first_k, keys + (tile - tiles_n) * 128, first_q, query, tiles_m, place, diagonal]
            for tile in range(tiles_n)
        ]
    expected.sort(key=lambda values: values[0])  # keeps the order of equal ones
    assert [values[1:] for values in expected] == entries[:number]
    assert len(used) == len({*used})


@pytest.mark.parametrize("seed", range(20) if LONG else (0, 9, 12, 19))
@pytest.mark.parametrize("training", WIDE, indirect=True)
def test_both_lists_have_every_tile_once(training, seed):
    """Tiles of parts that see most tokens come first, and each part has its own statistics."""
    tokens_q, tokens_k, sequences, drawn = draw_starts(random.Random(seed), seed)
    found = names_in(training.__name__.removeprefix("stages."), "backward")["list_tiles"]
    key_list, query_list, head_tiles = found(Starts(*map(on_device, drawn)), tokens_q, tokens_k, 64)
    lists, both = [], (tokens_q, tokens_k)
    for listed, (seen, own), rows in ((key_list, both, 64), (query_list, both[::-1], 128)):
        (number, statistics, *_), *entries = listed.tolist()
        lists.append([entry[:6] for entry in entries[:number]])
        assert 0 < number <= len(entries) and statistics == head_tiles
        for tile, part, first, length, first_seen, its_seen in lists[-1]:  # inside of the tensors, for any starts
            assert 0 <= tile * rows < length and 0 <= first <= first + length <= own and 0 <= part <= sequences + 1
            assert 0 <= first_seen <= first_seen + its_seen <= seen and (its_seen == 0 or 0 < part <= sequences)
    if seed >= 15:
        return
    parts = list(zip(*map(itertools.pairwise, bounds_of(drawn, both)), strict=True))
    for listed, side, rows in zip(lists, (1, 0), (64, 128), strict=True):
        expected = []
        for part, bounds in enumerate(parts):
            (first, end), (first_seen, end_seen) = bounds[side], bounds[1 - side]
            seen = end_seen - first_seen if 0 < part <= sequences else 0
            expected += [[tile, part, first, end - first, first_seen, seen] for tile in range(-(-(end - first) // rows))]
        assert listed == sorted(expected, key=lambda entry: -entry[5])  # keeps the order of equal ones
    used = [
        first // 64 + part + tile for part, ((first, end), _) in enumerate(parts) for tile in range((end - first + 63) // 64)
    ]
    assert len(used) == len({*used}) and max(used) < head_tiles


def test_the_host_never_reads_the_starts(training):
    packed = Trained([(3, 5), (0, 2)], 2, 1, *sizes(training))
    with Unread():
        packed.gradients(training, True)
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            packed.gradients(training, True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_calls_and_graphs_take_new_starts(training, head_dim):
    """Later calls replay the second call's launches with their own starts, and so does a captured graph."""
    packed = Trained(SAME, 2, 1, *sizes(training, head_dim))
    for pairs in (SAME, OTHERS, SAME[::-1]):
        check(training, Trained(pairs, 2, 1, *sizes(training, head_dim)))
    given = [tensor.requires_grad_() for tensor in packed.tensors]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = training.attention_varlen(*given, *packed.starts, causal=True, scale=SCALE)
        gradients = torch.autograd.grad(out, given, packed.grad_out)
    for pairs in (OTHERS, SAME[::-1]):
        packed.pairs = pairs
        with torch.no_grad():
            for own, new in zip((*given, *packed.starts), Packed(pairs, 2, 1, *sizes(training, head_dim)), strict=True):
                own.copy_(new)
        graph.replay()
        assert_gradients(gradients, packed, True)


def of_each(packed, weigh):
    """Return the gradients of the sum of weigh(out, lse) over sequences with causal masks, from float64."""
    given = [tensor.detach().double().requires_grad_() for tensor in packed.tensors]
    total = 0
    for (q0, q1), (k0, k1) in zip(*(itertools.pairwise(each.tolist()) for each in packed.starts), strict=True):
        blind = max((q1 - q0) - (k1 - k0), 0)
        if q0 + blind < q1:
            q, k, v = given[0][q0 + blind : q1], given[1][k0:k1], given[2][k0:k1]
            k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
            s = torch.einsum("qhd,khd->hqk", q, k) * SCALE
            s = s.masked_fill(torch.ones_like(s[0]).triu(1 + k1 - k0 - (q1 - q0) + blind).bool(), -torch.inf)
            total = total + weigh(torch.einsum("hqk,khd->qhd", s.softmax(-1), v), s.logsumexp(-1))
    return torch.autograd.grad(total, given)


def weigh(out, lse):
    return out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0).sin().sum()


@pytest.fixture
def loss(training):
    """Packed sequences with tokens of no sequence behind them, and a function of them and of q, k and v that also uses LSE."""
    packed = Packed([(3, 5), (0, 2), (9, 4), (4, 0)], 2, 1, *sizes(training), behind=2)
    tokens = packed.starts[0][-1].item()

    def function(q, k, v, *starts):
        out, lse = training.attention_varlen(q, k, v, *starts, causal=True, scale=SCALE, return_lse=True)
        return weigh(out[:tokens].float(), lse[:, :tokens])

    return packed, function


def test_the_log_sum_exp_has_gradients(loss):
    packed, function = loss
    given = [tensor.requires_grad_() for tensor in packed.tensors]
    for got, expected in zip(torch.autograd.grad(function(*packed), given), of_each(packed, weigh), strict=True):
        torch.testing.assert_close(got.double(), expected, atol=0.01, rtol=0.01)


def test_tokens_of_no_sequence_have_zeros_as_gradients_of_the_log_sum_exp(training):
    """Their rows are NaN, and so may be the gradient of their log-sum-exp, which is undefined."""
    packed = Packed([(3, 2), (4, 5), (2, 2)], behind=2)
    for tensor in packed.of_sequence(0):
        tensor.fill_(torch.nan)
    starts = [each[1:].clone() for each in packed.starts]
    starts[0][-1] -= 1  # so the last query belongs to no sequence, and is no NaN
    given = [tensor.requires_grad_() for tensor in packed.tensors]
    for grad_lse in (1.0, torch.nan):
        _, lse = training.attention_varlen(*given, *starts, causal=True, scale=SCALE, return_lse=True)
        grad_lse = torch.full_like(lse, grad_lse)
        grad_lse[:, 3:8] = 1
        gradients = torch.autograd.grad(lse, given, grad_lse)
        for gradient, (first, last) in zip(gradients, ((3, 8), (2, 9), (2, 9)), strict=True):
            assert (gradient[:first] == 0).all() and (gradient[last:] == 0).all()
            assert gradient.isfinite().all()
        assert (gradients[0][3:8] != 0).any()


def test_rows_without_keys_have_zeros_as_gradients_of_the_log_sum_exp(training):
    """Their log-sum-exp is −∞, so its gradient may be NaN."""
    packed = Packed([(5, 2)])
    given = [tensor.requires_grad_() for tensor in packed.tensors]
    _, lse = training.attention_varlen(*given, *packed.starts, causal="bottom-right", scale=SCALE, return_lse=True)
    assert (lse[:, :3] == -torch.inf).all()
    gradients = torch.autograd.grad(lse, given, torch.where(lse == -torch.inf, torch.nan, 1.0))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][:3] == 0).all() and (gradients[0][3:] != 0).any() and (gradients[1] != 0).any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_sequence_that_is_not_finite_leaves_others_the_gradients_of_the_log_sum_exp(training, value):
    packed = Packed([(5, 5), (4, 6)])
    given = [tensor.requires_grad_() for tensor in packed.tensors]

    def gradients():
        _, lse = training.attention_varlen(*given, *packed.starts, causal=True, scale=SCALE, return_lse=True)
        return torch.autograd.grad(lse, given[:2], torch.ones_like(lse))

    expected = gradients()
    with torch.no_grad():
        packed.tensors[0][5:] = value
    for got, alone in zip(gradients(), expected, strict=True):
        assert torch.equal(got[:5], alone[:5]) and not got[5:].isfinite().all()


def test_a_sequence_with_large_gradients_of_the_log_sum_exp_leaves_others_exact(training):
    """The gradients' sum over the first sequence would overflow float16, but cancels. The second sequence's are small."""
    packed, alone = Packed([(2000, 1), (4, 5)]), Packed([(4, 5)])
    for tensor, whole in zip(alone.tensors, packed.tensors, strict=True):
        tensor.copy_(whole[-len(tensor) :])
    gradients = []
    for one, large in ((packed, 2000), (alone, 0)):
        k = one.tensors[1].requires_grad_()
        _, lse = training.attention_varlen(*one.tensors, *one.starts, scale=SCALE, return_lse=True)
        grad_lse = torch.full_like(lse, 1e-3)
        grad_lse[:, 0:large:2], grad_lse[:, 1:large:2] = 1e4, -1e4
        gradients.append(torch.autograd.grad(lse, k, grad_lse)[0][-5:])
    torch.testing.assert_close(*gradients, rtol=4e-3, atol=1e-6)


@pytest.mark.long
def test_compiled_and_in_transforms(loss):
    packed, function = loss
    given = [tensor.requires_grad_() for tensor in packed.tensors]
    results = torch.autograd.grad(function(*packed), given)
    compiled = torch.compile(function, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    of_compiled = torch.autograd.grad(compiled(*packed), given)
    torch._dynamo.reset()
    of_checkpoint = torch.autograd.grad(checkpoint(function, *packed, use_reentrant=False), given)
    plain_tensors = [tensor.detach() for tensor in given]
    stacked = torch.stack((plain_tensors[0], plain_tensors[0]))
    of_vmap = vmap(grad(lambda q: function(q, *plain_tensors[1:], *packed.starts)))(stacked)
    for got, expected in zip(
        (*of_compiled, *of_checkpoint, *of_vmap), (*results, *results, results[0], results[0]), strict=True
    ):
        # Sums in dQ are added in any order, which may change the rounding.
        torch.testing.assert_close(got, expected, rtol=0, atol=2 * torch.finfo(got.dtype).eps * expected.abs().max().item())


@pytest.mark.long
def test_as_a_registered_operator(training):
    packed = Packed(SAME, 2, 1, *sizes(training))
    name = training.__name__.removeprefix("stages.")
    given = [tensor.requires_grad_() for tensor in packed.tensors]
    torch.library.opcheck(getattr(torch.ops.kernel_evolution, f"{name}_varlen").default, (*given, *packed.starts, True, SCALE))


def test_gradients_that_are_refused(training):
    """A head dimension is refused before any kernel, unless the stage has kernels for D = 256."""
    for both in () if is_wide(training) else ((256, 64), (64, 256)):
        packed = Packed([(2, 3)], 1, 1, *both)
        packed.tensors[1].requires_grad_()
        with pytest.raises(NotImplementedError, match="attention_varlen with a head dimension above 128 has no gradients"):
            training.attention_varlen(*packed)
    packed = Trained([(2, 3)], 1, 1)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(NotImplementedError, match="packed sequences have no gradients .* deterministically"):
            packed.gradients(training, True)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("training", WIDE, indirect=True)
def test_wide_gradients_are_deterministic(training):
    """No two CTAs add to a gradient at D = 256."""
    torch.use_deterministic_algorithms(True)
    try:
        check(training, Trained([(2, 3), (3, 2)], 1, 1, 256, 16))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("training", NARROW, indirect=True)
def test_the_newest_stage_takes_the_track_s_gradients(training):
    newest = stages.load("newest")
    assert newest.__name__ in map("stages.{}".format, TRAINING)
    assert newest.backward.__globals__["backward_of_shortbwd"] is training.backward
    check(newest, Trained([(3, 5), (5, 3)], head_dim=16))
