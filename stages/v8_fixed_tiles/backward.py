"""FlashAttention-2 backward (arXiv 2307.08691, Algorithm 2) in one kernel, with tiles for Hopper: dQ accumulates in memory."""

import torch
import triton
import triton.language as tl

from common.kernels.descriptors import describe
from common.kernels.hopper import require_hopper
from common.kernels.order import tile_and_head
from common.layout import empty_rows
from stages.v6_tile_order.backward import backward as backward_of_v6

LOG2_E = tl.constexpr(1.4426950408889634)
DELTA_ROWS = 64  # rows per program of the delta kernel
KEYS = 128  # keys of a program; their dK and dV stay in its registers


@triton.jit
def _delta_kernel(out_desc, do_desc, delta_ptr, heads, seq_q: tl.int32, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr):
    """Compute delta = rowsum(dO * O), [B, H, Sq] float32, which the softmax's gradient subtracts from each row of dP."""
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    start_m = tl.program_id(0) % tiles_m * BLOCK_M
    batch_head = tl.program_id(0) // tiles_m
    batch = batch_head // heads
    head = batch_head % heads
    offs_m = start_m + tl.arange(0, BLOCK_M)
    do = do_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, VALUE_DIM)
    out = out_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, VALUE_DIM)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + batch_head.to(tl.int64) * seq_q + offs_m, delta, mask=offs_m < seq_q)


