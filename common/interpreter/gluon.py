"""Interpret Gluon kernels on the CPU.

The interpreter runs unchanged kernels, with partitions, barriers, TMA and asynchronous matmuls. `run` replaces the launch of
Gluon's kernels, and executes a kernel's Python body. The dict MEANING has replacements for functions of Gluon and Triton. If a
kernel calls a function that has no replacement, an error names the function.

The module `schedule` orders the events, and `shared` finds races. `asynchronous` performs copies and matmuls, and `values`
represents a kernel's variables.
"""

import builtins
import functools
import inspect
import re
import types

import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITCallable

from . import shared
from .asynchronous import Descriptor, Load, Matmul, Store, matmul_wait, store_wait, traffic
from .schedule import MARK, Program, Waiting, begin, now, outermost_frame
from .shared import Barrier, Barriers, Buffer, Memory
from .timing import STORES
from .values import Pointer, Register, Scalar, computed, in_torch, operand, promoted, tensor, value

# id of a function of Gluon or Triton -> (the function, its replacement). Ids, because hashing a function is slow.
MEANING = {}


def means(*functions):
    """Register the decorated function as the replacement of `functions`."""

    def enter(meaning):
        MEANING.update({id(function): (function, meaning) for function in functions})
        return meaning

    return enter


# --- programs and constants


