"""Each stage moves and computes exactly the bytes and FLOPs of its formula. The counter counts correctly."""

import contextlib
import dataclasses
import importlib
import json
import re
import types

import pytest
import torch
import triton
import triton.language as tl
from cases import TILED, in_full, make_inputs, namespaces
from predictions import Problem, formula, total
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, InterpreterError

import stages
from common.entry import Unavailable
from common.interpreter.asynchronous import Traffic
from common.kernels.descriptors import describe
from common.kernels.hopper import async_reduce_add, describe_rows, new_barriers
from common.kernels.matmul import bmm_float32
from common.kernels.tiles import key_tile, query_tile
from common.kernels.tuning import tuners
from common.measure import traffic
from common.measure.constants import NEVER
from common.measure.counter import Count, Launch, Operand, count
from common.runtime import INTERPRETED
from common.show import results, story

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="loads and stores can be watched in the interpreter only")

H200 = traffic.GPUS["h200"]
FORWARD, BACKWARD = 0, 1
LENGTHS = [(256, 256), (113, 203), (300, 140), TILED]


def name_of(stage):
    return stage.__name__.removeprefix("stages.")


def problem(seq_q, seq_k, head_dim, causal, *, heads=2, kv_heads=None, value_dim=None, tiles=None):
    """Return a problem with batch size 1.

    `tiles` has two pairs (BLOCK_M, BLOCK_N): one for programs that own queries, and one for programs that own keys. By default,
    `tiles` has the fixed tiles for an H200.
    """
    value_dim = value_dim or head_dim
    fixed = (choose(max(head_dim, value_dim), torch.float16) for choose in (query_tile, key_tile))
    tiles = tiles or [(tile["BLOCK_M"], tile["BLOCK_N"]) for tile in fixed]
    return Problem(heads, kv_heads or heads, seq_q, seq_k, head_dim, value_dim, causal, *tiles)


def predicted(name, pass_, p):
    """Return the bytes read, the bytes written and the FLOPs that a pass's formula predicts."""
    return total(formula(name, ("forward", "backward")[pass_])(p))


def counted(stage, p, tuned=None):
    """Return the counts of a stage's forward and backward."""
    q, k, v, grad_out = make_inputs(
        p.seq_q, p.seq_k, p.head_dim, batch=1, heads=p.heads, kv_heads=p.kv_heads, value_dim=p.value_dim
    )
    options, results = {"causal": p.causal, "scale": 0.125}, []
    with traffic.tiles_of(H200, stage, max(p.head_dim, p.value_dim), q.dtype, tuned):
        forward = count(lambda: results.extend(stage.forward(q, k, v, **options)))
        backward = count(lambda: stage.backward(grad_out, q, k, v, *results, **options))
    return forward, backward


def totals(counts):
    return counts.read, counts.written, counts.flops


# --- stages


def check(stage, p, tuned=None):
    """Assert that a stage moves and computes the bytes and FLOPs of its formulas."""
    for pass_, counts in enumerate(counted(stage, p, tuned)):
        assert totals(counts) == predicted(name_of(stage), pass_, p), counts.launches


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_q, seq_k", LENGTHS)
def test_stage_moves_what_its_formula_says(stage, seq_q, seq_k, causal):
    check(stage, problem(seq_q, seq_k, 32, causal))


