"""With our repairs, Triton's interpreter computes the same results as a GPU.

As a script, this file prints the bfloat16 errors of Triton's interpreter without the repairs.
"""

import json

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

GPU = torch.cuda.is_available()


@triton.jit
def _bfloat16_kernel(a_ptr, b_ptr, dot_ptr, sum_ptr, product_ptr, less_ptr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    a = tl.load(a_ptr + offs)
    b = tl.load(b_ptr + offs)
    tl.store(dot_ptr + offs, tl.dot(a, b.T))
    tl.store(sum_ptr + offs, a + b)
    tl.store(product_ptr + offs, a * b)
    tl.store(less_ptr + offs, (a < b).to(tl.int32))


@triton.jit
def _cast_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, SIZE))
    tl.store(y_ptr + tl.arange(0, SIZE), x.to(y_ptr.dtype.element_ty))


@triton.jit
def _add_tile_kernel(x_desc, BLOCK: tl.constexpr):
    x_desc.atomic_add([tl.program_id(0) * 4, 0], tl.full([BLOCK, BLOCK], 1.0, tl.float32))


@triton.jit
def _shift_tile_kernel(x_desc, source, target):
    x_desc.store([target, 0], x_desc.load([source, 0]))


@triton.jit
def _add_one(x):
    return x + 1


@triton.jit
def _count_kernel(count_ptr, calls):
    count = tl.load(count_ptr)
    for _ in range(calls):
        count = _add_one(count)
    tl.store(count_ptr, count)


def bfloat16_errors(device):
    """For each bfloat16 operation, return the largest difference from PyTorch's result."""
    torch.manual_seed(0)
    a, b = torch.randn(2, 32, 32, device=device).bfloat16()
    results = {"dot": torch.empty(32, 32, device=device), "sum": torch.empty_like(a), "product": torch.empty_like(a)}
    results["less"] = torch.empty(32, 32, dtype=torch.int32, device=device)
    _bfloat16_kernel[(1,)](a, b, *results.values(), SIZE=32)
    expected = {"dot": a.float() @ b.float().mT, "sum": a + b, "product": a * b, "less": (a < b).int()}
    return {name: (results[name] - expected[name]).abs().max().item() for name in results}


def rounding_errors(device, dtype):
    """Return how many float32 values a kernel casts differently from PyTorch. PyTorch rounds ties to even."""
    torch.manual_seed(0)
    values = torch.randn(2048, device=device).to(dtype).float()
    ulp = torch.finfo(dtype).eps * 2.0 ** values.abs().log2().floor()
    x = torch.cat([values, values + ulp / 2])  # values of `dtype`, and values half-way between two of them (ties)
    y = torch.empty(4096, dtype=dtype, device=device)
    _cast_kernel[(1,)](x, y, SIZE=4096)
    return (y != x.to(dtype)).sum().item()


def test_bfloat16_is_right():
    from common.runtime import DEVICE

    errors = bfloat16_errors(DEVICE)
    assert errors.pop("dot") < 1e-4
    assert errors == {"sum": 0, "product": 0, "less": 0}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts_round_to_nearest_even(dtype):
    from common.runtime import DEVICE

    assert rounding_errors(DEVICE, dtype) == 0


@pytest.mark.skipif(GPU, reason="the interpreter is not in use here")
def test_bfloat16_needs_the_repair():
    """Without the repair the errors are large. If this test fails, Triton is fixed, and you can delete the repair."""
    import programs

    run = programs.python(__file__, TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stderr
    errors = json.loads(run.stdout)
    operations = [errors[name] for name in ("dot", "sum", "product")]  # an error may be NaN, and NaN < 0.1 is false
    assert not any(error < 0.1 for error in operations), "fixed in Triton: drop the repair"
    assert errors["casts"] > 0


@pytest.mark.skipif(GPU, reason="the interpreter is not in use here")
def test_language_is_patched_once_however_often_a_function_is_called(monkeypatch):
    from triton.runtime import interpreter

    import common.runtime  # noqa: F401  (repairs)

    patched = []
    patch = interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *args: patched.append(args) or patch(*args))
    counts = []
    for calls in (1, 10):
        patched.clear()
        count = torch.zeros(1, dtype=torch.int32)
        _count_kernel[(1,)](count, calls)
        assert count.item() == calls
        counts.append(len(patched))
    assert counts[0] == counts[1] > 0


@triton.jit
def _arithmetic_kernel(x_ptr, y_ptr, OPERATION: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 2))
    y = x + x if OPERATION == "add" else x * x
    tl.store(y_ptr + tl.arange(0, 2), y)


@pytest.mark.skipif(GPU, reason="a GPU wraps")
@pytest.mark.parametrize("operation, fits, does_not", [("add", 2**30 - 1, 2**30), ("mul", 46340, 46341)])
def test_int32_that_overflows_is_an_error(operation, fits, does_not):
    from triton.runtime.interpreter import InterpreterError

    import common.runtime  # noqa: F401  (repairs)

    x, y = torch.tensor([1, fits], dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    _arithmetic_kernel[(1,)](x, y, operation)
    assert y[1] == (2 * fits if operation == "add" else fits * fits)
    x[1] = does_not
    with pytest.raises(InterpreterError, match=f"int32 overflows: {operation} gives "):
        _arithmetic_kernel[(1,)](x, y, operation)


SMALL_ATTENTION = """
import torch
from common.runtime import DEVICE
q, k, v = torch.randn(3, 1, 2, 20, 16, device=DEVICE).bfloat16()
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
for name in stages.names():
    if stages.unavailable(name):
        continue
    torch.testing.assert_close(stages.load(name).attention(q, k, v), expected, atol=0.02, rtol=0)
print(DEVICE)
"""


if __name__ == "__main__":
    print(json.dumps(bfloat16_errors("cpu") | {"casts": rounding_errors("cpu", torch.bfloat16)}))


def test_descriptors_add_to_memory():
    """Two programs add 1 to overlapping tiles, so the overlap holds 2. Memory past the end of the tensor stays unchanged."""
    x = torch.zeros(20, 16, device="cuda" if GPU else "cpu")
    descriptor = TensorDescriptor.from_tensor(x[:18], [16, 16])
    _add_tile_kernel[(2,)](descriptor, BLOCK=16)
    expected = torch.tensor([1.0] * 4 + [2.0] * 12 + [1.0] * 2 + [0.0] * 2)
    assert torch.equal(x.cpu(), expected[:, None].expand(20, 16))


@pytest.mark.skipif(GPU, reason="on a GPU this error ends the program, and no later test can run")
def test_descriptors_store_nothing_before_a_tensor():
    """At negative coordinates a GPU can load, but not store."""
    from triton.runtime.interpreter import InterpreterError

    x = torch.zeros(20, 16)
    descriptor = TensorDescriptor.from_tensor(x, [16, 16])
    _shift_tile_kernel[(1,)](descriptor, -4, 8)
    with pytest.raises(InterpreterError, match="a store at .-4, 0.: TMA cannot store before a tensor"):
        _shift_tile_kernel[(1,)](descriptor, 8, -4)
