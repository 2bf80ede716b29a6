"""The timing model of Gluon stages has the right rates and results."""

from dataclasses import replace

import pytest
import torch

import stages
from common.interpreter import schedule
from common.interpreter.timing import COPIES, EXPONENTIALS, TENSOR_CORES, UNITS
from common.measure import timeline
from common.measure.traffic import stage_call
from common.measure.workloads import Workload
from common.runtime import INTERPRETED, interpreted_as

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the model runs in the interpreter")

SMALL = Workload("fwd", 1, 1, 512, 64, False, "float16")


def simulate(name, workload):
    """Run one pass of a stage on the model of an SM. Return the timings of the pass's Gluon kernels."""
    torch.manual_seed(0)
    with interpreted_as(timeline.HOPPER):
        call = stage_call(stages.load(name), workload, workload.inputs())
        with schedule.timed(timeline.measured_rates()) as timings:
            call()
    return list(timings)


def test_rates_come_from_the_committed_file():
    rates = timeline.measured_rates()
    assert 0.98 * 4096 < rates.flops <= 4096 and 15 < rates.results["exp2"] <= 16  # an SM's limits per cycle
    assert all(0 < rate <= 128 for rate in rates.results.values())
    assert rates.copied > rates.stored > rates.added > 0
    assert rates.matmul > 0 and rates.copy > rates.store > 0


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_matmuls_take_their_time_whatever_the_kernel(pass_):
    """The tensor cores are busy for FLOPs / rate cycles. A forward has 4 S² D FLOPs, and a backward has 10 S² D."""
    rates = timeline.measured_rates()
    timing = max(simulate("v28", replace(SMALL, pass_=pass_)), key=lambda timing: timing.end)  # the pass's main kernel
    busy = {unit: share * timing.end for unit, share in timeline.busy(timing.spans, timing.end).items()}
    flops = {"fwd": 4, "bwd": 10}[pass_] * 512**2 * 64
    assert busy[TENSOR_CORES] == pytest.approx(flops / rates.flops)
    assert busy[EXPONENTIALS] == pytest.approx(512**2 / rates.results["exp2"], rel=0.01)
    assert all(0 <= busy[unit] <= timing.end for unit in UNITS) and busy[COPIES] > 0


def test_the_model_is_deterministic():
    first, second = (simulate("v25", SMALL) for _ in range(2))
    assert [timing.end for timing in first] == [timing.end for timing in second]