@pytest.mark.parametrize("causal", [False, True])
def test_formula_holds_for_large_heads(stage, causal):
    """The formulas hold for D = 128. Some stages have other tiles for D = 128 than for a smaller D."""
    check(stage, problem(150, 200, 128, causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_q", "seq_k"), [TILED, *(pytest.param(*pair, marks=pytest.mark.long) for pair in LENGTHS[:-1])])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 64), (32, 128), (128, 32)])
def test_formula_holds_for_shared_heads_and_a_v_of_another_dimension(stage, seq_q, seq_k, head_dim, value_dim, causal):
    """The formulas hold if six query heads share two K/V heads, and D differs from Dv."""
    check(stage, problem(seq_q, seq_k, head_dim, causal, heads=6, kv_heads=2, value_dim=value_dim))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_q", "seq_k"), LENGTHS)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(256, 256), pytest.param(64, 256, marks=pytest.mark.long)])
def test_formula_of_the_newest_backward_holds_for_the_largest_heads(seq_q, seq_k, head_dim, value_dim, causal):
    """The newest stage's backward meets its formula for Dv = 256."""
    stage = stages.load([name for name in stages.names() if not stages.is_dead_end(name)][-1])
    p = problem(seq_q, seq_k, head_dim, causal, heads=4, kv_heads=2, value_dim=value_dim)
    _, backward = counted(stage, p)
    assert totals(backward) == predicted(name_of(stage), BACKWARD, p), backward.launches


@pytest.mark.parametrize("name", ["v30", "v31", "v32", "v33", "v34"])
@pytest.mark.parametrize("sizes", [{"heads": 4, "kv_heads": 2}, {"heads": 2, "head_dim": 128}, {"heads": 1, "causal": True}])
def test_formula_holds_where_keys_are_split(name, sizes):
    """Two queries see 1500 keys, which stages from v31 on split. With a causal mask, the queries see only one or two keys."""
    check(stages.load(name), problem(2, 1500, **{"head_dim": 32, "causal": False} | sizes))


def nothing_is_short(monkeypatch, *others):
    """Make the formulas and a stage treat short work like long work. `others` are the globals of the stage's modules."""
    for names in (*namespaces("v34_planned_splits"), *namespaces("v53_short_forward"), *others):
        for width in names.get("SHORT", ()):
            monkeypatch.setitem(names["SHORT"], width, NEVER)
        if "FEW_SQUARES" in names:
            monkeypatch.setitem(names, "FEW_SQUARES", NEVER)


@pytest.mark.parametrize("name", ["v32", "v33", "v34", "v39", "v40", "v41", "v42", "v43", "v53"])
@pytest.mark.parametrize("kv_heads", [pytest.param(1, marks=pytest.mark.long), 2])
def test_formula_holds_for_long_work(monkeypatch, kv_heads, name):
    nothing_is_short(monkeypatch, *namespaces(stages.resolve(name)))
    check(stages.load(name), problem(150, 300, 64, False, kv_heads=kv_heads))


def test_formula_holds_for_looks_at_other_tiles(monkeypatch):
    """v42 reads flags that say which earlier tiles failed. With few tiles, no tile starts late enough to read a flag."""
    nothing_is_short(monkeypatch, *namespaces(stages.resolve("v42")))
    check(stages.load("v42"), problem(129, 20, 16, False, heads=150))


@pytest.mark.parametrize("tiles", [((64, 32), (64, 32)), ((16, 64), (128, 64))], ids=str)
@pytest.mark.parametrize("name", [name for name in stages.names() if tuners(stages.load(name))])
def test_formulas_hold_for_other_tiles(name, tiles):
    stage = stages.load(name)
    tuned = {kernel: tiles[kernel in ("_dkv_kernel", "_backward_kernel")] for kernel in tuners(stage)}
    check(stage, problem(150, 170, 16, True, tiles=tiles), tuned)


@pytest.mark.parametrize("stage_name", stages.names())
def test_committed_counts_are_what_the_formulas_say(stage_name):
    counts, machine = results.load_counts(results.TRAFFIC)
    mine = [record for record in counts if record["impl"] == stage_name]
    if not mine:
        pytest.skip("not counted yet: make traffic")
    assert len(mine) == 8 and "dirty" not in machine["commit"]
    for record in mine:
        p = problem(record["seq_len"], record["seq_len"], record["head_dim"], record["causal"], heads=record["heads"])
        pass_ = ("fwd", "bwd").index(record["pass"])
        saved = record["bytes_read"], record["bytes_written"], record["flops_executed"]
        assert predicted(stage_name, pass_, p) == saved


# The next tests use the formulas, because counting would take too long. The tests above compare the formulas with counts.


def moved(name, pass_, seq_len, head_dim=64, causal=False, tiles=None):
    read, written, _ = predicted(stages.resolve(name), pass_, problem(seq_len, seq_len, head_dim, causal, tiles=tiles))
    return read + written


@pytest.mark.parametrize(("name", "pass_", "bytes_a_score"), [
    ("v0", FORWARD, 52), ("v1", FORWARD, 16), ("v0", BACKWARD, 68), ("v1", BACKWARD, 28),
])  # fmt: skip
def test_v0_and_v1_move_a_constant_for_each_score(name, pass_, bytes_a_score):
    seq_len = 2**20
    scores = problem(seq_len, seq_len, 64, False).s / 4
    assert moved(name, pass_, seq_len) / scores == pytest.approx(bytes_a_score, rel=1e-3)


@pytest.mark.parametrize("pass_", [FORWARD, BACKWARD])
def test_v2_moves_s_squared_d_squared_over_the_memory_on_the_chip(pass_):
    """v2's bytes grow with S² D² / M, as in the FlashAttention paper.

    M is the size of the memory on the chip. K/V tiles have M / 4D rows.
    """

    def with_memory(memory, seq_len, head_dim):
        tile = 64, memory // (4 * head_dim)
        return moved("v2", pass_, seq_len, head_dim, tiles=(tile, tile))

    base = with_memory(2**16, 2**18, 128)
    assert with_memory(2**16, 2**19, 128) / base == pytest.approx(4, rel=0.02)
    assert with_memory(2**17, 2**18, 128) / base == pytest.approx(1 / 2, rel=0.02)
    assert with_memory(2**16, 2**18, 256) / base == pytest.approx(4, rel=0.02)


# The next test repeats one access of a kernel, and the checks above must notice the repetition. The test leaves out accesses
# for failed tiles, because no tile fails in these problems.

ACCESS = re.compile(
    r"\s+(?:\w+ = .*)?\b(?:(?:tl|gl|\w+_desc)\.(?:load|store|atomic_add)|tma\.async_copy_\w+|async_reduce_add|fetch_add)"
    r"\((?!.*mask=fails).*\)"
)
FOR_FAILED = {"_begun", "_leave", "_next_failed", "_next_again"}


def accesses():
    """Yield every line of a kernel that loads or stores, as (stage, file, index of the line).

    A line is marked `long` if its function equals the parent's, or if no stage of `in_full` (tests/cases.py) has its function.
    """
    checked = {
        (file, *function)
        for name in in_full()
        for file in story.code_files(name)
        for function in story.functions(stages.source(name, file)).items()
    }
    for name in stages.names():
        base = stages.parent(name)
        for file in story.code_files(name):
            known = story.functions(stages.source(base, file)) if base else {}
            source, kept, for_failed = stages.source(name, file), set(), set()
            for function, text in story.functions(source).items():
                first = source[: source.index(text)].count("\n")
                if known.get(function) == text or (file, function, text) not in checked:
                    kept.update(range(first, first + 1 + text.count("\n")))
                if function in FOR_FAILED:
                    for_failed.update(range(first, first + 1 + text.count("\n")))
            for i, line in enumerate(source.splitlines()):
                if ACCESS.match(line) and i not in for_failed:
                    marks = [pytest.mark.long] if i in kept else []
                    yield pytest.param(name, file, i, id=f"{name}-{file}-{i + 1}", marks=marks)


@pytest.fixture
def mutated(tmp_path):
    """A function that changes a file in a copy of a stage. It returns the copy, and the modules of the copy's forward."""
    with contextlib.ExitStack() as stack:

        def changed(name, file, text):
            package = stack.enter_context(stages.changed(name, {file: text}, tmp_path))
            forwards = [importlib.import_module(f"{package}.{each[:-3]}") for each in stages.files("forward", name)]
            backward = importlib.import_module(f"{package}.backward").backward
            return types.SimpleNamespace(forward=forwards[0].forward, backward=backward), forwards

        yield changed


# Accesses that fail if they happen twice, with the error.
ERRORS = {
    "async_copy_global_to_shared": "race: a copy writes|a copy brings .* bytes to .* which expects",
    "before = fetch_add": "waits for a flag in global memory",  # a CTA with two tickets waits for itself
}


@pytest.mark.parametrize("name, file, index", list(accesses()))
def test_access_that_happens_twice_is_noticed(name, file, index, mutated, monkeypatch):
    stage = stages.load(name)
    lines = stages.source(name, file).splitlines()
    changed, forwards = mutated(name, file, "\n".join([*lines[: index + 1], *lines[index:]]))
    pass_ = int(file.startswith("backward"))
    p = problem(*TILED, 32, True)  # a problem for which the formula is right, as tested above
    if error := next((error for access, error in ERRORS.items() if access in lines[index]), None):
        with pytest.raises(InterpreterError, match=error):
            counted(changed, p)
            counted(changed, problem(*TILED, 256, True))
            nothing_is_short(monkeypatch, *map(vars, forwards))
            counted(changed, problem(130, 70, 32, True))
        return
    both = "atomic_add" in lines[index] and "desc" not in lines[index]
    # Some accesses run only for some problems. The keys of the second problem are split. The third problem is treated like long
    # work, and has no splits. The fourth problem has wide heads. The last has more than 128 tiles, so that v42 reads flags.
    looks = problem(130, 20, 16, False, heads=150)
    for each in (p, problem(2, 1500, 32, False), problem(130, 70, 32, True), problem(*TILED, 256, True), looks):
        if each.seq_q == 130:
            nothing_is_short(monkeypatch, *map(vars, forwards))
        read, written, _ = predicted(name_of(stage), pass_, each)
        counts = counted(changed, each)[pass_]
        if noticed := (counts.read > read) + (counts.written > written):
            break
    assert noticed == 1 + both


# --- the counter


@triton.jit
def _copy_kernel(x_ptr, y_ptr, size, BLOCK_M: tl.constexpr):
    offs = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < size), mask=offs < size)


