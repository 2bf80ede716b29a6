"""Results are right on hostile inputs: attention sinks at any key, in all heads or in one, wide scores, and outlier channels.

On a GPU, `make test-long` searches for inputs on which a stage is wrong. `HOSTILE_SEED` and `HOSTILE_SECONDS` set where the
search starts, and how long it takes for each head dimension, dtype and mask.
"""

import itertools
import os
import random
import time

import pytest
import torch
from cases import Part, available, by_functions, check, guessing, namespaces, never_short, set_names

import stages
from common import recording
from common.checks import diagonal
from common.measure.inputs import Scores, Sink, draw, hostile
from common.measure.reference import assert_close, error_bounds, plain, truth
from common.runtime import DEVICE, Device, interpreted_as

on_gpu = DEVICE == "cuda"

SEED, SECONDS = int(os.environ.get("HOSTILE_SEED", "0")), float(os.environ.get("HOSTILE_SECONDS", "20"))
GUESSING = guessing()
NEWEST = [name for name in GUESSING if not stages.is_dead_end(name)][-1]


def always_guess(name):
    """Return the values of a stage's global variables with which it guesses the maximum, whatever samples say."""
    return never_short(name) | {"SAMPLE_LIMIT": 2**20}


@pytest.fixture
def guess(monkeypatch):
    """A function that loads a stage and makes it guess the maximum."""
    monkeypatch.setattr(recording, "is_watched", lambda: True)  # recorded launches would not have these changes

    def load(name):
        available(name)
        set_names(monkeypatch, name, **always_guess(name))
        return stages.load(name)

    return load


def inputs(seq_q, seq_k, head_dim, dtype, scores, heads=2, kv_heads=2):
    torch.manual_seed(0)
    kv_shape = 1, kv_heads, seq_k, head_dim
    return draw((1, heads, seq_q, head_dim), kv_shape, kv_shape, dtype, head_dim**-0.5, scores)


def with_plain_gradients(stage, q, k, v, grad_out, *, causal, scale):
    """Return a stage's out and LSE, and v0's gradients from them, which show whether out and LSE fit together."""
    forward = Part(stage.__name__, "forward")(stage, q, k, v, grad_out, causal=causal, scale=scale)
    options = {"causal": bool(causal), "scale": scale, "diagonal": diagonal(causal, q.shape[2], k.shape[2])}
    dq, dk, dv = stages.load("v0").backward(grad_out, q, k, v, *forward.values(), **options)
    return forward | {"dq": dq, "dk": dk, "dv": dv}


# (key, nats, more). The first 16 keys and the last 64 may enter the guess, so no sink is there.
SINKS = [
    (70, 24.0, {}),
    (90, 10.4, {"lone": True, "std": 0.3, "repeats": 16}),  # in float16, P does not overflow
    (75, 12.0, {"lone": True, "repeats": 4}),
]
DISTRIBUTIONS = [Scores(sinks=(Sink(key, nats, head=1),), **more) for key, nats, more in SINKS]


def misses():
    """Yield (stage, dtype, scores). The default run has all of them for the newest stage, and two for each other stage."""
    for name, dtype, scores in itertools.product(GUESSING, (torch.float16, torch.bfloat16), DISTRIBUTIONS):
        worst = scores is DISTRIBUTIONS[1 if dtype == torch.float16 else 0]
        marks = [] if worst or name == NEWEST else [pytest.mark.long]
        yield pytest.param(name, dtype, scores, id=f"{name}-{str(dtype)[6:]}-{scores.sinks[0].nats:g}nats", marks=marks)


