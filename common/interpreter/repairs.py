"""Repair Triton's interpreter, because some of its results differ from a GPU's, and some of its steps are slow.

`common.runtime` applies these repairs.
"""

import functools
import threading

import numpy
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction


def adopt_language():
    """Replace the compiler's functions in `triton.language` by interpreted functions.

    `triton.language` has the compiler's functions if it was imported before `common.runtime`.
    """
    adopted = {}
    for namespace in (tl, tl.standard, tl.random, tl.tensor):
        for name, function in list(vars(namespace).items()):
            if isinstance(function, JITFunction):
                adopted.setdefault(function, InterpretedFunction(function.fn))
                setattr(namespace, name, adopted[function])


def _widen(handle):
    """Convert a bfloat16 TensorHandle, whose data are uint16, to float32. Return any other handle unchanged."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)


def _to_bfloat16(data):
    """Round a float32 array to bfloat16, to nearest even. Return a TensorHandle that holds the result's bits as uint16."""
    rounded = torch.from_numpy(numpy.ascontiguousarray(data)).to(torch.bfloat16)
    return TensorHandle(rounded.view(torch.uint16).numpy().reshape(data.shape), tl.bfloat16)


def repair_bfloat16():
    """Let Triton's interpreter compute with bfloat16 numbers as a GPU does.

    In Triton 3.6 and 3.7, `tl.dot` and arithmetic treat the 16 bits of a bfloat16 number as an integer. Also, a cast from
    float32 truncates, but a GPU rounds to nearest even.
    """
    builder = InterpreterBuilder
    dot, binary_op, cast = builder.create_dot, builder.binary_op, builder.cast_impl

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        return dot(self, _widen(a), _widen(b), d, input_precision, max_num_imprecise_acc)

    def repaired_binary_op(self, lhs, rhs, op):
        if lhs.dtype.scalar != tl.bfloat16:
            return binary_op(self, lhs, rhs, op)
        result = op(_widen(lhs).data, _widen(rhs).data)
        return _to_bfloat16(result) if result.dtype == numpy.float32 else TensorHandle(result, tl.int1)

    def cast_impl(self, src, dst_type):
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return _to_bfloat16(src.data)
        return cast(self, src, dst_type)

    builder.create_dot, builder.binary_op, builder.cast_impl = create_dot, repaired_binary_op, cast_impl


def add_descriptor_reductions():
    """Give Triton's interpreter `descriptor.atomic_add`, which Triton 3.6 and 3.7 leave out."""

    def create_descriptor_reduce(self, kind, desc, value, indices):
        if kind != ir.DESCRIPTOR_REDUCE_KIND.ADD:
            raise NotImplementedError(f"the interpreter has no {kind.name} of a descriptor")
        pointers, mask = desc.materialize_pointers(indices)
        self.create_atomic_rmw(ir.ATOMIC_OP.FADD, pointers, value, mask, ir.MEM_SEMANTIC.RELAXED, None)

    InterpreterBuilder.create_descriptor_reduce = create_descriptor_reduce


def refuse_stores_before_a_tensor():
    """Make a descriptor's store at a negative coordinate fail, as on a GPU. A load at such a coordinate gives zeros."""
    store = InterpreterBuilder.create_descriptor_store

    def checked(self, desc, value, indices):
        where = [int(index.data.item()) for index in indices]
        if min(where) < 0:
            raise ValueError(f"a store at {where}: TMA cannot store before a tensor")
        store(self, desc, value, indices)

    InterpreterBuilder.create_descriptor_store = checked


def repair_loop_bounds():
    """Let a scalar tensor be the end of a loop.

    Triton 3.6 converts the tensor to an int in a way that fails from numpy 2.5 on.
    """
    patch = interpreter._patch_lang_tensor

    def patch_and_repair(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_repair


def run_one_kernel_at_a_time():
    """Run one kernel at a time, because all kernels share a builder that holds the state of one program."""
    run, lock = InterpretedFunction.run, threading.RLock()

    def run_alone(self, *args, **kwargs):
        with lock:
            return run(self, *args, **kwargs)

    InterpretedFunction.run = run_alone


def patch_the_language_once():
    """During a launch, patch Triton's language only once for each function.

    Triton itself does so at every call of the function, which takes a fifth of a kernel's time.
    """
    patch, run, patched = interpreter._patch_lang, InterpretedFunction.run, set()

    def run_and_patch(self, *args, **kwargs):
        patched.clear()
        return run(self, *args, **kwargs)

    def patch_once(fn):
        if fn in patched:
            return interpreter._LangPatchScope()
        patched.add(fn)
        return patch(fn)

    InterpretedFunction.run, interpreter._patch_lang = run_and_patch, patch_once


def check_overflow_cheaply():
    """Raise an error if an addition, subtraction or multiplication of integers overflows.

    The check covers all integers of fewer than 64 bits. Triton's own check takes a third of a kernel's time, and raises an
    error only if Triton's debug option is on.
    """
    of_numbers = {"add": numpy.add, "sub": numpy.subtract, "mul": numpy.multiply}

    def check(lhs, rhs, operation):
        bits = lhs.type.scalar.int_bitwidth
        if bits < 64:
            exact = of_numbers[operation.__name__](lhs.handle.data, rhs.handle.data, dtype=numpy.int64)
            limits = numpy.iinfo(lhs.handle.data.dtype)
            inside = (exact >= limits.min) & (exact <= limits.max)
            assert inside.all(), f"{lhs.type.scalar} overflows: {operation.__name__} gives {exact[~inside].flat[0]}"

    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = check


def look_types_up_once():
    """Cache the numpy dtype of each Triton dtype. Triton itself builds a table of all dtypes for every array."""
    look_up = functools.cache(interpreter._get_np_dtype)

    def numpy_type(dtype):
        scalar = dtype.scalar
        return look_up(tl.uint64 if isinstance(scalar, tl.pointer_type) else scalar)

    interpreter._get_np_dtype = numpy_type