@triton.jit
def _scalar_kernel(x_ptr, y_ptr):
    tl.store(y_ptr, tl.load(x_ptr) + tl.load(x_ptr + 1))


@triton.jit
def _descriptor_kernel(x_desc, y_desc, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    y_desc.store([0, 0, start, 0], x_desc.load([0, 0, start, 0]))


@triton.jit
def _atomic_kernel(x_ptr, lock_ptr, size, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.atomic_add(x_ptr + offs, 1.0, mask=offs < size)
    tl.atomic_cas(lock_ptr, 0, 1)


@triton.jit
def _dot_kernel(a_ptr, c_ptr, M: tl.constexpr, K: tl.constexpr):
    a = tl.load(a_ptr + tl.arange(0, M)[:, None] * K + tl.arange(0, K)[None, :])
    tl.store(c_ptr + tl.arange(0, M)[:, None] * M + tl.arange(0, M)[None, :], tl.dot(a, a.T))


@gluon.jit
def _gluon_copy_kernel(x_ptr, y_ptr, size, BLOCK_M: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offs = gl.program_id(0) * BLOCK_M + gl.arange(0, BLOCK_M, layout)
    gl.store(y_ptr + offs, gl.load(x_ptr + offs, mask=offs < size), mask=offs < size)


@gluon.jit
def _gluon_atomic_kernel(counter_ptr, y_ptr):
    gl.store(y_ptr, gl.atomic_add(counter_ptr, 1))


@gluon.jit
def _copy_in(x_desc, y_desc, x_s, full, start, ADDS: gl.constexpr):
    mbarrier.expect(full.index(0), x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [start, 0], full.index(0), x_s)


@gluon.jit
def _copy_out(x_desc, y_desc, x_s, full, start, ADDS: gl.constexpr):
    mbarrier.wait(full.index(0), 0)
    if ADDS:
        async_reduce_add(y_desc, [start, 0], x_s)
    else:
        tma.async_copy_shared_to_global(y_desc, [start, 0], x_s)
    tma.store_wait(0)


@gluon.jit
def _tma_copy_kernel(x_desc, y_desc, ADDS: gl.constexpr):
    """One partition copies a tile to shared memory. Another partition copies it to global memory, or adds it there."""
    x_s = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_shape, x_desc.layout)
    full = new_barriers(1, 1)
    arguments = (x_desc, y_desc, x_s, full, gl.program_id(0) * x_desc.block_shape[0], ADDS)
    gl.warp_specialize([(_copy_in, arguments), (_copy_out, arguments)], [1], [24])


@gluon.jit
def _matmul_kernel(M: gl.constexpr, N: gl.constexpr, K: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    of_a: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, K], gl.float16)
    of_b: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, N], gl.float16)
    a = gl.allocate_shared_memory(gl.float16, [M, K], of_a, gl.full([M, K], 1, gl.float16, layout))
    b = gl.allocate_shared_memory(gl.float16, [K, N], of_b, gl.full([K, N], 1, gl.float16, layout))
    fence_async_shared()
    matmul = warpgroup_mma(a, b, gl.zeros([M, N], gl.float32, layout), is_async=True)
    warpgroup_mma_wait(0, [matmul])


