"""The measured rates count what the kernels move, and are plausible on a GPU."""

import pytest

from common.kernels import hopper
from common.measure import ceilings
from common.measure.counter import count
from common.measure.timing import GpuTimer
from common.runtime import DEVICE, INTERPRETED


@pytest.mark.skipif(not INTERPRETED, reason="bytes are counted in the interpreter only")
@pytest.mark.parametrize("copies", [3, 30])
def test_the_read_of_the_cache_moves_the_bytes_that_its_rate_divides(copies):
    call, nbytes = ceilings.read_l2(2, copies)
    (launch,) = count(call).launches
    assert (launch.read, launch.written) == (nbytes, 0)
    assert launch.operands[0].nbytes == nbytes // copies * ceilings.TILES.value  # each program reads its own tiles


@pytest.mark.alone
@pytest.mark.skipif(DEVICE == "cpu" or hopper.unavailable(), reason="needs a Hopper GPU")
def test_the_rates_of_a_hopper_gpu_are_plausible():
    timer = GpuTimer()
    assert 4_000 < ceilings.l2_gbps(timer) < 20_000 and 0.5 < ceilings.launch_us(timer) < 10
