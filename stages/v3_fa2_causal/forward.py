"""FlashAttention-2 forward (arXiv 2307.08691, Algorithm 1): one program per query tile.

A program owns its rows of O until they are done. So O, m and l stay in registers, memory sees O only once, and there are
programs for all SMs. The rest follows from that:

- The program sees the last key of its rows, so it divides O by l once, after the loop, and computes the log-sum-exp.
- The keys of its rows come in order. So tiles that need a mask are the last ones. They have their own loop, so that no other
  tile spends time on a mask.
- Its loop loads only K and V, and stores nothing. So the loads of later tiles can run ahead (`num_stages`).
"""

import torch
import triton
import triton.language as tl

from common.kernels.pointers import head_ptr, strides, tile_ptrs
from common.kernels.tiles import query_tile
from common.layout import cdiv, empty_rows

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _accumulate(
    acc, m, l, q, k_ptr, v_ptr, strides, lo, hi, seq_k, offs_m, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the keys [lo, hi) into one query tile's online softmax: acc, m (running maximum), l (running sum)."""
    offs_d = tl.arange(0, HEAD_DIM)
    offs_v = tl.arange(0, acc.shape[1])
    for start_n in range(lo, hi, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        in_k = offs_n[:, None] < seq_k
        k = tl.load(tile_ptrs(k_ptr, strides.k, offs_n, offs_d), mask=in_k, other=0.0)  # [BLOCK_N, HEAD_DIM]
        s = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            visible = offs_n[None, :] < seq_k
            if CAUSAL:
                visible = visible & (offs_m[:, None] >= offs_n[None, :])
            s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)  # finite, because the first tile has key 0, which every query sees
        p = tl.exp2(s * scale_log2 - m_new[:, None])
        rescale = tl.exp2(m - m_new)  # factor for the earlier l and acc
        l = l * rescale + tl.sum(p, 1)
        v = tl.load(tile_ptrs(v_ptr, strides.v, offs_n, offs_v), mask=in_k, other=0.0)  # [BLOCK_N, VALUE_DIM]
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    return acc, m, l


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, scale, strides,
    heads, heads_per_kv, seq_q: tl.int32, seq_k: tl.int32, diagonal: tl.int32,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    start_m = tl.program_id(0) % tiles_m * BLOCK_M
    batch_head = tl.program_id(0) // tiles_m
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // heads_per_kv
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    offs_v = tl.arange(0, VALUE_DIM)
    in_q = offs_m[:, None] < seq_q

    q_ptrs = tile_ptrs(head_ptr(q_ptr, strides.q, batch, head), strides.q, offs_m, offs_d)
    q = tl.load(q_ptrs, mask=in_q, other=0.0)  # [BLOCK_M, HEAD_DIM], stays on the chip
    k_ptr = head_ptr(k_ptr, strides.k, batch, kv_head)
    v_ptr = head_ptr(v_ptr, strides.v, batch, kv_head)

    acc = tl.zeros([BLOCK_M, VALUE_DIM], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    # exp(x) = exp2(x * log2(e)), and exp2 is one instruction. Never scale by 0, because a masked score (-inf) times 0 is NaN.
    scale_log2 = tl.maximum(scale * LOG2_E, 1e-37)

    # First come whole tiles that every row sees, without a mask. Then come tiles at the diagonal and the last key, with a mask.
    end = tl.minimum(start_m + BLOCK_M + diagonal, seq_k) if CAUSAL else seq_k
    full = (tl.minimum(start_m + diagonal, seq_k) if CAUSAL else seq_k) // BLOCK_N * BLOCK_N
    acc, m, l = _accumulate(
        acc, m, l, q, k_ptr, v_ptr, strides, 0, full, seq_k, offs_m + diagonal, scale_log2,
        HEAD_DIM, BLOCK_N, CAUSAL, False, PRECISION,
    )  # fmt: skip
    acc, m, l = _accumulate(
        acc, m, l, q, k_ptr, v_ptr, strides, full, end, seq_k, offs_m + diagonal, scale_log2,
        HEAD_DIM, BLOCK_N, CAUSAL, True, PRECISION,
    )  # fmt: skip

    out = acc / l[:, None]  # [BLOCK_M, VALUE_DIM]
    out_ptrs = tile_ptrs(head_ptr(out_ptr, strides.out, batch, head), strides.out, offs_m, offs_v)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_q)
    lse_ptrs = lse_ptr + batch_head.to(tl.int64) * seq_q + offs_m
    tl.store(lse_ptrs, (m + tl.log2(l)) / LOG2_E, mask=offs_m < seq_q)


def forward(q, k, v, *, causal, scale, diagonal=0):
    """Return attention output and log-sum-exp. `common.operator` lists shapes, dtypes and errors."""
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    out = empty_rows(q, value_dim)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if scale < 0:
        q, scale = -q, -scale  # the scores stay the same, and max(scale * s) = scale * max(s)
    tile = query_tile(max(head_dim, value_dim), q.dtype)
    _forward_kernel[cdiv(seq_q, tile["BLOCK_M"]) * batch * heads,](
        q, k, v, out, lse, scale, strides(q=q, k=k, v=v, out=out),
        heads, heads // kv_heads, seq_q, seq_k, diagonal,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, CAUSAL=causal, PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **tile,
    )  # fmt: skip
    return out, lse
