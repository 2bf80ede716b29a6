"""Choose the order of events in an interpreted Gluon kernel.

Each partition has a thread, and one thread runs at a time. The running thread gives up its turn at every barrier, copy, matmul
and fence. Then a random seed chooses the next thread, and which asynchronous operations take place. The same seed replays the
same order.

A run takes only one order, but can also find races that would happen in other orders: see `shared`.
"""

import contextlib
import itertools
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NamedTuple

import torch
from triton.runtime.interpreter import InterpreterError

from .repairs import one_at_a_time
from .timing import Rates, Timing

VARIABLE = "GLUON_SEED"  # this environment variable, if set, gives the seed of every launch
AT_ONCE = 2  # number of programs that run at the same time, and of SMs that kernels see
MARK = "__interpreted__"  # each interpreted function of a kernel has a global variable with this name

_seeds = itertools.count()


def restart_seeds(first: int):
    """Give the next launches the seeds `first`, `first` + 1, … unless the environment sets `VARIABLE`."""
    global _seeds
    _seeds = itertools.count(first)


def _kernel_frames(frame):
    """Yield the stack frames of a kernel's functions, from `frame` outwards."""
    while frame:
        if MARK in frame.f_globals:
            yield frame
        frame = frame.f_back


class Place:
    """A place in a launch: a partition, and the line of the kernel that the partition executes."""

    def __init__(self, partition, frame):
        inner = next(_kernel_frames(frame), None)
        self._partition, self._code, self._line = partition, inner and inner.f_code, inner and inner.f_lineno

    def __str__(self):
        if self._code is None:
            return f"{self._partition}, outside of its function"
        file = "/".join(self._code.co_filename.split(os.sep)[-2:])
        return f"{file}:{self._line}, in {self._code.co_name} ({self._partition})"


def outermost_frame():
    """Return the frame of the kernel function in which this thread began."""
    *_, frame = _kernel_frames(sys._getframe(1))
    return frame


class Stopped(BaseException):
    """The exception that ends a partition after another partition has failed."""


class Waiting(NamedTuple):
    """A condition that a partition waits for."""

    over: Callable[[], bool]
    what: Callable[[], str]  # describes the wait in a deadlock report


class Program:
    """One program of a launch, with its partitions, shared memory and barriers."""

    def __init__(self, number: int):
        self.number, self.sm = number, 0  # in a timed launch, `sm` is the number of the SM that runs this program
        self.partitions = []  # all partitions that have begun, including ended ones
        self.memories, self.barriers = [], []
        self.frame = None  # the kernel's outermost stack frame
        self._events = itertools.count()

    def event(self) -> int:
        """Return a new event: a number with one bit set, for `Partition.known`."""
        return 1 << next(self._events)

    def name_of(self, thing) -> str | None:
        """Return the kernel's name for a buffer or several barriers: a variable, or a field such as "ring.full"."""
        found = self.frame.f_locals if self.frame else {}
        for name, value in found.items():
            fields = value._fields if isinstance(value, tuple) and hasattr(value, "_fields") else ()
            for field in fields:
                if getattr(value, field) is thing:
                    return f"{name}.{field}"
        return next((name for name, value in found.items() if value is thing), None)


class Partition:
    """A program's warps with one role. The first partition runs the kernel. It starts the others with `warp_specialize`."""

    def __init__(self, program: Program, call: Callable, name: str, warps: int, parent: "Partition | None" = None):
        self.program, self.call, self.name, self.warps = program, call, name, warps
        self.clock = parent.clock if parent else 0.0  # the partition's current cycle in a timed launch
        self.known = parent.known if parent else 0  # one bit for each event that this partition knows to be over
        self.matmuls, self.stores = [], []  # matmuls and stores that were issued but not yet waited for
        self.sent = []  # stores that TMA has read; some may not have arrived in global memory yet
        self.waiting = self.frame = None
        self.turn = threading.Lock()
        self.turn.acquire()
        program.partitions.append(self)

    def __str__(self):
        number = self.program.partitions.index(self)
        return f"program {self.program.number}" + (f", partition {number}: {self.name}" if number else "")


