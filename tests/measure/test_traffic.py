"""Stages move and compute the bytes and FLOPs of their formulas, or of the committed counts. The counter counts correctly."""

import dataclasses
import functools
import itertools
import json

import pytest
import torch
import triton
import triton.language as tl
from cases import TILED, guessing, make_inputs, once, sources
from predictions import FORMULAS, Problem, predicted
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
from common.interpreter.asynchronous import Traffic
from common.kernels.descriptors import describe
from common.kernels.hopper import async_reduce_add, describe_rows, new_barriers
from common.kernels.matmul import bmm_float32
from common.kernels.tiles import key_tile, query_tile
from common.kernels.tuning import tuners
from common.measure import traffic
from common.measure.counter import Count, Launch, Operand, count
from common.measure.workloads import Workload
from common.runtime import INTERPRETED, architecture, num_sms
from common.show import results

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="loads and stores can be watched in the interpreter only")

H200 = traffic.GPUS["h200"]
PASSES = ("fwd", "bwd")


def problem(seq_q, seq_k, head_dim, causal, *, heads=2, kv_heads=None, value_dim=None, tiles=None):
    """Return a problem. `tiles` has the tiles of programs that own queries and of those that own keys. By default, these are
    the fixed tiles."""
    value_dim = value_dim or head_dim
    with H200.interpreted():
        fixed = (choose(max(head_dim, value_dim), torch.float16) for choose in (query_tile, key_tile))
        tiles = tiles or [(tile["BLOCK_M"], tile["BLOCK_N"]) for tile in fixed]
    return Problem(heads, kv_heads or heads, seq_q, seq_k, head_dim, value_dim, causal, *tiles)


def counts(stage, p, tuned=None):
    """Return the bytes read, the bytes written and the FLOPs of a stage's passes."""
    shape = {"heads": p.heads, "kv_heads": p.kv_heads, "value_dim": p.value_dim}
    q, k, v, grad_out = make_inputs(p.seq_q, p.seq_k, p.head_dim, batch=1, **shape)
    options, results = {"causal": p.causal, "scale": 0.125}, []
    with traffic.tiles_of(H200, stage, max(p.head_dim, p.value_dim), q.dtype, tuned):
        forward = count(lambda: results.extend(stage.forward(q, k, v, **options)))
        backward = count(lambda: stage.backward(grad_out, q, k, v, *results, **options))
    return [(found.read, found.written, found.flops) for found in (forward, backward)]


PROBLEMS = [
    problem(256, 140, 32, False),
    problem(113, 203, 32, True),
    problem(150, 200, 128, True),
    problem(*TILED, 16, True, heads=6, kv_heads=2, value_dim=64),
    problem(*TILED, 128, False, heads=6, kv_heads=2, value_dim=32),
]


@pytest.mark.parametrize("version", FORMULAS)
def test_a_stage_moves_and_computes_what_its_formulas_say(version):
    for p in PROBLEMS:
        assert counts(stages.load(version), p) == [predicted(version, pass_, p) for pass_ in PASSES], p


@pytest.mark.parametrize("version", ["v4", "v5"])
def test_the_formulas_hold_for_other_tiles(version):
    stage, tiles = stages.load(version), [(16, 64), (128, 64)]
    p = problem(150, 170, 16, True, tiles=tiles)
    tuned = {kernel: tiles[kernel == "_dkv_kernel"] for kernel in tuners(stage)}
    assert counts(stage, p, tuned) == [predicted(version, pass_, p) for pass_ in PASSES]


@pytest.mark.parametrize("version", FORMULAS)
def test_the_committed_counts_are_what_the_formulas_say(version):
    records = [record for record in results.read(results.TRAFFIC)["records"] if stages.version(record["impl"]) == version]
    assert len(records) == 8
    for record in records:
        p = problem(record["seq_len"], record["seq_len"], record["head_dim"], record["causal"], heads=record["heads"])
        saved = record["bytes_read"], record["bytes_written"], record["flops_executed"]
        assert predicted(version, record["pass"], p) == saved


