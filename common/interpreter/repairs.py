"""Repair Triton's interpreter, because some of its results differ from a GPU's, and some of its steps are slow."""

import functools
import threading

import numpy
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

_REPAIRS = []  # (owner, name of a function, its replacement)
_patched = set()  # during a launch: the functions for which Triton's language is patched
one_at_a_time = threading.RLock()  # held during each launch; Triton's patch the language that Gluon's use, too


def _replaces(owner, name):
    """Register the decorated function as the replacement of `owner.name`, which it gets as its first argument."""

    def enter(repair):
        _REPAIRS.append((owner, name, repair))
        return repair

    return enter


def install():
    """Repair the interpreter, once in a process."""
    if isinstance(tl.sum, JITFunction):
        _adopt_language()
    for owner, name, repair in _REPAIRS:
        original = getattr(owner, name, None)
        setattr(owner, name, lambda *args, repair=repair, original=original, **kwargs: repair(original, *args, **kwargs))


def _adopt_language():
    """Replace the compiler's functions in `triton.language` by interpreted functions.

    `triton.language` has the compiler's functions if it was imported before TRITON_INTERPRET was set.
    """
    adopted = {}
    for namespace in (tl, tl.standard, tl.random, tl.tensor):
        for name, function in list(vars(namespace).items()):
            if isinstance(function, JITFunction):
                adopted.setdefault(function, InterpretedFunction(function.fn))
                setattr(namespace, name, adopted[function])


# --- bfloat16: Triton 3.6 and 3.7 compute with the 16 bits of a bfloat16 number as with an integer, and casts truncate


def _widen(handle):
    """Convert a bfloat16 TensorHandle, whose data are uint16, to float32. Return any other handle unchanged."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)


def _to_bfloat16(data):
    """Round a float32 array to bfloat16, to nearest even. Return a TensorHandle that holds the result's bits as uint16."""
    rounded = torch.from_numpy(numpy.ascontiguousarray(data)).to(torch.bfloat16)
    return TensorHandle(rounded.view(torch.uint16).numpy().reshape(data.shape), tl.bfloat16)


@_replaces(InterpreterBuilder, "create_dot")
def _dot(dot, builder, a, b, *others):
    return dot(builder, _widen(a), _widen(b), *others)


@_replaces(InterpreterBuilder, "binary_op")
def _binary_op(binary_op, builder, lhs, rhs, op):
    if lhs.dtype.scalar != tl.bfloat16:
        return binary_op(builder, lhs, rhs, op)
    result = op(_widen(lhs).data, _widen(rhs).data)
    return _to_bfloat16(result) if result.dtype == numpy.float32 else TensorHandle(result, tl.int1)


@_replaces(InterpreterBuilder, "cast_impl")
def _cast(cast, builder, src, dst_type):
    if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
        return _to_bfloat16(src.data)
    return cast(builder, src, dst_type)


# --- 8 bits: Triton 3.6 and 3.7 round 1.99 to 1, keep no NaN, and let too large numbers wrap


@_replaces(InterpreterBuilder, "create_fp_to_fp")
def _convert(convert, builder, src, dst_type, rounding_mode):
    """Round float32 to e4m3, to nearest even. Numbers beyond ±448 become ±448, as on a GPU."""
    if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.float8e4nv:
        return convert(builder, src, dst_type, rounding_mode)
    rounded = torch.from_numpy(numpy.ascontiguousarray(src.data)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return TensorHandle(rounded.view(torch.uint8).numpy().reshape(src.data.shape), tl.float8e4nv)


# --- loops


@_replaces(interpreter, "_patch_lang_tensor")
def _patch_tensor(patch, tensor, scope):
    """Let a scalar tensor be the end of a loop. Triton 3.6 converts it to an int in a way that fails from numpy 2.5 on."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


# --- descriptors


@_replaces(InterpreterBuilder, "create_descriptor_reduce")
def _add_to_memory(_, builder, kind, desc, value, indices):
    """Perform `descriptor.atomic_add`, which Triton 3.6 and 3.7 leave out."""
    if kind != ir.DESCRIPTOR_REDUCE_KIND.ADD:
        raise NotImplementedError(f"the interpreter has no {kind.name} of a descriptor")
    pointers, mask = desc.materialize_pointers(indices)
    builder.create_atomic_rmw(ir.ATOMIC_OP.FADD, pointers, value, mask, ir.MEM_SEMANTIC.RELAXED, None)


@_replaces(InterpreterBuilder, "create_descriptor_store")
def _store_inside(store, builder, desc, value, indices):
    """Fail at a negative coordinate, as a store does on a GPU. A load at such a coordinate gives zeros."""
    where = [int(index.data.item()) for index in indices]
    if min(where) < 0:
        raise ValueError(f"a store at {where}: TMA cannot store before a tensor")
    store(builder, desc, value, indices)


# --- launches and arithmetic


@_replaces(InterpretedFunction, "run")
def _run_alone(run, function, *args, **kwargs):
    """Run one kernel at a time, because all kernels share a builder that holds the state of one program."""
    with one_at_a_time:
        _patched.clear()
        return run(function, *args, **kwargs)


@_replaces(interpreter, "_patch_lang")
def _patch_once(patch, function):
    """Patch Triton's language only once for each function of a launch. At every call, this takes a fifth of a kernel's time."""
    if function in _patched:
        return interpreter._LangPatchScope()
    _patched.add(function)
    return patch(function)


@_replaces(interpreter.interpreter_semantic, "binary_op_sanitize_overflow_impl")
def _check_overflow(_, lhs, rhs, operation):
    """Raise an error if an addition, subtraction or multiplication of integers of fewer than 64 bits overflows.

    Triton's own check takes a third of a kernel's time, and raises an error only if Triton's debug option is on.
    """
    bits = lhs.type.scalar.int_bitwidth
    if bits < 64:
        of_numbers = {"add": numpy.add, "sub": numpy.subtract, "mul": numpy.multiply}[operation.__name__]
        exact = of_numbers(lhs.handle.data, rhs.handle.data, dtype=numpy.int64)
        limits = numpy.iinfo(lhs.handle.data.dtype)
        inside = (exact >= limits.min) & (exact <= limits.max)
        assert inside.all(), f"{lhs.type.scalar} overflows: {operation.__name__} gives {exact[~inside].flat[0]}"


_np_dtype = functools.cache(interpreter._get_np_dtype)


@_replaces(interpreter, "_get_np_dtype")
def _look_type_up_once(_, dtype):
    """Return the numpy dtype of a Triton dtype. Triton itself builds a table of all dtypes for every array."""
    scalar = dtype.scalar
    return _np_dtype(tl.uint64 if isinstance(scalar, tl.pointer_type) else scalar)
