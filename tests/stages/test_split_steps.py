"""Backwards are right if several CTAs share the steps of a tile, with any number of CTAs. The host splits if it helps."""

import math
import random

import pytest
import torch
from cases import LONG, Part, available, check, make_inputs, names_in, once
from predictions import Problem, added_by_splits, added_by_wide_splits
from test_memory import PoisonedMemory

import stages
from common import recording
from common.checks import BOTTOM_RIGHT
from common.kernels.order import L2_BUDGET, mean_keys
from common.measure.counter import count
from common.runtime import INTERPRETED, Device, interpreted_as

SPLITTING = once([name for name in stages.names() if "splits_of" in names_in(name, "backward")], "backward")
LAST = {stages.track(name): name for name in SPLITTING}.values()


def is_wide(name):
    """Return whether a stage's CTAs share tiles only if D or Dv is 256."""
    return "_wide_dkv_kernel" in names_in(name, "backward")


def params(wide):
    """Return values of the fixture `split`. On the interpreter, a stage before its track's last one takes long, and teaches
    little more."""
    chosen = [name for name in SPLITTING if is_wide(name) == wide]
    return [pytest.param(name, marks=[pytest.mark.long] * (INTERPRETED and name not in LAST)) for name in chosen]


@pytest.fixture
def split(request, monkeypatch):
    """A stage, and a function that sets its number of splits. For D = 256, it may set another number for query tiles."""
    monkeypatch.setattr(recording, "is_watched", lambda: True)  # recorded launches would not contain the test's changes
    stage = available(request.param)

    def set_splits(number, of_queries=None):
        """Several query heads of a K/V head are shared first, where the stage knows how."""

        def splits_of(tiles, heads_per_kv, *_):
            shares = math.gcd(number, heads_per_kv)
            return (shares, number // shares) if divides_heads(request.param) else number

        monkeypatch.setitem(stage.backward.__globals__, "splits_of", splits_of)
        if shares_queries(request.param):
            monkeypatch.setitem(stage.backward.__globals__, "query_splits_of", lambda *_: of_queries or number)

    return stage, set_splits


def divides_heads(name):
    """Return whether a stage's CTAs first divide the query heads of a key tile."""
    return "shares" in names_in(name, "backward")["Problem"]._fields


def shares_queries(name):
    """Return whether a stage's CTAs also share query tiles."""
    return "query_splits_of" in names_in(name, "backward")


PROBLEMS = [  # (queries, keys, D, Dv, causal, heads, K/V heads, batch), and numbers of splits in the default run
    ((300, 300, 128, 128, True, 2, 2, 1), (8,)),  # the last key tile has one step, so most splits have none
    ((203, 150, 64, 64, True, 4, 1, 1), (3,)),
    ((150, 203, 64, 128, True, 5, 1, 1), (2,)),  # no query sees the last keys
    ((140, 270, 128, 64, BOTTOM_RIGHT, 4, 1, 2), (2,)),
    ((70, 300, 64, 64, BOTTOM_RIGHT, 1, 1, 2), (3,)),
    ((150, 270, 64, 32, False, 5, 1, 2), (8,)),
    ((113, 203, 128, 128, False, 8, 2, 1), (3,)),
    ((1, 1, 16, 16, False, 1, 1, 1), (3,)),
]
if LONG or not INTERPRETED:
    PROBLEMS = [(problem, (2, 3, 8)) for problem, _ in PROBLEMS]
WIDE_PROBLEMS = [  # the same kinds of problems, and numbers of splits
    ((300, 300, 256, 256, True, 1, 1, 1), 8),
    ((203, 150, 256, 64, True, 4, 1, 1), 3),
    ((150, 203, 128, 256, True, 5, 1, 1), 2),
    pytest.param((140, 270, 256, 128, BOTTOM_RIGHT, 4, 1, 2), 3, marks=pytest.mark.long),
    ((70, 300, 256, 256, BOTTOM_RIGHT, 1, 1, 2), 8),
    ((150, 270, 16, 256, False, 3, 1, 2), 2),
    ((113, 203, 256, 256, False, 4, 2, 1), 3),
    ((1, 1, 256, 16, False, 2, 2, 1), 8),
]


def check_gradients(split, problem, splits):
    """Check the gradients of a problem, with the exact out and LSE as inputs.

    Accumulators begin as NaN. On two SMs, persistent CTAs take several splits.
    """
    stage, set_splits = split
    set_splits(splits)
    seq_q, seq_k, head_dim, value_dim, causal, heads, kv_heads, batch = problem
    inputs = make_inputs(seq_q, seq_k, head_dim, batch=batch, heads=heads, kv_heads=kv_heads, value_dim=value_dim)
    backward = Part(stage.__name__.removeprefix("stages."), "backward")

    def run(*args, **options):
        with PoisonedMemory() as memory, interpreted_as(Device(num_sms=2)):
            results = backward(*args, **options)
        memory.check()
        return results

    gradients = check(stage, *inputs, causal=causal, run=run)
    if causal is True and seq_k > seq_q:
        assert not gradients["dk"][:, :, seq_q:].any() and not gradients["dv"][:, :, seq_q:].any()


@pytest.mark.parametrize("split", params(wide=False), indirect=True)
@pytest.mark.parametrize(("problem", "splits"), [(problem, number) for problem, some in PROBLEMS for number in some])
def test_gradients_of_split_steps_are_right(split, problem, splits):
    check_gradients(split, problem, splits)


@pytest.mark.parametrize("split", params(wide=True), indirect=True)
@pytest.mark.parametrize(("problem", "splits"), WIDE_PROBLEMS)
def test_gradients_of_shared_wide_tiles_are_right(split, problem, splits):
    check_gradients(split, problem, splits)


@pytest.mark.skipif(not INTERPRETED, reason="loads and stores can be watched in the interpreter only")
@pytest.mark.parametrize("split", params(wide=False), indirect=True)
@pytest.mark.parametrize(("causal", "value_dim", "splits"), [(False, 64, 3), (True, 64, 2), (True, 128, 3)])
def test_splits_move_what_the_formula_says(split, causal, value_dim, splits):
    stage, set_splits = split
    p = Problem(4, 2, 203, 150, 64, value_dim, causal, (128, 128), (128, 128))
    q, k, v, grad_out = make_inputs(203, 150, 64, batch=1, heads=4, kv_heads=2, value_dim=value_dim)
    options = {"causal": causal, "scale": 0.125}
    out, lse = torch.zeros_like(grad_out), torch.zeros(q.shape[:3])  # the counts do not depend on values
    whole, parts = [], []
    for number, launches in ((1, whole), (splits, parts)):
        set_splits(number)
        launches += count(lambda: stage.backward(grad_out, q, k, v, out, lse, **options)).launches
    added = [(after.read - before.read, after.written - before.written) for before, after in zip(whole, parts, strict=True)]
    assert added == list(added_by_splits(p, splits))
    assert sum(launch.flops for launch in whole) == sum(launch.flops for launch in parts)


@pytest.mark.skipif(not INTERPRETED, reason="loads and stores can be watched in the interpreter only")
@pytest.mark.parametrize("split", params(wide=True), indirect=True)
@pytest.mark.parametrize(
    ("causal", "value_dim", "splits", "query_splits"), [(False, 64, 3, 3), (True, 256, 3, 2), (False, 256, 1, 2)]
)
def test_splits_of_wide_tiles_move_what_the_formula_says(split, causal, value_dim, splits, query_splits):
    """With a causal mask, half of a query tile may see no key of a split, and computes one step all the same."""
    stage, set_splits = split
    p = Problem(4, 2, 203, 150, 256, value_dim, causal, (128, 64), (64, 64))
    q, k, v, grad_out = make_inputs(203, 150, 256, batch=1, heads=4, kv_heads=2, value_dim=value_dim)
    options = {"causal": causal, "scale": 0.125}
    out, lse = torch.zeros_like(grad_out), torch.zeros(q.shape[:3])  # the counts do not depend on values
    whole, parts = [], []
    for numbers, launches in (((1, 1), whole), ((splits, query_splits), parts)):
        set_splits(*numbers)
        launches += count(lambda: stage.backward(grad_out, q, k, v, out, lse, **options)).launches
    before = [(launch.read, launch.written) for launch in whole] + [(0, 0)] * (len(parts) - len(whole))
    added = [(after.read - read, after.written - written) for (read, written), after in zip(before, parts, strict=True)]
    shared = query_splits if "query_splits_of" in stage.backward.__globals__ else 1
    assert added == list(added_by_wide_splits(p, splits, shared))
    of_whole, of_parts = (sum(launch.flops for launch in launches) for launches in (whole, parts))
    assert of_whole < of_parts if causal and shared > 1 else of_whole == of_parts


@pytest.mark.skipif(not INTERPRETED, reason="launches can be watched in the interpreter only")
@pytest.mark.parametrize("split", params(wide=True), indirect=True)
def test_wide_tiles_are_not_shared_if_results_must_be_deterministic(split):
    """Only shared tiles have accumulators, which the last launches round."""
    stage, set_splits = split
    set_splits(2)
    q, k, v, grad_out = make_inputs(70, 70, 256, batch=1, heads=1)
    out, lse = stage.forward(q, k, v, causal=False, scale=0.1)
    rounds = []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        launches = count(lambda: stage.backward(grad_out, q, k, v, out, lse, causal=False, scale=0.1)).launches
        rounds.append("_finish_kernel" in {launch.name for launch in launches})
    assert rounds == [True, False]


@pytest.mark.parametrize("name", SPLITTING)
def test_key_tiles_are_split_if_they_do_not_fill_the_gpu_evenly(name):
    def splits(tiles, heads_per_kv, seq_q, seq_k, causal=False, diagonal=0, dims=(128, 128)):
        # The larger of D and Dv, or both; and the queries of a step
        tile = () if is_wide(name) else (*(dims if divides_heads(name) else (max(dims),)), 64)
        found = names_in(name, "backward")["splits_of"](tiles, heads_per_kv, seq_q, seq_k, *tile, causal, diagonal, 132)
        if not divides_heads(name):
            return found
        shares, found = found
        assert heads_per_kv % shares == 0 and (found == 1 or shares == heads_per_kv)
        return shares * found

    assert splits(132, 1, 4096, 4096) == splits(1320, 4, 4096, 4096) == 1
    assert splits(1, 1, 1, 100) == splits(28, 1, 70, 859) == 1  # nothing to split; too little to be worth it
    assert splits(28, 4, 859, 859) == 4  # all in one wave
    assert splits(140, 8, 4096, 4096) > 1  # eight CTAs would run alone at the end
    assert splits(1, 1, 65536, 100) == names_in(name, "backward")["MAX_SPLITS"]
    # The longest tile takes longer than the mean SM. And only one head of 8 leaves room for others in the L2 cache.
    assert splits(156, 8, 9920, 9920, causal=True) == (8 if divides_heads(name) else 2)
    if divides_heads(name):  # also in many waves, unless the heads of a K/V head all fit, or a group of heads fills its waves
        assert splits(16 * 66, 8, 8448, 8448, causal=True) == 8
        assert splits(126 * 11, 8, 1344, 1344, causal=True) == 1
        assert splits(16 * 64, 8, 8192, 8192, causal=True) == splits(8 * 256, 8, 32768, 32768, causal=True) == 1
        assert splits(8 * 192, 8, 24576, 24576, causal=True) == 8  # the second of two waves is half full
        # At D = 64, Dv = 128, a group has three heads, not two as at D = 128, and fills one and a half waves.
        assert splits(8 * 64, 8, 8192, 8192, causal=True, dims=(64, 128)) == 4
        # One K/V head has 64 tiles for each share, so two shares are a group, which fills a wave.
        assert splits(64, 16, 8192, 8192, causal=True) == 4
    assert splits(64 * 32, 1, 4096, 4096, causal=True) == 1
    assert splits(4, 4, 64, 512, causal=True, diagonal=448) == splits(4, 4, 64, 512)  # all queries see nearly all keys


@pytest.mark.parametrize("name", SPLITTING)
def test_key_tiles_are_split_as_after_a_full_search(name):
    """The stage stops its search when more CTAs can only cost more. A search over all divisions finds the same."""
    splits_of = names_in(name, "backward")["splits_of"]
    names, wide, divides = splits_of.__globals__, is_wide(name), divides_heads(name)
    keys, row_bytes = (64, None) if wide else (128, 1024)
    start, sums = names["COSTS"] if wide else (4, 9)  # at D = 128

    def searched(tiles, heads_per_kv, seq_q, seq_k, causal, diagonal):
        longest = -(-seq_q // 64) * heads_per_kv
        mean = max(mean_keys(seq_k, seq_q, seq_q - seq_k + diagonal, keys) / 64, 1) * heads_per_kv

        def time(shares, splits):
            ctas, heads = shares * splits, heads_per_kv // shares
            cost, added = (start, sums) if ctas > 1 else (0, 0)
            most = -(-longest // ctas) + cost
            waves = max(tiles * (mean + cost * ctas) / (132 * most), 1) if causal else -(-tiles * ctas // 132)
            if divides and causal and heads > 1 and heads * seq_q * row_bytes > L2_BUDGET.value:
                group = min(max(L2_BUDGET.value // row_bytes // seq_q, 1) * -(-seq_k // keys), tiles * shares)
                last = group % 132 or 132  # CTAs of a group's last wave
                waves *= 1 if last >= names["FULL"] * 132 else names["CROWDED"]
            return (waves * most + tiles * added / 132) * (names["GAIN"] if ctas == 1 else 1)

        shared = [(shares, 1) for shares in range(1, heads_per_kv + 1) if heads_per_kv % shares == 0] if divides else [(1, 1)]
        ways = shared + [(shared[-1][0], splits) for splits in range(2, names["MAX_SPLITS"] + 1)]
        return min(ways, key=lambda way: time(*way))

    draw = random.Random(0)
    for _ in range(2000):
        seq_q, seq_k = (int(2 ** draw.uniform(0, 14)) for _ in range(2))
        heads_per_kv, causal = draw.choice([1, 1, 2, 3, 8, 16]), draw.random() < 0.5
        tiles = -(-seq_k // keys) * draw.choice([1, 2, 8, 16, 40])
        diagonal = draw.choice([0, max(seq_k - seq_q, 0)]) if causal else 0
        tile = () if wide else (128, *[128] * divides, 64)  # D, and Dv if the stage takes it; and the queries of a step
        found = splits_of(tiles, heads_per_kv, seq_q, seq_k, *tile, causal, diagonal, 132)
        shape = tiles, heads_per_kv, seq_q, seq_k, causal, diagonal
        assert (found if divides else (1, found)) == searched(*shape), shape


@pytest.mark.parametrize("name", [name for name in SPLITTING if shares_queries(name)])
def test_query_tiles_are_split_if_they_do_not_fill_the_gpu_evenly(name):
    def splits(tiles, seq_q, seq_k, causal=False, diagonal=0):
        return names_in(name, "backward")["query_splits_of"](tiles, seq_q, seq_k, causal, diagonal, 132)

    assert splits(132, 4096, 4096) == splits(1320, 4096, 4096) == 1
    assert splits(1, 100, 1) == splits(28, 859, 70) == 1
    assert splits(16, 79, 15316) == 8  # all in one wave
    assert splits(1, 100, 65536) == names_in(name, "backward")["MAX_SPLITS"]
    assert splits(32 * 32, 4096, 4096, causal=True) == 1
    assert splits(4, 64, 512, causal=True, diagonal=448) == splits(4, 64, 512)  # all queries see nearly all keys
    assert splits(4, 64, 65536, causal=True) == splits(4, 64, 64)  # no query sees the later keys
