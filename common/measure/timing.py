"""Measure the GPU time of a call's kernels, with and without the time that the CPU needs to launch them."""

import statistics
import time
from collections.abc import Callable

import torch

REST_S = 0.06  # seconds of rest before a case, so that earlier cases do not slow it down (see `GpuTimer`)
WARM_UP_S = 0.15  # GPU seconds of warm-up; after them, the clock has settled
CASE_S = 0.1  # GPU seconds that the rounds of a case take together
FEWEST_ROUNDS, MOST_ROUNDS = 5, 200  # minimum and maximum number of rounds of a case
SLOW_S = 50e-3  # a call that takes more GPU seconds than this gets no warm-up except its first call
SLOW_ROUNDS = 3  # number of rounds of such a slow call
HEAD_START_S = 3e-3  # the GPU spins this long before the first round, so that the CPU is ahead of the GPU
SHORTEST_SPIN_S, LONGEST_SPIN_S = 50e-6, 20e-3  # minimum and maximum seconds of the GPU's spin before each round
EXPOSED_SHARE = 0.1  # allowed share of exposed rounds (see `GpuTimer`); so few exposed rounds hardly change the median
HOST_S = 20e-3  # seconds spent on measuring a call's CPU time
FEWEST_HOST_ROUNDS, MOST_HOST_ROUNDS = 3, 100  # minimum and maximum number of rounds that measure CPU time
HOST_WARM_UP_ROUNDS = 2  # number of warm-up rounds before the rounds that measure CPU time
IN_A_ROW = 10  # number of calls back to back in a round of `seconds_in_a_row`
MOST_ROWS = 20  # maximum number of rounds of `seconds_in_a_row`
CACHE_BYTES = 256 * 2**20  # more than any L2 cache holds
MATMUL_SIZE = 8192
COPY_BYTES = 4 * 2**30  # much more than an L2 cache holds


class GpuTimer:
    """Time the rounds of a call back to back, with a cold L2 cache.

    A case is all rounds of one call. Each case begins after a rest. After a rest of 0.05 s, an H200 works for 0.8 s at full
    speed. Then its power limit slows it down by up to a fifth.

    The CPU queues all rounds, including warm-up, without waiting for the GPU. So the GPU is never idle between rounds. After an
    idle time, its clock would be unusually high. A round first reads `CACHE_BYTES` bytes, so that the L2 cache no longer holds
    the call's inputs. Written bytes would slow down a memory-bound call, because the L2 cache must write them to memory first.
    After the reads, the round records an event, makes the call, and records another event. If the CPU is ahead of the GPU, the
    time between the events is GPU time only.

    A round is exposed if the GPU passes the first event before the call has queued its kernels. The measured time then includes
    CPU time. If too many rounds are exposed, the timer measures again, and lets the GPU spin at the beginning of each round.
    The timer doubles the spin until few rounds are exposed. Rounds stay exposed if the call's CPU time exceeds
    `LONGEST_SPIN_S`, or if the call itself waits for the GPU.
    """

    def __init__(self):
        self._cache_filler = torch.zeros(CACHE_BYTES // 4, device="cuda")
        self._cycles_per_s = 1e9
        self._rounds(lambda: None, 1, 0.0)  # the first round loads the kernels that every round launches
        cycles = 10_000_000
        (seconds,), _ = self._rounds(lambda: torch.cuda._sleep(cycles), 1, 0.0)
        self._cycles_per_s = cycles / seconds

    def clear_cache(self):
        """Read `CACHE_BYTES` bytes, so that the L2 cache no longer holds a call's inputs."""
        self._cache_filler.sum()

    def _rounds(self, call: Callable, count: int, spin_s: float, warm_up: int = 0) -> tuple[list[float], bool]:
        """Run `warm_up` rounds, then time `count` rounds.

        Return the GPU seconds of each timed round, and whether too many of the timed rounds were exposed.
        """
        exposed = 0
        events = []
        torch.cuda._sleep(int(HEAD_START_S * self._cycles_per_s))
        for number in range(-warm_up, count):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if spin_s:
                torch.cuda._sleep(int(spin_s * self._cycles_per_s))
            self.clear_cache()
            start.record()
            call()
            exposed += number >= 0 and start.query()
            end.record()
            events.append((start, end))
        end.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events[warm_up:]], exposed > EXPOSED_SHARE * count

    def measure(self, call: Callable) -> tuple[list[float], bool]:
        """Return the GPU seconds of each round of a call, and whether the launches were hidden.

        Launches are hidden if few rounds were exposed. Then the median includes no CPU time.
        """
        call()  # may compile
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
    """Return for each round the CPU seconds from the beginning of a call until it returns.

    During this time the CPU checks arguments, makes descriptors and launches kernels. Before each round, the CPU waits until
    the GPU has finished. The first rounds are left out, because the CPU's caches are still cold.

    Args:
        gpu_seconds: the GPU time of a call.
    """
    count = max(FEWEST_HOST_ROUNDS, min(int(HOST_S / gpu_seconds), MOST_HOST_ROUNDS))
    return host_seconds_of_each([call] * (HOST_WARM_UP_ROUNDS + count))[HOST_WARM_UP_ROUNDS:]


