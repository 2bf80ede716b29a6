"""The library matrix product of the stages that still materialise the scores."""

import torch
from torch import Tensor


@torch.library.impl("aten::bmm.dtype", "CPU")
def _bmm_on_cpu(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """What PyTorch has on GPUs alone, so that the CPU runs, and counts, the same operators."""
    return torch.bmm(a.to(out_dtype), b.to(out_dtype))


def matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """Batched a @ b, [B, H, M, K] x [B, H, K, N] -> [B, H, M, N] float32, accumulated in float32.

    PyTorch's `matmul` would round the result to the inputs' dtype: float16 scores overflow past 65504.
    """
    if a.dtype == torch.float32:
        return a @ b
    product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
    return product.unflatten(0, a.shape[:2])
