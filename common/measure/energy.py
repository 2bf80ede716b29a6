"""Measure a call's energy and clock at a GPU's power limit with NVML, NVIDIA's management library.

    python -m common.measure.energy results/energy-d128-h200.json --head-dim 128   # on an NVIDIA GPU
    make table FILE=results/energy-d128-h200.json

A GPU lowers its clock to stay within its power limit. At the limit, a call's time is its energy divided by the power limit. So
an idea that saves cycles shortens a call only if it also saves energy.
"""

import contextlib
import ctypes
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from common.measure import workloads
from common.measure.baselines import BASELINES, refusal, timed_call
from common.measure.options import add_implementations, add_list, command, write_cases
from common.measure.timing import GpuTimer, seconds_of_row
from common.measure.workloads import Workload
from common.runtime import INTERPRETED

SETTLE_S = 0.3  # seconds of calls before the measurement; after them, the clock has settled at the power limit
MEASURED_S = 1.0  # seconds of measured calls back to back, during which the energy counter is read many times
READ_S = 4e-3  # seconds between two readings of the energy counter, which the GPU updates every 20 to 100 ms
SM_CLOCK = 1  # the SM clock in NVML's nvmlClockType_t
POWER_CAP = 0x4 | 0x80  # the two bits of NVML's nvmlClocksThrottleReasons that mean a power limit


class Reading(NamedTuple):
    """The GPU's own measurements at one time."""

    seconds: float  # the time of the reading
    joules: float  # the energy that the GPU has used since the driver was loaded
    mhz: int  # the clock of the SMs
    capped: bool  # whether the power limit lowers the clock


class Gauges:
    """NVML's measurements of the GPU that PyTorch uses.

    Raises:
        OSError: NVML is missing.
        RuntimeError: NVML does not support a measurement on this GPU.
    """

    def __init__(self):
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._check(self._nvml.nvmlInit_v2())
        self._check(self._nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._device)))
        self.read()  # raises if this GPU does not count its energy

    def _check(self, code: int):
        if code:
            self._nvml.nvmlErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"NVML says: {self._nvml.nvmlErrorString(code).decode()}")

    def _get(self, name: str, kind, *args):
        value = kind()
        self._check(getattr(self._nvml, name)(self._device, *args, ctypes.byref(value)))
        return value.value

    def limit_watts(self) -> float:
        return self._get("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint) / 1e3

    def read(self) -> Reading:
        reasons = self._get("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong)
        mhz = self._get("nvmlDeviceGetClockInfo", ctypes.c_uint, SM_CLOCK)
        joules = self._get("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong) / 1e3
        return Reading(time.perf_counter(), joules, mhz, bool(reasons & POWER_CAP))

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[Reading]]:
        """Yield a list that gets a reading every `READ_S` seconds."""
        readings, stop = [], threading.Event()

        def watch():
            while not stop.wait(READ_S):
                readings.append(self.read())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield readings
        finally:
            stop.set()
            thread.join()


def watts(readings: list[Reading]) -> float:
    """Return the mean power in watts between the first and the last update of the energy counter.

    Raises:
        ValueError: the counter was updated less than twice.
    """
    steps = [after for before, after in itertools.pairwise(readings) if after.joules > before.joules]
    if len(steps) < 2:
        raise ValueError("the energy counter was updated less than twice")
    first, last = steps[0], steps[-1]
    return (last.joules - first.joules) / (last.seconds - first.seconds)


def measure(call: Callable, gauges: Gauges, timer: GpuTimer) -> dict:
    """Measure a call's seconds, joules, watts and clock at the power limit, and its seconds after a rest, as `timer` does."""
    rested = statistics.median(timer.measure(call)[0])
    seconds_of_row(call, max(1, int(SETTLE_S / rested)))
    with gauges.watching() as readings:
        seconds = seconds_of_row(call, max(3, int(MEASURED_S / rested)))
    power = watts(readings)
    return {
        "seconds": seconds,
        "rested_seconds": rested,
        "watts": power,
        "joules": power * seconds,
        "mhz": statistics.median(reading.mhz for reading in readings),
        "capped": statistics.mean(reading.capped for reading in readings),
    }


def main(argv: list[str]):
    """Run the command line. Workloads that an implementation does not support are named and left out."""
    parser = command("common.measure.energy", __doc__, "the JSON file to write")
    add_implementations(parser, BASELINES)
    for flag, default in (("--seq-len", "4096"), ("--head-dim", "64,128"), ("--causal", "no,yes")):
        add_list(parser, flag, default)
    options = parser.parse_args(argv)
    if INTERPRETED or not torch.cuda.is_available():
        raise SystemExit("measuring energy needs an NVIDIA GPU, and there is none")
    try:
        gauges = Gauges()
    except (OSError, RuntimeError) as error:
        raise SystemExit(f"the energy of a call cannot be measured: {error}") from None
    timer, measured = GpuTimer(), []
    shapes = itertools.product(("fwd", "bwd"), options.head_dim, options.seq_len, options.causal, options.impl)
    for pass_, head_dim, seq_len, causal, impl in shapes:
        workload = Workload(pass_, *workloads.paper_shape(seq_len, head_dim), seq_len, head_dim, causal, "float16")
        try:
            call = timed_call(impl, workload, workload.inputs())
            call()
        except Exception as error:
            if not (reason := refusal(impl, error)):
                raise
            print(f"{impl} {workload.label}: {reason}", file=sys.stderr)
            continue
        measured.append({"impl": impl, **workload.record(), **measure(call, gauges, timer)})
        print(impl, workload.label, f"{measured[-1]['joules']:.3f} J", flush=True)
    write_cases(options.file, measured, limit_watts=gauges.limit_watts())


if __name__ == "__main__":
    main(sys.argv[1:])