def only_launch(call):
    (launch,) = count(call).launches
    return launch


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_masked_elements_count_nothing(dtype):
    x, y = torch.zeros(2, 100, dtype=dtype)
    for kernel, block in ((_copy_kernel, 32), (_gluon_copy_kernel, 32), (_gluon_copy_kernel, gl.constexpr(32))):
        launch = only_launch(lambda kernel=kernel, block=block: kernel[(4,)](x, y, 100, BLOCK_M=block))
        assert launch == Launch(kernel.__name__, {"BLOCK_M": 32}, 100 * dtype.itemsize, 100 * dtype.itemsize, 0)
        assert type(launch.tile["BLOCK_M"]) is int


def test_every_program_counts_and_so_does_every_scalar():
    x = torch.zeros(2)
    launch = only_launch(lambda: _scalar_kernel[(3,)](x, torch.empty_like(x)))
    assert (launch.read, launch.written) == (3 * 2 * 4, 3 * 4)


def test_descriptors_are_clipped_at_the_end_of_their_tensor():
    x, y = torch.zeros(2, 1, 1, 50, 16, dtype=torch.float16)
    launch = only_launch(lambda: _descriptor_kernel[(2,)](describe(x, 32, x.shape[-1]), describe(y, 32, y.shape[-1]), BLOCK=32))
    assert (launch.read, launch.written) == (50 * 16 * 2, 50 * 16 * 2)


