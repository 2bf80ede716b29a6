"""FlashAttention forward (arXiv 2205.14135, Algorithm 1): K/V tiles outer, query tiles inner, no S or P in global memory."""

import torch
import triton
import triton.language as tl

from common.kernels.pointers import head_ptr, strides, tile_ptrs
from common.kernels.replay import replayed
from common.kernels.tiles import query_tile
from common.operator import empty_rows


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, m_ptr, l_ptr, scale, strides,
    heads, heads_per_kv, seq_q: tl.int32, seq_k: tl.int32, diagonal: tl.int32,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A program owns one head. o [B, H, Sq, Dv], m and l [B, H, Sq] are float32, contiguous, and initially 0, -inf and 0."""
    batch = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    kv_head = head // heads_per_kv
    offs_d = tl.arange(0, HEAD_DIM)
    offs_v = tl.arange(0, VALUE_DIM)
    q_ptr = head_ptr(q_ptr, strides.q, batch, head)
    k_ptr = head_ptr(k_ptr, strides.k, batch, kv_head)
    v_ptr = head_ptr(v_ptr, strides.v, batch, kv_head)
    first_row = tl.program_id(0).to(tl.int64) * seq_q  # int64: row * VALUE_DIM can pass 2**31 elements

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
            in_q = offs_m < seq_q
            q = tl.load(tile_ptrs(q_ptr, strides.q, offs_m, offs_d), mask=in_q[:, None], other=0.0)
            o_ptrs = o_ptr + (first_row + offs_m[:, None]) * VALUE_DIM + offs_v[None, :]
            o = tl.load(o_ptrs, mask=in_q[:, None], other=0.0)  # [BLOCK_M, VALUE_DIM]
            m = tl.load(m_ptr + first_row + offs_m, mask=in_q, other=0.0)
            l = tl.load(l_ptr + first_row + offs_m, mask=in_q, other=1.0)

            s = tl.dot(q, k.T, input_precision=PRECISION) * scale  # [BLOCK_M, BLOCK_N]
            visible = offs_n[None, :] < seq_k
            if CAUSAL:
                visible = visible & (offs_m[:, None] >= offs_n[None, :] - diagonal)
            s = tl.where(visible, s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))  # finite: the first tile contains key 0, which every query sees
            p = tl.exp(s - m_new[:, None])
            l_old = l * tl.exp(m - m_new)
            l_new = l_old + tl.sum(p, 1)
            o = (l_old[:, None] * o + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)) / l_new[:, None]

            tl.store(o_ptrs, o, mask=in_q[:, None])
            tl.store(m_ptr + first_row + offs_m, m_new, mask=in_q)
            tl.store(l_ptr + first_row + offs_m, l_new, mask=in_q)
        # The next K/V tile reads o, m and l that other threads of this program have just written. The barrier makes their
        # stores visible.
        tl.debug_barrier()


@replayed
def forward(q, k, v, *, causal, scale, diagonal=0):
    """Attention output and log-sum-exp; see `common.operator` for shapes, dtypes and errors."""
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    o = q.new_zeros(*q.shape[:3], value_dim, dtype=torch.float32)
    m = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)
    l = q.new_zeros(q.shape[:3], dtype=torch.float32)
    # With more stages, tiles of O would be buffered too, and these do not fit on the chip.
    tile = {**query_tile(max(head_dim, value_dim), q.dtype), "num_stages": 1}
    _forward_kernel[batch * heads,](
        q, k, v, o, m, l, scale, strides(q=q, k=k, v=v),
        heads, heads // kv_heads, seq_q, seq_k, diagonal,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, CAUSAL=causal,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **tile,
    )  # fmt: skip
    return empty_rows(q, value_dim).copy_(o), m + torch.log(l)
