"""Where the kernels run: on the GPU, or, where there is none, on Triton's interpreter on the CPU.

Importing this module decides. Without a GPU it switches the interpreter on, so that nobody has to set a variable; an explicit
`TRITON_INTERPRET=1` (or `0`) in the environment wins.
"""

import contextlib
import functools
import math
import os
import sys

import numpy
import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
_imported_before = "triton.language" in sys.modules

import triton  # noqa: E402  (reads TRITON_INTERPRET)
import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRETED else "cuda"


def _adopt_language():
    """Give the interpreter its own version of what `triton.language`, imported before us, defined for the compiler."""
    adopted = {}
    for namespace in (tl, tl.standard, tl.random, tl.tensor):
        for name, function in list(vars(namespace).items()):
            if isinstance(function, JITFunction):
                adopted.setdefault(function, InterpretedFunction(function.fn))
                setattr(namespace, name, adopted[function])


def _widen(handle):
    """A bfloat16 handle, which the interpreter keeps as raw uint16, as float32; any other handle as it is."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)


def _to_bfloat16(data):
    """A float32 array rounded to nearest even, as the raw uint16 of bfloat16."""
    rounded = torch.from_numpy(numpy.ascontiguousarray(data)).to(torch.bfloat16)
    return TensorHandle(rounded.view(torch.uint16).numpy().reshape(data.shape), tl.bfloat16)


def _repair_bfloat16():
    """Give the interpreter's bfloat16 the meaning that it has on a GPU.

    Triton 3.6 and 3.7 compute with the raw 16 bits: `tl.dot` multiplies them as integers, arithmetic adds them as integers, and
    a cast from float32 truncates where the hardware rounds to nearest even.
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


@functools.cache  # the driver takes most of a millisecond to answer
def _properties_of(device: int) -> dict[str, int]:
    return triton.runtime.driver.active.utils.get_device_properties(device)


def _properties() -> dict[str, int]:
    return _properties_of(triton.runtime.driver.active.get_current_device())


_interpreter_limit = math.inf


def shared_memory_limit() -> float:
    """Bytes of shared memory that one program can have on the current device; the interpreter has no limit of its own."""
    return _interpreter_limit if INTERPRETED else _properties()["max_shared_mem"]


def multiprocessors() -> int:
    """The number of multiprocessors of the current GPU."""
    return _properties()["multiprocessor_count"]


def architecture() -> int | None:
    """The current device's, 90 for sm_90; None on the interpreter."""
    return None if INTERPRETED else triton.runtime.driver.active.get_current_target().arch


@contextlib.contextmanager
def limited_shared_memory(limit: float):
    """Inside, the interpreter's programs have that many bytes of shared memory, as on some GPU; they get its tiles."""
    global _interpreter_limit
    before, _interpreter_limit = _interpreter_limit, limit
    try:
        yield
    finally:
        _interpreter_limit = before


if INTERPRETED:
    if _imported_before:
        _adopt_language()
    _repair_bfloat16()