@pytest.mark.parametrize("adds", [False, True])
def test_tma_moves_only_elements_inside_a_tensor_and_reads_none_to_add(adds):
    x, y = torch.zeros(2, 50, 16)
    launch = only_launch(lambda: _tma_copy_kernel[(2,)](describe_rows(x, 32), describe_rows(y, 32), ADDS=adds))
    assert launch == Launch("_tma_copy_kernel", {}, 50 * 16 * 4, 50 * 16 * 4, 0)


def test_atomics_read_and_write():
    x, lock = torch.zeros(16), torch.zeros(1, dtype=torch.int32)
    launch = only_launch(lambda: _atomic_kernel[(1,)](x, lock, 10, BLOCK=16))
    assert (launch.read, launch.written) == (10 * 4 + 4, 10 * 4 + 4)
    launch = only_launch(lambda: _gluon_atomic_kernel[(3,)](lock, torch.empty_like(lock)))
    assert (launch.read, launch.written) == (3 * 4, 3 * 2 * 4)


def test_dots_count_their_flops():
    a = torch.zeros(32, 16, dtype=torch.float16)
    assert only_launch(lambda: _dot_kernel[(5,)](a, torch.empty(32, 32), M=32, K=16)).flops == 5 * 2 * 32 * 32 * 16
    assert only_launch(lambda: _matmul_kernel[(5,)](M=64, N=32, K=16)).flops == 5 * 2 * 64 * 32 * 16


