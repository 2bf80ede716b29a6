"""Shared memory, barriers, and the rules for both: who may use a buffer when.

Each use of a part of a buffer is an event. It may conflict with one before it (one of the two writes) only where the partition
that begins it knows that the other is over: because it was its own, or through barriers and waits, which pass on what those who
arrive know. What ordinary stores have written, TMA and matmuls see only after `fence_async_shared`.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
import triton.language as tl

from .schedule import Place, Program, Waiting, now
from .values import Register, in_torch, in_triton


class _Part(NamedTuple):
    """Which elements of its memory a view has."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, view):
        """A view's."""
        return cls(view.storage_offset(), tuple(view.shape), view.stride())

    @property
    def span(self):
        """The first element in its memory, and that after its last."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset, self.offset + last + 1

    @property
    def is_dense(self):
        """Whether it has all elements between its first and its last."""
        first, end = self.span
        return end - first == math.prod(self.shape)

    def elements(self):
        """Where its elements lie in its memory."""
        offsets = numpy.array([self.offset])
        for size, stride in zip(self.shape, self.strides, strict=True):
            offsets = (offsets[:, None] + numpy.arange(size) * stride).ravel()
        return offsets


@dataclass(eq=False)
class _Use:
    """Of a part of a buffer, by an ordinary access or by an asynchronous operation."""

    part: _Part
    who: str
    where: Place
    writes: bool
    event: int
    fences: int | None = None  # of an ordinary store: the events that made it visible to TMA and to matmuls


# A kernel's tiles have few shapes and places, and each use of one is compared with all before it: answers are kept.


@functools.lru_cache(2**16)
def _overlap(a: _Part, b: _Part) -> bool:
    """Whether two parts of one memory share an element."""
    (first_a, end_a), (first_b, end_b) = a.span, b.span
    if first_a >= end_b or first_b >= end_a:
        return False
    return a.is_dense and b.is_dense or numpy.intersect1d(a.elements(), b.elements()).size > 0


@functools.lru_cache(2**16)
def _inside(part: _Part, whole: _Part) -> bool:
    """Whether a part without gaps has all elements of another."""
    (first, end), (first_whole, end_whole) = part.span, whole.span
    return whole.is_dense and first_whole <= first and end <= end_whole


class Memory:
    """What lies behind the views of a buffer, and who uses it."""

    def __init__(self, program: Program, dtype: tl.dtype, shape: list[int]):
        self.program = program
        self.data = torch.empty([int(size) for size in shape], dtype=in_torch(dtype))
        self._filled = torch.zeros(self.data.numel(), dtype=torch.bool)
        self._all_filled = False
        self.uses = []  # that one to come may conflict with
        program.memories.append(self)

    def use(self, buffer: "Buffer", who: str, *, writes: bool, asynchronous: bool) -> int:
        """The event of a use that begins now; an error where it is too early for it."""
        schedule, part = now(), _Part.of(buffer.view)
        known = schedule.running.known
        does = "writes" if writes else "reads"
        for use in self.uses:
            if not (writes or use.writes) or not _overlap(use.part, part):
                continue
            if not use.event & known:
                may = "write" if use.writes else "read"
                schedule.fail(f"race: {who} {does} {buffer}, and {use.who} may still {may} it: {use.where}")
            if asynchronous and use.fences is not None and not use.fences & known:
                schedule.fail(f"{who} {does} {buffer} after {use.who}, with no fence_async_shared in between: {use.where}")
        if writes:
            self.uses = [use for use in self.uses if not _inside(use.part, part)]
            self._flags(buffer.view).fill_(True)
        else:
            self._check_filled(buffer, who)
            # Whoever will know of this read knows of those before it that this partition knows of.
            self.uses = [u for u in self.uses if u.writes or not u.event & known or not _inside(u.part, part)]
        use = _Use(part, who, schedule.here(), writes, self.program.event())
        if writes and not asynchronous:
            use.fences = 0
        self.uses.append(use)
        return use.event

    def _flags(self, view):
        """Which elements of a view were ever written."""
        return self._filled.as_strided(view.shape, view.stride(), view.storage_offset())

    def _check_filled(self, buffer, who):
        self._all_filled = self._all_filled or bool(self._filled.all())
        if not self._all_filled and not self._flags(buffer.view).all():
            now().fail(f"{who} reads {buffer}, and not all of that was ever written")


def fence():
    """fence_async_shared: what the partition knows to be stored, TMA and matmuls see from here on."""
    partition = now().running
    event = partition.program.event()
    for use in itertools.chain.from_iterable(memory.uses for memory in partition.program.memories):
        if use.fences is not None and use.event & partition.known:
            use.fences |= event
    partition.known |= event
    if timing := now().timing:
        timing.spend(partition, timing.rates.fence)
    now().switch()


class Buffer:
    """A view of shared memory, as Gluon's shared_memory_descriptor."""

    def __init__(self, memory: Memory, view: torch.Tensor, whole: "Buffer | None" = None, part: str = ""):
        self.memory, self.view = memory, view
        self._whole, self._part = whole or self, part

    dtype = property(lambda self: in_triton(self.view.dtype))
    shape = property(lambda self: list(self.view.shape))
    rank = property(lambda self: self.view.dim())
    numel = property(lambda self: self.view.numel())
    nbytes = property(lambda self: self.view.numel() * self.view.itemsize)

    def __str__(self):
        return f"{self.memory.program.name_of(self._whole) or 'a buffer'}{self._part}"

    def _view(self, view, part=""):
        return Buffer(self.memory, view, self._whole, self._part + part)

    def index(self, index):
        """One of a row of buffers."""
        if not 0 <= index < self.shape[0]:
            now().fail(f"index {index} of {self}, which has {self.shape[0]}")
        return self._view(self.view[int(index)], f"[{index}]")

    def slice(self, start, length, dim=0):
        """Some rows, or columns."""
        if not 0 <= start <= start + length <= self.shape[dim]:
            now().fail(f"{start} to {start + length} of dimension {dim} of {self}, which has {self.shape[dim]}")
        return self._view(
            self.view.narrow(dim, int(start), length), f"[{', '.join([':'] * dim + [f'{start}:{start + length}'])}]"
        )

    def reshape(self, shape):
        """The same elements in another shape."""
        return self._view(self.view.view(shape))

    def permute(self, order):
        """The same elements with the dimensions in another order."""
        return self._view(self.view.permute(order))

    def load(self, layout=None):
        """Its elements, in registers."""
        schedule = now()
        schedule.running.known |= self.memory.use(self, "a load", writes=False, asynchronous=False)
        schedule.switch()
        if schedule.timing:
            schedule.timing.shared(schedule.running, "load", self.nbytes)
        return Register(self.view.clone(), layout)

    def store(self, values):
        """Fill it from registers."""
        if values.shape != self.shape or values.dtype != self.dtype:
            now().fail(f"{values.dtype} {values.shape} is stored to {self}, which is {self.dtype} {self.shape}")
        now().running.known |= self.memory.use(self, "a store", writes=True, asynchronous=False)
        self.view.copy_(values.data)
        if timing := now().timing:
            timing.shared(now().running, "store", self.nbytes)
        now().switch()


