"""Prepare tensors that kernels address by pointers."""

import torch
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
