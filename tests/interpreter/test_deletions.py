"""A Gluon kernel needs each of its barrier statements: if a test deletes one, the interpreter finds an error.

If a test finds no error, delete the statement from the stage, or add a problem that needs the statement.
"""

import functools
import importlib
import inspect
import itertools
import re

import cases
import pytest
import torch
from cases import LONG, asked, available, by_functions, check, make_inputs, names_in, needs_hopper, once, sources
from triton.runtime.interpreter import InterpreterError

import stages
from common.eight_bits import quantized
from common.entry import Descales, Lengths
from common.interpreter import schedule
from common.runtime import INTERPRETED
from common.show import story

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a GPU only goes wrong sometimes, or hangs")

# Statements that synchronize, including waits for matmuls. Waits on `turns` are left out: they affect only speed.
SYNCHRONIZES = re.compile(
    r"\s+(mbarrier\.(?!wait\(turns\.)(wait|arrive|expect)\(|fence_async_shared\(|tma\.store_wait\("
    r"|(\w+, )*\w+ = warpgroup_mma_wait\(\d, \[[\w, ]+\]\))"
)
IN_MEMORY = re.compile(r"\s+(stored_wait|flag_wait)\(")  # waits for other programs, for which the interpreter finds no races
# (queries, keys, D, Dv, causal, heads, K/V heads, scale · sqrt(D)). Each problem runs code that the other problems
# do not run. The rows of the last two are long, so that stages guess the maximum. In the last one, P overflows float16.
PROBLEMS = [
    (60, 100, 64, 128, True, 12, 1, 1),
    (300, 330, 64, 64, True, 2, 1, 1),
    (130, 200, 64, 64, False, 2, 2, 1),
    (130, 200, 128, 128, True, 4, 2, 1),
    (200, 130, 256, 256, True, 2, 2, 1),
    (700, 640, 64, 64, True, 2, 2, 1),
    (400, 300, 128, 128, True, 3, 1, 1),
    (200, 260, 256, 256, True, 1, 1, 1),
    (600, 1100, 64, 64, False, 2, 2, 1),
    (600, 1100, 64, 64, False, 2, 2, 10),
]
# The same with caches, for forwards that take lengths: k and v are [B, Hkv, capacity, D], and the last entry has the lengths.
CACHES = [
    (3, 500, 64, 64, True, 4, 2, 1, (500, 450, 0, 70, 1, 300)),
    (1, 400, 128, 128, False, 8, 4, 1, (400, 10, 399, 129)),
    (70, 260, 256, 256, True, 1, 1, 1, (260, 3, 200)),
]
TICKETS = (60, 300, 16, 16, False, 1, 1, 1)
SEEDS = range(12)
# The default run deletes some statements of the functions that a stage adds or changes: every sixth of a stage that has changed
# since the last commit, and every 60th of all stages together.
EVERY, SPREAD = 6, 60


@functools.cache
def changed_stages():
    """Return up to three stages that have changed, or else the last stage of a track."""
    return sorted(cases.changed(), key=stages.position)[:3] or [stages.line(track)[-1] for track in stages.tracks()][:1]


@functools.cache
def lines_of_changed_functions(name, file):
    """Return the indices of the lines in functions that a stage adds or changes."""
    source, parent, found = stages.source(name, file), stages.parent(name), set()
    known = story.functions(stages.source(parent, file)) if parent else {}
    for function, text in story.functions(source).items():
        if known.get(function) != text:
            first = source[: source.index(text)].count("\n")
            found.update(range(first, first + 1 + text.count("\n")))
    return found


def statements(pattern):
    """Yield each statement that a test deletes, as (stage, pass, file, index of its line).

    The default run has some of the changed stages' statements, and very few of the other stages'.
    """
    count = itertools.count()
    for name, pass_ in itertools.product(stages.names(), ("forward", "backward")):
        found = [
            (file, index)
            for file, text in sources(name, pass_).items()
            for index, line in enumerate(text.splitlines())
            if pattern.match(line)
        ]
        changed = [place for place in found if place[1] in lines_of_changed_functions(name, place[0])]
        kept = changed[:: 1 if asked() else EVERY] if name in changed_stages() else []
        for file, index in found:
            if LONG or (file, index) in kept or (file, index) in changed and next(count) % SPREAD == 0:
                yield pytest.param(name, pass_, file, index, id=f"{name}-{file}-{index + 1}")


