"""Forward with one Triton kernel between the two matmuls, for scale, mask and softmax.

These operations wait for memory, so a fused kernel saves time by each score that it need not read or write. It reads a score
twice and writes its probability once. The first reading gets a row's maximum and sum together (online softmax, arXiv
1805.02867, Algorithm 3), and the second writes P. Masked scores are not read, and the scale is part of the exponential.
"""

import torch
import triton
import triton.language as tl

from common.kernels.matmul import matmul_float32
from common.kernels.tiles import query_tile
from common.layout import cdiv, empty_rows

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _softmax_kernel(
    s_ptr, p_ptr, lse_ptr, scale, seq_q: tl.int32, seq_k: tl.int32, diagonal: tl.int32,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Compute P = softmax(scale * S) and the log-sum-exp for BLOCK_M rows of one head."""
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    offs_m = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = (tl.program_id(0) // tiles_m).to(tl.int64) * seq_q + offs_m  # int64: S can have over 2**31 elements
    in_q = offs_m < seq_q
    # Skip the keys past the diagonal of the last row: their probabilities are 0.
    end = tl.minimum(tl.program_id(0) % tiles_m * BLOCK_M + BLOCK_M + diagonal, seq_k) if CAUSAL else seq_k

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    # exp(x) = exp2(x * log2(e)), and exp2 is one instruction. Never scale by 0, because a masked score (-inf) times 0 is NaN.
    scale_log2 = tl.maximum(scale * LOG2_E, 1e-37)
    for start_n in range(0, end, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        visible = offs_n[None, :] < seq_k
        if CAUSAL:
            visible = visible & (offs_m[:, None] + diagonal >= offs_n[None, :])
        s_ptrs = s_ptr + rows[:, None] * seq_k + offs_n[None, :]
        s = tl.load(s_ptrs, mask=visible & in_q[:, None], other=0.0)  # [BLOCK_M, BLOCK_N]
        s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)  # finite, because the first tile has key 0, which every query sees
        p = tl.exp2(s * scale_log2 - m_new[:, None])
        l = l * tl.exp2(m - m_new) + tl.sum(p, 1)
        m = m_new
    lse_log2 = m + tl.log2(l)
    tl.store(lse_ptr + rows, lse_log2 / LOG2_E, mask=in_q)

    for start_n in range(0, seq_k, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        inside = in_q[:, None] & (offs_n[None, :] < seq_k)
        visible = inside
        if CAUSAL:
            visible = visible & (offs_m[:, None] + diagonal >= offs_n[None, :])
        offs = rows[:, None] * seq_k + offs_n[None, :]
        s = tl.load(s_ptr + offs, mask=visible, other=0.0)  # [BLOCK_M, BLOCK_N]
        p = tl.where(visible, tl.exp2(s * scale_log2 - lse_log2[:, None]), 0.0)
        tl.store(p_ptr + offs, p.to(p_ptr.dtype.element_ty), mask=inside)


def forward(q, k, v, *, causal, scale, diagonal=0):
    """Return attention output and log-sum-exp. `common.operator` lists shapes, dtypes and errors."""
    batch, heads, seq_q, head_dim = q.shape
    seq_k, value_dim = v.shape[2:]
    if scale < 0:
        q, scale = -q, -scale  # the scores stay the same, and max(scale * s) = scale * max(s)
    # NOTE: S and P, Sq x Sk each, go to memory and back; v2 keeps them on the chip.
    s = matmul_float32(q, k.mT)  # [B, H, Sq, Sk]
    p = torch.empty_like(s, dtype=q.dtype)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    tile = query_tile(max(head_dim, value_dim), q.dtype)  # as for FlashAttention, so that times compare algorithms, not tiles
    _softmax_kernel[cdiv(seq_q, tile["BLOCK_M"]) * batch * heads,](
        s, p, lse, scale, seq_q, seq_k, diagonal, CAUSAL=causal, **tile
    )  # fmt: skip
    return empty_rows(q, value_dim).copy_(matmul_float32(p, v)), lse
