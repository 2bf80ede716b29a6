"""How the rows of a tensor lie in memory, for tensors that kernels read and write."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # kernels want addresses that are multiples of 16 bytes, and strides that are multiples of 16 elements


def cdiv(rows: int, tile: int) -> int:
    """Return the number of tiles that hold all rows. `triton.cdiv` does the same, but is slow on the host."""
    return -(-rows // tile)


def contiguous_rows(tensor: Tensor) -> Tensor:
    """Return `tensor` if its last dimension is contiguous, else a contiguous copy.

    Kernels assume that the elements of a row lie next to each other.
    """
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def empty_rows(tensor: Tensor, columns: int | None = None) -> Tensor:
    """Return `torch.empty_like(tensor)`, but with contiguous rows.

    If `empty_like` makes another dimension the innermost, this function returns a contiguous tensor instead. This may happen if
    the tensor's rows are not contiguous, or if it is expanded.

    Args:
        columns: the size of the last dimension. None means the tensor's own size.
    """
    if columns not in (None, tensor.shape[-1]):
        if tensor.stride(-1) != 1:
            tensor = empty_rows(tensor)
        tensor = tensor[..., :1].expand(*tensor.shape[:-1], columns)
    empty = torch.empty_like(tensor)
    return empty if empty.stride(-1) == 1 else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def used_strides(tensor: Tensor) -> list[int]:
    """Return the tensor's strides, with a valid stride for each dimension of size 1.

    PyTorch may give a dimension of size 1 any stride, but TMA requires a multiple of 16 bytes.
    """
    return [stride if size > 1 else ALIGNMENT for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def are_aligned(strides: Sequence[int]) -> bool:
    """Return whether rows with these strides are contiguous, and all start at a multiple of 16 elements if the first does."""
    *steps, last = strides
    return last == 1 and math.gcd(*steps) % ALIGNMENT == 0


def addressable(tensor: Tensor) -> Tensor:
    """Return `tensor` if kernels can address it well, else a copy whose dimensions lie in memory in the same order.

    A row must be contiguous and start at a multiple of 16 bytes, and other strides must be multiples of 16 elements.

    - A descriptor of TMA needs multiples of 16 bytes.
    - Triton loads 16 bytes at a time only if it can prove this alignment. Other rows it loads element by element and without
      prefetching, which is slow. A view is not aligned if it starts in the middle of a row, or if its rows are padded by a few
      elements.
    - The copy also avoids a bug of ptxas 12.8. If V is not aligned and has 16 or 32 columns in half precision, a matmul in v3's
      forward reads V's tile from an undefined address.
    """
    if tensor.data_ptr() % ALIGNMENT == 0 and (
        tensor.is_contiguous() or are_aligned(tensor.stride()) or are_aligned(used_strides(tensor))  # the fastest checks first
    ):
        return tensor
    return empty_rows(tensor).copy_(tensor)