def recounted():
    """Yield each distinct pass with a head dimension and a mask. By default, these are a pass in Triton, and two in Gluon."""
    for pass_, code in results.CODE.items():
        names = once(stages.names(), code)
        gluon = [name for name in names if "@gluon.jit" in "".join(sources(name, code).values())]
        trunk = [name for name in gluon if not stages.track(name)]
        usual = names[names.index(gluon[0]) - 1], trunk[-1], gluon[-1]
        for name, span in itertools.product(names, ((64, True), (128, False))):
            marks = [] if name in usual and span[1] else [pytest.mark.long]
            yield pytest.param(name, pass_, *span, id=f"{name}-{pass_}-{span[0]}", marks=marks)


@pytest.mark.parametrize(("name", "pass_", "head_dim", "causal"), list(recounted()))
def test_a_stage_still_has_its_committed_counts(name, pass_, head_dim, causal):
    saved = results.counted(name, pass_, head_dim, causal)
    if not saved:
        pytest.skip("not counted yet: make traffic")
    part = H200.share(saved["heads_at_once"])
    found = traffic.costs(traffic.count_stage(stages.load(name), Workload.of(saved), part))
    fields = "bytes_read", "bytes_written", "flops_executed", "kernel_launches", "peak_extra_mib", "tiles"
    assert {field: found[field] for field in fields} == {field: saved[field] for field in fields}


# --- the counter


@triton.jit
def _copy_kernel(x_ptr, y_ptr, size, BLOCK_M: tl.constexpr):
    offs = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < size), mask=offs < size)


@triton.jit
def _descriptor_kernel(x_desc, y_desc, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    y_desc.store([0, 0, start, 0], x_desc.load([0, 0, start, 0]))


@triton.jit
def _atomic_kernel(x_ptr, size, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.atomic_add(x_ptr + offs, 1.0, mask=offs < size)


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
def _tma_copy_kernel(x_desc, y_desc, ADDS: gl.constexpr):
    """Copy a tile to shared memory, and from there to global memory, or add it there."""
    x_s = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_shape, x_desc.layout)
    full = new_barriers(1, 1)
    start = gl.program_id(0) * x_desc.block_shape[0]
    mbarrier.expect(full.index(0), x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [start, 0], full.index(0), x_s)
    mbarrier.wait(full.index(0), 0)
    if ADDS:
        async_reduce_add(y_desc, [start, 0], x_s)
    else:
        tma.async_copy_shared_to_global(y_desc, [start, 0], x_s)
    tma.store_wait(0)


@gluon.jit
def _matmul_kernel(M: gl.constexpr, N: gl.constexpr, K: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    of_a: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, K], gl.float16)
    of_b: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, N], gl.float16)
    a, b = gl.allocate_shared_memory(gl.float16, [M, K], of_a), gl.allocate_shared_memory(gl.float16, [K, N], of_b)
    a.store(gl.full([M, K], 1, gl.float16, layout))
    b.store(gl.full([K, N], 1, gl.float16, layout))
    fence_async_shared()
    matmul = warpgroup_mma(a, b, gl.zeros([M, N], gl.float32, layout), is_async=True)
    warpgroup_mma_wait(0, [matmul])


def only_launch(call):
    (launch,) = count(call).launches
    return launch


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_masked_elements_count_nothing(dtype):
    x, y = torch.zeros(2, 100, dtype=dtype)
    for kernel, block in ((_copy_kernel, 32), (_gluon_copy_kernel, 32), (_gluon_copy_kernel, gl.constexpr(32))):
        launch = only_launch(lambda kernel=kernel, block=block: kernel[(4,)](x, y, 100, BLOCK_M=block))
        assert launch == Launch(kernel.__name__, {"BLOCK_M": 32}, 100 * dtype.itemsize, 100 * dtype.itemsize, 0)
        assert type(launch.tile["BLOCK_M"]) is int


