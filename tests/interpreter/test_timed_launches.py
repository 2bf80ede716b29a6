"""In the timing model of an SM, partitions wait for each other and share the SM's units.

Most tests use invented rates, so that cycles are easy to count.
"""

import pytest
import torch
from cases import guessing
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

import stages
from common.interpreter import schedule
from common.interpreter.timing import COPIES, EXPONENTIALS, OTHERS, TENSOR_CORES, UNITS, Rates, busy
from common.kernels.hopper import describe_tile, new_barriers
from common.measure.timeline import measured_rates
from common.measure.trace import trace
from common.measure.workloads import Workload
from common.runtime import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a GPU has its own time")

TILE = 64 * 64
RATES = Rates(
    results={"add": TILE / 100, "mul": TILE / 100, "sub": TILE / 100, "exp2": TILE / 400, "row maximum": TILE / 50},
    moved={"matmul": 2 * 64**3 / 1000, "load": TILE * 2 / 500},
    latency={"matmul": 60, "load": 300},
    synchronization={("arrive", 4): 4, ("wait", 4): 8},
    hand_over=20,
)


def spans(timing, unit):
    return [(span.what, span.start, span.end) for span in timing.spans if span.unit == unit]


def time_of(kernel, *arguments, programs=1, num_sms=1, **options):
    with schedule.timed(RATES, num_sms) as timings:
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
    timing = time_of(_instructions, torch.zeros(1))
    others = [("row maximum", 0, 50), ("mul", 50, 150), ("add", 550, 650), ("row maximum", 650, 700)]
    assert spans(timing, OTHERS) == others and spans(timing, EXPONENTIALS) == [("exp2", 150, 550)]
    assert timing.end == 700
    assert time_of(_instructions, torch.zeros(1), programs=3).end == 3 * 700  # one program after the other
    several = time_of(_instructions, torch.zeros(1), programs=3, num_sms=2)
    assert several.end == 2 * 700 and several.ends == {0: 1400, 1: 700}


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
    multiply = (_multiply, (tile_s, layout, PENDING))
    gl.warp_specialize([multiply] * PARTITIONS, [4] * (PARTITIONS - 1), [128] * (PARTITIONS - 1))


FILLED = 4 + 500 + 300 + 20  # cycles of expect, bytes, latency and hand-over


@pytest.mark.parametrize(("partitions", "pending", "begin"), [(1, 1, 1000), (1, 0, 2000), (2, 0, None)])
def test_matmuls_take_turns_and_exponentials_run_under_the_matmul_that_is_not_waited_for(partitions, pending, begin):
    tile = describe_tile(torch.zeros(1, 1, 64, 64, dtype=torch.float16), 64)
    timing = time_of(_matmuls, tile, PARTITIONS=partitions, PENDING=pending)
    begins = [FILLED + 1000 * number for number in range(2 * partitions)]
    assert spans(timing, TENSOR_CORES) == [("matmul", first, first + 1000) for first in begins]
    if partitions == 1:
        begin += FILLED + 60
        assert spans(timing, EXPONENTIALS) == [("exp2", begin, begin + 400)]
    else:
        assert len({span.who for span in timing.spans if span.unit == EXPONENTIALS}) == 2


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_a_stage_keeps_the_units_busy_for_as_long_as_their_measured_rates_say(pass_):
    """A forward has 4 S² D FLOPs, a backward has 10 S² D, and each computes S² exponentials."""
    rates = measured_rates()
    assert 0.98 * 4096 < rates.moved["matmul"] <= 4096 and 15 < rates.results["exp2"] <= 16  # an SM's limits per cycle
    recorded = trace(stages.load(guessing()[0]), Workload(pass_, 1, 1, 512, 64, False, "float16"))
    spans = max(recorded.spans.values(), key=len)  # of the pass's main kernel
    end = max(span.end for span in spans)
    cycles = {unit: share * end for unit, share in busy(spans, end).items()}
    assert cycles[TENSOR_CORES] == pytest.approx({"fwd": 4, "bwd": 10}[pass_] * 512**2 * 64 / rates.moved["matmul"])
    assert cycles[EXPONENTIALS] == pytest.approx(512**2 / rates.results["exp2"], rel=0.01)
    assert all(0 <= cycles[unit] <= end for unit in UNITS) and cycles[COPIES] > 0
