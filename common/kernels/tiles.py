"""The fixed tiles of v1 to v3: the same wherever they mean the same thing, so that a stage's gain is its idea's."""

import torch

from common.runtime import shared_memory_limit

# Bytes of shared memory that a program can have, at least: on data-centre GPUs (the others have about 100 KiB), and on those
# from Hopper on, whose tensor cores take their operands from there and leave the registers to the accumulators.
DATA_CENTRE = 160 * 1024
HOPPER = 200 * 1024


def query_tile(head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Keyword arguments of a launch whose programs own query rows: BLOCK_M of them, against BLOCK_N key rows a step.

    128 rows against 64, and less where the operands of a step would outgrow registers and shared memory: for D = 256, and for
    float32, whose exact matmuls run on the ordinary arithmetic units with every operand in registers.
    """
    if dtype == torch.float32:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1}
    spare = 1 if shared_memory_limit() >= DATA_CENTRE else 0  # one more K/V tile on its way
    if head_dim > 128:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1 + spare}
    return {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2 + spare}


def key_tile(head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """The same for a backward that keeps BLOCK_N key rows, with two accumulators, against BLOCK_M query rows a step."""
    if dtype == torch.float32:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1}
    if head_dim > 128:
        return {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1}
    if shared_memory_limit() >= HOPPER:
        if head_dim <= 64:  # two such programs fit on an SM, and one computes while the other waits
            return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
        return {"BLOCK_M": 32, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3}
    return {"BLOCK_M": 32, "BLOCK_N": 128 if head_dim <= 64 else 64, "num_warps": 8, "num_stages": 2}
