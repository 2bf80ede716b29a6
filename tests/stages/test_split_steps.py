"""Backwards are right if several CTAs share the steps of a key tile, with any number of CTAs. The host splits if it helps."""

import itertools
import math

import pytest
from cases import available, by_functions, check, make_inputs, names_in, once
from predictions import Problem, added_by_splits
from test_memory import PoisonedMemory

import stages
from common import recording
from common.measure.counter import count
from common.operator import BOTTOM_RIGHT
from common.runtime import INTERPRETED, Device, interpreted_as

SPLITTING = once([name for name in stages.names() if "splits_of" in names_in(name, "backward")], "backward")


# On the interpreter, a stage before the last one takes long, and teaches little more.
PARAMS = [pytest.param(name, marks=[pytest.mark.long] * (INTERPRETED and name != SPLITTING[-1])) for name in SPLITTING]


@pytest.fixture(params=PARAMS)
def split(request, monkeypatch):
    """A stage, and a function that sets its number of splits."""
    monkeypatch.setattr(recording, "is_watched", lambda: True)  # recorded launches would not contain the test's changes
    stage = available(request.param)

    def set_splits(number):
        """Several query heads of a K/V head are shared first, where the stage knows how."""

        def splits_of(tiles, heads_per_kv, *_):
            shares = math.gcd(number, heads_per_kv)
            return (shares, number // shares) if divides_heads(request.param) else number

        monkeypatch.setitem(stage.backward.__globals__, "splits_of", splits_of)

    return stage, set_splits


def divides_heads(name):
    """Return whether a stage's CTAs first divide the query heads that share a key tile."""
    return "shares" in names_in(name, "backward")["Problem"]._fields


PROBLEMS = [  # (queries, keys, D, Dv, causal, heads, K/V heads, batch)
    (300, 300, 128, 128, True, 2, 2, 1),  # the last key tile has one step, so most splits have none
    (203, 150, 64, 64, True, 4, 1, 1),
    (150, 203, 64, 128, True, 5, 1, 1),  # no query sees the last keys
    (140, 270, 128, 64, BOTTOM_RIGHT, 4, 1, 2),
    (70, 300, 64, 64, BOTTOM_RIGHT, 1, 1, 2),
    (150, 270, 64, 32, False, 5, 1, 2),
    (113, 203, 128, 128, False, 8, 2, 1),
    (1, 1, 16, 16, False, 1, 1, 1),
]


@pytest.mark.parametrize(("problem", "splits"), list(itertools.product(PROBLEMS, (2, 3, 8))))
def test_gradients_of_split_steps_are_right(split, problem, splits):
    """The accumulators begin as NaN. On two SMs, persistent CTAs take several splits."""
    stage, set_splits = split
    set_splits(splits)
    seq_q, seq_k, head_dim, value_dim, causal, heads, kv_heads, batch = problem
    inputs = make_inputs(seq_q, seq_k, head_dim, batch=batch, heads=heads, kv_heads=kv_heads, value_dim=value_dim)

    def run(*args, **options):
        with PoisonedMemory() as memory, interpreted_as(Device(num_sms=2)):
            results = by_functions(*args, **options)
        memory.check()
        return results

    gradients = check(stage, *inputs, causal=causal, run=run)
    if causal is True and seq_k > seq_q:
        assert not gradients["dk"][:, :, seq_q:].any() and not gradients["dv"][:, :, seq_q:].any()


@pytest.mark.skipif(not INTERPRETED, reason="loads and stores can be watched in the interpreter only")
@pytest.mark.parametrize(("causal", "value_dim", "splits"), [(False, 64, 3), (True, 64, 2), (True, 128, 3)])
def test_splits_move_what_the_formula_says(split, causal, value_dim, splits):
    stage, set_splits = split
    p = Problem(8, 2, 203, 150, 64, value_dim, causal, (128, 128), (128, 128))
    q, k, v, grad_out = make_inputs(203, 150, 64, batch=1, heads=8, kv_heads=2, value_dim=value_dim)
    options = {"causal": causal, "scale": 0.125}
    out, lse = stage.forward(q, k, v, **options)
    whole, parts = [], []
    for number, launches in ((1, whole), (splits, parts)):
        set_splits(number)
        launches += count(lambda: stage.backward(grad_out, q, k, v, out, lse, **options)).launches
    added = [(after.read - before.read, after.written - before.written) for before, after in zip(whole, parts, strict=True)]
    assert added == list(added_by_splits(p, splits))
    assert sum(launch.flops for launch in whole) == sum(launch.flops for launch in parts)


@pytest.mark.parametrize("name", SPLITTING)
def test_key_tiles_are_split_if_they_do_not_fill_the_gpu_evenly(name):
    def splits(tiles, heads_per_kv, seq_q, seq_k, causal=False, diagonal=0):
        sizes = tiles, heads_per_kv, seq_q, seq_k, 128, 64, causal, diagonal, 132
        found = names_in(name, "backward")["splits_of"](*sizes)
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
    assert splits(64 * 32, 1, 4096, 4096, causal=True) == 1
    assert splits(4, 4, 64, 512, causal=True, diagonal=448) == splits(4, 4, 64, 512)  # all queries see nearly all keys
