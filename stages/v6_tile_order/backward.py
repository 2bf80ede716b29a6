"""FlashAttention-2 backward (arXiv 2307.08691, Algorithm 2) with tensor descriptors, for tiles that an autotuner chooses.

As in the forward, TMA moves the tiles, and the autotuner writes the fastest tile sizes into the descriptors.
"""

import torch
import triton
import triton.language as tl

from common.kernels.descriptors import describe
from common.kernels.order import tile_and_head
from common.kernels.tuning import autotune, bucket, configs
from common.layout import cdiv, empty_rows

from .backward_prepare import DELTA_ROWS, _delta_kernel

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _accumulate_dq(
    dq, q, do, lse_log2, delta, k_desc, v_desc, batch, kv_head, lo, hi, seq_k, offs_m, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the keys [lo, hi) to one query tile's dq."""
    for start_n in range(lo, hi, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = k_desc.load([batch, kv_head, start_n, 0]).reshape(BLOCK_N, HEAD_DIM)
        # NOTE: S and dP are computed here and again in `_dkv_kernel`; v9 computes dQ there.
        s = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        v = v_desc.load([batch, kv_head, start_n, 0]).reshape(BLOCK_N, do.shape[1])
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


def _set_block_shapes(args):
    """Run before each launch: write the tuner's tile sizes into the descriptors, which fix the shape of a tile."""
    for name, rows, columns in (
        ("q_desc", "BLOCK_M", "HEAD_DIM"),
        ("do_desc", "BLOCK_M", "VALUE_DIM"),
        ("dq_desc", "BLOCK_M", "HEAD_DIM"),
        ("k_desc", "BLOCK_N", "HEAD_DIM"),
        ("v_desc", "BLOCK_N", "VALUE_DIM"),
        ("dk_desc", "BLOCK_N", "HEAD_DIM"),
        ("dv_desc", "BLOCK_N", "VALUE_DIM"),
    ):
        if name in args:
            args[name].block_shape = [1, 1, args[rows], args[columns]]


DQ_TILES = (  # BLOCK_M, BLOCK_N, num_warps, num_stages
    (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2),
    (32, 32, 8, 1), (16, 32, 8, 1),
)  # fmt: skip


@autotune(configs(DQ_TILES, _set_block_shapes))
@triton.jit
def _dq_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, lse_ptr, delta_ptr, scale,
    heads, heads_per_kv, seq_q: tl.int32, seq_k: tl.int32, diagonal: tl.int32, bucket,  # tuned once per `bucket` of lengths
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    ROW_BYTES: tl.constexpr = 2 * (HEAD_DIM + VALUE_DIM)  # bytes of one key's 16-bit K and V
    tile, batch_head = tile_and_head(tiles_m, tl.cdiv(seq_k, heads_per_kv), ROW_BYTES, CAUSAL)
    start_m = (tiles_m - 1 - tile) * BLOCK_M  # the last rows see the most keys, so their tile is tile 0 and starts first
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // heads_per_kv
    offs_m = start_m + tl.arange(0, BLOCK_M)

    q = q_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, HEAD_DIM)
    do = do_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, VALUE_DIM)
    rows = batch_head.to(tl.int64) * seq_q + offs_m
    delta = tl.load(delta_ptr + rows, mask=offs_m < seq_q, other=0.0)
    lse_log2 = tl.load(lse_ptr + rows, mask=offs_m < seq_q, other=float("inf")) * LOG2_E  # p = 0 past the end
    scale_log2 = scale * LOG2_E
    dq = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)

    # First come whole tiles that every row sees, without a mask. Then come tiles at the diagonal and the last key, with a mask.
    end = tl.minimum(start_m + BLOCK_M + diagonal, seq_k) if CAUSAL else seq_k
    full = (tl.minimum(start_m + diagonal, seq_k) if CAUSAL else seq_k) // BLOCK_N * BLOCK_N
    dq = _accumulate_dq(
        dq, q, do, lse_log2, delta, k_desc, v_desc, batch, kv_head, 0, full, seq_k, offs_m + diagonal, scale_log2,
        HEAD_DIM, BLOCK_N, CAUSAL, False, PRECISION,
    )  # fmt: skip
    dq = _accumulate_dq(
        dq, q, do, lse_log2, delta, k_desc, v_desc, batch, kv_head, full, end, seq_k, offs_m + diagonal, scale_log2,
        HEAD_DIM, BLOCK_N, CAUSAL, True, PRECISION,
    )  # fmt: skip

    dq *= scale
    dq_desc.store([batch, head, start_m, 0], dq.to(dq_desc.dtype).reshape(1, 1, BLOCK_M, HEAD_DIM))


