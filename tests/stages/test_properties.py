"""Results are as close to float64 as `common.measure.reference` requires, for random problems with all kinds of inputs.

`make test` tries the same few problems of each stage every time. `make test-long` on a GPU tries 10 000 new problems of each
stage. A failure shows the simplest problem that fails. Add this problem to `FOUND`. Every run tries these problems first.
"""

import sys

import pytest
import torch
from cases import by_operator, check
from hypothesis import HealthCheck, example, given, settings
from problems import Layout, Problem, problems
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from common.checks import HEAD_DIMS
from common.runtime import DEVICE

on_gpu = DEVICE == "cuda"

FEW = 3 if on_gpu else 10  # number of problems of each stage in `make test`; a GPU compiles kernels for most of them
MANY = 10_000  # number of problems of each stage in `make test-long`
CHEAP = (16, 32)  # head dimensions for the slow interpreter

EXPANDED = Layout("hsdb", expanded="s")  # for this layout, `torch.empty_like` makes the sequence the innermost dimension
FOUND = [  # simplest problems that have revealed a mistake
    Problem(1, 15, dtype=torch.float16),
    Problem(1, 1, dtype=torch.float16, scale=-0.125),
    Problem(8, 2, heads=2, dtype=torch.float16, scale=0.0, layouts=(Layout(), Layout(), EXPANDED, Layout())),
    Problem(8, 2, heads=2, dtype=torch.float16, layouts=(EXPANDED, EXPANDED, Layout(), Layout())),
    Problem(
        1, 1, dtype=torch.float16, layouts=(Layout(), Layout(), Layout("hdbs", ((0, 0), (0, 0), (0, 1), (0, 0))), Layout())
    ),
]


def replaying(test):
    """Let a test run the problems in `FOUND` first."""
    for problem in FOUND:
        test = example(problem=problem)(test)
    return test


def without_lse(stage, q, k, v, grad_out, *, causal, scale):
    """Return all results of a stage. The differentiated call returns no LSE. A second call returns the LSE."""
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out = stage.attention(*leaves, causal=causal, scale=scale)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad_out)
    _, lse = stage.attention(q, k, v, causal=causal, scale=scale, return_lse=True)
    return {"out": out.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def solve(stage, problem):
    """Assert that a stage is right on a problem."""
    run = by_operator if problem.return_lse else without_lse
    check(stage, *problem.tensors(), causal=problem.causal, scale=problem.scale, run=run)


# All examples of a test share the fixtures. There is no deadline, because a compilation takes longer than hypothesis allows.
ordinary = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
same_every_time = settings(ordinary, derandomize=True, database=None)


@settings(same_every_time, max_examples=FEW)
@replaying
@given(problem=problems(HEAD_DIMS if on_gpu else CHEAP))
def test_any_problem_is_solved(stage, problem):
    solve(stage, problem)


@pytest.fixture
def one_binary(stage, monkeypatch):
    """Compile a stage's kernels once for all values and addresses.

    Triton would compile again for arguments that are 1 or multiples of 16. Ten thousand problems have so many such arguments
    that compilation would take hours. `test_any_problem_is_solved` compiles the kernels as usual.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("stages.")]
    values = [value for module in modules for value in vars(module).values()]
    kernels = [value.fn if isinstance(value, Autotuner) else value for value in values]
    kernels = [kernel for kernel in kernels if isinstance(kernel, JITFunction)]
    for kernel in kernels:
        for parameter in kernel.params:
            monkeypatch.setattr(parameter, "do_not_specialize", not parameter.is_constexpr)
        kernel.device_caches.clear()
    yield
    for kernel in kernels:
        kernel.device_caches.clear()


@pytest.mark.long
@pytest.mark.skipif(not on_gpu, reason="takes an hour on the interpreter")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_any_of_many_problems_is_solved(stage, head_dim, one_binary):
    @settings(ordinary, max_examples=MANY // len(HEAD_DIMS), print_blob=True)
    @given(problem=problems([head_dim]))
    def solved(problem):
        solve(stage, problem)

    solved()
