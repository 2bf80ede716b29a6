"""FlashAttention-2 forward (arXiv 2307.08691, Algorithm 1) with tensor descriptors, for tiles that fit Hopper.

A descriptor tells TMA where a tensor lies, so TMA computes the addresses of a tile and clips it at the tensor's end. Threads
spend neither instructions nor registers on this, and registers limit the tiles: on Hopper, a tile of 128 x 128 at D = 128 takes
203 registers per thread, but up to 254 of 255 with addresses in registers.

The tile sizes are fixed, to prepare the port to Gluon (v8): its layouts and buffers depend on them. Each tile fills the
registers of a Hopper SM, so K and V are read less often. By itself, this is slower, perhaps because an SM has room for only one
program: while its warps wait, no other program computes. In Gluon, the warps of one program can overlap their work. These tiles
suit neither other GPUs, which raise an error, nor float32, which falls back to v6. So all matmuls are in 16 bits, and no dot
needs a precision.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from common.kernels.descriptors import describe
from common.kernels.hopper import LOG2_E, require_hopper
from common.kernels.order import tile_and_head
from common.layout import cdiv, empty_rows
from stages.v6_tile_order.forward import forward as forward_of_v6


@triton.jit
def _accumulate(
    acc, m, l, q, k_desc, v_desc, batch, kv_head, lo, hi, seq_k, offs_m, scale_log2,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the keys [lo, hi) into one query tile's online softmax: acc, m (running maximum), l (running sum)."""
    for start_n in range(lo, hi, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = k_desc.load([batch, kv_head, start_n, 0]).reshape(BLOCK_N, q.shape[1])
        s = tl.dot(q, k.T)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            visible = offs_n[None, :] < seq_k
            if CAUSAL:
                visible = visible & (offs_m[:, None] >= offs_n[None, :])
            s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)  # finite, because the first tile has key 0, which every query sees
        p = tl.exp2(s * scale_log2 - m_new[:, None])
        rescale = tl.exp2(m - m_new)  # factor for the earlier l and acc
        l = l * rescale + tl.sum(p, 1)
        v = v_desc.load([batch, kv_head, start_n, 0]).reshape(BLOCK_N, acc.shape[1])
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
        m = m_new
    return acc, m, l


@triton.jit
def _forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, scale,
    heads, heads_per_kv, seq_q: tl.int32, seq_k: tl.int32, diagonal: tl.int32,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    ROW_BYTES: tl.constexpr = 2 * (HEAD_DIM + VALUE_DIM)  # bytes of one key's 16-bit K and V
    number, batch_head = tile_and_head(tiles_m, tl.cdiv(seq_k, heads_per_kv), ROW_BYTES, CAUSAL)
    start_m = (tiles_m - 1 - number) * BLOCK_M  # the last rows see the most keys, so their tile is tile 0 and starts first
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // heads_per_kv
    offs_m = start_m + tl.arange(0, BLOCK_M)

    q = q_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, HEAD_DIM)  # stays on the chip

    acc = tl.zeros([BLOCK_M, VALUE_DIM], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    # exp(x) = exp2(x * log2(e)), and exp2 is one instruction. Never scale by 0, because a masked score (-inf) times 0 is NaN.
    scale_log2 = tl.maximum(scale * LOG2_E, 1e-37)

    # First come whole tiles that every row sees, without a mask. Then come tiles at the diagonal and the last key, with a mask.
    end = tl.minimum(start_m + BLOCK_M + diagonal, seq_k) if CAUSAL else seq_k
    full = (tl.minimum(start_m + diagonal, seq_k) if CAUSAL else seq_k) // BLOCK_N * BLOCK_N
    acc, m, l = _accumulate(
        acc, m, l, q, k_desc, v_desc, batch, kv_head, 0, full, seq_k, offs_m + diagonal, scale_log2, BLOCK_N, CAUSAL, False
    )
    acc, m, l = _accumulate(
        acc, m, l, q, k_desc, v_desc, batch, kv_head, full, end, seq_k, offs_m + diagonal, scale_log2, BLOCK_N, CAUSAL, True
    )

    out = acc / l[:, None]  # [BLOCK_M, VALUE_DIM]
    out_desc.store([batch, head, start_m, 0], out.to(out_desc.dtype).reshape(1, 1, BLOCK_M, VALUE_DIM))
    lse_ptrs = lse_ptr + batch_head.to(tl.int64) * seq_q + offs_m
    tl.store(lse_ptrs, (m + tl.log2(l)) / LOG2_E, mask=offs_m < seq_q)


class Shape(NamedTuple):
    """Sizes of a work tile, and numbers of buffers."""

    queries: int  # query rows
    keys: int  # keys of a key tile
    kv_slots: int  # buffers of K and V


# TILES is indexed by the larger of D and Dv. No tuner chooses the tiles, because Gluon's layouts and buffers depend on them.
TILES = dict.fromkeys((16, 32, 64), Shape(queries=256, keys=64, kv_slots=6)) | {
    128: Shape(queries=128, keys=128, kv_slots=2),
    256: Shape(queries=128, keys=64, kv_slots=2),
}


def forward(q, k, v, *, causal, scale, diagonal=0):
    """Return attention output and log-sum-exp. `common.operator` lists shapes, dtypes and errors. Float32 falls back to v6.

    Raises:
        Unavailable: the GPU is not a Hopper GPU.
    """
    require_hopper(__package__)
    if q.dtype == torch.float32:  # exact float32 has no wgmma, and its tiles take twice the space
        return forward_of_v6(q, k, v, causal=causal, scale=scale, diagonal=diagonal)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    out = empty_rows(q, value_dim)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if scale < 0:
        q, scale = -q, -scale  # the scores stay the same, and max(scale * s) = scale * max(s)
    shape = TILES[max(head_dim, value_dim)]
    _forward_kernel[cdiv(seq_q, shape.queries) * batch * heads,](
        describe(q, shape.queries, head_dim), describe(k, shape.keys, head_dim), describe(v, shape.keys, value_dim),
        describe(out, shape.queries, value_dim),
        lse, scale, heads, heads // kv_heads, seq_q, seq_k, diagonal,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=shape.queries, BLOCK_N=shape.keys,
        CAUSAL=causal, num_warps=shape.queries // 16, num_stages=shape.kv_slots,
    )  # fmt: skip
    return out, lse
