"""A first Triton kernel: the softmax of each row of a matrix. docs/reading.md shows it line by line.

TRITON_INTERPRET=1 .venv/bin/python -m examples.first_kernel   # without a GPU; with a GPU, leave out the variable
"""

import torch
import triton
import triton.language as tl

from common.runtime import DEVICE


@triton.jit  # compiles the function for the GPU
def softmax_kernel(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):  # pointers to first elements; BLOCK is known to the compiler
    row = tl.program_id(0)  # the number of this program: the GPU runs the function once for each row
    offs = tl.arange(0, BLOCK)  # a block of numbers 0, 1, …, BLOCK − 1; BLOCK is a power of 2
    inside = offs < columns  # the mask: which of these columns exist
    ptrs = x_ptr + row * columns + offs  # BLOCK pointers, one to each element of the row
    x = tl.load(ptrs, mask=inside, other=float("-inf"))  # reads the row; outside the mask, it reads nothing and x is −∞
    p = tl.exp(x - tl.max(x, 0))  # as in PyTorch, but p stays on the chip; exp(−∞) is 0
    p = p / tl.sum(p, 0)  # the sum of the whole block, over its only dimension, 0
    tl.store(y_ptr + row * columns + offs, p, mask=inside)  # writes the row; outside the mask, it writes nothing


def softmax(x):  # the host's part: x is a float32 matrix on the GPU, with contiguous rows
    rows, columns = x.shape
    y = torch.empty_like(x)  # the kernel fills it
    softmax_kernel[rows,](x, y, columns, BLOCK=triton.next_power_of_2(columns))  # launches `rows` programs
    return y


if __name__ == "__main__":
    x = torch.tensor([[1.0, 3.0, 2.0, 5.0], [0.0, 0.0, 0.0, 0.0]], device=DEVICE)
    print(softmax(x))