@triton.jit
def _accumulate(
    dk, dv, k, v, q_desc, do_desc, sums_desc, lse_ptr, delta_ptr, batch, head, lo, hi, seq_q, seen_from, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the queries [lo, hi) to one K/V tile's dk and dv, and to dq in memory. P and dS are transposed,
    for the matmuls of dk and dv."""
    for start_m in range(lo, hi, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q = q_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, HEAD_DIM)
        s_t = tl.dot(k, q.T)  # [BLOCK_N, BLOCK_M]
        lse_log2 = tl.load(lse_ptr + offs_m, mask=offs_m < seq_q, other=float("inf")) * LOG2_E  # p = 0 past the end
        p_t = s_t * scale_log2 - lse_log2[None, :]
        if MASKED:
            p_t = tl.where(offs_m[None, :] >= seen_from[:, None], p_t, float("-inf"))
        p_t = tl.exp2(p_t).to(q.dtype)  # 16 bits, because float32 would take twice the registers until dS needs P
        do = do_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, v.shape[1])
        dv = tl.dot(p_t, do, dv)
        dp_t = tl.dot(v, do.T)  # [BLOCK_N, BLOCK_M]
        delta = tl.load(delta_ptr + offs_m, mask=offs_m < seq_q, other=0.0)
        ds_t = (p_t.to(tl.float32) * (dp_t - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds_t, q, dk)
        # NOTE: the compiler decides when to wait for a matmul and where its operands lie; v10 makes this explicit.
        dq = tl.dot(ds_t.T, k)  # [BLOCK_M, HEAD_DIM]
        sums_desc.atomic_add([batch, head, start_m, 0], dq.reshape(1, 1, BLOCK_M, HEAD_DIM))
    return dk, dv


@triton.jit
def _backward_kernel(
    q_desc, k_desc, v_desc, do_desc, sums_desc, dk_desc, dv_desc, lse_ptr, delta_ptr, scale,
    kv_heads, heads_per_kv, seq_q: tl.int32, seq_k: tl.int32, diagonal: tl.int32,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(seq_k, BLOCK_N)
    ROW_BYTES: tl.constexpr = 6 * HEAD_DIM + 2 * VALUE_DIM  # bytes of a query's Q, dQ accumulator and dO
    tile, batch_head = tile_and_head(tiles_n, seq_q, ROW_BYTES, CAUSAL)
    start_n = tile * BLOCK_N
    batch = batch_head // kv_heads
    kv_head = batch_head % kv_heads
    offs_n = start_n + tl.arange(0, BLOCK_N)

    k = k_desc.load([batch, kv_head, start_n, 0]).reshape(BLOCK_N, HEAD_DIM)
    v = v_desc.load([batch, kv_head, start_n, 0]).reshape(BLOCK_N, VALUE_DIM)
    scale_log2 = scale * LOG2_E
    dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, VALUE_DIM], tl.float32)

    # The first query that sees each key. For a key past the end it is 2**30, so that the key's p is 0. Otherwise p may be
    # infinite, and infinity times 0 is NaN.
    seen_from = tl.where(offs_n < seq_k, offs_n - diagonal if CAUSAL else 0, 2**30)
    # First come the tiles that need a mask: the query tiles at the diagonal, or all query tiles if this key tile passes the
    # last key. Then come the query tiles that see all these keys. They need no mask.
    first = tl.maximum(start_n - diagonal, 0) // BLOCK_M * BLOCK_M if CAUSAL else 0
    full = tl.cdiv(tl.maximum(start_n + BLOCK_N - 1 - diagonal, 0), BLOCK_M) * BLOCK_M if CAUSAL else 0
    full = tl.where(start_n + BLOCK_N > seq_k, seq_q, full)
    for shared in range(heads_per_kv):  # the query heads that share these keys
        head = kv_head * heads_per_kv + shared
        rows = (batch_head.to(tl.int64) * heads_per_kv + shared) * seq_q
        dk, dv = _accumulate(
            dk, dv, k, v, q_desc, do_desc, sums_desc, lse_ptr + rows, delta_ptr + rows, batch, head,
            first, tl.minimum(full, seq_q), seq_q, seen_from, scale_log2, HEAD_DIM, BLOCK_M, True,
        )  # fmt: skip
        dk, dv = _accumulate(
            dk, dv, k, v, q_desc, do_desc, sums_desc, lse_ptr + rows, delta_ptr + rows, batch, head,
            full, seq_q, seq_q, seen_from, scale_log2, HEAD_DIM, BLOCK_M, False,
        )  # fmt: skip

    dk *= scale
    dk_desc.store([batch, kv_head, start_n, 0], dk.to(dk_desc.dtype).reshape(1, 1, BLOCK_N, HEAD_DIM))
    dv_desc.store([batch, kv_head, start_n, 0], dv.to(dv_desc.dtype).reshape(1, 1, BLOCK_N, VALUE_DIM))


def backward(grad_out, q, k, v, out, lse, *, causal, scale, diagonal=0):
    """Return the gradients of q, k and v. `common.operator` lists shapes, dtypes and errors.

    This falls back to v6 for float32, for D or Dv = 256, and under `torch.use_deterministic_algorithms`, because programs add
    to dQ in any order.
    """
    require_hopper(__package__)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    if q.dtype == torch.float32 or max(head_dim, value_dim) == 256 or torch.are_deterministic_algorithms_enabled():
        return backward_of_v6(grad_out, q, k, v, out, lse, causal=causal, scale=scale, diagonal=diagonal)
    dq, dk, dv = empty_rows(q), empty_rows(k), empty_rows(v)
    sums = torch.zeros_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)  # dQ's accumulator
    delta = torch.empty_like(lse)
    block_m = 64 if max(head_dim, value_dim) >= 128 else 128  # the most rows of S and dP that fit in registers beside dK and dV
    _delta_kernel[triton.cdiv(seq_q, DELTA_ROWS) * batch * heads,](
        describe(out, DELTA_ROWS, value_dim), describe(grad_out, DELTA_ROWS, value_dim), delta,
        heads, seq_q, VALUE_DIM=value_dim, BLOCK_M=DELTA_ROWS,
    )  # fmt: skip
    _backward_kernel[triton.cdiv(seq_k, KEYS) * batch * kv_heads,](
        describe(q, block_m, head_dim), describe(k, KEYS, head_dim), describe(v, KEYS, value_dim),
        describe(grad_out, block_m, value_dim), describe(sums, block_m, head_dim),
        describe(dk, KEYS, head_dim), describe(dv, KEYS, value_dim), lse, delta,
        scale, kv_heads, heads // kv_heads, seq_q, seq_k, diagonal,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=block_m, BLOCK_N=KEYS, CAUSAL=causal, num_warps=8, num_stages=2,
    )  # fmt: skip
    torch.mul(sums, scale, out=dq)
    return dq, dk, dv