def host_seconds_of_each(calls: list[Callable]) -> list[float]:
    """Return for each call the CPU seconds from its beginning until it returns. The GPU has nothing to do before."""
    times = []
    for call in calls:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times


def seconds_of_row(call: Callable, count: int) -> float:
    """Make `count` calls back to back, and return the seconds per call from the first call's launch to the last call's end."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def seconds_in_a_row(call: Callable, gpu_seconds: float) -> list[float]:
    """Return for each round the seconds per call, where a round is `IN_A_ROW` calls back to back.

    The L2 cache is warm, and the seconds include the launches. The GPU passes a first event before the first call is launched,
    and a second event after the last call. The result is the time between the events, divided by the number of calls. If a call
    is short, its kernels end before the CPU has launched the next call. The result is then mostly CPU time and launch latency.

    Args:
        gpu_seconds: the GPU time of a call.
    """
    count = max(FEWEST_HOST_ROUNDS, min(int(HOST_S / (IN_A_ROW * gpu_seconds)), MOST_ROWS))
    return [seconds_of_row(call, IN_A_ROW) for _ in range(HOST_WARM_UP_ROUNDS + count)][HOST_WARM_UP_ROUNDS:]


class Replay:
    """A timer for pytest-benchmark that replays measured times.

    pytest-benchmark reads the timer before and after each round. The reading before a round is always 0, so that the difference
    is exact.
    """

    def __init__(self):
        self._readings = iter(())

    def __repr__(self):
        return "replayed: GPU time between two events, or counted time at peak"  # saved runs have this text as the timer's name

    def load(self, times: list[float]):
        """Set the seconds of the next rounds, and drop the seconds of earlier rounds."""
        self._readings = iter([reading for seconds in times for reading in (0.0, seconds)])

    def __call__(self) -> float:
        return next(self._readings)


def matmul_tflops(timer: GpuTimer, dtype: torch.dtype) -> float:
    """Measure the TFLOP/s of PyTorch on a large square matmul. Attention can hardly reach a higher rate."""
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=dtype)
    out = torch.empty_like(a)
    times, _ = timer.measure(lambda: torch.mm(a, b, out=out))
    return 2 * MATMUL_SIZE**3 / statistics.median(times) / 1e12


def copy_gbps(timer: GpuTimer) -> float:
    """Measure the GB/s of a copy on the GPU, counting the bytes read and written.

    The copy has `COPY_BYTES` or a quarter of the free memory, whichever is less.
    """
    size = min(COPY_BYTES, torch.cuda.mem_get_info()[0] // 4)
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()  # zeros save power and raise the clock
    target = torch.empty_like(source)
    times, _ = timer.measure(lambda: target.copy_(source))
    return 2 * size / statistics.median(times) / 1e9