def test_descriptors_and_tma_move_only_elements_inside_a_tensor():
    """TMA's addition reads nothing. Neither the interpreters' own operators nor their memory count."""
    x, y = torch.zeros(2, 1, 1, 50, 16, dtype=torch.float16)
    launch = only_launch(lambda: _descriptor_kernel[(2,)](describe(x, 32, 16), describe(y, 32, 16), BLOCK=32))
    assert (launch.read, launch.written) == (50 * 16 * 2, 50 * 16 * 2)
    x = torch.zeros(50, 16)
    for adds in (False, True):
        descs = describe_rows(x, 32), lambda: describe_rows(torch.empty_like(x), 32)
        found = count(lambda descs=descs, adds=adds: _tma_copy_kernel[(2,)](descs[0], descs[1](), ADDS=adds))
        assert found == Count([Launch("_tma_copy_kernel", {}, 50 * 16 * 4, 50 * 16 * 4, 0)], peak=50 * 16 * 4)


def test_atomics_read_and_write():
    x, counter = torch.zeros(16), torch.zeros(1, dtype=torch.int32)
    launch = only_launch(lambda: _atomic_kernel[(1,)](x, 10, BLOCK=16))
    assert (launch.read, launch.written) == (10 * 4, 10 * 4)
    launch = only_launch(lambda: _gluon_atomic_kernel[(3,)](counter, torch.empty_like(counter)))
    assert (launch.read, launch.written) == (3 * 4, 3 * 2 * 4)


