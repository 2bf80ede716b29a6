"""Record the allocations and launches of a stage's host function, and replay them with less work for the CPU.

The CPU often takes longer to prepare a launch than the GPU takes to run the kernel. The CPU checks the arguments, makes
descriptors, and looks up the tile sizes. Triton's search for the binary that fits the arguments takes most of the CPU's time.
Apart from addresses, the results of this work depend only on the call's options and the tensors' shapes, strides and dtypes.

Calls with equal options, shapes, strides and dtypes are of one kind. The second call of a kind is recorded as steps:
allocations, PyTorch operators, and kernel launches. Later calls of this kind replay the steps with their own tensors. A
recording is like a CUDA graph, but each replay allocates new memory and may run on any stream. A recording keeps no tensor
alive, and a replay frees each tensor that it makes after the last step that uses it.

Triton 3.6 and 3.7 load a kernel's binary, and parse its source, in ways that are not safe in several threads. So calls without
a recording run one at a time. They find compiled kernels in tables (`common.launching`), except while they are recorded.
"""

import collections
import contextvars
import functools
import itertools
import threading
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary
from triton.compiler import CompiledKernel

from common.launching import bare, with_tables
from common.layout import ALIGNMENT
from common.runtime import give_context

KNOWN = ("3.6.", "3.7.")  # versions of Triton whose launches can be recorded
MOST_KINDS = 1024  # a function keeps at most this many kinds of calls, and drops the oldest kind first
MOST_ADDRESSES = 64  # a launch keeps at most this many encoded descriptors for each of its descriptor arguments
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}  # operators that allocate a tensor
_ZEROS = {"new_zeros", "zeros", "zeros_like"}  # operators that allocate a tensor and fill it with zeros
# `Recorded.replays` has these entries for kinds of calls without a recording. _CALLED: there was one call of this kind, so the
# next call is recorded. _UNREPEATABLE: calls of this kind cannot be replayed.
_CALLED, _UNREPEATABLE = "called", "unrepeatable"
_alone = threading.RLock()  # a thread holds this lock while it runs a call without a recording, or changes `Recorded.replays`


class _Thread(threading.local):
    recording = None


_thread = _Thread()


class _Place(NamedTuple):
    """Where a tensor starts: `offset` bytes after the start of tensor `number` (see `_Recording` for the numbers).

    `is_view` says whether the tensor differs from tensor `number` in its start, shape or strides.
    """

    number: int
    offset: int = 0
    is_view: bool = False