@pytest.mark.parametrize(("call", "read", "written"), [
    (lambda x, y: x + y, 800, 400),
    (lambda x, y: x * x, 400, 400),
    (lambda x, y: x.add_(y), 800, 400),
    (lambda x, y: x.copy_(y), 400, 400),
    (lambda x, y: torch.add(x, 1, out=y), 400, 400),
    (lambda x, y: x.new_zeros(100), 0, 400),
    (lambda x, y: torch.zeros_like(x), 0, 400),
    (lambda x, y: x.half(), 400, 200),
    (lambda x, y: x.sum(), 400, 4),
    (lambda x, y: x.view(10, 10).t().contiguous(), 400, 400),
    (lambda x, y: x + y[:1].expand(100), 404, 400),
    (lambda x, y: torch.bmm(x.view(2, 5, 10), y.view(2, 10, 5)), 800, 200),
    (lambda x, y: torch.bmm(x.view(2, 5, 10), x.view(2, 10, 5)), 800, 200),  # x is read in two shapes
    (lambda x, y: x.view(10, 10) + x.view(10, 10).t(), 800, 400),  # x is read in two orders
    (lambda x, y: x + x.view(torch.int32), 800, 400),  # x is read with two dtypes
])  # fmt: skip
def test_operators_count_arguments_and_results_once(call, read, written):
    x, y = torch.zeros(2, 100)
    launch = only_launch(lambda: call(x, y))
    assert (launch.read, launch.written) == (read, written), launch


@pytest.mark.parametrize("call", [torch.empty_like, torch.t, lambda x: x.view(-1)[3:].expand(2, -1), lambda x: x.float()])
def test_views_and_empty_tensors_move_nothing(call):
    x = torch.zeros(10, 10)
    assert count(lambda: call(x)).launches == []


def test_matmuls_of_operators_count_their_flops():
    a, b = torch.zeros(2, 3, 4, 5, dtype=torch.float16), torch.zeros(2, 3, 5, 6, dtype=torch.float16)
    assert count(lambda: a @ b).flops == 2 * 6 * 4 * 5 * 6
    assert count(lambda: bmm_float32(a[0], b[0])).flops == 2 * 3 * 4 * 5 * 6
    q = torch.zeros(1, 2, 32, 16)
    assert count(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)).flops == 4 * 2 * 32 * 32 * 16


def test_peak_is_of_live_memory():
    given = torch.ones(256, 1024)  # each tensor of this shape has 1 MiB

    def call():
        first = given.t().contiguous()
        second = torch.empty_like(first).copy_(first)
        del first
        return second.view(-1)[:10] + torch.add(second, 1, out=torch.empty_like(second)).view(-1)[:10]

    result = count(call)
    assert result.peak / 2**20 == pytest.approx(2, abs=1e-3)
    assert [launch.name for launch in result.launches] == ["aten.clone", "aten.copy_", "aten.add", "aten.add"]


