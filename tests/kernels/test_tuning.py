"""Every configuration of an autotuner gives right results, and problems of similar lengths share a choice."""

import functools
import itertools
import math
import time
import types
from pathlib import Path

import pytest
import torch
from cases import check, make_inputs

import stages
from common.kernels import tuning
from common.runtime import DEVICE

on_gpu = DEVICE == "cuda"

LENGTHS = (185, 203)


def tuners(name):
    """Return the autotuned kernels of a stage by name."""
    return tuning.tuners(stages.load(name))


TUNED = [name for name in stages.names() if tuners(name)]
# The interpreter's default run has, for each number of tuned kernels, the last stage with this number.
SOON = TUNED if on_gpu else {len(tuners(name)): name for name in TUNED if not stages.is_dead_end(name)}.values()


def marks_of(name, unlike_others=True):
    return [] if unlike_others and name in SOON else [pytest.mark.long]


TUNERS = [pytest.param(name, kernel, id=f"{name}{kernel}", marks=marks_of(name)) for name in TUNED for kernel in tuners(name)]


def configurations():
    """Yield (stage, kernel, index) of each configuration of each tuner.

    The interpreter ignores warps and pipeline stages. There, a configuration is marked long if an earlier one has equal tiles.
    """
    for name in stages.names():
        for kernel, tuner in tuners(name).items():
            tiles = [tuple(config.kwargs.values()) for config in tuner.configs]
            for index, config in enumerate(tuner.configs):
                again = not on_gpu and tiles.index(tiles[index]) < index
                where = f"{name}{kernel}-{'x'.join(map(str, tiles[index]))}"
                yield pytest.param(
                    name, kernel, index, id=f"{where}-warps{config.num_warps}-stages{config.num_stages}",
                    marks=marks_of(name, unlike_others=not again),
                )  # fmt: skip


PROBLEMS = [(16, torch.float16)]
if on_gpu:
    PROBLEMS = [(64, torch.float16), (64, torch.float32), pytest.param(128, torch.bfloat16, marks=pytest.mark.long)]


def check_both(name, inputs):
    for causal in (False, True):
        check(stages.load(name), *inputs, causal=causal)


@functools.cache
def timed(name, head_dim, dtype):
    """Tune a stage's kernels for a problem. Return the timed configurations of each kernel."""
    for tuner in tuners(name).values():
        tuner.cache.clear()  # forget what other tests have picked without timing
    check_both(name, make_inputs(*LENGTHS, head_dim, dtype, batch=1, heads=1))
    return {kernel: set(tuner.configs_timings) for kernel, tuner in tuners(name).items()}


@pytest.mark.parametrize("name, kernel, index", list(configurations()))
@pytest.mark.parametrize("head_dim, dtype", PROBLEMS)
def test_every_configuration_is_right(name, kernel, index, head_dim, dtype, real_tuning, monkeypatch):
    """Every configuration gives right results. A wrong configuration that skips tiles is fast, so the tuner would choose it.

    A causal kernel may split its loop wrongly for some pairs of BLOCK_M and BLOCK_N. To find such pairs, both lengths end
    inside a tile and exceed every tile.
    """
    tuner = tuners(name)[kernel]
    config = tuner.configs[index]
    assert min(LENGTHS) > max(config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"])
    if on_gpu and config not in timed(name, head_dim, dtype)[kernel]:
        pytest.skip("left out for this problem on this GPU")
    monkeypatch.setattr(tuner, "configs", [config])  # a single configuration runs without being timed
    check_both(name, make_inputs(*LENGTHS, head_dim, dtype, batch=1, heads=1))


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in TUNED])
def test_timing_leaves_nothing_behind(name, real_tuning, monkeypatch):
    """Sums in memory start at zero each time that the autotuner runs a kernel, and in the final run."""

    def time_twice(call, quantiles):
        call()
        call()
        return [0.0] * len(quantiles)

    for tuner in tuners(name).values():
        monkeypatch.setattr(tuner, "cache", {})
        monkeypatch.setattr(tuner, "do_bench", time_twice)
    check(stages.load(name), *make_inputs(70, 90, 16, batch=1, heads=1), causal=True)


@pytest.mark.parametrize("name, kernel", TUNERS)
def test_nearby_lengths_share_a_tuning(name, kernel, monkeypatch):
    tuner = tuners(name)[kernel]
    monkeypatch.setattr(tuner, "cache", {})
    for lengths in [(60, 70), (65, 90), (128, 128), (1, 70)]:
        check(stages.load(name), *make_inputs(*lengths, 16, batch=1, heads=1), causal=False)
    assert len(tuner.cache) == 1
    check(stages.load(name), *make_inputs(60, 130, 16, batch=1, heads=1), causal=False)
    check(stages.load(name), *make_inputs(60, 70, 16, batch=1, heads=1), causal=True)
    check(stages.load(name), *make_inputs(60, 70, 32, batch=1, heads=1), causal=False)
    check(stages.load(name), *make_inputs(60, 70, 16, batch=1, heads=1, value_dim=32), causal=False)
    assert len(tuner.cache) == 5


