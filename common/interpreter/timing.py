"""Model a kernel on an SM, or on a few: from given rates, compute the kernel's time and when each unit works.

A unit is a part of the SM, such as the tensor cores. It serves its requests in order. A partition does one operation after the
other, each for a whole tile. Meanwhile other partitions may use other units. The model ignores bank conflicts, misses of the L2
cache, address and loop arithmetic, and clock changes.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

FEW = 512  # the model ignores instructions on fewer elements than this, such as those on one element per row
COPIES, STORES, TENSOR_CORES = "copies in", "copies out", "tensor cores"
EXPONENTIALS, OTHERS, SHARED = "exponentials", "other instructions", "shared memory"
UNITS = COPIES, STORES, TENSOR_CORES, EXPONENTIALS, OTHERS, SHARED


@dataclass(frozen=True)
class Rates:
    """The rates of one SM while all SMs do the same work. Times are in cycles of the SM's clock.

    results: for each kind of instruction, the number of results per cycle.
    moved: the work of the other units per cycle: "load", "store" and "add" are bytes that TMA copies from and to global memory
        and adds to it, "matmul" is FLOPs, and "shared" is bytes loaded from or stored to shared memory.
    latency: for "load", "store", "add" and "matmul", the cycles from the end of the unit's work until the operation is over.
        Meanwhile the unit can begin the next operation.
    synchronization: (operation, warps) -> the cycles of an "arrive", "wait" or "fence". A partition has 1 warp, or more (4).
    hand_over: the cycles from a phase's last arrival until the waiting partition continues.
    """

    results: dict[str, float]
    moved: dict[str, float]
    latency: dict[str, float]
    synchronization: dict[tuple[str, int], float]
    hand_over: float


class Span(NamedTuple):
    """A time span in which a unit works for a partition, from cycle `start` to cycle `end`."""

    unit: str
    who: object
    what: str
    start: float
    end: float


def busy(spans: list[Span], end: float) -> dict[str, float]:
    """Return for each unit the share of the time from 0 to `end` in which the unit is busy."""
    cycles = Counter()
    for span in spans:
        cycles[span.unit] += span.end - span.start
    return {unit: cycles[unit] / end for unit in UNITS}


class Timing:
    """The clock of a launch. Each SM runs its programs one after the other. Without rates, the launch is not timed."""

    def __init__(self, rates: Rates | None, num_sms: int = 1):
        self.rates, self.num_sms = rates, num_sms
        self.spans: list[Span] = []
        self.end = 0.0  # the cycle in which all work so far ends
        self.ends = defaultdict(float)  # the same for each SM
        self._free = defaultdict(float)  # the cycle from which each unit of each SM is free

    def __bool__(self):
        return self.rates is not None

    def _take(self, unit, partition, what, cycles):
        """Occupy a unit for some cycles, once its earlier requests are done. Return the cycle in which this request is done."""
        sm = partition.program.sm
        start = max(self._free[sm, unit], partition.clock)
        self._free[sm, unit] = end = start + cycles
        self.spans.append(Span(unit, partition, what, start, end))
        self._ends(sm, end)
        return end

    def _ends(self, sm, cycle):
        self.ends[sm] = max(self.ends[sm], cycle)
        self.end = max(self.end, cycle)

    def issue(self, unit: str, partition, what: str, amount: int) -> float:
        """Issue a copy or a matmul of some bytes or FLOPs. Return the cycle in which it is over."""
        if not self:
            return 0.0
        return self._take(unit, partition, what, amount / self.rates.moved[what]) + self.rates.latency[what]

    def instruction(self, partition, name: str, elements: int, operands: list, result):
        """Time an elementwise instruction, and store the instruction's name in `result.made`."""
        result.made = name
        if name in ("add", "sub") and any(operand.made == "mul" for operand in operands):
            return  # the multiplication and this addition become one instruction
        if elements >= FEW and name in self.rates.results:
            unit = EXPONENTIALS if name in ("exp2", "log2") else OTHERS
            self.reach(partition, self._take(unit, partition, name, elements / self.rates.results[name]))

    def shared(self, partition, what: str, nbytes: int):
        """Time a load or store of shared memory."""
        if self:
            self.reach(partition, self._take(SHARED, partition, what, nbytes / self.rates.moved["shared"]))

    def synchronize(self, partition, operation: str):
        """Time an operation of `Rates.synchronization`."""
        if self:
            self.reach(partition, partition.clock + self.rates.synchronization[operation, 1 if partition.warps == 1 else 4])

    def reach(self, partition, cycle: float):
        """Advance a partition's clock to `cycle`, unless the clock is past `cycle` already."""
        partition.clock = max(partition.clock, cycle)
        self._ends(partition.program.sm, partition.clock)