def test_kernel_bodies_count_no_operators_and_no_memory():
    x = torch.zeros(100)
    result = count(lambda: _copy_kernel[(4,)](x, torch.empty_like(x), 100, BLOCK_M=32))
    assert [launch.name for launch in result.launches] == ["_copy_kernel"]
    assert result.peak == 400
    x = torch.zeros(50, 16)
    result = count(lambda: _tma_copy_kernel[(2,)](describe_rows(x, 32), describe_rows(torch.empty_like(x), 32), ADDS=True))
    assert [launch.name for launch in result.launches] == ["_tma_copy_kernel"]
    assert result.peak == 50 * 16 * 4


def test_counting_leaves_the_interpreter_as_it_was():
    def functions():
        return [vars(owner).copy() for owner in (InterpreterBuilder, InterpretedFunction, GluonJITFunction, Traffic)]

    before = functions()
    count(lambda: None)
    assert functions() == before
    x = torch.zeros(3)
    with pytest.raises(InterpreterError):
        count(lambda: _copy_kernel[(1,)](x, "nowhere", 3, BLOCK_M=4))
    assert functions() == before
    assert count(lambda: x + x).read == 12


# --- tiles, predictions


def blocks(counts):
    return [tuple(launch.tile.values()) for launch in counts.launches if len(launch.tile) == 2]


@pytest.mark.parametrize(("gpu", "fixed", "tuned"), [
    ("h200", [(128, 64), (32, 128)], [(128, 64), (32, 128)]),
    ("rtx5060ti", [(128, 64), (32, 64)], [(128, 64), (32, 64)]),
    ("a100", [(128, 64), (32, 64)], [(32, 32), (32, 32)]),  # no TMA
])  # fmt: skip
def test_stages_get_the_tiles_of_the_gpu(gpu, fixed, tuned):
    for name, tiles in (("v3", fixed), ("v4", tuned)):
        stage = stages.load(name)
        before = {kernel: tuner.configs for kernel, tuner in tuners(stage).items()}
        workload = traffic.Workload("bwd", 1, 1, 32, 128, False, "float16")
        assert blocks(traffic.count_stage(stage, workload, traffic.GPUS[gpu])) == tiles
        assert {kernel: tuner.configs for kernel, tuner in tuners(stage).items()} == before


def test_persistent_kernels_have_as_many_programs_as_the_gpu_has_sms():
    """v28's second launch has one program per SM, here three. Each program reads a flag of four bytes."""
    workload = traffic.Workload("fwd", 1, 5, 16, 16, False, "float16")
    counts = traffic.count_stage(stages.load("v28"), workload, dataclasses.replace(H200, num_sms=3))
    assert counts.launches[-1] == Launch("_forward_kernel", {"BLOCK_M": 256, "BLOCK_N": 64}, 3 * 4, 0, 0)


def test_stages_are_available_where_a_gpu_has_what_they_need():
    for name in stages.names():
        assert H200.unavailable(name) is None and stages.unavailable(name) is None
    assert traffic.GPUS["a100"].unavailable("v7") is None
    assert "this GPU is sm_80" in traffic.GPUS["a100"].unavailable("v12")
    with pytest.raises(Unavailable):
        traffic.count_stage(stages.load("v12"), traffic.Workload("fwd", 1, 1, 16, 16, False, "float16"), traffic.GPUS["a100"])


RATES = traffic.Rates(tflops=100, hbm_tb_per_s=1, l2_tb_per_s=4, launch_us=2)


def operands(*each):
    """Return a launch with operands of (allocation, size in bytes, bytes read, bytes written)."""
    return Launch(
        "a", read=sum(e[2] for e in each), written=sum(e[3] for e in each), operands=[Operand(*operand) for operand in each]
    )


def test_bytes_cross_hbm_once_unless_the_cache_drops_them():
    small, again = operands((0, 60, 600, 0), (1, 30, 0, 30)), operands((1, 30, 90, 0), (0, 60, 60, 0))
    assert traffic.compulsory([small, again], 100) == [60, 0]
    # Allocation 2 needs the room of allocation 0, which HBM has, and of allocation 1, which HBM lacks.
    large = operands((2, 90, 0, 500))
    assert traffic.compulsory([small, large, again], 100) == [60, 30, 30 + 60 + 90]
    assert traffic.compulsory([operands((0, 101, 50, 101))], 100) == [50 + 101]