means(gl.program_id, tl.program_id)(lambda axis: Scalar(now().running.program.number if axis == 0 else 0))
means(gl.num_programs, tl.num_programs)(lambda axis: Scalar(now().programs if axis == 0 else 1))
means(gl.cdiv, tl.cdiv)(lambda a, b: (a + b - 1) // b)
means(gl.constexpr)(lambda constant: constant)
means(gl.to_tensor)(lambda x: Scalar(x) if isinstance(x, int) else x)
means(gl.static_range, tl.static_range)(range)
means(gdc_wait)(lambda: None)  # here each launch begins after the previous launch has ended
means(gdc_launch_dependents)(lambda: None)


@means(gl.static_assert, tl.static_assert)
def _static_assert(condition, message=""):
    if not condition:
        now().fail(f"static_assert: {message}")


@means(range, tl.range)
def _range(*bounds):
    bits = max(getattr(bound, "bits", 32) for bound in bounds)
    return (Scalar(number, bits) for number in range(*map(int, bounds)))


# --- tensors in registers


@means(gl.arange, tl.arange)
def _arange(start, end, layout=None):
    return Register(torch.arange(start, end, dtype=torch.int32), layout)


@means(gl.full)
def _full(shape, fill, dtype, layout=None):
    return Register(torch.full(list(shape), operand(fill), dtype=in_torch(dtype)), layout)


means(gl.zeros)(lambda shape, dtype, layout=None: _full(shape, 0, dtype, layout))
means(gl.convert_layout)(lambda x, layout, assert_trivial=False: computed("move", x.data, x, layout=layout))
means(gl.split)(lambda x: (x[..., 0], x[..., 1]))
means(gl.join)(lambda x, y: computed("move", torch.stack(promoted(x, y), -1), x, y))


@means(gl.where, tl.where)
def _where(condition, x, y):
    chosen = torch.where(tensor(condition), *promoted(x, y))
    return computed("select", chosen, condition, x, y, layout=getattr(condition, "layout", None))


def _either(compute, or_nan):
    """Return the replacement of `maximum` or `minimum`.

    If one operand is NaN, the result is the other operand, or NaN with PropagateNan.ALL. As in Triton, bfloat16 operands give a
    float32 result.
    """

    def meaning(x, y, propagate_nan=tl.PropagateNan.NONE):
        chosen = or_nan if propagate_nan == tl.PropagateNan.ALL else compute
        wide = (Register(data.float() if data.dtype == torch.bfloat16 else data) for data in (tensor(x), tensor(y)))
        return computed("max", chosen(*promoted(*wide)), x, y)

    return meaning


means(gl.maximum, tl.maximum)(_either(torch.fmax, torch.maximum))
means(gl.minimum, tl.minimum)(_either(torch.fmin, torch.minimum))


def _at_least_32_bits(data):
    return data.to(torch.promote_types(data.dtype, torch.float32 if data.is_floating_point() else torch.int32))


@means(gl.max, tl.max)
def _max(x, axis):
    data = _at_least_32_bits(x.data)
    largest = data.amax(axis)
    if largest.isnan().any():  # the maximum is NaN only if the whole row is NaN
        nan = data.isnan()
        largest = data.masked_fill(nan, float("-inf")).amax(axis).masked_fill(nan.all(axis), float("nan"))
    return computed("row maximum", largest, x)


@means(gl.sum, tl.sum)
def _sum(x, axis):
    dtype = x.data.dtype if x.data.is_floating_point() else _at_least_32_bits(x.data).dtype
    return computed("sum", x.data.sum(axis, dtype=dtype), x)


@means(gl.associative_scan)
def _associative_scan(x, axis, combine_fn):
    total, reach = x.data.movedim(axis, 0), 1
    while reach < total.shape[0]:  # each element now combines itself and up to `reach` - 1 elements before it
        further = combine_fn(Register(total[:-reach], None), Register(total[reach:], None)).data
        total, reach = torch.cat([total[:reach], further]), 2 * reach
    return computed("scan", total.movedim(0, axis), x, layout=x.layout)


for _function, _compute in ((gl.abs, torch.abs), (gl.exp2, torch.exp2), (gl.log2, torch.log2)):
    means(_function)(lambda x, name=_compute.__name__, compute=_compute: computed(name, compute(x.data), x, layout=x.layout))


@means(gl.inline_asm_elementwise)
def _inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    """Evaluate the comment at the start of the assembly. The comment is an expression of the arguments a, b, c, …"""
    comment = re.match(r"/\*(.*?)\*/", asm)
    if comment is None:
        now().fail("inline assembly must begin with a comment: the expression of a, b, … that the assembly computes")
    names = dict(zip("abcdefgh", args, strict=False))
    return eval(comment[1].strip(), {"gl": _Language(gl)}, names).to(dtype)  # safe: the comment is the kernel's source


# --- global memory


def _extent(pointer, offsets) -> tuple[int, int, int]:
    """Return the bytes of some elements, their lowest address and their highest address."""
    start, size = pointer.elements.data_ptr(), pointer.elements.itemsize
    ends = (int(offsets.min()), int(offsets.max())) if offsets.numel() else (0, 0)
    return offsets.numel() * size, *(start + end * size for end in ends)


@means(gl.load, tl.load)
def _load(pointer, mask=None, other=None, volatile=False):
    offsets, counts = pointer.at(mask)
    traffic.read(*_extent(pointer, offsets[counts]))
    loaded = pointer.elements[torch.where(counts, offsets, 0)]
    if other is not None:
        loaded = torch.where(counts, loaded, torch.as_tensor(operand(other), dtype=loaded.dtype))
    return value(loaded[0]) if pointer.is_scalar and loaded.numel() == 1 else Register(loaded)


@means(gl.store, tl.store)
def _store(pointer, stored, mask=None):
    offsets, counts = pointer.at(mask)
    traffic.write(*_extent(pointer, offsets[counts]))
    stored = torch.as_tensor(operand(stored)).to(pointer.elements.dtype).expand(offsets.shape)
    pointer.elements[offsets[counts]] = stored[counts]


def _add_up(pointer, added, mask=None):
    """Add `added` to elements in global memory. Return the number of added bytes."""
    offsets, counts = pointer.at(mask)
    added = torch.as_tensor(operand(added)).to(pointer.elements.dtype).expand(offsets.shape)
    pointer.elements.index_put_((offsets[counts],), added[counts], accumulate=True)
    nbytes, *ends = _extent(pointer, offsets[counts])
    traffic.write(nbytes, *ends, True)
    now().switch()
    return nbytes


@means(gl.atomic_add)
def fetch_add(pointer, added, mask=None, sem=None):
    """Add to elements of global memory, and return their old values."""
    before = _load(pointer, mask)
    _add_up(pointer, added, mask)
    return before


def flag_wait(pointer, least):
    """Wait until an element of global memory is at least `least`."""
    offsets, _ = pointer.at(None)
    now().switch(Waiting(lambda: bool((pointer.elements[offsets] >= int(least)).all()), lambda: "a flag in global memory"))


def reduce_add(pointer, added):
    """Add a tile to global memory. The L2 cache does the addition, so the SM reads nothing."""
    now().timing.issue(STORES, now().running, "add", _add_up(pointer, added))


# --- shared memory, barriers, TMA, matmuls, partitions


@means(gl.allocate_shared_memory)
def _allocate_shared_memory(dtype, shape, layout):
    program = now().running.program
    program.frame = outermost_frame()
    if isinstance(layout, mbarrier.MBarrierLayout):
        return Barriers(program, shape[0])
    memory = Memory(program, dtype, shape)
    return Buffer(memory, memory.data)


means(mbarrier.init)(Barrier.init)
means(mbarrier.expect)(Barrier.expect)
means(mbarrier.arrive)(Barrier.arrive)
means(mbarrier.wait)(Barrier.wait)
means(tma.async_copy_global_to_shared)(Load)
means(tma.async_copy_shared_to_global)(Store)
means(tma.store_wait)(store_wait)
means(fence_async_shared)(shared.fence)
means(warpgroup_mma_wait)(matmul_wait)


@means(warpgroup_mma)
def _warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
    matmul = Matmul(a, b, acc, use_acc)
    return matmul if is_async else matmul_wait(0, [matmul])


@means(gl.warp_specialize)
def _warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    if len(worker_num_warps) != len(functions_and_args) - 1:
        now().fail(f"{len(functions_and_args) - 1} workers, but {len(worker_num_warps)} numbers of warps")
    warps = [now().running.warps, *worker_num_warps]
    calls = [functools.partial(function, *given) for function, given in functions_and_args]
    now().specialize(list(zip(calls, (function.__name__ for function, _ in functions_and_args), warps, strict=True)))


# --- a kernel's functions, and its launch


class _Language:
    """A module of Triton in which MEANING replaces the functions."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        return _meaning(getattr(self._module, name), f"{self._module.__name__}.{name}")


def _meaning(thing, name):
    """Return the object that the interpreter uses for a kernel's global variable."""
    if id(thing) in MEANING:
        return MEANING[id(thing)][1]
    if isinstance(thing, types.ModuleType) and thing.__name__.startswith("triton"):
        return _Language(thing)
    if isinstance(thing, gl.constexpr):
        return thing.value
    if isinstance(thing, JITCallable | InterpretedFunction) and not thing.fn.__module__.startswith("triton."):
        return _translated(thing.fn)
    if isinstance(thing, JITCallable | InterpretedFunction) or tl.core.is_builtin(thing):
        return lambda *args, **kwargs: now().fail(f"the interpreter does not know {name}: add it to {__name__}")
    return thing


@functools.cache
def _translated(function):
    """Return a copy of a kernel's function in which `_meaning` has replaced every global variable."""
    scope = {MARK: True}
    made = types.FunctionType(function.__code__, scope, function.__name__, None, function.__closure__)
    made.__defaults__ = function.__defaults__ and tuple(_meaning(one, "a default") for one in function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    known = vars(builtins) | function.__globals__
    for name in names & known.keys():
        scope[name] = _meaning(known[name], name)
    return made


def _codes(code):
    """Yield the code of a function and of all nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _argument(name, argument):
    """Convert a launch argument to the object that the kernel sees."""
    if hasattr(argument, "block_shape"):
        return Descriptor(argument, name)
    if isinstance(argument, torch.Tensor):
        span = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True)) + 1
        return Pointer(argument.detach().as_strided((span,), (1,)), name=name)
    if isinstance(argument, bool) or argument is None:
        return argument
    if isinstance(argument, int):
        return Scalar(argument, 32 if -(2**31) <= argument < 2**31 else 64)
    if isinstance(argument, float):
        return Register(torch.tensor(argument, dtype=torch.float32))
    raise TypeError(f"{name}: a kernel takes no {type(argument).__name__}")


def run(kernel: GluonJITFunction, *args, grid, warmup, **options):
    """Run a launch on the CPU: `schedule.AT_ONCE` programs at a time, or one at a time if the launch is timed."""
    if warmup:
        return
    signature = inspect.signature(kernel.fn)
    given = signature.bind(*args, **{name: option for name, option in options.items() if name in signature.parameters})
    given.apply_defaults()
    arguments = given.arguments
    size = grid(arguments) if callable(grid) else grid
    if any(number != 1 for number in size[1:]):
        raise NotImplementedError(f"the grid is {size}, but the interpreter runs only grids of one dimension")
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    unwrapped = {name: one.value if isinstance(one, gl.constexpr) else one for name, one in arguments.items()}
    with begin() as schedule:
        values = {name: _meaning(one, name) if name in constants else _argument(name, one) for name, one in unwrapped.items()}
        call = functools.partial(_translated(kernel.fn), **values)
        schedule.run([(Program(number), call) for number in range(size[0])], options.get("num_warps", 4))
