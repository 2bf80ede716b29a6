"""The tests share this code. It makes inputs, computes a stage's results, and checks them against float64."""

import functools
import hashlib
import importlib
import inspect
import os
import re
import subprocess
import zlib
from collections import ChainMap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import stages
from common.checks import diagonal
from common.entry import differentiable_entry, entry
from common.kernels.tuning import tuners
from common.measure import digest
from common.measure.reference import EIGHT_BIT_FACTORS, assert_close, error_bounds, plain, plain_in_eight_bits, truth
from common.runtime import DEVICE, INTERPRETED

ALWAYS, NEVER = 2**30, -(2**30)  # limits with which rows are always or never short
LONG = False  # whether long tests are asked for; conftest.py sets it before the tests are imported
TILED = (40, 100)  # (queries, keys) of a small problem: the last tiles are not full, and most queries see several key tiles

# Batch size and number of heads for most tests. They are small without a GPU, because the interpreter computes batch elements
# and heads one after another. Tests of strides, memory and short lengths use larger, unequal numbers.
FEW = {} if DEVICE == "cuda" else {"batch": 1, "heads": 2}
FEW_SHARED = FEW | {"kv_heads": 1, "value_dim": 16}  # all query heads share one K/V head, and V has a smaller head dimension

KEPT_PROBLEMS, KEPT_ELEMENTS = 100, 2**18  # limits of the cache: the number of problems, and the elements of q and k in each


NEED = re.compile(r"""^from stages\.(\w+)|^PARENT = "(\w+)"|stages\.resolve\("(v\w+)"\)""")


def needs_of_stages_that_are_gone(root: Path) -> list[str]:
    """Find lines of bench.py and of stages that need a missing stage. Return each as `file:line: text`."""
    names = {path.parent.name for path in root.glob("stages/*/__init__.py")}
    there = names | {name.split("_")[0] for name in names}
    found = []
    for path in (root / "bench.py", *sorted(root.glob("stages/*/*.py"))):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if {name for match in NEED.findall(line) for name in match if name} - there:
                found.append(f"{path.relative_to(root)}:{number}: {line}")
    return found


@functools.cache
def in_full() -> frozenset[str]:
    """Return the stages that get every test in the default run.

    On a GPU these are all stages. On the slow interpreter these are the last stage of Triton kernels without an autotuner, the
    newest stage, whose kernels are in Gluon, and the stage of `make test STAGE=…`. Other stages get the tests of their distinct
    code (`parts`).
    """
    if not INTERPRETED:
        return frozenset(stages.names())
    line = stages.line()
    plain_triton = [name for name in line if not needs_hopper(name) and not tuners(stages.load(name))]
    return frozenset({plain_triton[-1], line[-1], *filter(None, [asked()])})


def asked() -> str | None:
    """Return the stage of `make test STAGE=…`, or None."""
    return stages.resolve(os.environ["TESTED"]) if os.environ.get("TESTED") else None


def tested() -> list[str]:
    """Return the stages with which tests of an argument `stage` run, in order. If long tests are asked for, these are all."""
    return [name for name in stages.names() if LONG or name in in_full()]


def available(name: str):
    """Load a stage, or skip the test if the stage cannot run here."""
    if reason := stages.unavailable(name):
        pytest.skip(f"{name} {reason}")
    return stages.load(name)


def needs_hopper(name: str) -> bool:
    """Return whether a stage runs only on Hopper. For float32, such a stage calls another stage's kernels."""
    return hasattr(stages.load(name), "unavailable")


def once(names: list[str], pass_: str) -> list[str]:
    """Return `names` without the stages whose code for the pass equals an earlier one's. Equal code gives equal results."""
    first = {}
    for name in names:
        first.setdefault(digest.current(name, pass_), name)
    return list(first.values())


def once_by_file(names: list[str], file: str) -> list[str]:
    """Return `names` without the stages whose file equals an earlier one's, comments included."""
    first = {}
    for name in names:
        first.setdefault(stages.source(name, file), name)
    return list(first.values())


class Part(NamedTuple):
    """A pass of a stage, "forward" or "backward". An instance is a `run` function for `check`."""

    name: str
    pass_: str

    def __str__(self):
        return f"{self.name}-{self.pass_}"

    def __call__(self, stage, q, k, v, grad_out, *, causal, scale):
        """Return the results of this pass alone. A backward gets the exact out and LSE, rounded."""
        options = {"causal": bool(causal), "scale": scale, "diagonal": diagonal(causal, q.shape[2], k.shape[2])}
        if self.pass_ == "forward":
            return dict(zip(("out", "lse"), entry(stage.forward)(q, k, v, **options), strict=True))
        exact, _ = answer(q, k, v, grad_out, causal=causal, scale=scale)
        out, lse = exact["out"].to(q.dtype), exact["lse"].float()
        gradients = entry(stage.backward)(grad_out, q, k, v, out, lse, **options)
        return dict(zip(("dq", "dk", "dv"), gradients, strict=True))

    def check(self, q, k, v, grad_out, *, causal, scale=None):
        """Assert that the results of this pass are right, and return them."""
        __tracebackhide__ = True
        return check(stages.load(self.name), q, k, v, grad_out, causal=causal, scale=scale, run=self)

    @property
    def place(self) -> int:
        """The pass's number among all passes. So each pass can get other problems than the next."""
        return parts().index(self)


