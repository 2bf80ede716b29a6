"""FlashAttention-3 forward (arXiv 2407.08608, Algorithm 1) with one consumer, in Gluon, for Hopper."""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from common.kernels.descriptors import addressable
from common.kernels.hopper import describe_tile, new_barriers, new_ring, require_hopper
from common.kernels.order import tile_and_head
from common.kernels.replay import replayed
from common.operator import empty_rows
from stages.v7_one_backward.forward import forward as forward_of_v7

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _load(load, ring, fill):
    """Start to load a key tile's K and V into the next buffers of the ring, when the consumers have released them."""
    k_desc, v_desc, batch, kv_head = load
    k_s, v_s, kv_full, kv_empty = ring
    STAGES: gl.constexpr = k_s.shape[0]
    slot = fill % STAGES
    where = [batch, kv_head, fill * k_s.shape[3], 0]
    mbarrier.wait(kv_empty.index(slot), (fill // STAGES & 1) ^ 1)
    mbarrier.expect(kv_full.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, where, kv_full.index(slot), k_s.index(slot))
    tma.async_copy_global_to_shared(v_desc, where, kv_full.index(slot), v_s.index(slot))


@gluon.jit
def _accumulate(acc, m, l, q, ring, lo, hi, seq_k, last_n, scale_log2, CAUSAL: gl.constexpr, MASKED: gl.constexpr):
    """Fold the key tiles [lo, hi) into one query tile's online softmax: acc, m (running maximum), l (running sum)."""
    k_s, v_s, kv_full, kv_empty = ring
    STAGES: gl.constexpr = k_s.shape[0]
    BLOCK_N: gl.constexpr = k_s.shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [acc.shape[0] // 16, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = acc.type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    no_s = gl.zeros([acc.shape[0], BLOCK_N], gl.float32, s_layout)
    for tile in range(lo, hi):
        slot = tile % STAGES
        mbarrier.wait(kv_full.index(slot), tile // STAGES & 1)
        k = k_s.index(slot).reshape([BLOCK_N, k_s.shape[4]])
        s = warpgroup_mma(q, k.permute([1, 0]), no_s, use_acc=False, is_async=True)
        # NOTE: all warps wait, so no matmul runs under their softmax; in v10 each warpgroup goes at its own pace.
        s = warpgroup_mma_wait(0, [s])  # [rows, BLOCK_N]
        if MASKED:
            offs_n = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
            visible = (offs_n < seq_k)[None, :]
            if CAUSAL:
                visible = visible & (last_n[:, None] >= offs_n[None, :])
            s = gl.where(visible, s, float("-inf"))
        m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)  # finite: the first tile contains key 0, which every query sees
        p = gl.exp2(s * scale_log2 - m_new[:, None])
        rescale = gl.exp2(m - m_new)  # rescales what was computed with the old maximum
        l = l * rescale + gl.sum(p, 1)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc_layout))[:, None]
        v = v_s.index(slot).reshape([BLOCK_N, v_s.shape[4]])
        acc = warpgroup_mma(gl.convert_layout(p.to(k_s.dtype), p_layout), v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        m = m_new
        mbarrier.arrive(kv_empty.index(slot), count=1)
    return acc, m, l


@gluon.jit
def _producer(load):
    """One warp: load Q, and keep the buffers of K and V full."""
    q_desc, q_s, q_full, batch, head, start_m, kv, ring, n = load
    mbarrier.expect(q_full.index(0), q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [batch, head, start_m, 0], q_full.index(0), q_s.index(0))
    for fill in range(n):
        _load(kv, ring, fill)


@gluon.jit
def _consumer(work, CAUSAL: gl.constexpr):
    """The other warps: compute a CTA's query tile."""
    out_desc, lse_ptr, scale, q_s, o_s, q_full, batch, head, start_m, seq_q, seq_k, diagonal, ring, n = work
    k_s, v_s, kv_full, kv_empty = ring
    ROWS: gl.constexpr = q_s.shape[3]
    BLOCK_N: gl.constexpr = k_s.shape[3]
    HEAD_DIM: gl.constexpr = k_s.shape[4]
    VALUE_DIM: gl.constexpr = v_s.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, VALUE_DIM, 16])
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    # Stage 1: whole tiles that every row sees, without a mask. Stage 2: the diagonal and the ragged end, masked.
    full = (gl.minimum(start_m + diagonal, seq_k) if CAUSAL else seq_k) // BLOCK_N

    offs_m = start_m + gl.arange(0, ROWS, rows)
    acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, acc_layout)
    m = gl.full([ROWS], float("-inf"), gl.float32, rows)
    l = gl.zeros([ROWS], gl.float32, rows)
    # exp(x) = exp2(x * log2(e)), and exp2 is one instruction; never 0, because a masked score, -inf, times 0 is NaN
    scale_log2 = gl.maximum(scale * LOG2_E, 1e-37)
    mbarrier.wait(q_full.index(0), 0)
    q = q_s.index(0).reshape([ROWS, HEAD_DIM])  # stays on the chip
    acc, m, l = _accumulate(acc, m, l, q, ring, 0, full, seq_k, offs_m + diagonal, scale_log2, CAUSAL, False)
    acc, m, l = _accumulate(acc, m, l, q, ring, full, n, seq_k, offs_m + diagonal, scale_log2, CAUSAL, True)

    out = acc / gl.convert_layout(l, gl.SliceLayout(1, acc_layout))[:, None]  # [ROWS, VALUE_DIM]
    o_s.index(0).reshape([ROWS, VALUE_DIM]).store(out.to(q_s.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [batch, head, start_m, 0], o_s.index(0))
    gl.store(lse_ptr + offs_m, (m + gl.log2(l)) / LOG2_E, mask=offs_m < seq_q)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "seq_q", "seq_k", "diagonal"])
