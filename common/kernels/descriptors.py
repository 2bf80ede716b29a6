"""Make tensor descriptors for TMA on the host."""

import math

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from common.launching import block_of_one_kind
from common.layout import ALIGNMENT, used_strides
from common.runtime import give_context

_checked = {}  # (class, block shape, dtype) -> a descriptor's block shape and layout, which depend on nothing else


def aligned_strides(tensor: Tensor) -> list[int]:
    """Return the strides of an `addressable` tensor for a descriptor."""
    strides = [*tensor.stride()]
    assert strides[-1] == 1, "a row is not contiguous: call a stage through common.entry"
    return strides if math.gcd(*strides[:-1]) % ALIGNMENT == 0 else [*used_strides(tensor)[:-1], 1]


def make(kind: type, tensor: Tensor, block: tuple[int, ...], layout=None):
    """Make a descriptor of an `addressable` tensor. `layout(block, dtype)` returns the layout of a block in shared memory.

    The checks of the class `kind` are slow. If one addressable tensor passes them, all pass with its block shape and dtype, and
    with strides that TMA can take.
    """
    give_context(tensor)
    *steps, last = strides = [*tensor.stride()]
    if last != 1 or math.gcd(*steps) % ALIGNMENT:
        *steps, _ = strides = aligned_strides(tensor)
        assert math.gcd(*steps) * tensor.itemsize % 16 == 0, "rows are not aligned: call a stage through common.entry"
    constant = _checked.get(key := (kind, block, tensor.dtype))
    if constant is None:
        constant = [block_of_one_kind(block)] + ([layout(block, tensor.dtype)] if layout else [])
        kind(tensor, [*tensor.shape], strides, *constant)
        _checked[key] = constant
    descriptor = kind.__new__(kind)  # its other fields have defaults, which are attributes of the class
    descriptor.base, descriptor.shape, descriptor.strides = tensor, [*tensor.shape], strides
    descriptor.block_shape, *others = constant
    if others:
        (descriptor.layout,) = others
    return descriptor


def describe(tensor: Tensor, rows: int = 1, columns: int = 1) -> TensorDescriptor:
    """Make a descriptor of an `addressable` [B, H, S, D] tensor, for tiles of `rows` x `columns` of one head.

    An autotuned kernel's `pre_hook` later replaces `rows` and `columns`. The sequence is a dimension of its own, so TMA clips a
    tile at the end of the sequence. Past this end, a load gives zeros and a store does nothing.
    """
    return make(TensorDescriptor, tensor, (1, 1, rows, columns))
