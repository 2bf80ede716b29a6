"""Interpret shared memory and barriers, and check for races.

Each use of a part of a buffer is an event. Two uses conflict if they overlap and one of them writes. Conflicting uses race
unless the later use's partition knows that the earlier use is over.

A partition knows that its own ordinary accesses are over. After a wait for a barrier, the partition also knows what the
arriving partitions knew to be over. TMA and matmuls see ordinary stores only after `fence_async_shared`.
"""

import functools
import itertools
from dataclasses import dataclass

import numpy
import torch
import triton.language as tl

from .schedule import Place, Program, Waiting, now
from .values import Register, in_torch, in_triton


@functools.lru_cache(2**12)
def _elements(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the elements of a memory that a view covers, as an integer with a bit for each element."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    covered = torch.zeros(offset + last + 1, dtype=torch.bool)
    covered.as_strided(shape, strides, offset).fill_(True)
    return int.from_bytes(numpy.packbits(covered.numpy(), bitorder="little").tobytes(), "little")


@dataclass(eq=False)
class _Use:
    """One use of a part of a buffer, by an ordinary access or an asynchronous operation."""

    elements: int  # see `_elements`
    who: str
    where: Place
    writes: bool
    event: int
    fences: int | None = None  # of an ordinary store: events of fences that made the store visible to TMA and matmuls


class Memory:
    """The memory that all views of a buffer share, and the uses of this memory."""

    def __init__(self, program: Program, dtype: tl.dtype, shape: list[int]):
        self.program = program
        self.data = torch.empty([int(size) for size in shape], dtype=in_torch(dtype))
        self._filled = 0  # the elements that were written, as in `_elements`
        self.uses = []  # earlier uses with which a later use may conflict
        program.memories.append(self)

    def use(self, buffer: "Buffer", who: str, *, writes: bool, asynchronous: bool) -> int:
        """Begin a use and return its event. Fail if the use conflicts with an earlier use that may not be over."""
        schedule, view = now(), buffer.view
        elements = _elements(view.storage_offset(), tuple(view.shape), view.stride())
        known = schedule.running.known
        does = "writes" if writes else "reads"
        for use in self.uses:
            if not (writes or use.writes) or not use.elements & elements:
                continue
            if not use.event & known:
                may = "write" if use.writes else "read"
                schedule.fail(f"race: {who} {does} {buffer}, and {use.who} may still {may} it: {use.where}")
            if asynchronous and use.fences is not None and not use.fences & known:
                schedule.fail(f"{who} {does} {buffer} after {use.who}, with no fence_async_shared in between: {use.where}")
        if writes:
            self._filled |= elements
        elif self._filled & elements != elements:
            schedule.fail(f"{who} reads {buffer}, which was not fully written")
        # The new use replaces uses of its elements: a write replaces all, and a read those reads that are known to be over. A
        # partition that learns of the new read's end also learns of theirs.
        inside = [use for use in self.uses if use.elements | elements == elements]
        replaced = [use for use in inside if writes or not use.writes and use.event & known]
        self.uses = [use for use in self.uses if use not in replaced]
        use = _Use(elements, who, schedule.here(), writes, self.program.event())
        if writes and not asynchronous:
            use.fences = 0
        self.uses.append(use)
        return use.event


def fence():
    """Let TMA and matmuls see the stores that the running partition knows to be over."""
    partition = now().running
    event = partition.program.event()
    for use in itertools.chain.from_iterable(memory.uses for memory in partition.program.memories):
        if use.fences is not None and use.event & partition.known:
            use.fences |= event
    partition.known |= event
    now().timing.synchronize(partition, "fence")
    now().switch()


class Buffer:
    """A view of shared memory, like Gluon's shared_memory_descriptor."""

    def __init__(self, memory: Memory, view: torch.Tensor, whole: "Buffer | None" = None, part: str = ""):
        self.memory, self.view = memory, view
        self._whole, self._part = whole or self, part

    dtype = property(lambda self: in_triton(self.view.dtype))
    shape = property(lambda self: list(self.view.shape))
    numel = property(lambda self: self.view.numel())
    nbytes = property(lambda self: self.view.numel() * self.view.itemsize)

    def __str__(self):
        return f"{self.memory.program.name_of(self._whole) or 'a buffer'}{self._part}"

    def _view(self, view, part=""):
        return Buffer(self.memory, view, self._whole, self._part + part)

    def index(self, index):
        """Return one buffer of several: the one at `index` in dimension 0."""
        if not 0 <= index < self.shape[0]:
            now().fail(f"index {index} is out of range: {self} has {self.shape[0]} entries")
        return self._view(self.view[int(index)], f"[{index}]")

    def slice(self, start, length, dim=0):
        """Return a view of some rows or columns."""
        if not 0 <= start <= start + length <= self.shape[dim]:
            now().fail(f"{start} to {start + length} is out of range: dimension {dim} of {self} has {self.shape[dim]} elements")
        return self._view(
            self.view.narrow(dim, int(start), length), f"[{', '.join([':'] * dim + [f'{start}:{start + length}'])}]"
        )

    def reshape(self, shape):
        """Return a view of the same elements in another shape."""
        return self._view(self.view.view(shape))

    def _reinterpret(self, dtype, shape, layout):
        """Return a view of matrices as pieces with this `shape`, in the order in which the pieces lie in shared memory."""
        return Pieces(self, shape)

    def permute(self, order):
        """Return a view with the dimensions in another order."""
        return self._view(self.view.permute(order))

    def load(self, layout=None):
        """Load the elements into registers."""
        schedule = now()
        schedule.running.known |= self.memory.use(self, "a load", writes=False, asynchronous=False)
        schedule.switch()
        schedule.timing.shared(schedule.running, "load", self.nbytes)
        return Register(self.view.clone(), layout)

    def store(self, values):
        """Fill the buffer from registers."""
        if values.shape != self.shape or values.dtype != self.dtype:
            now().fail(f"{values.dtype} {values.shape} is stored to {self}, which is {self.dtype} {self.shape}")
        now().running.known |= self.memory.use(self, "a store", writes=True, asynchronous=False)
        self.view.copy_(values.data)
        now().timing.shared(now().running, "store", self.nbytes)
        now().switch()


class Pieces:
    """A buffer of matrices, [slots, 1, 1, rows, columns], as pieces with fewer rows and columns.

    In shared memory, matrices for wgmma lie in blocks of columns. All rows of a block follow each other.
    """

    def __init__(self, whole: Buffer, shape: list[int]):
        *_, rows, columns = shape
        parts = whole.view.unflatten(4, (-1, columns)).unflatten(3, (-1, rows))  # [slots, 1, 1, parts, rows, blocks, columns]
        self._whole, self._pieces = whole, parts.permute(0, 5, 3, 1, 2, 4, 6)
        if self._pieces.shape[:3].numel() != shape[0]:
            now().fail(f"{whole}, which is {whole.shape}, has not {shape[0]} pieces of {rows} x {columns}")

    def index(self, index):
        """Return one piece."""
        slots, blocks, parts = self._pieces.shape[:3]
        if not 0 <= index < slots * blocks * parts:
            now().fail(f"index {index} is out of range: {self._whole} has {slots * blocks * parts} pieces")
        slot, block, part = numpy.unravel_index(int(index), (slots, blocks, parts))
        return self._whole._view(self._pieces[slot, block, part], f"[{slot}], block {block}, part {part}")


class Barriers:
    """Several barriers, which Gluon allocates together as shared memory with MBarrierLayout."""

    def __init__(self, program: Program, number: int):
        self.program = program
        self._barriers = [Barrier(self, i) for i in range(number)]
        program.barriers += self._barriers

    shape = property(lambda self: [len(self._barriers), 1])

    def __str__(self):
        return self.program.name_of(self) or "a barrier"

    def index(self, index):
        """Return one barrier."""
        if not 0 <= index < len(self._barriers):
            now().fail(f"index {index} is out of range: {self} has {len(self._barriers)} entries")
        return self._barriers[index]


class Barrier:
    """An mbarrier: a phase is over when all arrivals and all announced bytes have come."""

    def __init__(self, row: Barriers, number: int):
        self._row, self._number = row, number
        self._count = None  # number of arrivals that complete a phase
        self._missing = self._bytes = 0  # numbers of arrivals and bytes that the current phase still waits for
        self._announced = 0  # number of announced bytes for which no copy was issued yet
        self._where = None  # where a partition last announced bytes
        self._phases = 0  # number of completed phases
        self._gathered = 0  # events that partitions knew to be over when they arrived in the current phase
        self._passed_on = 0  # events that were gathered in completed phases
        self._cycle = self._over_at = 0.0  # in a timed launch: when the last arrival came, and when the last phase ended

    def __str__(self):
        return f"{self._row}[{self._number}]"

    def init(self, count):
        """Initialize the barrier, as `mbarrier.init` does."""
        self._count = self._missing = count

    def arrive(self, *, count=1, pred=True, nbytes=0):
        """Arrive at the barrier, as `mbarrier.arrive` does. Also announce `nbytes` bytes that copies will bring."""
        if not pred:
            return
        self._check_init()
        if self._missing < count:
            now().fail(f"{self} gets {count} more arrivals, but its phase had all {self._count} already")
        now().timing.synchronize(now().running, "arrive")
        self._cycle = max(self._cycle, now().running.clock)
        self._gathered |= now().running.known
        if nbytes:
            self._where = now().here()
        self._announced += nbytes
        self._bytes += nbytes
        self._missing -= count
        self._complete()
        now().switch()

    def expect(self, nbytes):
        """Arrive and announce bytes, as `mbarrier.expect` does."""
        self.arrive(nbytes=nbytes)

    def claim(self, nbytes: int):
        """Register a copy of `nbytes` that will signal this barrier."""
        self._check_init()
        if nbytes > self._announced:
            now().fail(f"a copy brings {nbytes} bytes to {self}, which expects {self._announced} more")
        self._announced -= nbytes

    def land(self, nbytes: int, known: int, cycle: float):
        """Count a finished copy. `known` has the copy's event, and the events that the issuing partition knew to be over."""
        self._cycle = max(self._cycle, cycle)
        self._bytes -= nbytes
        self._gathered |= known
        self._complete()

    def wait(self, phase):
        """Wait until the phase with the parity `phase` is over, as `mbarrier.wait` does."""
        self._check_init()
        now().switch(Waiting(lambda: self._phases & 1 != phase, lambda: self._described(phase)))
        now().running.known |= self._passed_on
        if timing := now().timing:
            timing.synchronize(now().running, "wait")
            timing.reach(now().running, self._over_at + timing.rates.hand_over)

    def check_at_end(self):
        """Fail if the barrier still waits for announced bytes."""
        if self._bytes:
            now().fail(f"{self} expects {self._bytes} more bytes: {self._where}")

    def _complete(self):
        if self._missing == 0 and self._bytes == 0:
            self._phases += 1
            self._missing = self._count
            self._passed_on |= self._gathered
            self._gathered = 0
            self._over_at = self._cycle

    def _check_init(self):
        if self._count is None:
            now().fail(f"{self} has had no mbarrier.init")

    def _described(self, phase):
        """Describe what a phase still waits for."""
        return f"{self}, phase {phase}: {self._missing} of {self._count} arrivals and {self._bytes} bytes are missing"
