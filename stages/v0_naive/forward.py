"""Textbook forward (arXiv 2205.14135, Algorithm 0): softmax(scale · Q Kᵀ) V, with S and P in memory."""

import torch

from common.kernels.matmul import matmul_float32
from common.layout import empty_rows


def forward(q, k, v, *, causal, scale, diagonal=0):
    """Return attention output and log-sum-exp. `common.operator` lists shapes, dtypes and errors."""
    s = matmul_float32(q, k.mT) * scale  # [B, H, Sq, Sk]
    if causal:
        visible = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril(diagonal)
        s = s.masked_fill(~visible, float("-inf"))
    # NOTE: each line here reads all of S or P; in v1 the softmax is one kernel.
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - m)  # cannot overflow: s - m is at most 0
    l = p.sum(-1, keepdim=True)
    out = matmul_float32((p / l).to(v.dtype), v).to(q.dtype)
    lse = (m + torch.log(l)).squeeze(-1)
    return empty_rows(q, v.shape[3]).copy_(out), lse
