"""Each barrier of every Gluon kernel is needed, and missed: without one of its statements some order of events is an error.

What can go without an error is not needed, and goes from the kernel; or no problem below reaches it, and one more is added.
"""

import importlib.util
import itertools
import re
from pathlib import Path

import pytest
import torch
from cases import make_inputs
from triton.runtime.interpreter import InterpreterError

import stages
from common.interpreter import schedule
from common.runtime import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a GPU only goes wrong sometimes, or hangs")

# To wait or to let others go on; and the waits for matmuls, which compute nothing themselves. Not the waits for a turn (v11a),
# which are for speed alone.
STATEMENT = re.compile(
    r"\s+(mbarrier\.(?!wait\(turns\.)(wait|arrive|expect)\(|fence_async_shared\(|tma\.store_wait\("
    r"|(\w+, )*\w+ = warpgroup_mma_wait\(\d, \[[\w, ]+\]\))"
)
# (query rows, keys, head dimension, that of v, causal, heads, those of k and v, scale over the usual one): each has paths that
# the others have not. In float16 the last overflows where the first keys are trusted.
PROBLEMS = [
    (60, 100, 64, 128, True, 12, 1, 1),
    (300, 330, 64, 64, True, 2, 1, 1),
    (130, 200, 64, 64, False, 2, 2, 1),
    (130, 200, 128, 128, True, 4, 2, 1),
    (200, 130, 256, 256, True, 2, 2, 1),
    (700, 640, 64, 64, True, 2, 2, 1),
    (400, 300, 128, 128, True, 3, 1, 1),
    (200, 260, 256, 256, True, 1, 1, 1),
    (600, 1100, 64, 64, False, 2, 2, 10),
]
SEEDS = range(12)
EVERY = 12  # statement of a file is deleted in the default run


def statements():
    """Each that is deleted: stage, part, index of its line."""
    for name, part in itertools.product(stages.names(), ("forward", "backward")):
        lines = Path(stages.__path__[0], name, f"{part}.py").read_text().splitlines()
        found = [index for index, line in enumerate(lines) if STATEMENT.match(line)]
        for number, index in enumerate(found):
            marks = [pytest.mark.long] if number % EVERY else []
            yield pytest.param(name, part, index, id=f"{name}-{part}-{index + 1}", marks=marks)


def without_line(name, part, index, folder):
    """`forward` or `backward` of a stage without a line of its file."""
    lines = Path(stages.__path__[0], name, f"{part}.py").read_text().splitlines()
    indent = re.match(r"\s*", lines[index])[0]
    path = folder / f"{part}.py"
    path.write_text("\n".join([*lines[:index], f"{indent}pass", *lines[index + 1 :]]))
    spec = importlib.util.spec_from_file_location(f"stages.{name}.mutant", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, part)


def run(function, part, stage, problem):
    """One pass of a stage, with `function` in place of its own."""
    seq_q, seq_k, head_dim, value_dim, causal, heads, kv_heads, wider = problem
    q, k, v, grad_out = make_inputs(seq_q, seq_k, head_dim, batch=1, heads=heads, kv_heads=kv_heads, value_dim=value_dim)
    options = {"causal": causal, "scale": wider * head_dim**-0.5}
    if part == "forward":
        return function(q, k, v, **options)
    return function(grad_out, q, k, v, *stage.forward(q, k, v, **options), **options)


@pytest.mark.parametrize("name, part, index", list(statements()))
def test_without_it_there_is_an_error(name, part, index, tmp_path):
    function, stage = without_line(name, part, index, tmp_path), stages.load(name)
    for seed, problem in itertools.product(SEEDS, PROBLEMS):
        schedule.restart_seeds(seed)
        torch.manual_seed(0)
        try:
            run(function, part, stage, problem)
        except InterpreterError as error:
            assert f"{part}.py:" in str(error) and "GLUON_SEED" in str(error), error
            return
    pytest.fail("nothing is missed")


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("stage", sorted({param.values[0] for param in statements()}, key=stages.position))
def test_with_all_of_them_there_is_none(stage, problem):
    """Else the test above could pass for another reason."""
    for part in ("forward", "backward"):
        schedule.restart_seeds(0)
        run(getattr(stages.load(stage), part), part, stages.load(stage), problem)