def inputs(problem):
    """Return q, k, v, the gradient of the output, and a dict of options."""
    seq_q, seq_k, head_dim, value_dim, causal, heads, kv_heads, wider, *lengths = problem
    batch = len(lengths[0]) if lengths else 1
    tensors = make_inputs(seq_q, seq_k, head_dim, batch=batch, heads=heads, kv_heads=kv_heads, value_dim=value_dim)
    options = {"causal": causal, "scale": wider * head_dim**-0.5}
    if lengths:
        options["lengths"] = Lengths(torch.tensor(*lengths, dtype=torch.int32))
    return *tensors, options


def run(function, pass_, stage, problem, seed):
    """Run `function` as the stage's forward or backward on a problem."""
    schedule.restart_seeds(seed)
    torch.manual_seed(0)
    q, k, v, grad_out, options = inputs(problem)
    if "lengths" in options and "descales" in inspect.signature(function).parameters:
        (k, k_descale), (v, v_descale) = quantized(k), quantized(v)
        options["descales"] = Descales(k_descale, v_descale)
    if pass_ == "forward":
        return function(q, k, v, **options)
    return function(grad_out, q, k, v, *stage.forward(q, k, v, **options), **options)


@pytest.mark.parametrize("name, pass_, file, index", [*statements(SYNCHRONIZES), *statements(IN_MEMORY)])
def test_a_deleted_statement_is_missed(name, pass_, file, index, tmp_path):
    """The interpreter finds an error, or, without a wait for another program, a result changes."""
    lines = stages.source(name, file).splitlines()
    changes_results = IN_MEMORY.match(lines[index])
    lines[index] = re.match(r"\s*", lines[index])[0] + "pass"
    with stages.changed(name, {file: "\n".join(lines)}, tmp_path) as package:
        changed, stage = getattr(importlib.import_module(f"{package}.{pass_}"), pass_), stages.load(name)
        if "FEWEST" in changed.__globals__:  # shorter sequences would fall back to the parent
            changed.__globals__["FEWEST"] = {64: 0, 128: 0}
        caches = CACHES if pass_ == "forward" and name in cases.taking_lengths() else []
        for seed, problem in itertools.product(SEEDS, [*caches, *PROBLEMS]):
            try:
                results = run(changed, pass_, stage, problem, seed)
            except InterpreterError as error:
                assert f"{tmp_path.name}/{pass_}" in str(error) and "GLUON_SEED" in str(error), error
                return
            if changes_results:
                right = run(getattr(stage, pass_), pass_, stage, problem, seed)
                if not all(torch.allclose(a, b, rtol=0.1, atol=0.1) for a, b in zip(results, right, strict=True)):
                    return
    pytest.fail("nothing is missed")


def complete():
    """Yield (stage, problem, seed) for kernels without a deletion.

    Where CTAs take tickets for a query tile, the first stores dQ, and the others add. An addition that arrives before the store
    is lost, which only some orders show. In TICKETS, three CTAs share each query tile.
    """
    for name in filter(needs_hopper, stages.names()) if LONG else changed_stages():
        yield from ((name, problem, 0) for problem in PROBLEMS)
    taking = once([name for name in stages.names() if "_take_ticket" in names_in(name, "backward")], "backward")
    yield from itertools.product(taking if LONG else taking[-1:], [TICKETS], SEEDS if LONG else SEEDS[::2])


@pytest.mark.parametrize("name, problem, seed", list(complete()), ids=str)
def test_complete_kernel_is_right(name, problem, seed):
    *tensors, options = inputs(problem)
    schedule.restart_seeds(seed)
    check(available(name), *tensors, **options, run=by_functions)
