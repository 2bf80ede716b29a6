"""Variables of a Gluon kernel have the same types and values as in Triton's own interpreter."""

import operator
import warnings

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.interpreter import InterpreterError

from common.runtime import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the interpreter is not in use here")

TYPES = [torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
_recorded = []


def _record(result):
    """Record a result and Triton's name for its type. Kernels call this function."""
    if isinstance(result, bool):
        data, dtype = torch.tensor(result), "int1"
    elif isinstance(result, int):
        data, dtype = torch.tensor(int(result)), str(result.dtype)
    elif isinstance(result, tl.tensor):
        data, dtype = torch.from_numpy(result.handle.data.copy()), str(result.dtype)
        data = data.view(torch.bfloat16) if dtype == "bf16" else data
    else:
        data, dtype = result.data, str(result.dtype)
    _recorded.append((dtype, (data.double() if data.is_floating_point() else data.long()).flatten()))


def record(kernel, *arguments):
    """Return the results that a kernel records, as pairs (type, values)."""
    _recorded.clear()
    with warnings.catch_warnings(action="ignore"):  # numpy warns if a number overflows
        kernel[(1,)](*arguments)
    return list(_recorded)


OPERATORS = [operator.add, operator.sub, operator.mul, operator.truediv, operator.mod, operator.lt, operator.eq]
OF_INTEGERS = [*OPERATORS, operator.floordiv, operator.and_, operator.or_, operator.xor]


@triton.jit
def _note_two(x, y, INTEGERS: tl.constexpr):
    """Record the results of operations on two values."""
    for compute in OF_INTEGERS if INTEGERS else OPERATORS:
        _record(compute(x, y))
    _record(tl.maximum(x, y))
    _record(tl.minimum(x, y))
    _record(tl.where(x < y, x, y))


@triton.jit
def _note_numbers(x, INTEGERS: tl.constexpr, IS_SCALAR: tl.constexpr):
    """Record the results of operations on a value alone, and on the value and literals."""
    _note_two(x, 2, INTEGERS)
    _note_two(3, x, INTEGERS)
    _note_two(x, 2.5, False)
    if not (IS_SCALAR and INTEGERS):  # with a scalar integer, Python computes in double precision
        _note_two(0.1, x, False)
    _record(-x)
    _record(tl.where(x < 2, 1, 0.5))
    _record(x.to(tl.float16))
    _record(x.to(tl.int64))


def _operations(x, y, X_IS_SCALAR: tl.constexpr, Y_IS_SCALAR: tl.constexpr, INTEGERS: tl.constexpr):
    x = tl.load(x if X_IS_SCALAR else x + tl.arange(0, 4))
    if y is None:
        if not X_IS_SCALAR:
            _record(tl.sum(x, 0))
            _record(tl.max(x, 0))
        _note_numbers(x, INTEGERS, X_IS_SCALAR)
    else:
        _note_two(x, tl.load(y if Y_IS_SCALAR else y + tl.arange(0, 4)), INTEGERS)


def check_same(x, y):
    """Check that Gluon's interpreter records what Triton's records, for operations on two values, or on `x` if `y` is None."""
    integers = not any(one is not None and one.is_floating_point() for one in (x, y))
    expected, results = (
        record(jit(_operations), x, y, x.dim() == 0, y is None or y.dim() == 0, integers) for jit in (triton.jit, gluon.jit)
    )
    assert [dtype for dtype, _ in results] == [dtype for dtype, _ in expected]
    assert results
    for (_, result), (_, right) in zip(results, expected, strict=True):
        torch.testing.assert_close(result, right, rtol=0, atol=0, equal_nan=True)


def operands(*numbers):
    """Return a tensor of `numbers` in each dtype, and three tensors without dimensions, which stand for scalars."""
    scalars = torch.tensor(2.5), torch.tensor(2**31 + 1), torch.tensor(7, dtype=torch.int32)
    return [*(torch.tensor(numbers).to(dtype) for dtype in TYPES), *scalars]


@pytest.mark.parametrize("x", operands(7, -7, 3, 0))
def test_types_are_promoted_as_in_triton(x):
    for y in operands(2, 2, -5, 9):
        check_same(x, y)


@pytest.mark.parametrize("x", [x for x in operands(7, -7, 3, 1) if x.dtype != torch.bfloat16])  # Triton fails there
def test_literals_take_the_type_of_the_other_operand_as_in_triton(x):
    check_same(x, None)


@gluon.jit
def _scalars_kernel(x_ptr, a, b, n, wide):
    _record(a // b)
    _record(a % b)
    _record(~a // 2)
    for i in range(-7, 8, 5):
        _record(i // 2)
    _record(n.to(gl.int64) * n)
    _record(n + wide)
    _record(gl.full([1], 1, gl.int32) + wide)
    _record(gl.load(x_ptr + n + n + -n + -n))  # an address has 64 bits
    offs = gl.full([1], n, gl.int32)
    _record(gl.load(x_ptr + offs + offs + -offs + -offs))


@pytest.mark.parametrize("a", [-8, -7, 7, 0])
@pytest.mark.parametrize("b", [-4, 3])
def test_scalars_are_divided_as_in_c_and_int64_holds_more(a, b):
    n, wide = 2**31 - 1, 2**40
    results = record(_scalars_kernel, torch.tensor([5]), a, b, n, wide)
    divided = [int(a / b), a - int(a / b) * b, int(~a / 2), -3, -1, 1]
    expected = [*(("int32", number) for number in divided), *(("int64", it) for it in (n * n, n + wide, 1 + wide, 5, 5))]
    assert [(dtype, int(result)) for dtype, result in results] == expected


@gluon.jit
def _too_wide_kernel(n, COMPUTE: gl.constexpr):
    COMPUTE(n)


TOO_WIDE = {
    "add": lambda n: n + 1,
    "sub": lambda n: -n - 2,
    "mul": lambda n: 2 * n,
    "lshift": lambda n: n << 1,
    "rshift": lambda n: (n >> 1) * 3,  # the shifted number is an int32, too
    "to": lambda n: (n.to(gl.int64) * 2).to(gl.int32),
}


@pytest.mark.parametrize("compute", TOO_WIDE.values(), ids=TOO_WIDE)
def test_int32_scalar_that_overflows_is_an_error(compute):
    with pytest.raises(InterpreterError, match=r"_too_wide_kernel \(program 0\): -?\d+ does not fit an int32\n"):
        _too_wide_kernel[(1,)](2**31 - 1, compute)
    _too_wide_kernel[(1,)](2**30 - 1, compute)


@gluon.jit
def _nan_kernel(x_ptr, y_ptr):
    x = gl.load(x_ptr + gl.arange(0, 4))
    y = gl.load(y_ptr + gl.arange(0, 4))
    _record(gl.maximum(x, y))
    _record(gl.minimum(x, y))
    _record(gl.maximum(x, 2.0))
    _record(gl.maximum(x, 2.0, propagate_nan=tl.PropagateNan.ALL))
    _record(gl.minimum(x, 2.0, propagate_nan=tl.PropagateNan.ALL))
    _record(gl.max(x, 0))
    _record(gl.max(y, 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_nan_is_neither_larger_nor_smaller_unless_asked_for(dtype):
    """Maximum and minimum ignore NaN, as on a GPU. In Triton's own interpreter the result is NaN if one operand is NaN."""
    nan, inf = float("nan"), float("inf")
    x, y, nothing = torch.tensor([[1, nan, nan, -inf], [nan, nan, 3, inf], [nan] * 4], dtype=dtype)
    expected = [[1, nan, 3, inf], [1, nan, 3, -inf], [2] * 4, [2, nan, nan, 2], [1, nan, nan, -inf], [1], [inf]]
    for (_, result), right in zip(record(_nan_kernel, x, y), expected, strict=True):
        torch.testing.assert_close(result, torch.tensor(right).double(), equal_nan=True)
    assert record(_nan_kernel, x, nothing)[-1][1].isnan()


@gluon.jit
def _copy_kernel(x_ptr, out_ptr, first, n_loaded, n_stored, lowest):
    offs = first + gl.arange(0, 16)
    x = gl.load(x_ptr + offs, mask=(offs >= lowest) & (offs < n_loaded), other=-1)
    gl.store(out_ptr + offs, x, mask=(offs >= 0) & (offs < n_stored))


@pytest.mark.parametrize("first", [0, 4, -4])
def test_masked_elements_may_be_outside(first):
    x, out = torch.arange(1, 11), torch.zeros(12, dtype=torch.int64)
    _copy_kernel[(1,)](x, out, first, 10, 12, 0)
    expected = torch.nn.functional.pad(x, (0, 2), value=-1)
    expected[: max(first, 0)] = expected[16 + first :] = 0
    assert out.tolist() == expected.tolist()


TEN = torch.arange(40)[:10]  # other elements follow in memory
OUTSIDE = [  # arguments, and the element that is out of bounds
    ((TEN, torch.arange(12), -2, 10, 12, -1), "-1 is .* `x_ptr` has 10"),
    ((TEN, torch.arange(12), 0, 11, 12, 0), "10 is .* `x_ptr` has 10"),
    ((TEN, torch.arange(20)[:12], 0, 10, 13, 0), "12 is .* `out_ptr` has 12"),
    ((TEN[::2][:3], torch.arange(20), 0, 16, 16, 0), "5 is .* `x_ptr` has 5"),  # the view spans 5 elements
]


@pytest.mark.parametrize(("arguments", "outside"), OUTSIDE)
def test_elements_outside_of_a_tensor_are_an_error(arguments, outside):
    with pytest.raises(InterpreterError, match=f"element {outside} elements"):
        _copy_kernel[(1,)](*arguments)


@gluon.jit
def _arguments_kernel(integer, wide, number, flag, nothing):
    _record(integer + 0)
    _record(wide + 0)
    _record(number)
    _record(flag)
    _record(gl.full([1], 3 if nothing is None else 0, gl.int32))


def test_arguments_of_a_launch():
    results = record(_arguments_kernel, 1, 2**40, 0.1, True, None)
    assert [dtype for dtype, _ in results] == ["int32", "int64", "fp32", "int1", "int32"]
    assert [float(result) for _, result in results] == [1, 2**40, float(torch.tensor(0.1)), 1, 3]
    with pytest.raises(TypeError, match="number: a kernel takes no str"):
        _arguments_kernel[(1,)](1, 2, "0.1", True, None)
    with pytest.raises(NotImplementedError, match="grids of one dimension"):
        _arguments_kernel[(1, 2)](1, 2, 0.1, True, None)
