"""With our repairs, Triton's interpreter rounds as a GPU does, and refuses what a GPU computes wrongly or cannot do.

The tests of the stages show that it multiplies bfloat16 numbers, and that descriptors add to memory.
"""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

from common.runtime import DEVICE, INTERPRETED


@triton.jit
def _cast_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, SIZE))
    tl.store(y_ptr + tl.arange(0, SIZE), x.to(y_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts_round_to_nearest_even(dtype):
    """The kernel casts values of `dtype`, and values half-way between two of them (ties), which PyTorch rounds to even."""
    values = torch.randn(2048, device=DEVICE).to(dtype).float()
    ulp = torch.finfo(dtype).eps * 2.0 ** values.abs().log2().floor()
    x = torch.cat([values, values + ulp / 2])
    y = torch.empty(4096, dtype=dtype, device=DEVICE)
    _cast_kernel[(1,)](x, y, SIZE=4096)
    assert torch.equal(y, x.to(dtype))


def test_casts_to_8_bits_round_to_nearest_even():
    """Every number of e4m3, each tie between two of them, NaN, and numbers that are too large, which become ±448."""
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).float()
    finite = numbers[numbers.isfinite()].sort().values
    x = torch.cat([numbers, (finite[1:] + finite[:-1]) / 2, torch.tensor([460.0, -1e9, torch.inf], device=DEVICE)])
    x = torch.nn.functional.pad(x, (0, 512 - len(x)))
    y = torch.empty(512, dtype=torch.float8_e4m3fn, device=DEVICE)
    _cast_kernel[(1,)](x, y, SIZE=512)
    torch.testing.assert_close(y.float(), x.clamp(-448, 448).to(y.dtype).float(), rtol=0, atol=0, equal_nan=True)


@triton.jit
def _arithmetic_kernel(x_ptr, y_ptr, OPERATION: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 2))
    y = x + x if OPERATION == "add" else x * x
    tl.store(y_ptr + tl.arange(0, 2), y)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU wraps")
@pytest.mark.parametrize("operation, fits, does_not", [("add", 2**30 - 1, 2**30), ("mul", 46340, 46341)])
def test_int32_that_overflows_is_an_error(operation, fits, does_not):
    x, y = torch.tensor([1, fits], dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    _arithmetic_kernel[(1,)](x, y, operation)
    assert y[1] == (2 * fits if operation == "add" else fits * fits)
    x[1] = does_not
    with pytest.raises(InterpreterError, match=f"int32 overflows: {operation} gives "):
        _arithmetic_kernel[(1,)](x, y, operation)


@triton.jit
def _shift_tile_kernel(x_desc, source, target):
    x_desc.store([target, 0], x_desc.load([source, 0]))


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU this error ends the program, and no later test can run")
def test_descriptors_store_nothing_before_a_tensor():
    """At negative coordinates a GPU can load, but not store."""
    descriptor = TensorDescriptor.from_tensor(torch.zeros(20, 16), [16, 16])
    _shift_tile_kernel[(1,)](descriptor, -4, 8)
    with pytest.raises(InterpreterError, match="a store at .-4, 0.: TMA cannot store before a tensor"):
        _shift_tile_kernel[(1,)](descriptor, 8, -4)
