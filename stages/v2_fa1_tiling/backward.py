"""FlashAttention backward (arXiv 2205.14135, Algorithm 4): a loop over K/V tiles, and in it a loop over query tiles."""

import torch
import triton
import triton.language as tl

from common.kernels.pointers import head_ptr, strides, tile_ptrs
from common.kernels.tiles import key_tile
from common.layout import empty_rows

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _accumulate(
    dk, dv, k, v, q_ptr, out_ptr, do_ptr, dq_ptr, lse_ptr, strides, first, seq_q, seen_from, scale_log2, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the queries from `first` on to one K/V tile's dk and dv, and to dq in memory. P and dS are
    transposed, for the matmuls of dk and dv."""
    offs_d = tl.arange(0, HEAD_DIM)
    offs_v = tl.arange(0, v.shape[1])
    for start_m in range(first, seq_q, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        in_q = offs_m[:, None] < seq_q
        q = tl.load(tile_ptrs(q_ptr, strides.q, offs_m, offs_d), mask=in_q, other=0.0)  # [BLOCK_M, HEAD_DIM]
        s_t = tl.dot(k, q.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        lse_log2 = tl.load(lse_ptr + offs_m, mask=offs_m < seq_q, other=float("inf")) * LOG2_E  # p = 0 past the end
        p_t = s_t * scale_log2 - lse_log2[None, :]
        p_t = tl.where(offs_m[None, :] >= seen_from[:, None], p_t, float("-inf"))
        p_t = tl.exp2(p_t)
        do = tl.load(tile_ptrs(do_ptr, strides.do, offs_m, offs_v), mask=in_q, other=0.0)  # [BLOCK_M, VALUE_DIM]
        dv = tl.dot(p_t.to(do.dtype), do, dv, input_precision=PRECISION)
        dp_t = tl.dot(v, do.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        out = tl.load(tile_ptrs(out_ptr, strides.out, offs_m, offs_v), mask=in_q, other=0.0)  # [BLOCK_M, VALUE_DIM]
        delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
        ds_t = (p_t * (dp_t - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds_t, q, dk, input_precision=PRECISION)

        # NOTE: each K/V tile reads and rewrites dQ of every query; in v3 a second kernel owns the queries and sums dQ on chip.
        dq_ptrs = tile_ptrs(dq_ptr, strides.dq, offs_m, offs_d)
        dq = tl.load(dq_ptrs, mask=in_q, other=0.0)  # [BLOCK_M, HEAD_DIM]
        dq += tl.dot(ds_t.T, k, input_precision=PRECISION) * scale
        tl.store(dq_ptrs, dq, mask=in_q)
    return dk, dv


@triton.jit
def _backward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, lse_ptr, scale, strides,
    kv_heads, heads_per_kv, seq_q: tl.int32, seq_k: tl.int32, diagonal: tl.int32,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A program owns one K/V head. dq [B, H, Sq, D] is float32 and initially 0."""
    batch_head = tl.program_id(0)
    batch = batch_head // kv_heads
    kv_head = batch_head % kv_heads
    offs_d = tl.arange(0, HEAD_DIM)
    offs_v = tl.arange(0, VALUE_DIM)
    scale_log2 = scale * LOG2_E

    for start_n in range(0, seq_k, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        in_k = offs_n[:, None] < seq_k
        k_ptrs = tile_ptrs(head_ptr(k_ptr, strides.k, batch, kv_head), strides.k, offs_n, offs_d)
        k = tl.load(k_ptrs, mask=in_k, other=0.0)  # [BLOCK_N, HEAD_DIM]
        v_ptrs = tile_ptrs(head_ptr(v_ptr, strides.v, batch, kv_head), strides.v, offs_n, offs_v)
        v = tl.load(v_ptrs, mask=in_k, other=0.0)  # [BLOCK_N, VALUE_DIM]
        dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
        dv = tl.zeros([BLOCK_N, VALUE_DIM], tl.float32)

        # The first query that sees each key. For a key past the end it is 2**30, so that the key's p is 0. Otherwise p may be
        # infinite, and infinity times 0 is NaN.
        seen_from = tl.where(offs_n < seq_k, offs_n - diagonal if CAUSAL else 0, 2**30)
        first = tl.maximum(start_n - diagonal, 0) // BLOCK_M * BLOCK_M if CAUSAL else 0
        for shared in range(heads_per_kv):  # the query heads that share these keys
            head = kv_head * heads_per_kv + shared
            q_head = head_ptr(q_ptr, strides.q, batch, head)
            out_head = head_ptr(out_ptr, strides.out, batch, head)
            do_head = head_ptr(do_ptr, strides.do, batch, head)
            dq_head = head_ptr(dq_ptr, strides.dq, batch, head)
            rows = (batch_head.to(tl.int64) * heads_per_kv + shared) * seq_q
            dk, dv = _accumulate(
                dk, dv, k, v, q_head, out_head, do_head, dq_head, lse_ptr + rows, strides,
                first, seq_q, seen_from, scale_log2, scale, HEAD_DIM, BLOCK_M, PRECISION,
            )  # fmt: skip

        dk *= scale
        dk_ptrs = tile_ptrs(head_ptr(dk_ptr, strides.dk, batch, kv_head), strides.dk, offs_n, offs_d)
        tl.store(dk_ptrs, dk.to(dk_ptr.dtype.element_ty), mask=in_k)
        dv_ptrs = tile_ptrs(head_ptr(dv_ptr, strides.dv, batch, kv_head), strides.dv, offs_n, offs_v)
        tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), mask=in_k)
        # The next K/V tile reads dq that other threads have just written; the barrier makes their stores visible.
        tl.debug_barrier()


def backward(grad_out, q, k, v, out, lse, *, causal, scale, diagonal=0):
    """Return the gradients of q, k and v. `common.operator` lists shapes, dtypes and errors."""
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    dq, dk, dv = empty_rows(q), empty_rows(k), empty_rows(v)
    sums = q.new_zeros(q.shape, dtype=torch.float32)  # accumulator of dQ
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    # With num_stages > 1, Triton would also buffer tiles of dQ, which do not fit in shared memory.
    tile = {**key_tile(max(head_dim, value_dim), q.dtype), "num_stages": 1}
    _backward_kernel[batch * kv_heads,](
        q, k, v, out, grad_out, sums, dk, dv, lse, scale, strides(q=q, k=k, v=v, out=out, do=grad_out, dq=sums, dk=dk, dv=dv),
        kv_heads, heads // kv_heads, seq_q, seq_k, diagonal,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, CAUSAL=causal, PRECISION=precision, **tile,
    )  # fmt: skip
    return dq.copy_(sums), dk, dv
