"""Tensors that kernels address by pointers."""

import torch
from torch import Tensor

ALIGNMENT = 16  # what Triton looks for: multiples of 16 bytes in an address, and of 16 elements in a stride


def aligned(tensor: Tensor) -> Tensor:
    """`tensor` if Triton can tell that its rows load 16 bytes at a time, else a contiguous copy.

    Where it cannot, as for a view that starts in the middle of a row, or whose rows are padded by a few elements, it loads
    element by element, and nothing ahead of its use. That is slow, and worse: where V has 16 or 32 columns in half precision,
    ptxas 12.8 then leaves the address undefined from which a matmul of v3's forward reads its tile.
    """
    *steps, last = tensor.stride()
    if last == 1 and all(number % ALIGNMENT == 0 for number in (tensor.data_ptr(), *steps)):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