class Barriers:
    """A row of barriers, as Gluon has them: shared memory of MBarrierLayout."""

    def __init__(self, program: Program, number: int):
        self.program = program
        self._barriers = [Barrier(self, i) for i in range(number)]
        program.barriers += self._barriers

    shape = property(lambda self: [len(self._barriers), 1])

    def __str__(self):
        return self.program.name_of(self) or "a barrier"

    def index(self, index):
        """One of them."""
        if not 0 <= index < len(self._barriers):
            now().fail(f"index {index} of {self}, which has {len(self._barriers)}")
        return self._barriers[index]


class Barrier:
    """An mbarrier: a phase of it is over when all arrivals have come, and all bytes that they announced."""

    def __init__(self, row: Barriers, number: int):
        self._row, self._number = row, number
        self._count = None  # arrivals of a phase
        self._missing = self._bytes = 0  # arrivals and bytes that this phase still waits for
        self._announced = 0  # bytes for which no copy was issued yet
        self._where = None  # bytes were last announced
        self._phases = 0  # that are over
        self._gathered = 0  # what those know who have arrived in this phase
        self._passed_on = 0  # what those knew who had arrived in the phases that are over
        self._cycle = self._over_at = 0.0  # in a launch that is timed: of the last arrival, and of the last that ended a phase

    def __str__(self):
        return f"{self._row}[{self._number}]"

    def init(self, count):
        """mbarrier.init"""
        self._count = self._missing = count

    def arrive(self, count=1, nbytes=0):
        """mbarrier.arrive, or mbarrier.expect, with the bytes that copies will bring."""
        self._check_init()
        if self._missing < count:
            now().fail(f"{count} more arrivals at {self}, of which this phase had all {self._count}")
        if timing := now().timing:
            timing.spend(now().running, timing.rates.arrive)
            self._cycle = max(self._cycle, now().running.clock)
        self._gathered |= now().running.known
        if nbytes:
            self._where = now().here()
        self._announced += nbytes
        self._bytes += nbytes
        self._missing -= count
        self._complete()
        now().switch()

    def claim(self, nbytes: int):
        """A copy of so many bytes will say here that it is over."""
        self._check_init()
        if nbytes > self._announced:
            now().fail(f"a copy brings {nbytes} bytes to {self}, which expects {self._announced} more")
        self._announced -= nbytes

    def land(self, nbytes: int, known: int, cycle: float):
        """A copy has come; `known` is over."""
        self._cycle = max(self._cycle, cycle)
        self._bytes -= nbytes
        self._gathered |= known
        self._complete()

    def wait(self, phase):
        """mbarrier.wait: until a phase of this parity is over."""
        self._check_init()
        now().switch(Waiting(lambda: self._phases & 1 != phase, lambda: self._described(phase)))
        now().running.known |= self._passed_on
        if timing := now().timing:
            timing.spend(now().running, timing.rates.wait)
            timing.reach(now().running, self._over_at + timing.rates.hand_over)

    def check_at_end(self):
        """All that was announced must have come."""
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
        """What a phase still waits for."""
        return f"{self}, phase {phase}: {self._missing} of {self._count} arrivals and {self._bytes} bytes are missing"
