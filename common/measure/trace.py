"""Record in order which tiles of which tensors a pass reads, writes or adds to.

Triton kernels run on Triton's interpreter, and Gluon kernels on `common.interpreter`. The command `make trace` shows the
record.

An access is one load, store, atomic operation or TMA copy of a program, or one argument or result of a PyTorch operator. Each
access has the bytes that `common.measure.counter` counts, so the bytes of a trace add up to the counted traffic.

Accesses of Triton's programs and PyTorch's operators have no times. Gluon's launches run on the model of an SM
(`common.measure.timeline`), which gives each access its cycles.
"""

import inspect
import itertools
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import interpreter_builder

from common.entry import Lengths, Starts
from common.interpreter import schedule
from common.interpreter.timing import COPIES, STORES
from common.measure.counter import Counter, Launch, tensors_of
from common.measure.timeline import measured_rates
from common.measure.traffic import GPUS, Gpu, stage_call, tiles_of
from common.measure.workloads import DTYPES, Workload
from common.runtime import DEVICE

ONE_SM = replace(GPUS["h200"], num_sms=1)  # the model has one SM, so a persistent kernel has one CTA
NAMES = {"forward": ("Q", "K", "V", "O", "LSE"), "backward": ("dO", "Q", "K", "V", "O", "LSE", "dQ", "dK", "dV")}


@dataclass
class Access:
    """An access of a program to a part of a tensor."""

    launch: int  # the index of the launch in `Trace.launches`
    program: int  # the number of the program or CTA; 0 for a PyTorch operator
    partition: str  # the function that the accessing warps run; "" if the kernel has no partitions
    kind: str  # "read", "write" or "add"
    tensor: str  # the tensor's name in `Trace.tensors`, which is known after the pass
    heads: tuple[int, int]  # the first and the last head; the heads of all batch elements have consecutive numbers
    rows: tuple[int, int]  # the first and the last row
    nbytes: int  # the bytes that move; an atomic addition counts twice, because it reads and writes
    start: float | None = None  # the cycle in which the access begins; None if the launch was not timed
    end: float | None = None  # the cycle in which the access ends; None if the launch was not timed


@dataclass
class Trace:
    """The accesses of a pass, in order."""

    launches: list[Launch]
    accesses: list[Access]  # of all launches
    tensors: dict[str, tuple[int, int, int]]  # name -> (heads, rows, columns), in the order of the first accesses
    spans: dict[int, list]  # index of a timed launch -> what the units of the modelled SM do in this launch, and when
    starts: list[int] = field(default_factory=list)  # the first row of each sequence in a head, if lengths differ


def trace(
    stage, workload: Workload, gpu: Gpu = ONE_SM, lengths: Sequence[int] = (), queries: int | None = None, at_once: bool = False
) -> Trace:
    """Record a forward or a backward of a stage, which is any object with these functions.

    Args:
        gpu: determines the kernels' tiles and the number of persistent CTAs, which are timed one after another.
        lengths: if not empty, the batch has a sequence of each of these lengths, in the place of the workload's batch.
        queries: the number of queries of each sequence; None means as many as keys. With a number, the sequences are caches.
        at_once: time the CTAs on SMs that work at the same time. So a shared counter gives the next tile to the first free CTA.
    """
    workload, starts, batch = _batch(stage, workload, lengths, queries) if lengths else (workload, [], {})
    with tiles_of(gpu, stage, max(workload.head_dim, workload.value_dim), DTYPES[workload.dtype]):
        tracer = _Tracer({(workload.batch, workload.heads), (workload.batch, workload.kv_heads)})
        named = SimpleNamespace(**{name: tracer.naming(getattr(stage, name), names) for name, names in NAMES.items()})
        call = stage_call(named, workload, workload.inputs(), **batch)
        with schedule.timed(measured_rates(), gpu.num_sms if at_once else 1) as tracer.timings, tracer:
            call()
    return replace(tracer.trace(), starts=starts)


def _batch(stage, workload: Workload, lengths: Sequence[int], queries: int | None) -> tuple[Workload, list[int], dict]:
    """Lay out sequences of different lengths as the stage's pass takes them: packed if it can, else padded. Pad caches.

    Returns:
        The workload of the batch, the first row of each sequence in a head, and the argument that tells the pass the lengths. A
        pass that takes no lengths computes the padding too.
    """
    takes = inspect.signature(stage.forward if workload.pass_ == "fwd" else stage.backward).parameters
    if "starts" in takes and queries is None:
        starts = [0, *itertools.accumulate(lengths)]
        on_device = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        packed = replace(workload, batch=1, seq_len=starts[-1], kv_len=starts[-1])
        return packed, starts[:-1], {"starts": Starts(on_device, on_device)}
    longest, mask = max(lengths), {"causal": workload.causal}
    padded = replace(workload, batch=len(lengths), seq_len=queries or longest, kv_len=longest, causal=False)
    if workload.causal and "lengths" not in takes:  # lengths align the mask themselves
        mask["diagonal"] = padded.kv_len - padded.seq_len
    keys = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return padded, [0], mask | ({"lengths": Lengths(keys)} if "lengths" in takes else {})


