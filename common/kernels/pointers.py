"""Address tensors by pointers and strides."""

import functools
from collections import namedtuple
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.descriptors import aligned_strides

ALIGNMENT = 16  # Triton checks for multiples of 16 bytes in addresses and of 16 elements in strides


def aligned(tensor: Tensor) -> Tensor:
    """`tensor` if Triton can prove that a load may take 16 bytes of a row at a time, else a contiguous copy.

    Triton cannot tell for a view that starts in the middle of a row, or whose rows are padded by a few elements. Then Triton
    loads element by element and without prefetching, which is slow. And if V has 16 or 32 columns in half precision, ptxas 12.8
    leaves an address undefined: a matmul in v3's forward reads its tile from there.
    """
    *steps, last = tensor.stride()
    if last == 1 and all(number % ALIGNMENT == 0 for number in (tensor.data_ptr(), *steps)):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class Strides(NamedTuple):
    """The strides of a [B, H, S, D] tensor whose last stride is 1, in elements."""

    batch: tl.tensor
    head: tl.tensor
    row: tl.tensor


@functools.cache
def _by_name(names: tuple[str, ...]) -> type:
    return namedtuple("strides", names)


def strides(**tensors: Tensor) -> tuple[Strides, ...]:
    """Return the strides of tensors by their names: `strides(q=q, k=k).q.row`. A kernel takes all of them as one argument."""
    return _by_name(tuple(tensors))(*(Strides(*aligned_strides(tensor)[:3]) for tensor in tensors.values()))


@triton.jit
def head_ptr(ptr, strides, batch, head):
    """Return the pointer to a head's first element, given the pointer to the tensor's."""
    return ptr + batch.to(tl.int64) * strides.batch + head.to(tl.int64) * strides.head


@triton.jit
def tile_ptrs(ptr, strides, rows, columns):
    """Return the pointers to a tile, [rows, columns], given a head's. Rows are int64: they can lie past 2**31 elements."""
    return ptr + rows.to(tl.int64)[:, None] * strides.row + columns[None, :]
