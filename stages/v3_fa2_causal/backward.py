"""FlashAttention-2 backward (arXiv 2307.08691, section 3.2): one program per tile of dQ or of dK and dV.

dK and dV are sums over queries, and dQ is a sum over keys. So no program can keep all three in registers until they are done.
Two kernels can, if both compute S and dP: `_dkv_kernel` owns K/V tiles, and `_dq_kernel` owns query tiles. (In Algorithm 2,
there is only the first, and every program adds to dQ in memory.) As in the forward, tiles that need a mask have their own loop.
"""

import torch
import triton
import triton.language as tl

from common.kernels.pointers import head_ptr, strides, tile_ptrs
from common.kernels.tiles import key_tile, query_tile
from common.layout import cdiv, empty_rows

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _accumulate_dq(
    dq, q, do, lse_log2, delta, k_ptr, v_ptr, strides, lo, hi, seq_k, offs_m, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the keys [lo, hi) to one query tile's dq."""
    offs_d = tl.arange(0, HEAD_DIM)
    offs_v = tl.arange(0, do.shape[1])
    for start_n in range(lo, hi, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        in_k = offs_n[:, None] < seq_k
        k = tl.load(tile_ptrs(k_ptr, strides.k, offs_n, offs_d), mask=in_k, other=0.0)  # [BLOCK_N, HEAD_DIM]
        s = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        v = tl.load(tile_ptrs(v_ptr, strides.v, offs_n, offs_v), mask=in_k, other=0.0)  # [BLOCK_N, VALUE_DIM]
        dp = tl.dot(do, v.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        p = s * scale_log2 - lse_log2[:, None]
        if MASKED:
            visible = offs_n[None, :] < seq_k
            if CAUSAL:
                visible = visible & (offs_m[:, None] >= offs_n[None, :])
            p = tl.where(visible, p, float("-inf"))
        p = tl.exp2(p)
        ds = (p * (dp - delta[:, None])).to(q.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, dq_ptr, lse_ptr, scale, strides,
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
    q = tl.load(q_ptrs, mask=in_q, other=0.0)  # [BLOCK_M, HEAD_DIM]
    do_ptrs = tile_ptrs(head_ptr(do_ptr, strides.do, batch, head), strides.do, offs_m, offs_v)
    do = tl.load(do_ptrs, mask=in_q, other=0.0)  # [BLOCK_M, VALUE_DIM]
    out_ptrs = tile_ptrs(head_ptr(out_ptr, strides.out, batch, head), strides.out, offs_m, offs_v)
    out = tl.load(out_ptrs, mask=in_q, other=0.0)  # [BLOCK_M, VALUE_DIM]
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    rows = batch_head.to(tl.int64) * seq_q + offs_m
    lse_log2 = tl.load(lse_ptr + rows, mask=offs_m < seq_q, other=float("inf")) * LOG2_E  # p = 0 past the end
    k_ptr = head_ptr(k_ptr, strides.k, batch, kv_head)
    v_ptr = head_ptr(v_ptr, strides.v, batch, kv_head)
    scale_log2 = scale * LOG2_E
    dq = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)

    # First come whole tiles that every row sees, without a mask. Then come tiles at the diagonal and the last key, with a mask.
    end = tl.minimum(start_m + BLOCK_M + diagonal, seq_k) if CAUSAL else seq_k
    full = (tl.minimum(start_m + diagonal, seq_k) if CAUSAL else seq_k) // BLOCK_N * BLOCK_N
    dq = _accumulate_dq(
        dq, q, do, lse_log2, delta, k_ptr, v_ptr, strides, 0, full, seq_k, offs_m + diagonal, scale_log2,
        HEAD_DIM, BLOCK_N, CAUSAL, False, PRECISION,
    )  # fmt: skip
    dq = _accumulate_dq(
        dq, q, do, lse_log2, delta, k_ptr, v_ptr, strides, full, end, seq_k, offs_m + diagonal, scale_log2,
        HEAD_DIM, BLOCK_N, CAUSAL, True, PRECISION,
    )  # fmt: skip

    dq *= scale
    dq_ptrs = tile_ptrs(head_ptr(dq_ptr, strides.dq, batch, head), strides.dq, offs_m, offs_d)
    tl.store(dq_ptrs, dq.to(dq_ptr.dtype.element_ty), mask=in_q)


@triton.jit
def _accumulate_dkv(
    dk, dv, k, v, q_ptr, out_ptr, do_ptr, lse_ptr, strides, lo, hi, seq_q, seen_from, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the queries [lo, hi) to one K/V tile's dk and dv. P and dS are transposed, for the matmuls of dk
    and dv."""
    offs_d = tl.arange(0, HEAD_DIM)
    offs_v = tl.arange(0, v.shape[1])
    for start_m in range(lo, hi, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        in_q = offs_m[:, None] < seq_q
        q = tl.load(tile_ptrs(q_ptr, strides.q, offs_m, offs_d), mask=in_q, other=0.0)  # [BLOCK_M, HEAD_DIM]
        s_t = tl.dot(k, q.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        lse_log2 = tl.load(lse_ptr + offs_m, mask=offs_m < seq_q, other=float("inf")) * LOG2_E  # p = 0 past the end
        p_t = s_t * scale_log2 - lse_log2[None, :]
        if MASKED:
            p_t = tl.where(offs_m[None, :] >= seen_from[:, None], p_t, float("-inf"))
        p_t = tl.exp2(p_t)
        do = tl.load(tile_ptrs(do_ptr, strides.do, offs_m, offs_v), mask=in_q, other=0.0)  # [BLOCK_M, VALUE_DIM]
        dv = tl.dot(p_t.to(do.dtype), do, dv, input_precision=PRECISION)
        dp_t = tl.dot(v, do.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        # NOTE: every K/V tile reads O again here, though the dQ kernel has computed delta already; v5 computes delta once.
        out = tl.load(tile_ptrs(out_ptr, strides.out, offs_m, offs_v), mask=in_q, other=0.0)  # [BLOCK_M, VALUE_DIM]
        delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
        ds_t = (p_t * (dp_t - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds_t, q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _dkv_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, dk_ptr, dv_ptr, lse_ptr, scale, strides,
    kv_heads, heads_per_kv, seq_q: tl.int32, seq_k: tl.int32, diagonal: tl.int32,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(seq_k, BLOCK_N)
    start_n = tl.program_id(0) % tiles_n * BLOCK_N
    batch_head = tl.program_id(0) // tiles_n
    batch = batch_head // kv_heads
    kv_head = batch_head % kv_heads
    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    offs_v = tl.arange(0, VALUE_DIM)
    in_k = offs_n[:, None] < seq_k

    k_ptrs = tile_ptrs(head_ptr(k_ptr, strides.k, batch, kv_head), strides.k, offs_n, offs_d)
    k = tl.load(k_ptrs, mask=in_k, other=0.0)  # [BLOCK_N, HEAD_DIM]
    v_ptrs = tile_ptrs(head_ptr(v_ptr, strides.v, batch, kv_head), strides.v, offs_n, offs_v)
    v = tl.load(v_ptrs, mask=in_k, other=0.0)  # [BLOCK_N, VALUE_DIM]
    scale_log2 = scale * LOG2_E
    dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, VALUE_DIM], tl.float32)

    seen_from = offs_n - diagonal  # the first query that sees each key
    # First come the queries at the diagonal, with a mask. Then come all later queries, without a mask. Queries past the end
    # have p = 0. Keys past the end need no mask: they change only their own rows of dk and dv, which are not stored.
    first = tl.maximum(start_n - diagonal, 0) // BLOCK_M * BLOCK_M if CAUSAL else 0
    full = tl.cdiv(tl.maximum(start_n + BLOCK_N - 1 - diagonal, 0), BLOCK_M) * BLOCK_M if CAUSAL else 0
    for shared in range(heads_per_kv):  # the query heads that share these keys
        head = kv_head * heads_per_kv + shared
        q_head = head_ptr(q_ptr, strides.q, batch, head)
        out_head = head_ptr(out_ptr, strides.out, batch, head)
        do_head = head_ptr(do_ptr, strides.do, batch, head)
        rows = (batch_head.to(tl.int64) * heads_per_kv + shared) * seq_q
        dk, dv = _accumulate_dkv(
            dk, dv, k, v, q_head, out_head, do_head, lse_ptr + rows, strides,
            first, tl.minimum(full, seq_q), seq_q, seen_from, scale_log2, HEAD_DIM, BLOCK_M, True, PRECISION,
        )  # fmt: skip
        dk, dv = _accumulate_dkv(
            dk, dv, k, v, q_head, out_head, do_head, lse_ptr + rows, strides,
            full, seq_q, seq_q, seen_from, scale_log2, HEAD_DIM, BLOCK_M, False, PRECISION,
        )  # fmt: skip

    dk *= scale
    dk_ptrs = tile_ptrs(head_ptr(dk_ptr, strides.dk, batch, kv_head), strides.dk, offs_n, offs_d)
    tl.store(dk_ptrs, dk.to(dk_ptr.dtype.element_ty), mask=in_k)
    dv_ptrs = tile_ptrs(head_ptr(dv_ptr, strides.dv, batch, kv_head), strides.dv, offs_n, offs_v)
    tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), mask=in_k)


def backward(grad_out, q, k, v, out, lse, *, causal, scale, diagonal=0):
    """Return the gradients of q, k and v. `common.operator` lists shapes, dtypes and errors."""
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    dq, dk, dv = empty_rows(q), empty_rows(k), empty_rows(v)
    widest = max(head_dim, value_dim)
    tile_q, tile_k = query_tile(widest, q.dtype), key_tile(widest, q.dtype)
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    _dq_kernel[cdiv(seq_q, tile_q["BLOCK_M"]) * batch * heads,](
        q, k, v, out, grad_out, dq, lse, scale, strides(q=q, k=k, v=v, out=out, do=grad_out, dq=dq),
        heads, heads // kv_heads, seq_q, seq_k, diagonal,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, CAUSAL=causal, PRECISION=precision, **tile_q,
    )  # fmt: skip
    _dkv_kernel[cdiv(seq_k, tile_k["BLOCK_N"]) * batch * kv_heads,](
        q, k, v, out, grad_out, dk, dv, lse, scale, strides(q=q, k=k, v=v, out=out, do=grad_out, dk=dk, dv=dv),
        kv_heads, heads // kv_heads, seq_q, seq_k, diagonal,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, CAUSAL=causal, PRECISION=precision, **tile_k,
    )  # fmt: skip
    return dq, dk, dv
