"""GPU time: what the kernels of a call take, without the time that the CPU takes to launch them."""

import statistics
import time
from collections.abc import Callable

import torch

SHORTEST_SPIN_S = 50e-6  # hides the launch of a kernel
LONGEST_SPIN_S = 20e-3
WARM_UP_S = 50e-3  # until the clock of the GPU has settled
LOAD_S, MOST_LOAD_CALLS = 5e-3, 20  # the call is repeated, unmeasured, for so long before a round, or so often
CASE_S = 0.3  # GPU time spent on the rounds of a case …
FEWEST_ROUNDS, MOST_ROUNDS = 5, 200  # … within these
SLOW_S = 0.5  # a call that takes longer than this …
SLOW_ROUNDS = 3  # … gets this many rounds
MATMUL_SIZE = 8192


class GpuTimer:
    """A timer for pytest-benchmark, which calls it before and after each round and subtracts the two readings.

    The first reading of a round keeps the GPU busy, with a spin and a few unmeasured calls, then empties the L2 cache by
    writing twice its size, records the start event behind that, and is 0.0. The caller queues its kernels while the GPU is
    still busy, so that they run back to back. The second reading records the end event, waits for it, and is the time between
    the two events in seconds. Readings start again from 0 in each round because an event's milliseconds are float32: sums of
    them would lose digits.

    The unmeasured calls put the GPU under the load of a program that does nothing else: after an idle stretch, and a spin is
    one, its clock is higher, by up to a tenth for the kernels that draw most power.

    Where the GPU is past the start event before the second reading begins, the spin was too short to hide the launch: that
    round counts as exposed, and later ones spin twice as long. A call whose host part is longer than `LONGEST_SPIN_S`, or
    that itself waits for the GPU, stays exposed and `launch_hidden` is False: its time is in part the CPU's.
    """

    def __init__(self):
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache_bytes = torch.cuda.get_device_properties().L2_cache_size
        self._cache_filler = torch.empty(2 * cache_bytes, dtype=torch.uint8, device="cuda")
        self._cycles_per_s = 1e9
        self._restart()
        self.time(lambda: None)  # the first spin loads its kernel
        cycles = 10_000_000
        self._cycles_per_s = cycles / self.time(lambda: torch.cuda._sleep(cycles))

    def _restart(self):
        """Forget an unfinished round (a call that raised left it) and what earlier cases needed."""
        self._in_round = False
        self._load = []
        self._spin_s = SHORTEST_SPIN_S
        self._rounds = self._exposed_rounds = 0

    def __call__(self) -> float:
        if not self._in_round:
            self._in_round = True
            torch.cuda._sleep(int(self._spin_s * self._cycles_per_s))
            for call in self._load:
                call()
            self._cache_filler.zero_()
            self._start.record()
            return 0.0
        exposed = self._start.query()  # first of all, while it still tells whether the launch was hidden
        self._end.record()
        self._end.synchronize()
        self._in_round = False
        self._rounds += 1
        if exposed:
            self._exposed_rounds += 1
            self._spin_s = min(2 * self._spin_s, LONGEST_SPIN_S)
        return self._start.elapsed_time(self._end) / 1e3

    @property
    def launch_hidden(self) -> bool:
        """Whether the launch was hidden in at least 90 % of the rounds since `warm_up`: the median is then the GPU's."""
        return self._exposed_rounds <= 0.1 * self._rounds

    def time(self, call: Callable) -> float:
        """GPU seconds of one call."""
        begin = self()
        call()
        return self() - begin

    def warm_up(self, call: Callable) -> int:
        """Begin a case: call until the clock has settled and the spin hides the launch; return how many rounds to measure."""
        self._restart()
        deadline = time.perf_counter() + WARM_UP_S
        times = []
        while True:
            exposed_before, spin_before = self._exposed_rounds, self._spin_s
            times.append(self.time(call))
            self._load = [call] * min(int(LOAD_S / times[-1]), MOST_LOAD_CALLS)
            hidden = self._exposed_rounds == exposed_before or spin_before == LONGEST_SPIN_S
            if times[-1] > SLOW_S or (len(times) >= 3 and hidden and time.perf_counter() > deadline):
                break
        self._rounds = self._exposed_rounds = 0
        seconds = statistics.median(times)
        if seconds > SLOW_S:
            return SLOW_ROUNDS
        return max(FEWEST_ROUNDS, min(int(CASE_S / seconds / (1 + len(self._load))), MOST_ROUNDS))


def matmul_tflops(timer: GpuTimer, dtype: torch.dtype) -> float:
    """TFLOP/s that the library reaches on a large square product, the ceiling of what attention can."""
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=dtype)
    out = torch.empty_like(a)

    def product():
        torch.mm(a, b, out=out)

    rounds = timer.warm_up(product)
    return 2 * MATMUL_SIZE**3 / statistics.median(timer.time(product) for _ in range(rounds)) / 1e12
