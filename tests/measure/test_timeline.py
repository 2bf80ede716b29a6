"""The timing model of Gluon stages has the right rates and results."""

import pytest

import stages
from common.interpreter.timing import COPIES, EXPONENTIALS, TENSOR_CORES, UNITS
from common.measure import timeline
from common.measure.workloads import Workload
from common.runtime import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the model runs in the interpreter")

SMALL = Workload("fwd", 1, 1, 512, 64, False, "float16")


def test_rates_come_from_the_committed_file():
    rates = timeline.measured_rates()
    assert 0.98 * 4096 < rates.flops <= 4096 and 15 < rates.results["exp2"] <= 16  # an SM's limits per cycle
    assert all(0 < rate <= 128 for rate in rates.results.values())
    assert rates.copied > rates.stored > rates.added > 0
    assert rates.matmul > 0 and rates.copy > rates.store > 0


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_matmuls_take_their_time_whatever_the_kernel(pass_):
    """The tensor cores are busy for FLOPs / rate cycles. A forward has 4 S² D FLOPs, and a backward has 10 S² D."""
    workload = Workload(pass_, 1, 1, 512, 64, False, "float16")
    rates = timeline.measured_rates()
    facts = timeline.record("v28", workload, timeline.simulate(stages.load("v28"), workload, rates))
    flops = {"fwd": 4, "bwd": 10}[pass_] * 512**2 * 64
    assert facts["busy"][TENSOR_CORES] * facts["cycles"] == pytest.approx(flops / rates.flops)
    assert facts["busy"][EXPONENTIALS] * facts["cycles"] == pytest.approx(512**2 / rates.results["exp2"], rel=0.01)
    assert all(0 <= facts["busy"][unit] <= 1 for unit in UNITS) and facts["busy"][COPIES] > 0
    assert facts["cycles_a_tile"] == pytest.approx(facts["cycles"] * timeline.SCORES / 512**2)


def test_the_model_is_deterministic():
    first, second = (timeline.simulate(stages.load("v25"), SMALL, timeline.measured_rates()) for _ in range(2))
    assert [timing.end for timing in first] == [timing.end for timing in second]


def test_a_stage_without_gluon_is_refused():
    with pytest.raises(SystemExit, match="v3_fa2_causal does not have Gluon kernels for both passes"):
        timeline.require_timed([stages.resolve("v3")], ["fwd"], [64])


def test_a_pass_that_falls_back_to_triton_is_refused_with_a_working_option():
    with pytest.raises(SystemExit) as refused:
        timeline.require_timed([stages.resolve("v12")], ["fwd", "bwd"], [64, 256])
    message = str(refused.value)
    assert message.startswith("v12_register_order launches no Gluon kernel for --pass bwd --head-dim 256")
    assert message.endswith("These head dimensions work: 16, 32, 64, 128.") and "\n" not in message
