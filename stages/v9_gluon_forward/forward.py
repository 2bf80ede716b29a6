"""FlashAttention-2 forward (arXiv 2307.08691, Algorithm 1) in Gluon, for Hopper."""

from typing import NamedTuple

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

from common.kernels.hopper import LOG2_E, describe_tile, new_barriers, require_hopper, slot_and_phase
from common.kernels.order import tile_and_head
from common.layout import empty_rows
from stages.v6_tile_order.forward import forward as forward_of_v6


class Tensors(NamedTuple):
    """Tensors in global memory, as TMA descriptors or pointers."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    out: tma.tensor_descriptor
    lse: gl.tensor  # pointer to LSE of this CTA's head


class Problem(NamedTuple):
    """Sizes that all CTAs share."""

    seq_q: gl.tensor
    seq_k: gl.tensor
    diagonal: gl.tensor  # with a causal mask, query i sees key j if j <= i + diagonal
    scale: gl.tensor


class Tile(NamedTuple):
    """A work tile: BLOCK_M query rows of one head, and the key tiles that they see."""

    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    start_m: gl.tensor  # the tile's first query row
    key_tiles: gl.tensor


class Queries(NamedTuple):
    """Buffers in shared memory: Q, and O until TMA has stored it."""

    q: gl.shared_memory_descriptor  # [1, 1, 1, BLOCK_M, HEAD_DIM]
    o: gl.shared_memory_descriptor  # [1, 1, 1, BLOCK_M, VALUE_DIM]
    full: gl.shared_memory_descriptor  # a barrier: Q has arrived


class Ring(NamedTuple):
    """K and V in shared memory: a ring buffer with STAGES slots."""

    k: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_N, HEAD_DIM]
    v: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_N, VALUE_DIM]
    full: gl.shared_memory_descriptor  # a barrier for each slot: K and V have arrived


@gluon.jit
def _load(tensors, tile, ring, fill):
    """Load a key tile's K and V into the ring's next slot. Before the call, all warps must have read the slot's old tiles."""
    STAGES: gl.constexpr = ring.k.shape[0]
    slot, _ = slot_and_phase(fill, STAGES)
    where = [tile.batch, tile.kv_head, fill * ring.k.shape[3], 0]
    mbarrier.expect(ring.full.index(slot), tensors.k.block_type.nbytes + tensors.v.block_type.nbytes)
    tma.async_copy_global_to_shared(tensors.k, where, ring.full.index(slot), ring.k.index(slot))
    tma.async_copy_global_to_shared(tensors.v, where, ring.full.index(slot), ring.v.index(slot))


@gluon.jit
def _accumulate(
    acc, m, l, q, tensors, tile, ring, lo, hi, problem, offs_m, scale_log2, CAUSAL: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Fold the key tiles [lo, hi) into the online softmax of some query rows: acc, m (running maximum), l (running sum)."""
    STAGES: gl.constexpr = ring.k.shape[0]
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [acc.shape[0] // 16, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = acc.type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    no_s = gl.zeros([acc.shape[0], BLOCK_N], gl.float32, s_layout)
    for fill in range(lo, hi):
        slot, phase = slot_and_phase(fill, STAGES)
        mbarrier.wait(ring.full.index(slot), phase)
        k = ring.k.index(slot).reshape([BLOCK_N, ring.k.shape[4]])
        s = warpgroup_mma(q, k.permute([1, 0]), no_s, use_acc=False, is_async=True)
        # NOTE: the warps that compute also load, and all wait for each load; v13 has a warp that loads.
        s = warpgroup_mma_wait(0, [s])  # [rows, BLOCK_N]
        if MASKED:
            offs_n = fill * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
            visible = (offs_n < problem.seq_k)[None, :]
            if CAUSAL:
                visible = visible & ((offs_m + problem.diagonal)[:, None] >= offs_n[None, :])
            s = gl.where(visible, s, float("-inf"))
        m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)  # finite, because the first tile has key 0, which every query sees
        p = gl.exp2(s * scale_log2 - m_new[:, None])
        rescale = gl.exp2(m - m_new)  # factor for the earlier l and acc
        l = l * rescale + gl.sum(p, 1)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc_layout))[:, None]
        v = ring.v.index(slot).reshape([BLOCK_N, ring.v.shape[4]])
        acc = warpgroup_mma(gl.convert_layout(p.to(ring.k.dtype), p_layout), v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        m = m_new
        if fill + STAGES < tile.key_tiles:
            _load(tensors, tile, ring, fill + STAGES)
    return acc, m, l


@gluon.jit
def _consumer(tensors, tile, queries, ring, problem, CAUSAL: gl.constexpr):
    """Compute a CTA's query tile. `_forward_kernel` loads the first STAGES key tiles, `_consumer` the others."""
    ROWS: gl.constexpr = queries.q.shape[3]
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    HEAD_DIM: gl.constexpr = ring.k.shape[4]
    VALUE_DIM: gl.constexpr = ring.v.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, VALUE_DIM, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    # First come whole tiles that every row sees, without a mask. Then come tiles at the diagonal and the last key, with a mask.
    full = (gl.minimum(tile.start_m + problem.diagonal, problem.seq_k) if CAUSAL else problem.seq_k) // BLOCK_N

    offs_m = tile.start_m + gl.arange(0, ROWS, of_rows)
    acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, acc_layout)
    m = gl.full([ROWS], float("-inf"), gl.float32, of_rows)
    l = gl.zeros([ROWS], gl.float32, of_rows)
    # exp(x) = exp2(x * log2(e)), and exp2 is one instruction. Never scale by 0, because a masked score (-inf) times 0 is NaN.
    scale_log2 = gl.maximum(problem.scale * LOG2_E, 1e-37)
    mbarrier.wait(queries.full.index(0), 0)
    q = queries.q.index(0).reshape([ROWS, HEAD_DIM])  # stays on the chip

    acc, m, l = _accumulate(acc, m, l, q, tensors, tile, ring, 0, full, problem, offs_m, scale_log2, CAUSAL, False)
    acc, m, l = _accumulate(acc, m, l, q, tensors, tile, ring, full, tile.key_tiles, problem, offs_m, scale_log2, CAUSAL, True)

    out = acc / gl.convert_layout(l, gl.SliceLayout(1, acc_layout))[:, None]  # [ROWS, VALUE_DIM]
    queries.o.index(0).reshape([ROWS, VALUE_DIM]).store(out.to(queries.q.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(tensors.out, [tile.batch, tile.head, tile.start_m, 0], queries.o.index(0))
    gl.store(tensors.lse + offs_m, (m + gl.log2(l)) / LOG2_E, mask=offs_m < problem.seq_q)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "seq_q", "seq_k", "diagonal"])