class _Recording(TorchDispatchMode):
    """Watch a call and record its steps.

    A step is a function that takes a list of tensors and the stream. A step may append a tensor to the list. Beside each step
    are the numbers of the tensors that the step uses or appends.

    A tensor's number is its index in this list. The list has first the call's arguments, then the results of steps. A kernel
    takes only an address, so a view needs no step if only kernels use the view.
    """

    def __init__(self, tensors):
        super().__init__()
        self.steps, self.conditions, self.repeatable = [], [], True
        self._places, self._numbers = WeakTensorKeyDictionary(), len(tensors)  # the place of each tensor that is alive
        for number, tensor in enumerate(tensors):
            self._places[tensor] = _Place(number)

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # otherwise the first recording imports torch.compile, which takes a second

    def __enter__(self):
        """Let Triton call `launch`. The caller holds the lock `_alone`, so no other thread changes or launches meanwhile."""
        _thread.recording, self._run = self, CompiledKernel.run
        CompiledKernel.run = self._mine = property(self._run_of)
        return super().__enter__()

    def __exit__(self, *exc_info):
        _thread.recording = None
        # An exported copy of this package has a lock of its own, and may have begun a recording meanwhile.
        if vars(CompiledKernel)["run"] is self._mine:
            CompiledKernel.run = self._run
        else:
            self.repeatable = False
        return super().__exit__(*exc_info)

    def _run_of(self, kernel):
        run = self._run.fget(kernel)  # a thread that replays may launch, too
        return functools.partial(self.launch, kernel, run) if _thread.recording is self else run

    def _step(self, step, used, result=None):
        """Add a step that uses the tensors with the numbers `used`, and appends `result` unless it is None."""
        if result is not None:
            used = {*used, self._numbers}
            self._places[result] = _Place(self._numbers)
            self._numbers += 1
        self.steps.append((step, used))

    def _place(self, tensor) -> _Place:
        self.repeatable &= tensor in self._places  # a replay has no tensors except arguments and steps' results
        return self._places.get(tensor, _Place(0))

    def number_of(self, tensor) -> int:
        """Return the number of a tensor that a step takes. If the tensor is a view, first add a step that makes the view."""
        place = self._place(tensor)
        if place.is_view:
            self._step(_view(tensor, place), {place.number}, tensor)
            return self._numbers - 1
        return place.number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.is_view and _shares_memory(result, args[0]):
            base = args[0]
            number, offset, is_view = self._place(base)
            for view in result if isinstance(result, (list, tuple)) else [result]:
                further = (view.storage_offset() - base.storage_offset()) * base.itemsize
                differs = further != 0 or view.shape != base.shape or view.stride() != base.stride()
                self.repeatable &= view.dtype == base.dtype
                self._places[view] = _Place(number, offset + further, is_view or differs)
        elif name in _EMPTY | _ZEROS:
            self._step(_take(result, name in _ZEROS), set(), result)
        elif isinstance(result, Tensor):
            values = [*args, *kwargs.values()]
            numbers = {at: self.number_of(value) for at, value in enumerate(values) if isinstance(value, Tensor)}
            self.repeatable &= len(numbers) == sum(isinstance(leaf, Tensor) for leaf in tree_leaves(values))
            in_place = result in self._places
            step = _operate(func, values, list(kwargs), numbers, in_place)
            self._step(step, {*numbers.values()}, None if in_place else result)
        else:
            self.repeatable = False
        return result

    def launch(self, kernel, run, x, y, z, stream, function, metadata, launch_metadata, enter_hook, exit_hook, *args):
        """Launch a compiled kernel and record the launch. Triton calls this method in place of the kernel's `run`."""
        with _disable_current_modes():  # do not record the launch's own allocations
            run(x, y, z, stream, function, metadata, launch_metadata, enter_hook, exit_hook, *args)
        if kernel.metadata.global_scratch_size:  # replays need the allocator, which the stage set in a context variable
            run = functools.partial(_in_context, contextvars.copy_context(), run)
        pointers, descriptors, others = [], [], list(args)
        for at, arg in enumerate(args):
            if isinstance(arg, Tensor):
                number, offset, _ = self._place(arg)
                pointers.append((at, number, offset))
                others[at] = None
            elif hasattr(arg, "block_shape"):
                number, offset, _ = self._place(arg.base)
                self.repeatable &= offset == 0
                descriptors.append((at, number, type(arg), {**vars(arg), "base": None}))
                others[at] = None
        inner = tree_leaves([other for other in others if isinstance(other, tuple)])
        self.repeatable &= not any(isinstance(each, Tensor) or hasattr(each, "block_shape") for each in inner)
        step = _launch(run, (x, y, z), (function, metadata, None, None, None), pointers, descriptors, others)
        self._step(step, {number for _, number, *_ in pointers + descriptors})

    def replay(self, results):
        """Return the entry of `Recorded.replays` for a call that returned `results`."""
        results = [self.number_of(result) for result in results]
        if not all(condition() for condition in self.conditions):
            return _CALLED
        if not self.repeatable:
            return _UNREPEATABLE
        last = {number: at for at, (_, used) in enumerate(self.steps) for number in used}  # the last step that uses a tensor
        steps = [
            (step, tuple(number for number in used - {*results} if last[number] == at))
            for at, (step, used) in enumerate(self.steps)
        ]
        return _Replay(steps, self.conditions, results)


def _shares_memory(result, base):
    """Return whether the result of an operator that may return views is no copy. `reshape` and `contiguous` may copy: PyTorch
    splits them into other operators, but not in inference mode or below autograd."""
    if not isinstance(result, Tensor):
        return True  # several results, as of `unbind`, are views
    return result.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


def _in_context(context, run, *args):
    context.copy().run(run, *args)  # a copy, because only one thread at a time can run in a context


def _take(like, zeros):
    take = functools.partial(torch.empty_strided, tuple(like.shape), like.stride(), dtype=like.dtype, device=like.device)
    return lambda tensors, stream: tensors.append(take().zero_() if zeros else take())


def _view(tensor, place):
    size, stride, further = tuple(tensor.shape), tensor.stride(), place.offset // tensor.itemsize

    def step(tensors, stream):
        base = tensors[place.number]
        tensors.append(base.as_strided(size, stride, base.storage_offset() + further))

    return step


def _operate(func, values, names, numbers, in_place):
    """Return a step that calls `func`. The last of its `values` are keyword arguments. `numbers` says which are tensors."""
    values = [None if at in numbers else value for at, value in enumerate(values)]
    positional = len(values) - len(names)

    def step(tensors, stream):
        given = values.copy()
        for at, number in numbers.items():
            given[at] = tensors[number]
        result = func(*given[:positional], **dict(zip(names, given[positional:], strict=True)))
        if not in_place:
            tensors.append(result)

    return step


def _launch(run, grid, binary, pointers, descriptors, others):
    run, encode, tiles = bare(run)
    # Replace the last descriptor first, because a replacement can move later arguments.
    described = [(*each, tile, {}) for each, tile in itertools.zip_longest(descriptors, tiles)][::-1]

    def step(tensors, stream):
        args = others.copy()
        for at, number, offset in pointers:
            args[at] = tensors[number].data_ptr() + offset
        for at, number, kind, fields, tile, encoded in described:
            address = tensors[number].data_ptr()
            places = encoded.get(address)  # PyTorch's allocator often gives a later call the same address
            if places is None:
                descriptor = kind.__new__(kind)  # skips the checks, which the recorded descriptor has passed
                descriptor.__dict__.update(fields, base=tensors[number])
                places = [descriptor]
                if encode:
                    if len(encoded) >= MOST_ADDRESSES:
                        encoded.clear()
                    places = encoded[address] = encode(descriptor, tile)
            args[at : at + 1] = places
        run(*grid, stream, *binary, *args)

    return step


