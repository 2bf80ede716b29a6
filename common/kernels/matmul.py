"""Multiply matrices with PyTorch, for the stages that store the whole score matrix in memory."""

import torch
from torch import Tensor

from common.operator import NAMESPACE

_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # PyTorch removes the operator when this is freed
_library.define("bmm_float32(Tensor a, Tensor b) -> Tensor")


@torch.library.impl(_library, "bmm_float32", "CompositeExplicitAutograd")
def _bmm_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return torch.bmm(a, b, out_dtype=torch.float32), which PyTorch has only on GPUs.

    An operator of our own lets a stage call the same operators on the CPU as on a GPU.
    """
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())


bmm_float32 = getattr(torch.ops, NAMESPACE).bmm_float32  # [N, M, K] x [N, K, L] -> [N, M, L]


def _bmm(a, b):
    """Return a @ b: [B, H, M, K] x [B, H, K, N] -> [B, H, M, N] float32, accumulated in float32."""
    if a.dtype == torch.float32:
        return a @ b
    product = bmm_float32(a.flatten(0, 1), b.flatten(0, 1))
    return product.unflatten(0, a.shape[:2])


def _stacked(tensor, heads):
    """Concatenate the rows of the query heads that share a K/V head: [B, H, M, K] -> [B, heads, H / heads · M, K]."""
    return tensor if tensor.shape[1] == heads else tensor.reshape(tensor.shape[0], heads, -1, tensor.shape[3])


def matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b for each head: [B, H, M, K] x [B, Hkv, K, N] -> [B, H, M, N] float32, accumulated in float32.

    H / Hkv heads of `a` share a head of `b`. PyTorch's `matmul` would round the result to the inputs' dtype, and float16 scores
    above 65504 would overflow.
    """
    return _bmm(_stacked(a, b.shape[1]), b).view(*a.shape[:3], b.shape[3])


def transposed_matmul_float32(a: Tensor, b: Tensor, kv_heads: int) -> Tensor:
    """Return aᵀ @ b for each K/V head: [B, H, M, K] x [B, H, M, N] -> [B, Hkv, K, N] float32.

    If several query heads share a K/V head, their products are summed.
    """
    return _bmm(_stacked(a, kv_heads).mT, _stacked(b, kv_heads))
