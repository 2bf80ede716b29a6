"""FlashAttention forward (arXiv 2205.14135, Algorithm 1): a loop over K/V tiles, and in it a loop over query tiles."""

import torch
import triton
import triton.language as tl

from common.kernels.pointers import head_ptr, strides, tile_ptrs
from common.kernels.tiles import query_tile
from common.layout import empty_rows

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, m_ptr, l_ptr, scale, strides,
    heads, heads_per_kv, seq_q: tl.int32, seq_k: tl.int32, diagonal: tl.int32,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A program owns one head. o [B, H, Sq, Dv], m and l [B, H, Sq] are float32, contiguous, and initially 0, -inf and 0."""
    batch_head = tl.program_id(0)
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // heads_per_kv
    offs_d = tl.arange(0, HEAD_DIM)
    offs_v = tl.arange(0, VALUE_DIM)

    q_ptr = head_ptr(q_ptr, strides.q, batch, head)
    o_ptr = head_ptr(o_ptr, strides.o, batch, head)
    k_ptr = head_ptr(k_ptr, strides.k, batch, kv_head)
    v_ptr = head_ptr(v_ptr, strides.v, batch, kv_head)
    # exp(x) = exp2(x * log2(e)), and exp2 is one instruction. Never scale by 0, because a masked score (-inf) times 0 is NaN.
    scale_log2 = tl.maximum(scale * LOG2_E, 1e-37)

    for start_n in range(0, seq_k, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        in_k = offs_n[:, None] < seq_k
        k = tl.load(tile_ptrs(k_ptr, strides.k, offs_n, offs_d), mask=in_k, other=0.0)  # [BLOCK_N, HEAD_DIM]
        v = tl.load(tile_ptrs(v_ptr, strides.v, offs_n, offs_v), mask=in_k, other=0.0)  # [BLOCK_N, VALUE_DIM]
        # Start at the diagonal: earlier queries do not see this tile.
        first_m = tl.maximum(start_n - diagonal, 0) // BLOCK_M * BLOCK_M if CAUSAL else 0
        # NOTE: each K/V tile reads and rewrites O, m and l of every query; in v3 a program owns the queries instead.
        for start_m in range(first_m, seq_q, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            in_q = offs_m[:, None] < seq_q
            rows = batch_head.to(tl.int64) * seq_q + offs_m
            q = tl.load(tile_ptrs(q_ptr, strides.q, offs_m, offs_d), mask=in_q, other=0.0)  # [BLOCK_M, HEAD_DIM]
            o_ptrs = tile_ptrs(o_ptr, strides.o, offs_m, offs_v)
            o = tl.load(o_ptrs, mask=in_q, other=0.0)  # [BLOCK_M, VALUE_DIM]
            m = tl.load(m_ptr + rows, mask=offs_m < seq_q, other=0.0)
            l = tl.load(l_ptr + rows, mask=offs_m < seq_q, other=1.0)

            s = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            visible = offs_n[None, :] < seq_k
            if CAUSAL:
                visible = visible & (offs_m[:, None] + diagonal >= offs_n[None, :])
            s = tl.where(visible, s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)  # finite, because the first tile has key 0, which every query sees
            p = tl.exp2(s * scale_log2 - m_new[:, None])
            l_old = l * tl.exp2(m - m_new)
            l_new = l_old + tl.sum(p, 1)
            o = (l_old[:, None] * o + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)) / l_new[:, None]

            tl.store(o_ptrs, o, mask=in_q)
            tl.store(m_ptr + rows, m_new, mask=offs_m < seq_q)
            tl.store(l_ptr + rows, l_new, mask=offs_m < seq_q)
        # The next K/V tile reads o, m and l that other threads have just written; the barrier makes their stores visible.
        tl.debug_barrier()


def forward(q, k, v, *, causal, scale, diagonal=0):
    """Return attention output and log-sum-exp. `common.operator` lists shapes, dtypes and errors."""
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    out = empty_rows(q, value_dim)
    o = q.new_zeros(*q.shape[:3], value_dim, dtype=torch.float32)
    m = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)
    l = q.new_zeros(q.shape[:3], dtype=torch.float32)
    if scale < 0:
        q, scale = -q, -scale  # the scores stay the same, and max(scale * s) = scale * max(s)
    # With num_stages > 1, Triton would also buffer tiles of O, which do not fit in shared memory.
    tile = {**query_tile(max(head_dim, value_dim), q.dtype), "num_stages": 1}
    _forward_kernel[batch * heads,](
        q, k, v, o, m, l, scale, strides(q=q, k=k, v=v, o=o),
        heads, heads // kv_heads, seq_q, seq_k, diagonal,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, CAUSAL=causal, PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **tile,
    )  # fmt: skip
    return out.copy_(o), (m + torch.log2(l)) / LOG2_E.value