@triton.jit
def _accumulate_dkv(
    dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, batch, head, lo, hi, seq_q, seen_from, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the queries [lo, hi) to one K/V tile's dk and dv. P and dS are transposed, for the matmuls of dk
    and dv."""
    for start_m in range(lo, hi, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q = q_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, HEAD_DIM)
        s_t = tl.dot(k, q.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        lse_log2 = tl.load(lse_ptr + offs_m, mask=offs_m < seq_q, other=float("inf")) * LOG2_E  # p = 0 past the end
        p_t = s_t * scale_log2 - lse_log2[None, :]
        if MASKED:
            p_t = tl.where(offs_m[None, :] >= seen_from[:, None], p_t, float("-inf"))
        p_t = tl.exp2(p_t)
        do = do_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, v.shape[1])
        dv = tl.dot(p_t.to(do.dtype), do, dv, input_precision=PRECISION)
        dp_t = tl.dot(v, do.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        delta = tl.load(delta_ptr + offs_m, mask=offs_m < seq_q, other=0.0)
        ds_t = (p_t * (dp_t - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds_t, q, dk, input_precision=PRECISION)
    return dk, dv


DKV_TILES = (  # BLOCK_M, BLOCK_N, num_warps, num_stages
    (32, 64, 4, 2), (64, 64, 4, 2), (32, 128, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3),
    (32, 32, 8, 1), (16, 32, 8, 1),
)  # fmt: skip


@autotune(configs(DKV_TILES, _set_block_shapes))
@triton.jit
def _dkv_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, lse_ptr, delta_ptr, scale,
    kv_heads, heads_per_kv, seq_q: tl.int32, seq_k: tl.int32, diagonal: tl.int32, bucket,  # tuned once per `bucket` of lengths
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(seq_k, BLOCK_N)
    ROW_BYTES: tl.constexpr = 2 * (HEAD_DIM + VALUE_DIM)  # bytes of a query's Q and dO in 16 bits
    tile, batch_head = tile_and_head(tiles_n, seq_q, ROW_BYTES, CAUSAL)
    start_n = tile * BLOCK_N  # the most queries see the first keys, so their tile is tile 0 and starts first
    batch = batch_head // kv_heads
    kv_head = batch_head % kv_heads
    offs_n = start_n + tl.arange(0, BLOCK_N)

    k = k_desc.load([batch, kv_head, start_n, 0]).reshape(BLOCK_N, HEAD_DIM)
    v = v_desc.load([batch, kv_head, start_n, 0]).reshape(BLOCK_N, VALUE_DIM)
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
        rows = (batch_head.to(tl.int64) * heads_per_kv + shared) * seq_q
        dk, dv = _accumulate_dkv(
            dk, dv, k, v, q_desc, do_desc, lse_ptr + rows, delta_ptr + rows, batch, head,
            first, tl.minimum(full, seq_q), seq_q, seen_from, scale_log2, HEAD_DIM, BLOCK_M, True, PRECISION,
        )  # fmt: skip
        dk, dv = _accumulate_dkv(
            dk, dv, k, v, q_desc, do_desc, lse_ptr + rows, delta_ptr + rows, batch, head,
            full, seq_q, seq_q, seen_from, scale_log2, HEAD_DIM, BLOCK_M, False, PRECISION,
        )  # fmt: skip

    dk *= scale
    dk_desc.store([batch, kv_head, start_n, 0], dk.to(dk_desc.dtype).reshape(1, 1, BLOCK_N, HEAD_DIM))
    dv_desc.store([batch, kv_head, start_n, 0], dv.to(dv_desc.dtype).reshape(1, 1, BLOCK_N, VALUE_DIM))


def backward(grad_out, q, k, v, out, lse, *, causal, scale, diagonal=0):
    """Return the gradients of q, k and v. `common.operator` lists shapes, dtypes and errors."""
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    dq, dk, dv = empty_rows(q), empty_rows(k), empty_rows(v)
    delta = torch.empty_like(lse)
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    _delta_kernel[cdiv(seq_q, DELTA_ROWS) * batch * heads,](
        describe(out, DELTA_ROWS, value_dim), describe(grad_out, DELTA_ROWS, value_dim), delta,
        heads, seq_q, VALUE_DIM=value_dim, BLOCK_M=DELTA_ROWS,
    )  # fmt: skip
    _dq_kernel[lambda args: (cdiv(seq_q, args["BLOCK_M"]) * batch * heads,)](
        describe(q), describe(k), describe(v), describe(grad_out), describe(dq), lse, delta, scale,
        heads, heads // kv_heads, seq_q, seq_k, diagonal, bucket(seq_q, seq_k),
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, CAUSAL=causal, PRECISION=precision,
    )  # fmt: skip
    _dkv_kernel[lambda args: (cdiv(seq_k, args["BLOCK_N"]) * batch * kv_heads,)](
        describe(q), describe(k), describe(v), describe(grad_out), describe(dk), describe(dv), lse, delta, scale,
        kv_heads, heads // kv_heads, seq_q, seq_k, diagonal, bucket(seq_q, seq_k),
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, CAUSAL=causal, PRECISION=precision,
    )  # fmt: skip
    return dq, dk, dv
