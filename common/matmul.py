"""The library matrix product of the stages that still materialise the scores."""

import torch
from torch import Tensor


def matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """Batched a @ b, [B, H, M, K] x [B, H, K, N] -> [B, H, M, N] float32, accumulated in float32.

    PyTorch's `matmul` would round the result to the inputs' dtype: float16 scores overflow past 65504.
    """
    if a.is_cuda and a.dtype != torch.float32:
        product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
        return product.unflatten(0, a.shape[:2])
    return a.float() @ b.float()