class _Replay(NamedTuple):
    """The steps of a recorded call, and the conditions under which they may be replayed."""

    steps: list[tuple[Callable, tuple[int, ...]]]  # each with the numbers of the tensors to free after it
    conditions: list[Callable]
    results: list[int]  # the numbers of the tensors that the call returns

    def __call__(self, tensors, stream):
        tensors = list(tensors)
        for step, unused in self.steps:
            step(tensors, stream)
            for number in unused:
                tensors[number] = None
        return tuple([tensors[number] for number in self.results])


def depends_on(condition: Callable[[], bool]):
    """Allow replays of the current recording only while `condition()` is true.

    Once the condition is false, the next call of this kind is recorded anew. If no call is being recorded, do nothing.
    """
    if _thread.recording:
        _thread.recording.conditions.append(condition)


def is_watched() -> bool:
    """Return whether a profiler has set hooks or a debugging mode is on. If so, each launch must go through Triton."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    hooked = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)  # the `calls` of a chain of hooks may be empty
    compiles_otherwise = runtime.debug or runtime.add_stages_inspection_hook or triton.knobs.compilation.instrumentation_mode
    return bool(hooked or compiles_otherwise)


def _kind(tensors, *others) -> tuple:
    """Return a key for a call's kind. It has no tuples inside: the garbage collector goes through each tuple that is kept."""
    kind = [*others]
    for tensor in tensors:
        kind += tensor.shape
        kind += tensor.stride()
        kind += tensor.dtype, tensor.device, tensor.data_ptr() % ALIGNMENT  # a dtype is no number, so it ends the strides
    return tuple(kind)


@functools.cache
def is_known() -> bool:
    """Return whether launches of the installed Triton can be recorded. If not, say so once."""
    known = triton.__version__.startswith(KNOWN)
    if not known:
        warnings.warn(
            f"Triton {triton.__version__} is none of {KNOWN}: launches are not recorded, so calls take more CPU time",
            stacklevel=2,
        )
    return known


class Recorded:
    """A stage's `forward` or `backward` that records the second call of a kind, and replays the recording in later calls.

    Calls of one kind have equal options, the same current device, and the same deterministic mode of PyTorch. Their tensors
    have equal shapes, strides, dtypes, devices and alignments. Code that depends on anything else must call `depends_on`. If
    `is_watched()` is true, every call runs the function itself.

    `differentiable` is an option of some forwards. `lengths` are options that are tuples of tensors and None. Calls of one kind
    have None at the same places. The values of these tensors may change from call to call, as those of all tensors.
    """

    def __init__(self, function: Callable):
        self.function, self.replays = function, collections.OrderedDict()  # a dict finds its oldest entry slowly

    def __call__(self, *tensors, causal, scale, diagonal=0, differentiable=None, **lengths):
        options = {"causal": causal, "scale": scale, "diagonal": diagonal, **lengths}
        if differentiable is not None:
            options["differentiable"] = differentiable
        try:
            driver = triton.runtime.driver.active
        except RuntimeError:  # there is no GPU, but a stage without kernels needs none
            return self.function(*tensors, **options)
        if _thread.recording or is_watched() or not is_known():
            with _alone:
                return self.function(*tensors, **options)
        device = driver.get_current_device()
        given, absent = tensors, ()
        if lengths:
            optional = [*itertools.chain(*lengths.values())]
            given = *tensors, *(each for each in optional if each is not None)
            absent = [each is None for each in optional]
        settings = driver, device, torch.are_deterministic_algorithms_enabled()
        number = type(scale), scale or str(scale)  # zero as text, because 0.0 equals -0.0
        kind = _kind(given, *settings, causal, *number, diagonal, differentiable, *lengths, *absent)
        replay = self.replays.get(kind)
        if isinstance(replay, _Replay) and all(condition() for condition in replay.conditions):
            give_context(tensors[0])
            return replay(given, driver.get_current_stream(device))
        with _alone:
            if replay is None or replay is _UNREPEATABLE:
                self.replays.setdefault(kind, _CALLED)
                if len(self.replays) > MOST_KINDS:
                    self.replays.popitem(last=False)
                return with_tables(self.function, *tensors, **options)
            given = [tensor.detach() for tensor in given]  # new objects, because a tensor passed twice needs two numbers
            others = iter(given[len(tensors) :])
            options |= {
                name: each._make(one if one is None else next(others) for one in each) for name, each in lengths.items()
            }
            with _Recording(given) as recording:
                results = self.function(*given[: len(tensors)], **options)
            self.replays[kind] = recording.replay(results)
            return results
