"""FlashAttention-2 forward (arXiv 2307.08691, Algorithm 1) with a loop that the compiler warp-specializes.

With `warp_specialize`, one warp loads tiles, and two groups of four warps each compute half of the tile's rows. So one group's
matmuls can run during the other group's softmax. The compiler does this only under conditions, which cause all other changes:

- The GPU is a Hopper GPU. For other GPUs, the forward falls back to v4.
- No other loop follows. So one loop takes all tiles, and if one of them needs a mask, it masks all (`MASKED`).
- The compiler halves the tiles of Q and O. So tiles have 128 rows and four warps, and descriptors have two dimensions and are
  made in the kernel, which takes memory from an allocator.
- Two errors of the compiler are avoided: see `do_not_specialize` and `zero`.
"""

import contextvars

import torch
import triton
import triton.language as tl

from common.kernels.hopper import unavailable
from common.kernels.pointers import head_ptr, strides
from common.kernels.tuning import autotune, bucket, configs
from common.layout import cdiv, empty_rows
from stages.v4_autotune_descriptor.forward import forward as forward_of_v4

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _accumulate(
    acc, m, l, q, k_desc, v_desc, lo, hi, seq_k, offs_m, scale_log2,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the keys [lo, hi) into one query tile's online softmax: acc, m (running maximum), l (running sum)."""
    for start_n in tl.range(lo, hi, BLOCK_N, warp_specialize=True):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = k_desc.load([start_n, 0])  # [BLOCK_N, HEAD_DIM]
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
        v = v_desc.load([start_n, 0])  # [BLOCK_N, VALUE_DIM]
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    return acc, m, l


# With 64 rows, both groups of warps compute all of them. With eight warps, the compiler specializes nothing: such tiles are for
# float32 and D = 256. The load warp runs one tile ahead: at D = 128, three stages of 128 keys exceed shared memory.
TILES = (  # BLOCK_M, BLOCK_N, num_warps, num_stages
    (128, 128, 4, 2), (128, 64, 4, 2), (32, 32, 8, 1), (16, 32, 8, 1),
)  # fmt: skip
MOST_KEYS = 128  # number of keys in the longest tile; if it divides Sk, no tile passes the last key


@autotune(configs(TILES, pre_hook=None))
@triton.jit(do_not_specialize=["heads", "heads_per_kv", "seq_q", "seq_k", "diagonal"])  # the compiler fails on a constant 1
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, scale, strides,
    heads, heads_per_kv, seq_q, seq_k, diagonal, bucket, zero,  # tuned once per `bucket` of lengths
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    start_m = tl.program_id(0) % tiles_m * BLOCK_M
    batch_head = tl.program_id(0) // tiles_m
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // heads_per_kv
    offs_m = start_m + tl.arange(0, BLOCK_M)

    # The compiler splits the rows of a descriptor between two groups of warps. It can do so only for descriptors with two
    # dimensions that are made in the kernel.
    q_ptr = head_ptr(q_ptr, strides.q, batch, head)
    q_desc = tl.make_tensor_descriptor(q_ptr, [seq_q, HEAD_DIM], [strides.q.row, 1], [BLOCK_M, HEAD_DIM])
    out_ptr = head_ptr(out_ptr, strides.out, batch, head)
    out_desc = tl.make_tensor_descriptor(out_ptr, [seq_q, VALUE_DIM], [strides.out.row, 1], [BLOCK_M, VALUE_DIM])
    k_ptr = head_ptr(k_ptr, strides.k, batch, kv_head)
    k_desc = tl.make_tensor_descriptor(k_ptr, [seq_k, HEAD_DIM], [strides.k.row, 1], [BLOCK_N, HEAD_DIM])
    v_ptr = head_ptr(v_ptr, strides.v, batch, kv_head)
    v_desc = tl.make_tensor_descriptor(v_ptr, [seq_k, VALUE_DIM], [strides.v.row, 1], [BLOCK_N, VALUE_DIM])
    # For the second group of warps the compiler adds 64 to first_m. If first_m were start_m, offs_m would be shifted twice. The
    # compiler does not know that `zero` is 0.
    first_m = start_m + zero
    q = q_desc.load([first_m, 0])  # [BLOCK_M, HEAD_DIM], stays on the chip

    acc = tl.zeros([BLOCK_M, VALUE_DIM], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    # exp(x) = exp2(x * log2(e)), and exp2 is one instruction. Never scale by 0, because a masked score (-inf) times 0 is NaN.
    scale_log2 = tl.maximum(scale * LOG2_E, 1e-37)

    # The compiler cannot specialize a loop that another loop follows. So one loop takes the tiles with and without a mask.
    end = tl.minimum(start_m + BLOCK_M + diagonal, seq_k) if CAUSAL else seq_k
    acc, m, l = _accumulate(
        acc, m, l, q, k_desc, v_desc, 0, end, seq_k, offs_m + diagonal, scale_log2,
        BLOCK_N, CAUSAL, MASKED, PRECISION,
    )  # fmt: skip

    out = acc / l[:, None]  # [BLOCK_M, VALUE_DIM]
    out_desc.store([first_m, 0], out.to(out_desc.dtype))
    lse_ptrs = lse_ptr + batch_head.to(tl.int64) * seq_q + offs_m
    tl.store(lse_ptrs, (m + tl.log2(l)) / LOG2_E, mask=offs_m < seq_q)


def forward(q, k, v, *, causal, scale, diagonal=0):
    """Return attention output and log-sum-exp. `common.operator` lists shapes, dtypes and errors."""
    if unavailable():  # the specialized loop compiles only for Hopper
        return forward_of_v4(q, k, v, causal=causal, scale=scale, diagonal=diagonal)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    out = empty_rows(q, value_dim)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if scale < 0:
        q, scale = -q, -scale  # the scores stay the same, and max(scale * s) = scale * max(s)
    device = q.device
    context = contextvars.copy_context()  # outside this context, the user's allocator stays
    context.run(triton.set_allocator, lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))  # for descriptors
    context.run(
        _forward_kernel[lambda args: (cdiv(seq_q, args["BLOCK_M"]) * batch * heads,)],
        q, k, v, out, lse, scale, strides(q=q, k=k, v=v, out=out),
        heads, heads // kv_heads, seq_q, seq_k, diagonal, bucket(seq_q, seq_k), 0,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, CAUSAL=causal, MASKED=causal or seq_k % MOST_KEYS > 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    return out, lse
