"""Model a kernel on one SM: from given rates, compute the kernel's time and when each unit works.

A unit is a part of the SM, such as the tensor cores. It serves its requests in order. A partition does one operation after the
other, each for a whole tile. Meanwhile other partitions may use other units. The model ignores bank conflicts, misses of the L2
cache, address and loop arithmetic, and clock changes.
"""

from collections import defaultdict
from dataclasses import dataclass, field

FEW = 512  # the model ignores instructions on fewer elements than this, such as those on one element per row
COPIES, STORES, TENSOR_CORES = "copies in", "copies out", "tensor cores"
EXPONENTIALS, OTHERS, SHARED = "exponentials", "other instructions", "shared memory"
UNITS = COPIES, STORES, TENSOR_CORES, EXPONENTIALS, OTHERS, SHARED


@dataclass(frozen=True)
class Rates:
    """The rates of one SM while all SMs do the same work. Times are in cycles of the SM's clock.

    results: the number of results per cycle, for each kind of instruction.
    flops: the number of matmul FLOPs per cycle.
    copied: the bytes per cycle that TMA copies from global memory.
    stored: the bytes per cycle that TMA copies to global memory.
    added: the bytes per cycle that TMA adds to global memory.
    shared: the bytes per cycle that are loaded from or stored to shared memory.
    matmul, copy, store: the cycles from the end of the unit's work until the operation is over. Meanwhile the unit can
        begin the next operation.
    arrive, wait, fence: {1: the cycles of one such operation in a partition of one warp, 4: the cycles in a partition of more
        warps}.
    hand_over: the cycles from a phase's last arrival until the waiting partition continues.
    """

    results: dict[str, float]
    flops: float
    copied: float
    stored: float
    added: float
    shared: float
    matmul: float
    copy: float
    store: float
    arrive: dict[int, float]
    wait: dict[int, float]
    fence: dict[int, float]
    hand_over: float


@dataclass(frozen=True)
class Span:
    """A time span in which a unit works for a partition, from cycle `start` to cycle `end`."""

    unit: str
    who: object
    what: str
    start: float
    end: float


@dataclass
class Timing:
    """The clock of a launch whose programs run one after the other."""

    rates: Rates
    spans: list[Span] = field(default_factory=list)
    end: float = 0.0  # the cycle in which all work so far ends
    _free: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # the cycle from which each unit is free

    def take(self, unit: str, partition, what: str, cycles: float) -> float:
        """Occupy a unit for some cycles, once its earlier requests are done. Return the cycle in which this request is done."""
        start = max(self._free[unit], partition.clock)
        self._free[unit] = end = start + cycles
        self.spans.append(Span(unit, partition, what, start, end))
        self.end = max(self.end, end)
        return end

    def instruction(self, partition, name: str, elements: int, operands: list, result):
        """Time an elementwise instruction, and store the instruction's name in `result.made`."""
        result.made = name
        if name in ("add", "sub") and any(operand.made == "mul" for operand in operands):
            return  # the multiplication and this addition become one instruction
        if elements >= FEW and name in self.rates.results:
            unit = EXPONENTIALS if name in ("exp2", "log2") else OTHERS
            self.reach(partition, self.take(unit, partition, name, elements / self.rates.results[name]))

    def shared(self, partition, what: str, nbytes: int):
        """Time a load or store of shared memory."""
        self.reach(partition, self.take(SHARED, partition, what, nbytes / self.rates.shared))

    def copy(self, partition, what: str, nbytes: int) -> float:
        """Issue a copy, and return the cycle in which the copy is over."""
        rate, latency, unit = {
            "load": (self.rates.copied, self.rates.copy, COPIES),
            "store": (self.rates.stored, self.rates.store, STORES),
            "add": (self.rates.added, self.rates.store, STORES),
        }[what]
        return self.take(unit, partition, what, nbytes / rate) + latency

    def matmul(self, partition, flops: int) -> float:
        """Issue a matmul, and return the cycle in which the matmul is over."""
        return self.take(TENSOR_CORES, partition, "matmul", flops / self.rates.flops) + self.rates.matmul

    def reach(self, partition, cycle: float):
        """Advance a partition's clock to `cycle`, unless the clock is past `cycle` already."""
        partition.clock = max(partition.clock, cycle)
        self.end = max(self.end, partition.clock)

    def spend(self, partition, cycles: dict[int, float]):
        """Advance a partition's clock by the entry of `cycles` for the partition's number of warps."""
        self.reach(partition, partition.clock + cycles[1 if partition.warps == 1 else 4])
