"""In the timing model of an SM, partitions wait for each other and share the SM's units.

The tests use invented rates, so that cycles are easy to count.
"""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from common.interpreter import schedule
from common.interpreter.timing import EXPONENTIALS, OTHERS, STORES, TENSOR_CORES, Rates
from common.kernels.hopper import describe_tile, new_barriers, reduce_add
from common.runtime import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a GPU has its own time")

TILE = 64 * 64
PRODUCT = 2 * 64**3
RATES = Rates(
    results={"add": TILE / 100, "mul": TILE / 100, "sub": TILE / 100, "exp2": TILE / 400, "row maximum": TILE / 50},
    flops=PRODUCT / 1000, copied=TILE * 2 / 500, stored=TILE * 2 / 700, added=TILE * 2 / 900, shared=TILE * 2 / 30,
    matmul=60, copy=300, store=80, arrive={1: 1, 4: 4}, wait={1: 2, 4: 8}, fence={1: 3, 4: 12}, hand_over=20,
)  # fmt: skip


def spans(timing, unit):
    return [(span.what, span.start, span.end) for span in timing.spans if span.unit == unit]


def time_of(kernel, *arguments, programs=1, **options):
    with schedule.timed(RATES) as timings:
        kernel[programs,](*arguments, num_warps=4, **options)
    (timing,) = timings
    return timing


@gluon.jit
def _instructions(x_ptr):
    x = gl.full([64, 64], 1.5, gl.float32, gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
    few = gl.max(x, 1)
    y = gl.exp2(x * 2.0 - few[:, None])
    gl.store(x_ptr, gl.max(gl.max(y + x, 1), 0))


def test_instructions_run_in_order_and_a_multiplication_joins_a_subtraction():
    x = torch.zeros(1)
    timing = time_of(_instructions, x)
    assert x.item() == pytest.approx(2**1.5 + 1.5)
    assert spans(timing, EXPONENTIALS) == [("exp2", 150, 550)]
    assert spans(timing, OTHERS) == [
        ("row maximum", 0, 50), ("mul", 50, 150), ("add", 550, 650), ("row maximum", 650, 700)
    ]  # fmt: skip
    assert timing.end == 700


def test_programs_follow_each_other():
    assert time_of(_instructions, torch.zeros(1), programs=3).end == 3 * 700


@gluon.jit
def _multiply(tile_s, layout: gl.constexpr, PENDING: gl.constexpr):
    acc = gl.zeros([64, 64], gl.float32, layout)
    tile = tile_s.index(0).reshape([64, 64])
    first = warpgroup_mma(tile, tile, acc, is_async=True)
    second = warpgroup_mma(tile, tile, acc, is_async=True)
    first = warpgroup_mma_wait(PENDING, [first])
    first = gl.exp2(first)
    second = warpgroup_mma_wait(0, [second])


@gluon.jit
def _matmuls(desc, PARTITIONS: gl.constexpr, PENDING: gl.constexpr):
    tile_s = gl.allocate_shared_memory(gl.float16, [1, 1, 1, 64, 64], desc.layout)
    full = new_barriers(1, 1)
    mbarrier.expect(full.index(0), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [0, 0, 0, 0], full.index(0), tile_s.index(0))
    mbarrier.wait(full.index(0), 0)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    if PARTITIONS == 1:
        _multiply(tile_s, layout, PENDING)
    else:
        gl.warp_specialize(
            [(_multiply, (tile_s, layout, PENDING)), (_multiply, (tile_s, layout, PENDING))], [4], [128],
        )  # fmt: skip


@gluon.jit
def _additions(sums_ptr):
    x = gl.full([64 * 64 // 2], 1.5, gl.float32, gl.BlockedLayout([4], [32], [4], [0]))
    for _ in range(2):
        reduce_add(sums_ptr + gl.arange(0, 64 * 64 // 2, x.type.layout), x)


def test_additions_from_registers_take_their_bytes_and_no_wait():
    sums = torch.zeros(TILE // 2)
    assert spans(time_of(_additions, sums), STORES) == [("add", 0, 900), ("add", 900, 1800)]
    assert (sums == 3).all()


FILLED = 4 + 500 + 300 + 20  # cycles of expect, bytes, latency and hand-over


def tile():
    return describe_tile(torch.zeros(1, 1, 64, 64, dtype=torch.float16), 64)


def test_a_copy_takes_its_bytes_and_its_latency():
    timing = time_of(_matmuls, tile(), PARTITIONS=1, PENDING=0)
    assert spans(timing, TENSOR_CORES)[0][1] == FILLED


@pytest.mark.parametrize(("pending", "begin"), [(1, 1000), (0, 2000)])
def test_exponentials_run_under_the_matmul_that_is_not_waited_for(pending, begin):
    timing = time_of(_matmuls, tile(), PARTITIONS=1, PENDING=pending)
    begin += FILLED
    assert spans(timing, TENSOR_CORES) == [("matmul", FILLED, FILLED + 1000), ("matmul", FILLED + 1000, FILLED + 2000)]
    assert spans(timing, EXPONENTIALS) == [("exp2", begin + 60, begin + 60 + 400)]


def test_partitions_share_units():
    timing = time_of(_matmuls, tile(), PARTITIONS=2, PENDING=0)
    matmuls = spans(timing, TENSOR_CORES)
    assert [end - start for _, start, end in matmuls] == 4 * [1000]
    assert [start for _, start, _ in matmuls] == [FILLED + 1000 * number for number in range(4)]
    assert len({span.who for span in timing.spans if span.unit == EXPONENTIALS}) == 2


@gluon.jit
def _arrive(full):
    fence_async_shared()
    mbarrier.arrive(full.index(0), count=1)


@gluon.jit
def _wait(full):
    mbarrier.wait(full.index(0), 0)


@gluon.jit
def _hand_over():
    full = new_barriers(1, 1)
    gl.warp_specialize([(_wait, (full,)), (_arrive, (full,))], [1], [24])


def test_a_wait_ends_some_cycles_after_the_arrival():
    assert time_of(_hand_over).end == 3 + 1 + 20  # cycles of a warp's fence, the arrival, and the hand-over


def test_launches_are_timed_inside_alone_and_in_order():
    with schedule.timed(RATES) as timings:
        _instructions[1,](torch.zeros(1), num_warps=4)
        _hand_over[1,](num_warps=4)
    _hand_over[1,](num_warps=4)
    assert [timing.end for timing in timings] == [700, 24]
