"""Address tensors by pointers and strides."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    """The strides of a [B, H, S, D] tensor whose last stride is 1, in elements. A kernel takes them as one argument."""

    batch: tl.tensor
    head: tl.tensor
    row: tl.tensor


def strides(*tensors: Tensor) -> list[Strides]:
    """Return the strides of each tensor."""
    return [Strides(*tensor.stride()[:3]) for tensor in tensors]


@triton.jit
def head_ptr(ptr, strides, batch, head):
    """Return the pointer to a head's first element, given the pointer to the tensor's."""
    return ptr + batch.to(tl.int64) * strides.batch + head.to(tl.int64) * strides.head


@triton.jit
def tile_ptrs(ptr, strides, rows, columns):
    """Return the pointers to a tile, [rows, columns], given a head's. Rows are int64: they can lie past 2**31 elements."""
    return ptr + rows.to(tl.int64)[:, None] * strides.row + columns[None, :]