def test_identical_kernels_are_tuned_once():
    """Kernels of two stages share a tuning only if the kernels' files are equal."""
    every = [(stage, *found) for stage in TUNED for found in tuners(stage).items()]
    shared = 0
    for (_, kernel, tuner), (_, other_kernel, other) in itertools.combinations(every, 2):
        files = (Path(each.fn.fn.__code__.co_filename).read_text() for each in (tuner, other))
        same = kernel == other_kernel and len(set(files)) == 1
        assert (tuner.cache is other.cache) == same
        shared += same
    assert shared, "no two stages have the same forward"


def picked(milliseconds):
    """Tune configurations 0 to 4. Return the chosen configuration, and the timed configurations in order.

    `milliseconds(number, before)` is the time of configuration `number` after `before` earlier timings.
    """
    ran = []
    kernel = types.SimpleNamespace(fn=lambda: None, run=lambda BLOCK_M, **_: ran.append(BLOCK_M))
    configs = tuning.configs([(number, 64, 4, 2) for number in range(5)], None)

    def fake_timer(call, quantiles):
        call()
        return [milliseconds(ran[-1], ran.count(ran[-1]) - 1)] * len(quantiles)

    tuner = tuning._Tuner(kernel, [], configs, tuning.KEY, None, None, do_bench=fake_timer)
    tuner.run(**dict.fromkeys(tuning.KEY, 0))
    *timed, taken = ran
    return taken, timed


@pytest.mark.parametrize("noise", list(itertools.permutations((1.0, 0.9, 0.8))), ids=str)
def test_noise_in_the_first_round_does_not_decide(noise, real_tuning):
    taken, timed = picked(lambda number, before: [2, *([1, 1, 1] if before else noise), 3][number])
    assert taken == 1
    assert timed == [0, 1, 2, 3, 4] + [1, 2, 3] * tuning.FINAL_ROUNDS


def test_a_falling_clock_does_not_decide(real_tuning):
    """The GPU slows down, so each timing takes longer than the one before.

    The tuner must not favor the configuration timed first.
    """
    clock = itertools.count()
    assert picked(lambda number, before: [2, 1, 2, 0.97, 2][number] * (1 + 0.004 * next(clock)))[0] == 3


@pytest.mark.parametrize("outlier", [0.1, 10])
@pytest.mark.parametrize("when", range(1, 1 + tuning.FINAL_ROUNDS))
def test_an_outlier_does_not_decide(outlier, when, real_tuning):
    assert picked(lambda number, before: outlier if (number, before) == (3, when) else [2, 1, 1.2, 1.1, 3][number])[0] == 1
    assert picked(lambda number, before: outlier if (number, before) == (1, when) else [2, 1, 1.2, 1.1, 3][number])[0] == 1


def test_the_first_of_equals_is_picked_unless_one_is_faster(real_tuning):
    assert picked(lambda number, before: 1)[0] == 0
    assert picked(lambda number, before: [1.009, 1.005, 1.2, 1.2, 1][number])[0] == 0
    assert picked(lambda number, before: [1.011, 1.2, 1.009, 1.2, 1][number])[0] == 2
    assert picked(lambda number, before: [1.02, 1.02, 1.02, 1.02, 1][number])[0] == 4


def test_a_configuration_that_cannot_run_is_not_picked(real_tuning):
    assert picked(lambda number, before: [math.inf, math.inf, math.inf, math.inf, 1][number])[0] == 4


@pytest.mark.alone
@pytest.mark.skipif(not on_gpu, reason="the interpreter has nothing to time")
@pytest.mark.parametrize("name", TUNED)
def test_first_call_says_that_it_tunes_and_is_soon_done(name, real_tuning, monkeypatch, capfd):
    for tuner in tuners(name).values():
        monkeypatch.setattr(tuner, "cache", {})
    inputs = make_inputs(700, 900, 64)
    start = time.perf_counter()
    check(stages.load(name), *inputs, causal=True)
    assert time.perf_counter() - start < 30 * len(tuners(name))
    said = capfd.readouterr().err
    assert all(kernel in said for kernel in tuners(name))
    check(stages.load(name), *inputs, causal=True)
    assert "tuning" not in capfd.readouterr().err, "tuned twice"
