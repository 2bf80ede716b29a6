"""Address tensors by pointers and strides."""

import functools
from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from common.kernels.descriptors import aligned_strides


class Strides(NamedTuple):
    """The strides, in elements, of a [B, H, S, D] tensor with contiguous rows."""

    batch: tl.tensor
    head: tl.tensor
    row: tl.tensor


@functools.cache
def _by_name(names: tuple[str, ...]) -> type:
    return namedtuple("strides", names)


def strides(**tensors: Tensor) -> tuple[Strides, ...]:
    """Return the strides of several tensors under their names, as in `strides(q=q, k=k).q.row`.

    A kernel takes the result as one argument.
    """
    return _by_name(tuple(tensors))(*(Strides(*aligned_strides(tensor)[:3]) for tensor in tensors.values()))


@triton.jit
def head_ptr(ptr, strides, batch, head):
    """Return the pointer to a head's first element. `ptr` points to the tensor's first element."""
    return ptr + batch.to(tl.int64) * strides.batch + head.to(tl.int64) * strides.head


@triton.jit
def tile_ptrs(ptr, strides, rows, columns):
    """Return the pointers to a tile's elements, [rows, columns]. `ptr` points to the head's first element.

    Row offsets are int64, because they can exceed 2**31 elements.
    """
    return ptr + rows.to(tl.int64)[:, None] * strides.row + columns[None, :]