def _forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, scale,
    heads, heads_per_kv, seq_q, seq_k, diagonal,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    tiles_m = gl.cdiv(seq_q, BLOCK_M)
    tile, batch_head = tile_and_head(tiles_m, gl.cdiv(seq_k, heads_per_kv), 2 * (HEAD_DIM + VALUE_DIM), CAUSAL)  # K, V
    start_m = (tiles_m - 1 - tile) * BLOCK_M
    batch = batch_head // heads
    head = batch_head % heads
    n = gl.cdiv(gl.minimum(start_m + BLOCK_M + diagonal, seq_k) if CAUSAL else seq_k, BLOCK_N)

    q_s = gl.allocate_shared_memory(q_desc.dtype, [1, 1, 1, BLOCK_M, HEAD_DIM], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, VALUE_DIM], v_desc.layout)
    if VALUE_DIM == HEAD_DIM:
        o_s = q_s  # Q is no longer needed when O is done
    else:
        o_s = gl.allocate_shared_memory(q_desc.dtype, [1, 1, 1, BLOCK_M, VALUE_DIM], out_desc.layout)
    q_full = new_barriers(1, 1)
    kv_full, kv_empty = new_ring(STAGES, 1, 1)
    ring = (k_s, v_s, kv_full, kv_empty)

    lse_ptr += batch_head.to(gl.int64) * seq_q
    kv = (k_desc, v_desc, batch, head // heads_per_kv)
    work = (out_desc, lse_ptr, scale, q_s, o_s, q_full, batch, head, start_m, seq_q, seq_k, diagonal, ring, n)
    load = (q_desc, q_s, q_full, batch, head, start_m, kv, ring, n)
    # An SM has 65,536 registers, 512 for each thread of a warpgroup. The producer keeps 24 per thread, and the consumers get
    # the rest.
    gl.warp_specialize([(_consumer, (work, CAUSAL)), (_producer, (load,))], [1], [24])


# By the larger head dimension: query rows per tile, keys per tile, buffers of K and V.
TILES = {16: (256, 64, 6), 32: (256, 64, 6), 64: (256, 64, 6), 128: (128, 128, 2), 256: (128, 64, 2)}


@replayed
def forward(q, k, v, *, causal, scale, diagonal=0):
    """Attention output and log-sum-exp; see `common.operator` for shapes, dtypes and errors. Falls back to v7 for float32.

    Raises:
        Unavailable: the GPU is not a Hopper GPU.
    """
    require_hopper(__package__)
    if q.dtype == torch.float32:
        return forward_of_v7(q, k, v, causal=causal, scale=scale, diagonal=diagonal)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    out = empty_rows(q, value_dim)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if scale < 0:
        q, scale = -q, -scale  # the scores stay the same; now their maximum can be taken before scaling
    q, k, v = addressable(q), addressable(k), addressable(v)
    block_m, block_n, stages = TILES[max(head_dim, value_dim)]
    _forward_kernel[triton.cdiv(seq_q, block_m) * batch * heads,](
        describe_tile(q, block_m), describe_tile(k, block_n), describe_tile(v, block_n), describe_tile(out, block_m), lse,
        scale, heads, heads // kv_heads, seq_q, seq_k, diagonal,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=block_m, BLOCK_N=block_n, STAGES=stages, CAUSAL=causal,
        num_warps=block_m // 16, maxnreg={128: 168, 256: 96}[block_m],
    )  # fmt: skip
    return out, lse