def test_matmuls_count_their_flops():
    a = torch.zeros(32, 16, dtype=torch.float16)
    assert only_launch(lambda: _dot_kernel[(5,)](a, torch.empty(32, 32), M=32, K=16)).flops == 5 * 2 * 32 * 32 * 16
    assert only_launch(lambda: _matmul_kernel[(5,)](M=64, N=32, K=16)).flops == 5 * 2 * 64 * 32 * 16
    a, b = torch.zeros(2, 3, 4, 5, dtype=torch.float16), torch.zeros(2, 3, 5, 6, dtype=torch.float16)
    assert count(lambda: a @ b).flops == 2 * 6 * 4 * 5 * 6
    assert count(lambda: bmm_float32(a[0], b[0])).flops == 2 * 3 * 4 * 5 * 6
    q = torch.zeros(1, 1, 256, 64, dtype=torch.float16)
    for causal, scores in ((False, 256 * 256), (True, 256 * 257 // 2)):  # masked scores do not count
        call = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, q, q, is_causal=causal)
        assert count(call).flops == 4 * 64 * scores


@pytest.mark.parametrize(("call", "read", "written"), [
    (lambda x, y: x + y, 800, 400),
    (lambda x, y: x * x, 400, 400),
    (lambda x, y: x.add_(y), 800, 400),
    (lambda x, y: x.copy_(y), 400, 400),
    (lambda x, y: torch.add(x, 1, out=y), 400, 400),
    (lambda x, y: torch.zeros_like(x), 0, 400),
    (lambda x, y: x.view(10, 10).t().contiguous(), 400, 400),
    (lambda x, y: x + y[:1].expand(100), 404, 400),
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


def test_peak_is_of_live_memory():
    given = torch.ones(256, 1024)  # each tensor of this shape has 1 MiB

    def call():
        first = given.t().contiguous()
        second = torch.empty_like(first).copy_(first)
        del first
        return second.view(-1)[:10] + torch.add(second, 1, out=torch.empty_like(second)).view(-1)[:10]

    assert count(call).peak / 2**20 == pytest.approx(2, abs=1e-3)


def test_counting_leaves_the_interpreter_as_it_was():
    def functions():
        return [vars(owner).copy() for owner in (InterpreterBuilder, InterpretedFunction, GluonJITFunction, Traffic)]

    before = functions()
    with pytest.raises(InterpreterError):
        count(lambda: _copy_kernel[(1,)](torch.zeros(3), "nowhere", 3, BLOCK_M=4))
    assert functions() == before


# --- tiles, predictions


@pytest.mark.parametrize(("gpu", "fixed", "tuned"), [
    ("h200", [(128, 64), (32, 128)], [(128, 64), (32, 128)]),
    ("a100", [(128, 64), (32, 64)], [(32, 32), (32, 32)]),  # no TMA
])  # fmt: skip
def test_stages_get_the_tiles_of_the_gpu(gpu, fixed, tuned):
    device = architecture(), num_sms()
    for name, tiles in (("v3", fixed), ("v4", tuned)):
        stage = stages.load(name)
        before = {kernel: tuner.configs for kernel, tuner in tuners(stage).items()}
        found = traffic.count_stage(stage, Workload("bwd", 1, 1, 32, 128, False, "float16"), traffic.GPUS[gpu])
        assert [tuple(launch.tile.values()) for launch in found.launches if len(launch.tile) == 2] == tiles
        assert {kernel: tuner.configs for kernel, tuner in tuners(stage).items()} == before
    assert (architecture(), num_sms()) == device


def test_persistent_kernels_have_as_many_programs_as_the_gpu_has_sms():
    """The second launch of a guess has one program per SM, here three. Each program reads a flag of four bytes."""
    workload = Workload("fwd", 1, 5, 16, 16, False, "float16")
    found = traffic.count_stage(stages.load(guessing()[0]), workload, dataclasses.replace(H200, num_sms=3))
    assert found.launches[-1] == Launch("_forward_kernel", {"BLOCK_M": 256, "BLOCK_N": 64}, 3 * 4, 0, 0)


RATES = traffic.Rates(tflops=100, hbm_gbps=1000, l2_gbps=4000, launch_us=2)


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


@pytest.mark.parametrize(
    ("crossing", "read", "written", "flops"), [(3e6, 3e6, 1e6, 1e8), (1e6, 4e6, 8e6, 1e8), (1e6, 3e6, 1e6, 3e8)]
)
def test_a_prediction_takes_the_level_that_binds_and_adds_launches(crossing, read, written, flops):
    """HBM, then the L2 cache, then the matmuls take 3 µs. A launch costs 2 µs more."""
    launch = Launch("a", {}, read, written, flops, crossing)
    assert traffic.predict([launch, launch], RATES) == pytest.approx(2 * 3e-6 + 2 * 2e-6)
    assert traffic.predict([launch, launch], RATES, heads=5) == pytest.approx(2 * 5 * 3e-6 + 2 * 2e-6)


def test_a_prediction_knows_that_matmuls_of_8_bits_take_half_the_time():
    assert traffic.predict([Launch("a", flops=5e8, eight_bit_flops=4e8)], RATES) == pytest.approx(3e-6 + 2e-6)


def test_v2_requests_its_output_many_times_and_v3_once():
    """v2's compulsory bytes are as few as v3's, because one head fits in the L2 cache."""
    qkv = 3 * 1024 * 64 * 2
    for name, much in (("v2", True), ("v3", False)):
        launches = traffic.count_stage(stages.load(name), Workload("fwd", 1, 1, 1024, 64, False, "float16"), H200).launches
        assert sum(launch.crossing for launch in launches) == qkv
        assert (sum(launch.read for launch in launches) > 12 * qkv) == much


def test_rates_are_those_that_were_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(traffic, "RESULTS", tmp_path)
    assert traffic.measured_rates(H200, "float16") is None
    ceilings = {"matmul_tflops": {"float16": 600}, "hbm_gbps": 4000, "l2_gbps": 9000, "launch_us": 2}
    (tmp_path / "ceilings-h200.json").write_text(json.dumps(ceilings))
    assert traffic.measured_rates(H200.share(8), "float16") == traffic.Rates(600, 4000, 9000, 2)
    assert traffic.measured_rates(H200, "float32") is None