@pytest.mark.parametrize("name, dtype, scores", list(misses()))
def test_a_sink_that_the_guess_misses(guess, name, dtype, scores):
    """The first head has no sink."""
    stage = guess(name)
    with interpreted_as(Device(num_sms=2)):
        check(stage, *inputs(140, 210, 64, dtype, scores), causal=False, run=with_plain_gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_without_its_check_a_guess_is_refused(guess, dtype, tmp_path, monkeypatch):
    """The rule refuses the newest stage if tiles that few keys dominate do not count as failed."""
    name = NEWEST
    stage = guess(name)
    forward = stages.source(name, "forward.py")
    line = next(line for line in forward.splitlines(keepends=True) if "LIMIT * l_capped" in line)
    with stages.changed(name, {"forward.py": forward.replace(line, "")}, tmp_path) as package:
        changed = __import__(f"{package}.forward", fromlist=["forward"])
        for names in (vars(changed), vars(__import__(f"{package}.forward_plan", fromlist=["plan"]))):
            for variable, value in always_guess(name).items():
                if variable in names:
                    monkeypatch.setitem(names, variable, value)
        monkeypatch.setattr(stage, "forward", changed.forward)
        scores = DISTRIBUTIONS[1 if dtype == torch.float16 else 0]
        with interpreted_as(Device(num_sms=2)), pytest.raises(AssertionError, match="d[qk]: |out: "):
            check(stage, *inputs(140, 210, 64, dtype, scores), causal=False, run=with_plain_gradients)


def test_hostile_inputs(part):
    """Each pass gets other inputs, and passes that guess the maximum get two."""
    first = 2 * part.place + part.place % 2
    for seed in (first, first ^ 1) if part.name in GUESSING or on_gpu else (first,):
        dtype = (torch.bfloat16, torch.float16)[seed % 2]
        part.check(*inputs(130, 130, 32, dtype, hostile(seed, 130, 2)), causal=seed % 8 < 4)


def random_problem(seed, head_dim, dtype, causal):
    """Return q, k, v and the output's gradient. Equal seeds give equal problems."""
    choose = random.Random(seed)
    seq_q = choose.choice((64, 200, 512, 1024, 2000))
    seq_k = seq_q if causal else choose.choice((100, 200, 640, 2048))
    kv_heads, shared = choose.choice((1, 1, 2)), choose.choice((1, 1, 4))
    torch.manual_seed(seed)
    q_shape, kv_shape = (1, kv_heads * shared, seq_q, head_dim), (1, kv_heads, seq_k, head_dim)
    return draw(q_shape, kv_shape, kv_shape, dtype, head_dim**-0.5, hostile(seed, seq_k, kv_heads))


def compile_for_all_lengths(name):
    """Let Triton compile a stage's kernels once. It would compile them again for arguments that are 1 or that 16 divides."""
    for kernel in (value for pass_ in ("forward", "backward") for names in namespaces(name, pass_) for value in names.values()):
        for parameter in getattr(getattr(kernel, "fn", kernel), "params", ()):  # an autotuner's `fn` is its kernel
            parameter.do_not_specialize = not parameter.is_constexpr


@pytest.mark.long
@pytest.mark.skipif(not on_gpu, reason="the interpreter takes seconds for each problem")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_a_search_finds_no_wrong_result(head_dim, dtype, causal):
    """Each problem goes through each distinct forward that guesses the maximum, and through the parent of the first one."""
    names = [name for name in (stages.parent(GUESSING[0]), *GUESSING) if not stages.unavailable(name)]
    for name in names:
        compile_for_all_lengths(name)
    end, seed, wrong = time.monotonic() + SECONDS, SEED, []
    while time.monotonic() < end:
        q, k, v, grad_out = random_problem(seed, head_dim, dtype, causal)
        scale = head_dim**-0.5
        exact = truth(q, k, v, causal, scale, grad_out)
        bounds = error_bounds(exact, plain(q, k, v, causal, scale, grad_out))
        for name in names:
            for result, got in by_functions(stages.load(name), q, k, v, grad_out, causal=causal, scale=scale).items():
                try:
                    assert_close(result, got, exact[result], bounds[result])
                except AssertionError as error:
                    wrong.append(f"seed {seed}, {name}: {error}")
        seed += 1
    print(f"seeds {SEED} to {seed - 1}, {len(names)} stages")
    assert names and not wrong, "\n".join(wrong)
