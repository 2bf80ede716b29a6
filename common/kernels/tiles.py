"""Choose the fixed tile sizes of v1 to v3. The sizes are equal in these stages, so a stage's gain comes from its idea alone."""

import torch

from common.runtime import shared_memory_limit

# The shared memory limit per program is at least DATA_CENTRE bytes on data-center GPUs, HOPPER bytes on data-center GPUs since
# Hopper, and about 100 KiB on other GPUs. Hopper's tensor cores read operands from shared memory, so registers have room for
# larger accumulators.
DATA_CENTRE = 160 * 1024
HOPPER = 200 * 1024


def query_tile(head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return launch arguments for programs that own BLOCK_M query rows and take BLOCK_N key rows in each step.

    BLOCK_M x BLOCK_N is 128 x 64. For D = 256 and for float32, both sizes are smaller, because the operands must fit in
    registers and shared memory. Exact float32 matmuls run on the ordinary arithmetic units, with every operand in registers.
    """
    if dtype == torch.float32:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1}
    spare = 1 if shared_memory_limit() >= DATA_CENTRE else 0  # number of additional K/V tiles that are loaded ahead
    if head_dim > 128:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1 + spare}
    return {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2 + spare}


def key_tile(head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return launch arguments for programs that own BLOCK_N key rows and take BLOCK_M query rows in each step.

    These programs compute the backward, with accumulators for dK and dV.
    """
    if dtype == torch.float32:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1}
    if head_dim > 128:
        return {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1}
    if shared_memory_limit() >= HOPPER:
        if head_dim <= 64:  # two programs fit on an SM: one computes while the other waits
            return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
        return {"BLOCK_M": 32, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3}
    return {"BLOCK_M": 32, "BLOCK_N": 128 if head_dim <= 64 else 64, "num_warps": 8, "num_stages": 2}
