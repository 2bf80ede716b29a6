"""The fixed tile of v1 to v3: the same wherever it means the same thing, so that a stage's gain is its idea's."""

import torch


def fixed_tile(head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Keyword arguments of a kernel launch: BLOCK_M query rows, BLOCK_N key rows, num_warps, num_stages.

    One tile for rows of up to 256 bytes, smaller ones where the operands of a step would outgrow registers and shared memory:
    for D = 256, and for float32, whose exact products run on the ordinary arithmetic units with every operand in registers.
    """
    if dtype == torch.float32:
        return {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}
    if head_dim > 128:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
