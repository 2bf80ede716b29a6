"""Represent a kernel's variables: scalars, tensors in registers, and pointers.

PyTorch computes the values, with Triton's dtypes. A layout assigns elements to threads and changes no value. So the interpreter
stores a layout, but does not use it.
"""

import functools
import operator
from types import SimpleNamespace

import torch
import triton.language as tl

from .schedule import now

_NAMES = "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"
_TORCH = {tl.int1: torch.bool, tl.float8e4nv: torch.float8_e4m3fn} | {
    getattr(tl, name): getattr(torch, name) for name in _NAMES
}
_TRITON = {in_torch: in_triton for in_triton, in_torch in _TORCH.items()}


def in_torch(dtype: tl.dtype) -> torch.dtype:
    """Convert a Triton dtype to a PyTorch dtype."""
    return _TORCH[dtype]


def in_triton(dtype: torch.dtype) -> tl.dtype:
    """Convert a PyTorch dtype to a Triton dtype."""
    return _TRITON[dtype]


class Scalar(int):
    """An integer of 32 or 64 bits in a register. A value that does not fit is an error here, but wraps on a GPU."""

    def __new__(cls, value, bits=32):
        number = super().__new__(cls, value)
        number.bits = bits
        if not -(1 << bits - 1) <= value < 1 << bits - 1:
            now().fail(f"{int(value)} does not fit an int{bits}")
        return number

    dtype = property(lambda self: tl.int32 if self.bits == 32 else tl.int64)

    def to(self, dtype):
        """Convert to another type."""
        if dtype in (tl.int32, tl.int64):
            return Scalar(int(self), dtype.primitive_bitwidth)
        return Register(torch.tensor(int(self), dtype=in_torch(dtype)))

    def __truediv__(self, other):
        return NotImplemented if isinstance(other, Values) else self.to(tl.float32) / other

    def __rtruediv__(self, other):
        return NotImplemented if isinstance(other, Values) else other / self.to(tl.float32)


def _truncated(a, b):
    return a // b if (a < 0) == (b < 0) else -(-a // b)


_INTEGER = {  # division rounds toward zero, as in C; Python's division rounds down
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": _truncated,
    "mod": lambda a, b: a - _truncated(a, b) * b, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "lshift": operator.lshift, "rshift": operator.rshift,
}  # fmt: skip


def _scalar_operator(name, compute, swapped):
    def method(self, other):
        if isinstance(other, float):
            return getattr(self.to(tl.float32), name)(other)
        if not isinstance(other, int):
            return NotImplemented
        bits = max(self.bits, getattr(other, "bits", 32 if -(2**31) <= other < 2**31 else 64))
        first, second = (int(other), int(self)) if swapped else (int(self), int(other))
        return Scalar(compute(first, second), bits)

    return method


for _name, _compute in _INTEGER.items():
    for _method, _swapped in ((f"__{_name}__", False), (f"__r{_name}__", True)):
        setattr(Scalar, _method, _scalar_operator(_method, _compute, _swapped))
Scalar.__neg__ = lambda self: Scalar(-int(self), self.bits)
Scalar.__invert__ = lambda self: Scalar(~int(self), self.bits)


def value(data: torch.Tensor, layout=None):
    """Wrap a tensor for a kernel. An integer without dimensions becomes a Scalar, any other tensor a Register."""
    if data.dim() == 0 and not data.is_floating_point():
        return bool(data) if data.dtype == torch.bool else Scalar(data.item(), 8 * max(4, data.itemsize))
    return Register(data, layout)


def computed(name: str, data: torch.Tensor, *operands, layout=None):
    """Return `value(data)` for the result of an elementwise instruction. A timed launch records the instruction.

    The name "move" is for the same values in a new arrangement, which takes no instruction on a GPU.
    """
    result, schedule = value(data, layout), now()
    if schedule and schedule.timing and isinstance(result, Register):
        given = [one for one in operands if isinstance(one, Values)]
        schedule.timing.instruction(schedule.running, name, max(one.data.numel() for one in (result, *given)), given, result)
    return result


def operand(thing):
    """Return a kernel's value as a PyTorch tensor or a number."""
    return thing.data if isinstance(thing, Values) else thing


_LITERALS = {bool: torch.bool, int: torch.int32, float: torch.float32}


def _type(thing):
    """Return the dtype of a kernel's value. A Python number gets the dtype that Triton gives to a literal."""
    if isinstance(thing, Values | Scalar):
        return in_torch(thing.dtype)
    return torch.int64 if isinstance(thing, int) and not -(2**31) <= thing < 2**31 else _LITERALS[type(thing)]