def _forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, scale,
    heads, heads_per_kv, seq_q, seq_k, diagonal,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    tiles_m = gl.cdiv(seq_q, BLOCK_M)
    ROW_BYTES: gl.constexpr = 2 * (HEAD_DIM + VALUE_DIM)  # bytes of a key's K and V
    number, batch_head = tile_and_head(tiles_m, gl.cdiv(seq_k, heads_per_kv), ROW_BYTES, CAUSAL)
    start_m = (tiles_m - 1 - number) * BLOCK_M
    head = batch_head % heads
    keys = gl.cdiv(gl.minimum(start_m + BLOCK_M + diagonal, seq_k) if CAUSAL else seq_k, BLOCK_N)

    q_s = gl.allocate_shared_memory(q_desc.dtype, [1, 1, 1, BLOCK_M, HEAD_DIM], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, VALUE_DIM], v_desc.layout)
    if VALUE_DIM == HEAD_DIM:
        o_s = q_s  # Q is no longer needed when O is done
    else:
        o_s = gl.allocate_shared_memory(q_desc.dtype, [1, 1, 1, BLOCK_M, VALUE_DIM], out_desc.layout)

    tensors = Tensors(q_desc, k_desc, v_desc, out_desc, lse_ptr + batch_head.to(gl.int64) * seq_q)
    problem = Problem(seq_q, seq_k, diagonal, scale)
    tile = Tile(batch_head // heads, head, head // heads_per_kv, start_m, keys)
    queries = Queries(q_s, o_s, new_barriers(1, 1))
    ring = Ring(k_s, v_s, new_barriers(STAGES, 1))
    mbarrier.expect(queries.full.index(0), q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [tile.batch, head, start_m, 0], queries.full.index(0), queries.q.index(0))
    for fill in range(gl.minimum(keys, STAGES)):
        _load(tensors, tile, ring, fill)
    _consumer(tensors, tile, queries, ring, problem, CAUSAL)


class Shape(NamedTuple):
    """Sizes of a work tile, and numbers of buffers."""

    queries: int  # query rows
    keys: int  # keys of a key tile
    kv_slots: int  # buffers of K and V


# TILES is indexed by the larger of D and Dv.
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
    if q.dtype == torch.float32:
        return forward_of_v6(q, k, v, causal=causal, scale=scale, diagonal=diagonal)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    out = empty_rows(q, value_dim)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if scale < 0:
        q, scale = -q, -scale  # the scores stay the same, and max(scale * s) = scale * max(s)
    shape = TILES[max(head_dim, value_dim)]
    _forward_kernel[triton.cdiv(seq_q, shape.queries) * batch * heads,](
        describe_tile(q, shape.queries), describe_tile(k, shape.keys), describe_tile(v, shape.keys),
        describe_tile(out, shape.queries), lse,
        scale, heads, heads // kv_heads, seq_q, seq_k, diagonal,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=shape.queries, BLOCK_N=shape.keys, STAGES=shape.kv_slots, CAUSAL=causal,
        num_warps=shape.queries // 16,
    )  # fmt: skip
    return out, lse