@functools.cache
def parts() -> list[Part]:
    """Return the passes of all stages, each distinct code once, by its hash."""
    return [Part(name, pass_) for pass_ in ("forward", "backward") for name in once(stages.names(), pass_)]


@functools.cache
def changed() -> frozenset[str]:
    """Return the stages with changed code (see `changed_files`). `make test STAGE=…` has its own stage."""
    if name := asked():
        return frozenset([name])
    return frozenset({file.split("/")[1] for file in changed_files("stages") if file.endswith(".py")} & set(stages.names()))


def changed_files(folder: str) -> list[str]:
    """Return the files with changes since the branch left main, or since the commit before if this is main. Without git, there
    are none."""

    def git(*arguments):
        root = Path(__file__).parents[1]
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.split() if done.returncode == 0 else []

    base = git("merge-base", "HEAD~1", "main")
    return git("diff", "--name-only", *base, "--", folder) if base else []


def usual(names: list[str]) -> list[str]:
    """Return the stages for most tests. On the interpreter, the default run leaves out stages inside a track that have not
    changed: neither its end, nor its dead ends."""
    if LONG or not INTERPRETED:
        return names
    inside = {name for track in stages.tracks() for name in stages.line(track)[:-1]} - changed()
    return [name for name in names if name not in inside]


def usual_parts(test: str) -> list[Part]:
    """Return the passes for most tests of a `part`: passes of the usual stages.

    On the interpreter, the default run gives a test every second pass of the stages that have not changed, and the next test
    the others, except ends of tracks and stages `in_full`.
    """
    names, turn = {*usual(stages.names())}, zlib.crc32(test.encode())
    whole = in_full() | changed() | {stages.line(track)[-1] for track in stages.tracks()}
    found = [part for part in parts() if part.name in names]
    return [part for part in found if LONG or not INTERPRETED or part.name in whole or (part.place + turn) % 2]


def guessing() -> list[str]:
    """Return the stages whose forwards guess the maximum, each distinct forward once."""
    return once([name for name in stages.names() if 'MODE == "guess"' in "".join(sources(name, "forward").values())], "forward")


def taking_lengths(argument: str = "lengths", pass_: str = "forward") -> list[str]:
    """Return the stages whose forwards, or backwards, take lengths, or another argument: "starts", for packed sequences."""
    return [name for name in stages.names() if argument in inspect.signature(getattr(stages.load(name), pass_)).parameters]


def taking_pages() -> list[str]:
    """Return the stages whose forwards take caches in pages."""
    return [name for name in taking_lengths() if getattr(stages.load(name), "PAGES", False)]


def first_with(text: str, pass_: str) -> str:
    """Return the first stage of the trunk whose code for a pass has this text."""
    return next(name for name in stages.line() if any(text in code for code in sources(name, pass_).values()))


def sources(name: str, pass_: str) -> dict[str, str]:
    """Return a dict from the names of a pass's files to their source code."""
    return {file: stages.source(name, file) for file in stages.files(pass_, name)}


@functools.cache  # while tests are collected, it is called a thousand times
def namespaces(name: str, pass_: str = "forward") -> list[dict]:
    """For each file of a pass, return the dict of its global variables. A change in a dict changes the stage."""
    modules = [file.removesuffix(".py") for file in stages.files(pass_, name)]
    return [vars(importlib.import_module(f"stages.{stages.home(name, pass_)}.{module}")) for module in modules]


def names_in(name: str, pass_: str = "forward") -> ChainMap:
    """Return all global variables of a stage's pass in one dict."""
    return ChainMap(*namespaces(name, pass_))


def set_names(monkeypatch, name: str, **values):
    """Set global variables of a stage's forward, in each file that has them."""
    for names in namespaces(name):
        for variable in values.keys() & names.keys():
            monkeypatch.setitem(names, variable, values[variable])


def never_short(name: str) -> dict:
    """Return the limits of a stage's forward that make no work short. So the stage guesses the maximum."""
    return {"FEW_SQUARES": NEVER, "SHORT": dict.fromkeys(names_in(name).get("SHORT", ()), NEVER)}


