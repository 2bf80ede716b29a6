"""Textbook backward (arXiv 2205.14135, Appendix B.2): S, P, dP and dS are whole tensors in memory."""

import torch

from common.kernels.matmul import matmul_float32, transposed_matmul_float32
from common.layout import empty_rows


def backward(grad_out, q, k, v, out, lse, *, causal, scale, diagonal=0):
    """Return the gradients of q, k and v. `common.operator` lists shapes, dtypes and errors."""
    kv_heads = k.shape[1]
    s = matmul_float32(q, k.mT) * scale  # [B, H, Sq, Sk]
    if causal:
        visible = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril(diagonal)
        s = s.masked_fill(~visible, float("-inf"))
    p = torch.exp(s - lse[..., None]).to(v.dtype)
    dv = transposed_matmul_float32(p, grad_out, kv_heads)
    dp = matmul_float32(grad_out, v.mT)  # [B, H, Sq, Sk]
    delta = (out.float() * grad_out.float()).sum(-1, keepdim=True)  # equals rowsum(P ∘ dP), but adds up Dv numbers, not Sk
    ds = (p * (dp - delta)).to(q.dtype)
    dq = matmul_float32(ds, k) * scale
    dk = transposed_matmul_float32(ds, q, kv_heads) * scale
    return empty_rows(q).copy_(dq), empty_rows(k).copy_(dk), empty_rows(v).copy_(dv)
