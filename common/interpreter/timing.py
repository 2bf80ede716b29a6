"""How long a kernel takes on one multiprocessor, and which unit does what meanwhile, at given rates.

A model, made of rates and of what waits for what. A partition goes from one barrier, product or copy to the next; in between
the compiler has it do its instructions as their operands come, so that exponentials run beside multiplications of the same
tile. A unit takes what it is asked for in turn. Not in it: what the compiler reorders across a wait, bank conflicts, global
memory beyond the L2 cache, addresses and loops, the clock.
"""

from collections import defaultdict
from dataclasses import dataclass, field

FEW = 512  # elements; of fewer, such as one for each row, a thread has so few that they cost next to nothing
COPIES, STORES, TENSOR_CORES = "copies in", "copies out", "tensor cores"
EXPONENTIALS, OTHERS, SHARED = "exponentials", "other instructions", "shared memory"
UNITS = COPIES, STORES, TENSOR_CORES, EXPONENTIALS, OTHERS, SHARED


@dataclass(frozen=True)
class Rates:
    """Of one multiprocessor while all others do the same, in cycles of its clock.

    results: a cycle, of each kind of instruction.
    flops, copied, stored, added, shared: FLOPs of products and bytes a cycle: of copies from global memory, to it, and of those
        that add to it, and of loads and stores of shared memory.
    product, copy, store: cycles from the issue of one to its end, beyond those that its unit takes.
    arrive, wait, fence: cycles that they take of a partition of one warp, and of four.
    hand_over: cycles from an arrival to the end of a wait for it.
    """

    results: dict[str, float]
    flops: float
    copied: float
    stored: float
    added: float
    shared: float
    product: float
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
    who: str
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

    def take(self, unit: str, who, what: str, cycles: float, earliest: float) -> tuple[float, float]:
        """From when to when a unit does something, after all that it was asked for before."""
        start = max(self._free[unit], earliest)
        self._free[unit] = end = start + cycles
        self.spans.append(Span(unit, str(who), what, start, end))
        self.end = max(self.end, end)
        return start, end

    def instruction(self, partition, name: str, elements: int, operands: list, result):
        """An instruction for each element. `result.times` becomes from when to when its elements come."""
        times = [operand.times for operand in operands if operand.times]
        begin = max([partition.clock, *(first for first, _ in times)])
        end = max([partition.clock, *(last for _, last in times)])
        result.times, result.made = (begin, end), name
        if elements < FEW or name not in self.rates.results:
            return
        if name in ("add", "sub") and any(operand.made == "mul" for operand in operands):
            return  # a multiplication and an addition are one instruction
        cycles = elements / self.rates.results[name]
        if name in ("exp2", "log2"):
            start, done = self.take(EXPONENTIALS, partition.name, name, cycles, begin)
            self.take(OTHERS, partition.name, name, elements / self.rates.results["add"], begin)  # each has to be issued, too
        else:
            start, done = self.take(OTHERS, partition.name, name, cycles, begin)
        done = max(done, end)
        # Of a row's maximum or sum nothing is there before the end.
        result.times = (done, done) if name == "row maximum" else (start, done)
        partition.issued = max(partition.issued, done)

    def reach(self, partition, cycle: float = 0.0):
        """A partition goes on when all that it has issued is done, and not before a cycle."""
        partition.clock = max(partition.clock, partition.issued, cycle)
        self.end = max(self.end, partition.clock)

    def spend(self, partition, cycles: dict[int, float]):
        """A partition takes so long for something that depends on its number of warps."""
        self.reach(partition)
        partition.clock += cycles[1 if partition.warps == 1 else 4]

    def shared(self, partition, what: str, nbytes: int, values=None) -> tuple[float, float]:
        """An ordinary access to shared memory; from when to when what it loads comes."""
        earliest = max(partition.clock, values.times[1] if values is not None and values.times else 0.0)
        start, end = self.take(SHARED, partition.name, what, nbytes / self.rates.shared, earliest)
        partition.issued = max(partition.issued, end)
        return start, end

    def copy(self, partition, what: str, nbytes: int) -> float:
        """A copy is issued; the cycle in which it is over."""
        self.reach(partition)
        rate, latency, unit = {
            "load": (self.rates.copied, self.rates.copy, COPIES),
            "store": (self.rates.stored, self.rates.store, STORES),
            "add": (self.rates.added, self.rates.store, STORES),
        }[what]
        return self.take(unit, partition.name, what, nbytes / rate, partition.clock)[1] + latency

    def product(self, partition, flops: int, a) -> float:
        """A product is issued, when its operand in registers is there; the cycle in which it is over."""
        self.reach(partition, a.times[1] if getattr(a, "times", None) else 0.0)
        end = self.take(TENSOR_CORES, partition.name, "product", flops / self.rates.flops, partition.clock)[1]
        return end + self.rates.product