def test_a_prediction_takes_the_level_that_binds_and_adds_launches():
    def predicted(read, requested, flops, **rates):
        launch = Launch("a", {}, requested, 0, flops, [Operand(0, 10**9, read, 0)])
        return traffic.predict([launch, launch], RATES._replace(**rates), l2_mb=1)

    assert predicted(3 * 10**6, 4 * 10**6, 10**8) == (pytest.approx(2 * 3e-6 + 4e-6), "HBM")
    assert predicted(10**6, 12 * 10**6, 10**8) == (pytest.approx(2 * 3e-6 + 4e-6), "L2")
    assert predicted(10**6, 4 * 10**6, 3 * 10**8) == (pytest.approx(2 * 3e-6 + 4e-6), "FLOPs")
    assert predicted(10**6, 10**6, 10**7) == (pytest.approx(2 * 1e-6 + 4e-6), "launches")


def test_a_prediction_for_many_heads_is_that_of_as_many_bytes():
    one, many = (operands((0, n * 4000, n * 9000, 0), (1, n * 4000, 0, n * 4000)) for n in (1, 8))
    launches = [[each, each] for each in (one, many)]
    assert traffic.predict(launches[0], RATES, 0.04, heads=8) == traffic.predict(launches[1], RATES, 0.04)
    assert traffic.predict(launches[0], RATES, 0.04)[0] < traffic.predict(launches[0], RATES, 0.04, heads=8)[0]


def test_v2_requests_its_output_many_times_and_v3_once():
    """v2's compulsory bytes are as few as v3's, because one head fits in the L2 cache."""
    workload = traffic.Workload("fwd", 1, 1, 1024, 64, False, "float16")
    qkv = 3 * 1024 * 64 * 2
    for name, much in (("v2", True), ("v3", False)):
        launches = traffic.count_stage(stages.load(name), workload, H200).launches
        assert sum(traffic.compulsory(launches, H200.l2_mb * 1e6)) == qkv
        assert (sum(launch.read for launch in launches) > 12 * qkv) == much


def test_costs_say_nothing_where_no_rate_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(traffic, "RESULTS", tmp_path)
    counted = Count([operands((0, 10**9, 10**6, 0))], 2**20)
    costs = traffic.costs(counted, H200, "float16")
    assert costs["predicted_us"] is None and costs["peak_extra_mib"] == 1 and costs["kernel_launches"] == 1
    assert costs["roofline_us"] == pytest.approx(1 / 4.8) and costs["bound"] == "HBM"
    assert traffic.costs(counted, H200, "float32")["roofline_us"] is None  # float32 has another peak
    ceilings = {"matmul_tflops": {"float16": 600}, "hbm_gbps": 4000, "l2_gbps": 9000, "launch_us": 2}
    (tmp_path / "ceilings-h200.json").write_text(json.dumps(ceilings))
    assert traffic.costs(counted, H200, "float16")["predicted_us"] == pytest.approx(2 + 1 / 4)
    assert traffic.costs(counted, H200, "float32")["predicted_us"] is None


@pytest.mark.parametrize("causal", [False, True])
def test_the_library_s_masked_scores_count_as_a_stage_s_do(causal):
    """With a causal mask, SDPA counts the unmasked scores. v3 also counts the masked halves of the tiles on the diagonal."""
    q = torch.zeros(1, 1, 256, 64, dtype=torch.float16)
    library = count(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=causal)).flops
    workload = traffic.Workload("fwd", 1, 1, 256, 64, causal, "float16")
    mine = traffic.count_stage(stages.load("v3"), workload, H200).flops
    assert library == (4 * 64 * 256 * 257 // 2 if causal else mine) and library <= mine < 1.8 * library
