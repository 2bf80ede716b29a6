"""GPU time: what the kernels of a call take, without the time that the CPU takes to launch them; and with it."""

import statistics
import time
from collections.abc import Callable

import torch

REST_S = 0.06  # before a case: what the power limit does to it then does not depend on the cases before
WARM_UP_S = 0.15  # GPU time until the clock has settled to what the power limit leaves
CASE_S = 0.1  # GPU time spent on the rounds of a case …
FEWEST_ROUNDS, MOST_ROUNDS = 5, 200  # … within these
SLOW_S = 50e-3  # a call that takes longer than this is a warm-up itself …
SLOW_ROUNDS = 3  # … and gets this many rounds
HEAD_START_S = 3e-3  # of the CPU, before the first round: more than a call's host part, so that few rounds are hidden too
SHORTEST_SPIN_S, LONGEST_SPIN_S = 50e-6, 20e-3
EXPOSED_SHARE = 0.1  # of the rounds; the median of the others is not moved by so few
HOST_S = 20e-3  # time spent on how long the CPU takes …
FEWEST_HOST_ROUNDS, MOST_HOST_ROUNDS = 3, 100  # … within these rounds …
HOST_WARM_UP_ROUNDS = 2  # … and after these
IN_A_ROW = 10  # calls, as a program makes them one after another …
MOST_ROWS = 20  # … in rounds for which the same holds
CACHE_BYTES = 256 * 2**20  # more than any L2 cache holds
MATMUL_SIZE = 8192
COPY_BYTES = 4 * 2**30  # much more than an L2 cache holds


class GpuTimer:
    """Measures calls as a program that does nothing else would run them: back to back, with a cold L2 cache.

    A case begins after a rest. At its power limit an H200 that has been at work without a pause for 0.8 s slows down by up to a
    fifth for 0.2 s, and again a second later: without rests, that would meet some case or other. After a rest of 0.05 s it is
    0.8 s again.

    All rounds, those to warm up too, are queued without waiting for the GPU in between, because after an idle stretch its clock
    is higher, most of all for the kernels that draw most power. A round reads `CACHE_BYTES`, which empties the L2 cache,
    records an event, calls, and records another: the time between the two is the GPU's as long as the CPU is ahead of it. It
    does not write them: what is written the L2 cache keeps for a while, and a call that is bound by memory would have to wait
    for that too.

    Where the GPU is past the first event before the call has queued its kernels, that round is exposed: it shows in part the
    CPU's time. Where too many are, each round is begun with a spin on the GPU, longer and longer until they are few; a call
    whose host part is longer than `LONGEST_SPIN_S`, or that itself waits for the GPU, stays exposed.
    """

    def __init__(self):
        self._cache_filler = torch.zeros(CACHE_BYTES // 4, device="cuda")
        self._cycles_per_s = 1e9
        self._rounds(lambda: None, 1, 0.0)  # loads the kernels of a round
        cycles = 10_000_000
        (seconds,), _ = self._rounds(lambda: torch.cuda._sleep(cycles), 1, 0.0)
        self._cycles_per_s = cycles / seconds

    def _rounds(self, call: Callable, count: int, spin_s: float, warm_up: int = 0) -> tuple[list[float], bool]:
        """GPU seconds of each of `count` rounds, after others to warm up, and whether too many of them were exposed."""
        exposed = 0
        events = []
        torch.cuda._sleep(int(HEAD_START_S * self._cycles_per_s))
        for number in range(-warm_up, count):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if spin_s:
                torch.cuda._sleep(int(spin_s * self._cycles_per_s))
            self._cache_filler.sum()
            start.record()
            call()
            exposed += number >= 0 and start.query()
            end.record()
            events.append((start, end))
        end.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events[warm_up:]], exposed > EXPOSED_SHARE * count

    def measure(self, call: Callable) -> tuple[list[float], bool]:
        """GPU seconds of each round of a call, and whether its launch was hidden, so that they are the GPU's alone."""
        torch.cuda.synchronize()
        time.sleep(REST_S)
        (estimate,), _ = self._rounds(call, 1, 0.0)
        if estimate > SLOW_S:
            times, exposed = self._rounds(call, SLOW_ROUNDS, 0.0)
            return times, not exposed
        warm_up, count = (max(FEWEST_ROUNDS, min(int(share / estimate), MOST_ROUNDS)) for share in (WARM_UP_S, CASE_S))
        times, exposed = self._rounds(call, count, 0.0, warm_up)
        spin_s = SHORTEST_SPIN_S
        while exposed and spin_s <= LONGEST_SPIN_S:
            times, exposed = self._rounds(call, count, spin_s, warm_up)
            spin_s *= 2
        return times, not exposed


