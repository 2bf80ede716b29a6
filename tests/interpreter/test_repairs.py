"""With our repairs, Triton's interpreter computes the same results as a GPU."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

from common.runtime import DEVICE, INTERPRETED


@triton.jit
def _bfloat16_kernel(a_ptr, b_ptr, dot_ptr, sum_ptr, product_ptr, less_ptr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    a = tl.load(a_ptr + offs)
    b = tl.load(b_ptr + offs)
    tl.store(dot_ptr + offs, tl.dot(a, b.T))
    tl.store(sum_ptr + offs, a + b)
    tl.store(product_ptr + offs, a * b)
    tl.store(less_ptr + offs, (a < b).to(tl.int32))


def test_bfloat16_is_right():
    a, b = torch.randn(2, 32, 32, device=DEVICE).bfloat16()
    expected = a.float() @ b.float().mT, a + b, a * b, (a < b).int()
    dot, *others = results = [torch.empty_like(tensor) for tensor in expected]
    _bfloat16_kernel[(1,)](a, b, *results, SIZE=32)
    torch.testing.assert_close(dot, expected[0], rtol=0, atol=1e-4)
    assert all(torch.equal(result, right) for result, right in zip(others, expected[1:], strict=True))


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
def _add_tile_kernel(x_desc, BLOCK: tl.constexpr):
    x_desc.atomic_add([tl.program_id(0) * 4, 0], tl.full([BLOCK, BLOCK], 1.0, tl.float32))


def test_descriptors_add_to_memory():
    """Two programs add 1 to overlapping tiles, so the overlap holds 2. Memory past the end of the tensor stays unchanged."""
    x = torch.zeros(20, 16, device=DEVICE)
    _add_tile_kernel[(2,)](TensorDescriptor.from_tensor(x[:18], [16, 16]), BLOCK=16)
    expected = torch.tensor([1.0] * 4 + [2.0] * 12 + [1.0] * 2 + [0.0] * 2)
    assert torch.equal(x.cpu(), expected[:, None].expand(20, 16))


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