class _Known:
    """A tensor that kernels may access. Its name may become known later.

    Args:
        outer: the pairs (B, H) and (B, Hkv) of a pass. A tensor of three dimensions is [B, H, S] if its shape begins with
            such a pair. Any other tensor of three dimensions is [B · H, rows, columns], as in a batched matmul.
    """

    def __init__(self, tensor: Tensor, outer: set[tuple[int, int]]):
        self.tensor, self.name = tensor, None  # keep the tensor, so that no other tensor gets its memory
        self.storage = tensor.untyped_storage()
        self.first, self.end = self.storage.data_ptr(), self.storage.data_ptr() + self.storage.nbytes()
        sizes, strides = list(tensor.shape), list(tensor.stride())
        if tensor.dim() == 3:
            at = 3 if tuple(tensor.shape[:2]) in outer else 0
            sizes.insert(at, 1)
            strides.insert(at, 0)
        if len(sizes) != 4:  # count the tensor as a single column
            sizes, strides = [1, 1, self.storage.nbytes() // tensor.itemsize, 1], [0, 0, 1, 0]
        self._sizes, self._strides = sizes, strides
        self.shape = sizes[0] * sizes[1], sizes[2], sizes[3]  # the heads of all batch elements, the rows, the columns

    def place(self, address: int) -> tuple[int, int]:
        """Return the head and the row of the element at an address."""
        left = (address - self.tensor.data_ptr()) // self.tensor.itemsize
        found, sizes, strides = [0, 0, 0, 0], self._sizes, self._strides
        for dim in sorted((dim for dim in range(4) if sizes[dim] > 1 and strides[dim]), key=lambda dim: -strides[dim]):
            found[dim], left = divmod(left, strides[dim])
        return found[0] * sizes[1] + found[1], found[2]


class _Tracer(Counter):
    """Count the traffic, and record each counted access."""

    def __init__(self, outer):
        super().__init__()
        self.timings, self._outer = [], outer
        self._known: list[_Known] = []
        self._seen = []  # (_Known, Access)
        self._timed = {}  # index of a timed launch -> index of its timing in `timings`

    def naming(self, function, names: tuple[str, ...]):
        """Return a function that does the same, and gives these names to the arguments and results."""

        def named(*tensors, **options):
            results = function(*tensors, **options)
            for name, tensor in zip(names, (*tensors, *results), strict=True):
                self.know(tensor, None).name = name
            return results

        return named

    def know(self, tensor: Tensor, name: str | None) -> _Known:
        """Return the `_Known` of `tensor`'s memory. If there is none yet, make it. If it has no name yet, it gets this one."""
        storage = tensor.untyped_storage()
        known = next((known for known in self._known if known.storage.data_ptr() == storage.data_ptr()), None)
        if known is None:
            known = _Known(tensor, self._outer)
            self._known.append(known)
        known.name = known.name or name
        return known

    def trace(self) -> Trace:
        """Return the recorded trace."""
        names, tensors = {}, {}
        for known, access in self._seen:
            if id(known) not in names:
                name = known.name or "temporary"
                while name in tensors:  # if several tensors have one name, later ones get a prime
                    name += "\N{PRIME}"
                names[id(known)], tensors[name] = name, known.shape
            access.tensor = names[id(known)]
        spans = {launch: self.timings[number].spans for launch, number in self._timed.items()}
        return Trace(self.launches, [access for _, access in self._seen], tensors, spans)

    def _access(self, read, written, first, last, adds=False):
        super()._access(read, written, first, last, adds)
        known = next(known for known in self._known if known.first <= first < known.end)
        launch = len(self.launches) - 1
        if launch not in self._timed:
            program, partition, span = interpreter_builder.grid_idx[0], "", (None, None)
        else:
            running, timing = schedule.now().running, schedule.now().timing
            program, partition, span = running.program.number, running.name, (running.clock, running.clock)
            if timing and timing.spans and timing.spans[-1].unit in (COPIES, STORES):
                span = timing.spans[-1].start, timing.spans[-1].end
        (head, row), (last_head, last_row) = known.place(first), known.place(last)
        place = (head, last_head), (row, last_row) if last_head == head else (0, known.shape[1] - 1)
        kind = "add" if adds else "write" if written else "read"
        self._seen.append((known, Access(launch, program, partition, kind, "", *place, read + written, *span)))

    def _run(self, run):
        counted = super()._run(run)

        def traced(function, *args, warmup, **kwargs):
            if not warmup:
                for name, value in [*zip(function.arg_names, args, strict=False), *kwargs.items()]:
                    tensor = getattr(value, "base", value)
                    if isinstance(tensor, Tensor):
                        self.know(tensor, name.removesuffix("_ptr").removesuffix("_desc"))
                if isinstance(function, GluonJITFunction):
                    self._timed[len(self.launches)] = len(self.timings)
            return counted(function, *args, warmup=warmup, **kwargs)

        return traced

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not self._in_kernel:
            for tensor in tensors_of(result):
                self.know(tensor, None)
        return result

    def _move(self, tensor, read, written):
        super()._move(tensor, read, written)
        if read + written:
            known = self.know(tensor, _name_in_a_stage(tensor))
            heads, rows, _ = known.shape
            kind = "read" if read else "write"
            place = (0, heads - 1), (0, rows - 1)
            self._seen.append((known, Access(len(self.launches) - 1, 0, "", kind, "", *place, read + written)))


def _name_in_a_stage(tensor: Tensor) -> str | None:
    """Return the name of the variable in a stage's host function that holds the tensor, or None without such a variable."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)) if "/stages/v" in frame.f_code.co_filename)
    variables = itertools.chain.from_iterable(frame.f_locals.items() for frame in frames)
    held = ((name, value.untyped_storage()) for name, value in variables if isinstance(value, Tensor))
    return next((name for name, storage in held if storage._cdata == tensor.untyped_storage()._cdata), None)
