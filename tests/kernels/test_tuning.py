"""Every configuration of an autotuner gives right results, and problems of similar lengths share a choice."""

import functools
import itertools
import math
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
SOON = TUNED if on_gpu else [*{len(tuners(name)): name for name in TUNED if not stages.is_dead_end(name)}.values()]


def marked(name, *values, unlike_others=True, **options):
    """Return a test's parameter. It is long, unless its stage is in `SOON` and it is unlike other parameters."""
    return pytest.param(name, *values, marks=[] if unlike_others and name in SOON else [pytest.mark.long], **options)


def configurations():
    """Yield (stage, kernel, index) of each configuration of each tuner.

    The interpreter ignores warps and pipeline stages. There, a configuration is marked long if an earlier one has equal tiles.
    """
    for name in TUNED:
        for kernel, tuner in tuners(name).items():
            tiles = [config.kwargs for config in tuner.configs]
            for index, config in enumerate(tuner.configs):
                new = on_gpu or config.kwargs not in tiles[:index]
                yield marked(name, kernel, index, unlike_others=new, id=f"{name}{kernel}-{index}")


PROBLEMS = [(16, torch.float16)]
if on_gpu:
    PROBLEMS = [(64, torch.float16), (64, torch.float32), pytest.param(128, torch.bfloat16, marks=pytest.mark.long)]


def check_masks(name, inputs):
    for causal in (False, True) if on_gpu else (True,):
        check(stages.load(name), *inputs, causal=causal)


@functools.cache
def timed(name, head_dim, dtype):
    """Tune a stage's kernels for a problem. Return the timed configurations of each kernel."""
    for tuner in tuners(name).values():
        tuner.cache.clear()  # forget what other tests have picked without timing
    check_masks(name, make_inputs(*LENGTHS, head_dim, dtype, batch=1, heads=1))
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
    check_masks(name, make_inputs(*LENGTHS, head_dim, dtype, batch=1, heads=1))


@pytest.mark.parametrize("name", [marked(name) for name in TUNED])
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


def test_nearby_lengths_share_a_tuning(monkeypatch):
    """The first three problems share a tuning. Each other problem differs in a length, a head dimension or the mask."""
    problems = [
        (60, 70, 16, 16, False), (65, 90, 16, 16, False), (1, 128, 16, 16, False),
        (60, 130, 16, 16, False), (60, 70, 32, 16, False), (60, 70, 16, 32, False), (60, 70, 16, 16, True),
    ]  # fmt: skip
    for tuner in tuners(SOON[-1]).values():
        monkeypatch.setattr(tuner, "cache", {})
    for seq_q, seq_k, head_dim, value_dim, causal in problems:
        inputs = make_inputs(seq_q, seq_k, head_dim, value_dim=value_dim, batch=1, heads=1)
        check(stages.load(SOON[-1]), *inputs, causal=causal)
    assert [len(tuner.cache) for tuner in tuners(SOON[-1]).values()] == [5] * len(tuners(SOON[-1]))


def test_identical_kernels_are_tuned_once():
    """Kernels of two stages share a tuning only if the kernels' files are equal."""
    caches = {}
    for kernel, tuner in (found for name in TUNED for found in tuners(name).items()):
        file = Path(tuner.fn.fn.__code__.co_filename)
        assert caches.setdefault((kernel, file.read_text()), tuner.cache) is tuner.cache
    assert len({id(cache) for cache in caches.values()}) == len(caches) < sum(len(tuners(name)) for name in TUNED)


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


OUTLIERS = [
    lambda number, before, at=at: at[2] if (number, before) == at[:2] else [2, 1, 1.2, 1.1, 3][number]
    for at in itertools.product((1, 3), range(1, 1 + tuning.FINAL_ROUNDS), (0.1, 10))
]
TIMES = [  # (milliseconds of configuration `number` after `before` earlier timings, the configuration to choose)
    (lambda number, before: [2, *([1, 1, 1] if before else [1, 0.9, 0.8]), 3][number], 1),  # noise in the first round
    *((outlier, 1) for outlier in OUTLIERS),
    (lambda number, before: [2, 1, 2, 0.97, 2][number] * (1 + 0.02 * before + 0.004 * number), 3),  # the clock falls
    (lambda number, before: 1, 0),  # the first of equals is chosen, unless one is faster
    (lambda number, before: [1.009, 1.005, 1.2, 1.2, 1][number], 0),
    (lambda number, before: [1.011, 1.2, 1.009, 1.2, 1][number], 2),
    (lambda number, before: [1.02, 1.02, 1.02, 1.02, 1][number], 4),
    (lambda number, before: [*[math.inf] * 4, 1][number], 4),  # a configuration that cannot run is not chosen
]


@pytest.mark.parametrize(("milliseconds", "expected"), TIMES)
def test_the_fastest_is_chosen_whatever_the_noise(milliseconds, expected, real_tuning):
    taken, timed = picked(milliseconds)
    assert taken == expected
    finalists = timed[5:][: tuning.FINALISTS]
    assert timed == [0, 1, 2, 3, 4] + finalists * tuning.FINAL_ROUNDS and taken in finalists