def host_seconds(call: Callable, gpu_seconds: float) -> list[float]:
    """The CPU's time for a call, until it returns, in each of some rounds: checks, dispatch, descriptors, launches.

    It varies much more than the GPU's: the CPU has other work and its clock rises and falls. So a short call gets many rounds,
    and their spread is worth as much as their median. The first rounds are left out: they find cold caches, and a CPU that has
    waited for the GPU.

    Args:
        gpu_seconds: what a call takes on the GPU, which is left to finish before the next one, so that none waits in a queue.
    """
    times = []
    count = max(FEWEST_HOST_ROUNDS, min(int(HOST_S / gpu_seconds), MOST_HOST_ROUNDS))
    for _ in range(HOST_WARM_UP_ROUNDS + count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times[HOST_WARM_UP_ROUNDS:]


def seconds_in_a_row(call: Callable, gpu_seconds: float) -> list[float]:
    """Seconds that each of `IN_A_ROW` calls takes in a program without CUDA graphs: no launch is hidden, no cache emptied.

    The time between an event that the GPU passes at once and one behind the last call, shared out among the calls. Of short
    ones, whose kernels are done before the CPU has launched the next, it is the CPU's, and what a launch takes to arrive.

    Args:
        gpu_seconds: what a call takes on the GPU alone.
    """
    times = []
    count = max(FEWEST_HOST_ROUNDS, min(int(HOST_S / (IN_A_ROW * gpu_seconds)), MOST_ROWS))
    for _ in range(HOST_WARM_UP_ROUNDS + count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(IN_A_ROW):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / IN_A_ROW)
    return times[HOST_WARM_UP_ROUNDS:]


class Replay:
    """A timer for pytest-benchmark, which reads it before and after each round: the readings are times measured before.

    Each round starts from 0 again, so that no sum of many rounds costs digits.
    """

    def __init__(self):
        self._readings = iter(())

    def __repr__(self):
        return "replayed: GPU time between two events, or counted time at peak"  # what saved runs name as their timer

    def load(self, times: list[float]):
        """Take the seconds of the rounds to come; what is left of earlier ones is dropped."""
        self._readings = iter([reading for seconds in times for reading in (0.0, seconds)])

    def __call__(self) -> float:
        return next(self._readings)


def matmul_tflops(timer: GpuTimer, dtype: torch.dtype) -> float:
    """TFLOP/s that the library reaches on a large square matmul, the ceiling of what attention can."""
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=dtype)
    out = torch.empty_like(a)
    times, _ = timer.measure(lambda: torch.mm(a, b, out=out))
    return 2 * MATMUL_SIZE**3 / statistics.median(times) / 1e12


def copy_gbps(timer: GpuTimer) -> float:
    """GB/s, read and written together, of a copy of `COPY_BYTES` in the GPU's memory, or of a quarter of what is free."""
    size = min(COPY_BYTES, torch.cuda.mem_get_info()[0] // 4)
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()  # no zeros, as in `Workload.inputs`
    target = torch.empty_like(source)
    times, _ = timer.measure(lambda: target.copy_(source))
    return 2 * size / statistics.median(times) / 1e9
