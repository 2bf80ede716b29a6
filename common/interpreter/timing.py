"""How long a kernel takes on one SM, and which unit does what meanwhile, at given rates.

A model, made of rates and of what waits for what. A unit does what it is asked for in turn. A partition does one thing after
the other, each for a whole tile, and meanwhile others use the other units. Not in it: instructions of one partition that
overlap, what the compiler moves across a wait, bank conflicts, what lies behind the L2 cache, addresses and loops, the clock.
"""

from collections import defaultdict
from dataclasses import dataclass, field

FEW = 512  # elements; of fewer, such as one for each row, a thread has so few that they cost next to nothing
COPIES, STORES, TENSOR_CORES = "copies in", "copies out", "tensor cores"
EXPONENTIALS, OTHERS, SHARED = "exponentials", "other instructions", "shared memory"
UNITS = COPIES, STORES, TENSOR_CORES, EXPONENTIALS, OTHERS, SHARED


@dataclass(frozen=True)
class Rates:
    """Of one SM while all others do the same, in cycles of its clock.

    results: a cycle, of each kind of instruction.
    flops, copied, stored, added, shared: FLOPs of matmuls and bytes a cycle: of copies from global memory, to it, and of those
        that add to it, and of loads and stores of shared memory.
    matmul, copy, store: cycles from the issue of one to its end, beyond those that its unit takes.
    arrive, wait, fence: cycles that they take of a partition of one warp, and of four.
    hand_over: cycles from an arrival to the end of a wait for it.
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
    """What a unit does for a partition, from one cycle to another."""

    unit: str
    who: object
    what: str
    start: float
    end: float


@dataclass
class Timing:
    """The clock of a launch in which one program after the other runs."""

    rates: Rates
    spans: list[Span] = field(default_factory=list)
    end: float = 0.0  # of all that was done so far
    _free: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # from when on each unit is

    def take(self, unit: str, partition, what: str, cycles: float) -> float:
        """Until when a unit does something, after all that it was asked for before."""
        start = max(self._free[unit], partition.clock)
        self._free[unit] = end = start + cycles
        self.spans.append(Span(unit, partition, what, start, end))
        self.end = max(self.end, end)
        return end

    def instruction(self, partition, name: str, elements: int, operands: list, result):
        """An instruction for each element; `result.made` becomes its name."""
        result.made = name
        if name in ("add", "sub") and any(operand.made == "mul" for operand in operands):
            return  # a multiplication and an addition are one instruction
        if elements >= FEW and name in self.rates.results:
            unit = EXPONENTIALS if name in ("exp2", "log2") else OTHERS
            self.reach(partition, self.take(unit, partition, name, elements / self.rates.results[name]))

    def shared(self, partition, what: str, nbytes: int):
        """An ordinary access to shared memory."""
        self.reach(partition, self.take(SHARED, partition, what, nbytes / self.rates.shared))

    def copy(self, partition, what: str, nbytes: int) -> float:
        """A copy is issued; the cycle in which it is over."""
        rate, latency, unit = {
            "load": (self.rates.copied, self.rates.copy, COPIES),
            "store": (self.rates.stored, self.rates.store, STORES),
            "add": (self.rates.added, self.rates.store, STORES),
        }[what]
        return self.take(unit, partition, what, nbytes / rate) + latency

    def matmul(self, partition, flops: int) -> float:
        """A matmul is issued; the cycle in which it is over."""
        return self.take(TENSOR_CORES, partition, "matmul", flops / self.rates.flops) + self.rates.matmul

    def reach(self, partition, cycle: float):
        """A partition goes on in that cycle, or is there already."""
        partition.clock = max(partition.clock, cycle)
        self.end = max(self.end, partition.clock)

    def spend(self, partition, cycles: dict[int, float]):
        """A partition takes so long for something that depends on its number of warps."""
        self.reach(partition, partition.clock + cycles[1 if partition.warps == 1 else 4])
