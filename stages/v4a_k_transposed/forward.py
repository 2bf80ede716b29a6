"""FlashAttention-2 forward (arXiv 2307.08691, Algorithm 1) with tensor descriptors, for tiles that an autotuner chooses.

A descriptor tells TMA where a tensor lies, so TMA computes the addresses of a tile and clips it at the tensor's end. Threads
spend neither instructions nor registers on this, and registers limit the tiles: on Hopper, a tile of 128 x 128 at D = 128 takes
203 registers per thread, but up to 254 of 255 with addresses in registers. So descriptors give a choice of tiles. Which is the
fastest depends on the GPU, D and the lengths, so an autotuner measures it. It writes its choice into the descriptors, because a
descriptor fixes its tile's shape.

K is transposed in memory once, before the kernel. So the matmul for S gets Kᵀ as it lies in memory, and no program transposes
the K tiles that it loads.
"""

import torch
import triton
import triton.language as tl

from common.kernels.descriptors import describe
from common.kernels.tuning import autotune, bucket, configs
from common.layout import ALIGNMENT, cdiv, empty_rows

LOG2_E = tl.constexpr(1.4426950408889634)


def transposed(k):
    """Return K as [B, H, D, Sk], with rows that start at multiples of 16 bytes, as descriptors require."""
    batch, heads, seq_k, head_dim = k.shape
    row = ALIGNMENT // k.element_size()
    k_t = k.new_empty(batch, heads, head_dim, cdiv(seq_k, row) * row)[..., :seq_k]
    return k_t.copy_(k.mT)


@triton.jit
def _accumulate(
    acc, m, l, q, kt_desc, v_desc, batch, kv_head, lo, hi, seq_k, offs_m, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the keys [lo, hi) into one query tile's online softmax: acc, m (running maximum), l (running sum)."""
    for start_n in range(lo, hi, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k_t = kt_desc.load([batch, kv_head, 0, start_n]).reshape(HEAD_DIM, BLOCK_N)
        s = tl.dot(q, k_t, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
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
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    return acc, m, l


def _set_block_shapes(args):
    """Run before each launch: write the tuner's tile sizes into the descriptors, which fix the shape of a tile."""
    args["q_desc"].block_shape = [1, 1, args["BLOCK_M"], args["HEAD_DIM"]]
    args["out_desc"].block_shape = [1, 1, args["BLOCK_M"], args["VALUE_DIM"]]
    args["kt_desc"].block_shape = [1, 1, args["HEAD_DIM"], args["BLOCK_N"]]
    args["v_desc"].block_shape = [1, 1, args["BLOCK_N"], args["VALUE_DIM"]]


TILES = (  # BLOCK_M, BLOCK_N, num_warps, num_stages
    (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 2), (128, 64, 4, 3), (64, 128, 4, 2), (64, 64, 4, 3),
    (64, 32, 4, 2), (32, 32, 8, 1), (16, 32, 8, 1),
)  # fmt: skip


@autotune(configs(TILES, _set_block_shapes))
@triton.jit
def _forward_kernel(
    q_desc, kt_desc, v_desc, out_desc, lse_ptr, scale,
    heads, heads_per_kv, seq_q: tl.int32, seq_k: tl.int32, diagonal: tl.int32, bucket,  # tuned once per `bucket` of lengths
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
        acc, m, l, q, kt_desc, v_desc, batch, kv_head, 0, full, seq_k, offs_m + diagonal, scale_log2,
        HEAD_DIM, BLOCK_N, CAUSAL, False, PRECISION,
    )  # fmt: skip
    acc, m, l = _accumulate(
        acc, m, l, q, kt_desc, v_desc, batch, kv_head, full, end, seq_k, offs_m + diagonal, scale_log2,
        HEAD_DIM, BLOCK_N, CAUSAL, True, PRECISION,
    )  # fmt: skip

    out = acc / l[:, None]  # [BLOCK_M, VALUE_DIM]
    out_desc.store([batch, head, start_m, 0], out.to(out_desc.dtype).reshape(1, 1, BLOCK_M, VALUE_DIM))
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
    _forward_kernel[lambda args: (cdiv(seq_q, args["BLOCK_M"]) * batch * heads,)](
        describe(q), describe(transposed(k)), describe(v), describe(out), lse, scale,
        heads, heads // kv_heads, seq_q, seq_k, diagonal, bucket(seq_q, seq_k),
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, CAUSAL=causal, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    return out, lse