def make_inputs(seq_q, seq_k, head_dim=32, dtype=torch.float16, *, batch=2, heads=3, kv_heads=None, value_dim=None):
    """Return q, k, v and a gradient of the output, with normally distributed elements.

    By default, the batch size and the number of heads differ and exceed 1. `kv_heads` defaults to `heads`, and `value_dim` to
    `head_dim`.
    """
    kv_heads, value_dim = kv_heads or heads, value_dim or head_dim
    shapes = (heads, seq_q, head_dim), (kv_heads, seq_k, head_dim), (kv_heads, seq_k, value_dim), (heads, seq_q, value_dim)
    return tuple(torch.randn(batch, *shape, device=DEVICE).to(dtype) for shape in shapes)


def by_operator(stage, q, k, v, grad_out, *, causal, scale):
    """Return all results of a stage, computed through its operator and autograd."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    out, lse = stage.attention(q, k, v, causal=causal, scale=scale, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad_out)
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def by_functions(stage, q, k, v, grad_out, *, causal, scale):
    """Return all results of a stage, computed by calls of its `forward` and `backward` without autograd."""
    options = {"causal": bool(causal), "scale": scale, "diagonal": diagonal(causal, q.shape[2], k.shape[2])}
    out, lse = differentiable_entry(stage.forward)(q, k, v, **options)
    dq, dk, dv = entry(stage.backward)(grad_out, q, k, v, out, lse, **options)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def check(stage, q, k, v, grad_out, *, causal, scale=None, run=by_operator):
    """Assert that a stage's results are right. Return the results."""
    __tracebackhide__ = True  # pytest shows the test's line and what is wrong
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    results = run(stage, q, k, v, grad_out, causal=causal, scale=scale)
    eight = "dq" not in results and in_eight_bits(stage, q, k, v, causal)
    assert_right(results, q, k, v, grad_out, causal=causal, scale=scale, eight=eight)
    return results


def in_eight_bits(stage, q, k, v, causal) -> bool:
    """Return whether a stage's forward computes in 8 bits, unless gradients are needed."""
    return hasattr(stage, "eight_bits") and stage.eight_bits(q, k, v, causal)


def assert_right(results: dict, q, k, v, grad_out, *, causal, scale, eight=False):
    """Assert that results have the right dtypes and are as close to float64 as `common.measure.reference` requires, where the
    rule of `eight` bits may apply."""
    __tracebackhide__ = True
    for name, like in {"out": q.dtype, "lse": torch.float32, "dq": q.dtype, "dk": k.dtype, "dv": v.dtype}.items():
        assert name not in results or results[name].dtype == like, f"{name}: dtype {results[name].dtype}, expected {like}"
    exact, bounds = answer(q, k, v, grad_out, causal=causal, scale=scale, eight=eight)
    for name, result in results.items():
        assert_close(name, result, exact[name], bounds[name])


def answer(q, k, v, grad_out, *, causal, scale, eight=False) -> tuple[dict, dict]:
    """Return the float64 results of a problem, and the error bounds of each result. Small problems are kept.

    With the bounds of `eight` bits, there are no gradients.
    """
    problem = _Problem(q, k, v, bool(causal), scale, grad_out, diagonal(causal, q.shape[2], k.shape[2]))
    return (_answer if q.numel() + k.numel() <= KEPT_ELEMENTS else _answer.__wrapped__)(problem, eight)


class _Problem(tuple):
    """The arguments of `truth` and `plain`, as the cache's key. Equal problems have equal dtypes, shapes and values."""

    def __new__(cls, *arguments):
        return super().__new__(cls, arguments)

    @functools.cached_property
    def _content(self):
        content = hashlib.blake2b()
        for one in self:
            if isinstance(one, torch.Tensor):
                content.update(f"{one.dtype} {list(one.shape)}".encode())
                content.update(one.detach().contiguous().view(torch.uint8).numpy(force=True))
            else:
                content.update(f" {one!r} ".encode())
        return content.digest()

    def __eq__(self, other):
        return self._content == other._content

    def __hash__(self):
        return hash(self._content)


@functools.lru_cache(KEPT_PROBLEMS if DEVICE == "cpu" else 0)
def _answer(problem, eight):
    """Return the float64 results of a problem, and the error bounds of each result."""
    exact = truth(*problem)
    bounds = (
        error_bounds(exact, plain_in_eight_bits(*problem), EIGHT_BIT_FACTORS) if eight else error_bounds(exact, plain(*problem))
    )
    return {name: exact[name] for name in bounds}, bounds


def assert_same_bits(first: dict, second: dict, unordered: tuple = ()):
    """Assert that each result is equal in every bit, even in the signs of zeros.

    Results in `unordered` need only be close. So a test that names such results also calls `check` or `assert_right`.
    """
    for name, result in first.items():
        other = second[name]
        if name in unordered:
            torch.testing.assert_close(result, other)
            continue
        assert torch.equal(result.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), name


def cells(table, impl):
    """Return those rows of a Markdown table whose third cell is `impl`. Each row is a list of cells."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    return [row for row in rows if row[2:3] == [impl]]