def tensor(thing, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Convert a kernel's value to a tensor. Without `dtype`, the value keeps its own dtype."""
    dtype = dtype or _type(thing)
    return thing.data.to(dtype) if isinstance(thing, Values) else torch.tensor(thing, dtype=dtype)


def _kind(dtype):
    return 2 if dtype.is_floating_point else int(dtype != torch.bool)


def _common_type(x, y):
    """Return the dtype in which Triton computes with two values."""
    of_x, of_y = _type(x), _type(y)
    if of_x == of_y:
        return of_x
    if type(x) in _LITERALS and _kind(of_x) <= _kind(of_y):
        return of_y
    if type(y) in _LITERALS and _kind(of_y) <= _kind(of_x):
        return of_x
    if torch.bfloat16 in (of_x, of_y):
        other = of_x if of_y == torch.bfloat16 else of_y
        return other if other in (torch.float16, torch.float64) else torch.float32
    return torch.promote_types(of_x, of_y)


def promoted(x, y, divides=False):
    """Convert two values to tensors of their common dtype. If `divides`, half-precision values become float32."""
    dtype = _common_type(x, y)
    if divides and dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    return tensor(x, dtype), tensor(y, dtype)


class Values:
    """The base class of a kernel's tensors. Its operators work on `data`, a PyTorch tensor."""

    made = None  # in a timed launch: the name of the instruction that computed the elements

    def _with(self, name, compute, other, swapped=False):
        if not isinstance(other, Values | int | float):
            return NotImplemented
        both = promoted(other, self, compute in _DIVISIONS) if swapped else promoted(self, other, compute in _DIVISIONS)
        return computed(name, compute(*both), self, other, layout=getattr(self, "layout", None))

    def __getitem__(self, index):
        return computed("move", self.data[index], self)

    def __bool__(self):
        return bool(self.data)


_divided = functools.partial(torch.div, rounding_mode="trunc")
_OPERATORS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv, "floordiv": _divided,
    "mod": torch.fmod, "and": operator.and_, "or": operator.or_, "xor": operator.xor, "lshift": operator.lshift,
    "rshift": operator.rshift,
}  # fmt: skip
_DIVISIONS = {operator.truediv, _divided, torch.fmod}
_COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}

for _name, _compute in _OPERATORS.items():
    setattr(Values, f"__{_name}__", lambda self, other, name=_name, compute=_compute: self._with(name, compute, other))
    setattr(Values, f"__r{_name}__", lambda self, other, name=_name, compute=_compute: self._with(name, compute, other, True))
for _name, _compute in _COMPARISONS.items():
    setattr(Values, f"__{_name}__", lambda self, other, compute=_compute: self._with("compare", compute, other))
Values.__neg__ = lambda self: value(-self.data, getattr(self, "layout", None))
Values.__invert__ = lambda self: value(~self.data, getattr(self, "layout", None))
Values.__hash__ = None


class Register(Values):
    """A tensor in registers."""

    def __init__(self, data: torch.Tensor, layout=None):
        self.data, self.layout = data, layout

    shape = property(lambda self: list(self.data.shape))
    dtype = property(lambda self: in_triton(self.data.dtype))
    type = property(lambda self: SimpleNamespace(layout=self.layout))

    def to(self, dtype, bitcast=False):
        """Convert to another dtype, and round to nearest even. With `bitcast`, reinterpret the bits instead."""
        if bitcast:
            if dtype.primitive_bitwidth != self.dtype.primitive_bitwidth:  # Gluon's compiler raises an error too
                raise ValueError(f"{self.dtype} and {dtype} differ in size, so a bitcast is impossible")
            return computed("move", self.data.view(in_torch(dtype)), self, layout=self.layout)
        name = f"from {self.dtype}" if dtype.primitive_bitwidth > self.dtype.primitive_bitwidth else f"to {dtype}"
        return computed(name, self.data.to(in_torch(dtype)), self, layout=self.layout)

    def reshape(self, *shape):
        """Return the same values in another shape."""
        return computed("move", self.data.reshape(*shape), self)

    def permute(self, *order):
        """Return the same values with the dimensions in another order."""
        return computed("move", self.data.permute(*order), self)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return now().fail(f"the interpreter does not know a tensor's `{name}`: add it to {__name__}")


class Pointer:
    """An address in a tensor that the kernel got as an argument, or a tensor of such addresses."""

    def __init__(self, elements: torch.Tensor, offset=0, name: str = ""):
        self.elements, self.offset, self.name = elements, offset, name  # the flat memory, offsets in it, the tensor's name

    dtype = property(lambda self: tl.pointer_type(in_triton(self.elements.dtype)))

    def __add__(self, offset):
        further = offset.data.long() if isinstance(offset, Values) else int(offset)  # an address has 64 bits
        return Pointer(self.elements, self.offset + further, self.name)

    __radd__ = __add__

    def at(self, mask):
        """Return (offsets, mask) as int64 and bool tensors of one shape. Fail if the mask selects an offset out of bounds."""
        if not isinstance(self.offset, torch.Tensor) and not isinstance(mask, Values):
            offsets, counts = torch.tensor([int(self.offset)]), torch.tensor([mask is None or bool(mask)])
        else:
            counts = torch.tensor(True) if mask is None else torch.as_tensor(operand(mask))
            offsets, counts = torch.broadcast_tensors(torch.as_tensor(self.offset), counts)
        outside = counts & ((offsets < 0) | (offsets >= len(self.elements)))
        if outside.any():
            now().fail(f"element {offsets[outside][0]} is out of bounds: `{self.name}` has {len(self.elements)} elements")
        return offsets.long(), counts

    @property
    def is_scalar(self):
        """Whether the pointer is a single address."""
        return not isinstance(self.offset, torch.Tensor) or self.offset.dim() == 0
