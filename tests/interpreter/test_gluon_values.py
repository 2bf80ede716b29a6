"""Variables of a Gluon kernel have the same types and values as in Triton's own interpreter."""

import linecache
import re
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


@triton.jit
def _note_two(x, y, INTEGERS: tl.constexpr):
    """Record the results of operations on two values."""
    _record(x + y)
    _record(x - y)
    _record(x * y)
    _record(x / y)
    _record(x % y)
    _record(x < y)
    _record(x == y)
    _record(tl.maximum(x, y))
    _record(tl.minimum(x, y))
    _record(tl.where(x < y, x, y))
    if INTEGERS:
        _record(x // y)
        _record(x & y)
        _record(x | y)
        _record(x ^ y)


@triton.jit
def _note_numbers(x, INTEGERS: tl.constexpr, SCALAR_INTEGER: tl.constexpr):
    _note_two(x, 2, INTEGERS)
    _note_two(3, x, INTEGERS)
    _note_two(x, 2.5, False)
    if not SCALAR_INTEGER:  # with a scalar integer, Python computes in double precision
        _note_two(0.1, x, False)
    _record(-x)
    _record(tl.where(x < 2, 1, 0))
    _record(tl.where(x < 2, 1, 0.5))
    _record(x.to(tl.float16))
    _record(x.to(tl.int64))


@triton.jit
def _two_in_triton(x, y, X_IS_SCALAR: tl.constexpr, Y_IS_SCALAR: tl.constexpr, INTEGERS: tl.constexpr):
    x = tl.load(x if X_IS_SCALAR else x + tl.arange(0, 4))
    _note_two(x, tl.load(y if Y_IS_SCALAR else y + tl.arange(0, 4)), INTEGERS)


@gluon.jit
def _two_in_gluon(x, y, X_IS_SCALAR: gl.constexpr, Y_IS_SCALAR: gl.constexpr, INTEGERS: gl.constexpr):
    x = gl.load(x if X_IS_SCALAR else x + gl.arange(0, 4))
    _note_two(x, gl.load(y if Y_IS_SCALAR else y + gl.arange(0, 4)), INTEGERS)


@triton.jit
def _one_in_triton(x, IS_SCALAR: tl.constexpr, INTEGERS: tl.constexpr):
    x = tl.load(x if IS_SCALAR else x + tl.arange(0, 4))
    if not IS_SCALAR:
        _record(tl.sum(x, 0))
        _record(tl.max(x, 0))
    _note_numbers(x, INTEGERS, IS_SCALAR and INTEGERS)


@gluon.jit
def _one_in_gluon(x, IS_SCALAR: gl.constexpr, INTEGERS: gl.constexpr):
    x = gl.load(x if IS_SCALAR else x + gl.arange(0, 4))
    if not IS_SCALAR:
        _record(gl.sum(x, 0))
        _record(gl.max(x, 0))
    _note_numbers(x, INTEGERS, IS_SCALAR and INTEGERS)


def check_same(in_gluon, in_triton, *arguments):
    expected = record(in_triton, *arguments)
    results = record(in_gluon, *arguments)
    assert [dtype for dtype, _ in results] == [dtype for dtype, _ in expected]
    assert results
    for (_, result), (_, right) in zip(results, expected, strict=True):
        torch.testing.assert_close(result, right, rtol=0, atol=0, equal_nan=True)


def operands(*numbers):
    """Return a tensor of `numbers` in each dtype, and three tensors without dimensions, which stand for scalars."""
    return (
        [torch.tensor(numbers).to(dtype) for dtype in TYPES]
        + [torch.tensor(number) for number in (2.5, 2**31 + 1)]
        + [torch.tensor(7, dtype=torch.int32)]
    )


def name(operand):
    return f"{'' if operand.dim() else 'one '}{operand.dtype}".replace("torch.", "")


@pytest.mark.parametrize("x", operands(7, -7, 3, 0), ids=name)
def test_types_are_promoted_as_in_triton(x):
    for y in operands(2, 2, -5, 9):
        integers = not (x.is_floating_point() or y.is_floating_point())
        check_same(_two_in_gluon, _two_in_triton, x, y, x.dim() == 0, y.dim() == 0, integers)


@pytest.mark.parametrize("x", [x for x in operands(7, -7, 3, 1) if x.dtype != torch.bfloat16], ids=name)  # Triton fails there
def test_literals_take_the_type_of_the_other_operand_as_in_triton(x):
    check_same(_one_in_gluon, _one_in_triton, x, x.dim() == 0, not x.is_floating_point())


@gluon.jit
def _divide_kernel(a, b):
    _record(a // b)
    _record(a % b)
    for i in range(-7, 8, 5):
        _record(i // 2)
    _record(~a // 2)


@pytest.mark.parametrize("a", [-8, -7, 7, 8, 0])
@pytest.mark.parametrize("b", [-4, -2, 3])
def test_scalars_are_divided_as_in_c(a, b):
    results = [int(result) for _, result in record(_divide_kernel, a, b)]
    assert results == [int(a / b), a - int(a / b) * b, -3, -1, 1, int(~a / 2)]


@gluon.jit
def _wide_kernel(x_ptr, n, wide):
    _record(n.to(gl.int64) * n)
    _record(n + wide)
    _record(gl.full([1], 1, gl.int32) + wide)
    _record(gl.load(x_ptr + n + n + -n + -n))
    offs = gl.full([1], n, gl.int32)
    _record(gl.load(x_ptr + offs + offs + -offs + -offs))


@gluon.jit
def _too_wide_kernel(n, EXPRESSION: gl.constexpr):
    if EXPRESSION == "add":
        n + 1
    elif EXPRESSION == "sub":
        -n - 2
    elif EXPRESSION == "mul":
        2 * n
    elif EXPRESSION == "lshift":
        n << 1
    elif EXPRESSION == "loop":
        for i in range(2, 3):
            i * n
    elif EXPRESSION == "to":
        (n.to(gl.int64) * 2).to(gl.int32)


@pytest.mark.parametrize("expression", ["add", "sub", "mul", "lshift", "loop", "to"])
def test_int32_scalar_that_overflows_is_an_error(expression):
    with pytest.raises(InterpreterError, match=r"_too_wide_kernel \(program 0\): -?\d+ does not fit an int32\n"):
        _too_wide_kernel[(1,)](2**31 - 1, expression)
    _too_wide_kernel[(1,)](2**30 - 1, expression)


def test_int64_and_addresses_hold_more():
    n, wide = 2**31 - 1, 2**40
    results = [(dtype, int(result)) for dtype, result in record(_wide_kernel, torch.tensor([5]), n, wide)]
    assert results == [("int64", n * n), ("int64", n + wide), ("int64", 1 + wide), ("int64", 5), ("int64", 5)]


@gluon.jit
def _nan_kernel(x_ptr, y_ptr):
    x = gl.load(x_ptr + gl.arange(0, 4))
    y = gl.load(y_ptr + gl.arange(0, 4))
    _record(gl.maximum(x, y))
    _record(gl.minimum(x, y))
    _record(gl.maximum(x, 2.0))
    _record(gl.max(x, 0))
    _record(gl.max(y, 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_nan_is_neither_larger_nor_smaller(dtype):
    """Maximum and minimum ignore NaN, as on a GPU. In Triton's own interpreter the result is NaN if one operand is NaN."""
    nan, inf = float("nan"), float("inf")
    x, y, nothing = torch.tensor([[1, nan, nan, -inf], [nan, nan, 3, inf], [nan] * 4], dtype=dtype)
    results = [result for _, result in record(_nan_kernel, x, y)]
    expected = [[1, nan, 3, inf], [1, nan, 3, -inf], [2, 2, 2, 2], [1], [inf]]
    for result, right in zip(results, expected, strict=True):
        torch.testing.assert_close(result, torch.tensor(right).double(), equal_nan=True)
    assert record(_nan_kernel, x, nothing)[-1][1].isnan()


@gluon.jit
def _nan_asked_for_kernel(x_ptr):
    x = gl.load(x_ptr + gl.arange(0, 4))
    _record(gl.maximum(x, 2.0, propagate_nan=tl.PropagateNan.ALL))
    _record(gl.minimum(x, 2.0, propagate_nan=tl.PropagateNan.ALL))


def test_nan_propagates_if_asked_for():
    nan = float("nan")
    (_, larger), (_, smaller) = record(_nan_asked_for_kernel, torch.tensor([1, nan, 3, 2]))
    torch.testing.assert_close(larger, torch.tensor([2, nan, 3, 2]).double(), equal_nan=True)
    torch.testing.assert_close(smaller, torch.tensor([1, nan, 2, 2]).double(), equal_nan=True)


@gluon.jit
def _bits_kernel(x_ptr):
    x = gl.load(x_ptr + gl.arange(0, 4))
    bits = x.to(gl.int32, bitcast=True)
    _record(bits)
    _record(bits << 9)
    _record((bits + (1 << 23)).to(gl.float32, bitcast=True))
    even, odd = gl.split(x.reshape([2, 2]))
    _record(even)
    _record(odd)
    _record(gl.join(odd, even))


def test_bits_and_halves_of_a_tensor():
    """A float32 stores a sign, 8 bits of exponent (plus 127), and 23 bits of fraction."""
    (dtype, bits), (_, shifted), (_, doubled), *halves = record(_bits_kernel, torch.tensor([1.5, -1.0, 0.25, 8.0]))
    assert dtype == "int32" and bits.tolist() == [0x3FC00000, 0x3F800000 - 2**31, 0x3E800000, 0x41000000]
    assert shifted.tolist() == [-(2**31), 0, 0, 0]
    assert doubled.tolist() == [3, -2, 0.5, 16]
    assert [half.tolist() for _, half in halves] == [[1.5, 0.25], [-1, 8], [-1, 1.5, 8, 0.25]]


@gluon.jit
def _too_few_bits_kernel(x_ptr):
    gl.load(x_ptr + gl.arange(0, 4)).to(gl.int16, bitcast=True)


def test_bits_of_another_width_are_refused():
    with pytest.raises(InterpreterError, match="fp32 and int16 differ in size"):
        _too_few_bits_kernel[(1,)](torch.ones(4))


@gluon.jit
def _copy_kernel(x_ptr, out_ptr, first, n_loaded, n_stored):
    offs = first + gl.arange(0, 16)
    x = gl.load(x_ptr + offs, mask=(offs >= 0) & (offs < n_loaded), other=-1)
    gl.store(out_ptr + offs, x, mask=(offs >= 0) & (offs < n_stored))


@gluon.jit
def _copy_one_kernel(x_ptr, out_ptr, i, MASK: gl.constexpr):
    gl.store(out_ptr + i, gl.load(x_ptr + i, mask=MASK), mask=MASK)


@pytest.mark.parametrize("first", [0, 4, -4])
def test_masked_elements_may_be_outside(first):
    x, out = torch.arange(1, 11), torch.zeros(12, dtype=torch.int64)
    _copy_kernel[(1,)](x, out, first, 10, 12)
    expected = torch.nn.functional.pad(x, (0, 2), value=-1)
    expected[: max(first, 0)] = expected[16 + first :] = 0
    assert out.tolist() == expected.tolist()
    _copy_one_kernel[(1,)](x, out, 12, False)
    _copy_one_kernel[(1,)](x, out, 9, True)


@pytest.mark.parametrize(
    "n_loaded, n_stored, outside",
    [(11, 12, "element 10 is .* `x_ptr` has 10 "), (10, 13, "element 12 is .* `out_ptr` has 12 ")],
)
def test_elements_outside_of_a_tensor_are_an_error(n_loaded, n_stored, outside):
    x, out = torch.arange(20)[:10], torch.arange(20)[:12]
    line = {"x_ptr": "gl.load(x_ptr + offs", "out_ptr": "gl.store(out_ptr + offs"}[outside.split("`")[1]]
    with pytest.raises(InterpreterError, match=outside) as error:
        _copy_kernel[(1,)](x, out, 0, n_loaded, n_stored)
    number = int(re.search(r"test_gluon_values.py:(\d+), in _copy_kernel", str(error.value))[1])
    assert line in linecache.getline(__file__, number)


@pytest.mark.parametrize("i, mask", [(-1, None), (10, None), (10, True)])
def test_element_outside_of_a_tensor_is_an_error(i, mask):
    with pytest.raises(InterpreterError, match=f"element {i} is out of bounds: `x_ptr` has 10 elements"):
        _copy_one_kernel[(1,)](torch.arange(10), torch.arange(10), i, mask)


def test_pointer_spans_what_a_view_spans():
    x, out = torch.arange(20), torch.zeros(20, dtype=torch.int64)
    _copy_kernel[(1,)](x[::2], out, 0, 16, 16)  # the view spans 19 elements of memory; the kernel loads 16
    assert out[:16].tolist() == list(range(16))
    with pytest.raises(InterpreterError, match="element 5 is out of bounds: `x_ptr` has 5 elements"):
        _copy_kernel[(1,)](x[:9:2][:3], out, 0, 16, 16)


@gluon.jit
def _assembly_kernel(x_ptr, out_ptr, ASSEMBLY: gl.constexpr, TYPE: gl.constexpr):
    offs = gl.arange(0, 4)
    x = gl.load(x_ptr + offs)
    gl.store(out_ptr + offs, gl.inline_asm_elementwise(ASSEMBLY, "=r,r,r", [x, x + 1], TYPE, is_pure=True, pack=1))


def test_assembly_computes_what_its_comment_says():
    x, out = torch.arange(4, dtype=torch.int32), torch.empty(4)
    _assembly_kernel[(1,)](x, out, "/* a * b + gl.exp2(a.to(gl.float32)) */ mul.lo.s32 $0, $1, $2; /* more */", gl.float32)
    assert torch.equal(out, x * (x + 1) + 2.0**x)
    with pytest.raises(InterpreterError, match="_assembly_kernel.*inline assembly must begin with a comment"):
        _assembly_kernel[(1,)](x, out, "mul.lo.s32 $0, $1, $2; /* a * b */", gl.float32)


THREE = gl.constexpr(3)


@gluon.jit
def _arguments_kernel(integer, wide, number, flag, nothing, DEFAULT: gl.constexpr = THREE):
    _record(integer + 0)
    _record(wide + 0)
    _record(number)
    _record(flag)
    _record(gl.full([1], DEFAULT if nothing is None else 0, gl.int32))


def test_arguments_of_a_launch():
    results = record(_arguments_kernel, 1, 2**40, 0.1, True, None)
    assert [dtype for dtype, _ in results] == ["int32", "int64", "fp32", "int1", "int32"]
    assert [float(result) for _, result in results] == [1, 2**40, float(torch.tensor(0.1)), 1, 3]
    with pytest.raises(TypeError, match="number: a kernel takes no str"):
        _arguments_kernel[(1,)](1, 2, "0.1", True, None)
    with pytest.raises(NotImplementedError, match="grids of one dimension"):
        _arguments_kernel[(1, 2)](1, 2, 0.1, True, None)