class Schedule:
    """A launch. It runs a few programs at a time, until all programs have ended or one has failed."""

    def __init__(self, seed: int, timing: Timing):
        self.seed, self.timing = seed, timing
        self.random = random.Random(seed)
        self.eagerness = self.random.choice((0, 0.1, 0.5, 1))  # probability, at each turn, that an issued operation takes place
        self.constancy = self.random.choice((0, 0.5, 0.9))  # probability that the running partition keeps its turn
        self.fair = self.random.choice((True, False))  # if False, operations take place in the order of their random ranks
        self._issued = {}  # operation that has not taken place yet (a copy, matmul, or arrival of a store) -> random rank
        self.error = None
        self.running = None
        self.programs = 0  # number of programs of the launch
        self._partitions = []  # partitions that have begun and not ended
        self._finished = threading.Lock()

    @torch.inference_mode()
    def run(self, programs: list[tuple[Program, Callable]], warps: int):
        """Run all programs with `warps` warps each, in an order that the seed chooses.

        In a timed launch, each SM runs one program after the other.
        """
        self.programs = len(programs)
        if not self.timing and self.random.random() < 0.5:
            self.random.shuffle(programs)
        waiting = iter(programs)

        def run_next(sm):
            if (pair := next(waiting, None)) and not self.error:
                program, call = pair
                partition = Partition(program, call, "the kernel", warps)
                program.sm = sm
                if self.timing:
                    partition.clock = self.timing.ends[sm]
                self._begin(partition, lambda: run_next(sm))

        self._finished.acquire()
        for sm in range(self.timing.num_sms if self.timing else AT_ONCE):
            run_next(sm)
        self._pass_on()
        self._finished.acquire()
        if self.error:
            raise self.error

    def specialize(self, calls: list[tuple[Callable, str, int]]):
        """Run partitions concurrently, and wait until all have ended. Each of `calls` is (function, name, number of warps)."""
        parent = self.running
        workers = [Partition(parent.program, *call, parent) for call in calls]
        for worker in workers:
            self._begin(worker, lambda: None)
        ended = Waiting(lambda: not any(worker in self._partitions for worker in workers), lambda: "its partitions")
        self.switch(ended)
        for worker in workers:
            parent.known |= worker.known

    def switch(self, waiting: Waiting | None = None):
        """Let the seed choose the next partition. The running partition continues only when `waiting` is over."""
        me = self.running
        me.waiting, me.frame = waiting, sys._getframe(1)
        following = self._next()
        if following is not me:
            self._resume(following)
            me.turn.acquire()
        me.waiting = me.frame = None
        if self.error:
            raise Stopped

    def issue(self, operation: Callable[[], None]):
        """Issue an asynchronous operation, which takes place when it is called. The seed chooses when."""
        self._issued[operation] = self.random.random()
        if self.timing:
            self.perform(operation)

    def perform(self, operation: Callable[[], None]):
        """Let an operation take place now, unless it already did."""
        if self._issued.pop(operation, None) is not None:
            operation()

    def fail(self, message: str):
        """Raise an error that names the running partition and its line in the kernel."""
        raise InterpreterError(f"{self.here()}: {message}\n{self.replayed}")

    def here(self) -> Place:
        """Return the running partition's place."""
        return Place(self.running, sys._getframe(1))

    @property
    def replayed(self) -> str:
        """A sentence on how to replay the order of this launch."""
        return f"{VARIABLE}={self.seed} replays this order"

    def _begin(self, partition, then):
        @torch.inference_mode()  # a new thread does not inherit inference mode, and the arguments may be inference tensors
        def body():
            partition.turn.acquire()
            try:
                if not self.error:
                    partition.call()
                    self._end(partition)
            except Stopped:
                pass
            except InterpreterError as error:
                self.error = self.error or error
            except Exception as error:
                self.error = self.error or self._in_the_kernel(error)
            self._partitions.remove(partition)
            then()
            self._pass_on()

        self._partitions.append(partition)
        threading.Thread(target=body, daemon=True).start()

    def _in_the_kernel(self, error):
        """Return an error with a Python exception's text, and the kernel's line that raised the exception."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if MARK in frame.f_globals]
        place = Place(self.running, frames[-1] if frames else None)
        wrapped = InterpreterError(f"{place}: {error!r}\n{self.replayed}")
        wrapped.__cause__ = error
        return wrapped

    def _end(self, partition):
        """Fail if a partition leaves stores or matmuls unfinished, or if a program leaves barriers waiting for bytes."""
        if partition.stores:
            store = partition.stores[0]
            self.fail(f"{partition.name} ends before {store.buffer} has been read, with no store_wait after {store.where}")
        if partition.matmuls:
            where = partition.matmuls[0].where
            self.fail(f"{partition.name} ends before a matmul does, with no warpgroup_mma_wait after {where}")
        if partition is partition.program.partitions[0]:
            for barrier in partition.program.barriers:
                barrier.check_at_end()

    def _pass_on(self):
        following = self._next()
        if following:
            self._resume(following)
        else:
            self._finished.release()

    def _resume(self, partition):
        self.running = partition
        partition.turn.release()

    def _next(self):
        """Let some issued operations take place. Return the partition that runs next, or None if all have ended."""
        while not self.error:
            try:
                if self._issued and self.random.random() < self.eagerness:
                    self._perform_any()
                ready = [one for one in self._partitions if one.waiting is None or one.waiting.over()]
                if ready and self.timing:
                    return min(ready, key=lambda one: one.clock)
                if ready:
                    stay = self.running in ready and self.random.random() < self.constancy
                    return self.running if stay else self.random.choice(ready)
                if self._issued:
                    self._perform_any()
                elif not self._partitions:
                    return None
                else:
                    lines = (f"{Place(one, one.frame)} waits for {one.waiting.what()}" for one in self._partitions)
                    raise InterpreterError("\n  ".join(["deadlock", *lines]) + f"\n{self.replayed}")
            except Exception as error:
                self.error = error
        return self._partitions[0] if self._partitions else None

    def _perform_any(self):
        self.perform(self.random.choice([*self._issued]) if self.fair else min(self._issued, key=self._issued.get))


_running = _rates = None
_num_sms = 1
_timings = []


@contextlib.contextmanager
def begin():
    """Enter a context for one launch. A launch by another thread waits until the context ends."""
    global _running
    with one_at_a_time:
        if timing := Timing(_rates, _num_sms):
            _timings.append(timing)
        _running = Schedule(int(os.environ.get(VARIABLE) or next(_seeds)), timing)
        try:
            yield _running
        finally:
            _running = None


@contextlib.contextmanager
def timed(rates: Rates, num_sms: int = 1):
    """Enter a context that times launches with `rates`. The context yields a list, to which each launch appends its timing.

    Args:
        num_sms: the number of SMs that work at the same time. Each has its own units.
    """
    global _rates, _timings, _num_sms
    with one_at_a_time:
        _rates, _timings, _num_sms = rates, [], num_sms
        try:
            yield _timings
        finally:
            _rates, _num_sms = None, 1


def now() -> Schedule | None:
    """Return the running launch."""
    return _running
