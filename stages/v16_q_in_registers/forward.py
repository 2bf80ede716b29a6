"""FlashAttention-3 forward (arXiv 2407.08608, Algorithm 1), warp-specialized, in Gluon, for Hopper."""

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

from common.kernels.hopper import LOG2_E, ROWS, describe_tile, new_barriers, new_ring, require_hopper, slot_and_phase
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

    q: gl.shared_memory_descriptor  # [CONSUMERS, 1, 1, 64, HEAD_DIM]
    o: gl.shared_memory_descriptor  # [CONSUMERS, 1, 1, 64, VALUE_DIM]
    full: gl.shared_memory_descriptor  # a barrier for each slot: Q has arrived


class Ring(NamedTuple):
    """K and V in shared memory: a ring buffer with STAGES slots."""

    k: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_N, HEAD_DIM]
    v: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_N, VALUE_DIM]
    full: gl.shared_memory_descriptor  # a barrier for each slot: K and V have arrived
    empty: gl.shared_memory_descriptor  # a barrier for each slot: all consumers have read K and V


@gluon.jit
def _load(tensors, tile, ring, fill):
    """Start to load a key tile's K and V into the next buffers of the ring, when the consumers have released these buffers."""
    STAGES: gl.constexpr = ring.k.shape[0]
    slot, phase = slot_and_phase(fill, STAGES)
    where = [tile.batch, tile.kv_head, fill * ring.k.shape[3], 0]
    mbarrier.wait(ring.empty.index(slot), phase ^ 1)
    mbarrier.expect(ring.full.index(slot), tensors.k.block_type.nbytes + tensors.v.block_type.nbytes)
    tma.async_copy_global_to_shared(tensors.k, where, ring.full.index(slot), ring.k.index(slot))
    tma.async_copy_global_to_shared(tensors.v, where, ring.full.index(slot), ring.v.index(slot))


@gluon.jit
def _accumulate(acc, m, l, q, ring, lo, hi, problem, offs_m, scale_log2, CAUSAL: gl.constexpr, MASKED: gl.constexpr):
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
        # NOTE: no matmul of this consumer runs during its softmax; in v22 the previous tile's P V does.
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
        mbarrier.arrive(ring.empty.index(slot), count=1)
    return acc, m, l


@gluon.jit
def _producer(tensors, tile, queries, ring):
    """Run on one warp: load Q, and keep the buffers of K and V full."""
    CONSUMERS: gl.constexpr = queries.q.shape[0]
    for w in gl.static_range(CONSUMERS):
        mbarrier.expect(queries.full.index(w), tensors.q.block_type.nbytes)
        where = [tile.batch, tile.head, tile.start_m + w * ROWS, 0]
        tma.async_copy_global_to_shared(tensors.q, where, queries.full.index(w), queries.q.index(w))
    for fill in range(tile.key_tiles):
        _load(tensors, tile, ring, fill)


@gluon.jit
def _consumer(tensors, tile, queries, ring, problem, w: gl.constexpr, CAUSAL: gl.constexpr):
    """Run on a warpgroup: compute the w-th 64 query rows of the CTA."""
    CONSUMERS: gl.constexpr = queries.q.shape[0]
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    HEAD_DIM: gl.constexpr = ring.k.shape[4]
    VALUE_DIM: gl.constexpr = ring.v.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, VALUE_DIM, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=2)
    of_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    # With Q in registers, the matmul need not read Q from shared memory for every key tile. Up to D = 128, two consumers have
    # enough registers for Q. More consumers do not.
    Q_IN_REGISTERS: gl.constexpr = CONSUMERS == 2 and HEAD_DIM <= 128
    start_m = tile.start_m + w * ROWS
    # First come whole tiles that every row sees, without a mask. Then come tiles at the diagonal and the last key, with a mask.
    # A consumer that ends early never releases the CTA's last tiles. No load needs their slots: they are at most STAGES tiles.
    seen = gl.cdiv(gl.minimum(start_m + ROWS + problem.diagonal, problem.seq_k) if CAUSAL else problem.seq_k, BLOCK_N)
    full = (gl.minimum(start_m + problem.diagonal, problem.seq_k) if CAUSAL else problem.seq_k) // BLOCK_N

    offs_m = start_m + gl.arange(0, ROWS, of_rows)
    acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, acc_layout)
    m = gl.full([ROWS], float("-inf"), gl.float32, of_rows)
    l = gl.zeros([ROWS], gl.float32, of_rows)
    # exp(x) = exp2(x * log2(e)), and exp2 is one instruction. Never scale by 0, because a masked score (-inf) times 0 is NaN.
    scale_log2 = gl.maximum(problem.scale * LOG2_E, 1e-37)
    mbarrier.wait(queries.full.index(w), 0)
    q_buffer = queries.q.index(w).reshape([ROWS, HEAD_DIM])
    q = q_buffer.load(q_layout) if Q_IN_REGISTERS else q_buffer

    acc, m, l = _accumulate(acc, m, l, q, ring, 0, full, problem, offs_m, scale_log2, CAUSAL, False)
    acc, m, l = _accumulate(acc, m, l, q, ring, full, seen, problem, offs_m, scale_log2, CAUSAL, True)

    out = acc / gl.convert_layout(l, gl.SliceLayout(1, acc_layout))[:, None]  # [ROWS, VALUE_DIM]
    queries.o.index(w).reshape([ROWS, VALUE_DIM]).store(out.to(queries.q.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(tensors.out, [tile.batch, tile.head, start_m, 0], queries.o.index(w))
    gl.store(tensors.lse + offs_m, (m + gl.log2(l)) / LOG2_E, mask=offs_m < problem.seq_q)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "seq_q", "seq_k", "diagonal"])
def _forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, scale,
    heads, heads_per_kv, seq_q, seq_k, diagonal,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    tiles_m = gl.cdiv(seq_q, BLOCK_M)
    ROW_BYTES: gl.constexpr = 2 * (HEAD_DIM + VALUE_DIM)  # bytes of a key's K and V
    number, batch_head = tile_and_head(tiles_m, gl.cdiv(seq_k, heads_per_kv), ROW_BYTES, CAUSAL)
    # NOTE: a consumer's diagonal may cross two key tiles; v17 shifts the query tiles, so that it crosses one.
    start_m = (tiles_m - 1 - number) * BLOCK_M
    head = batch_head % heads
    keys = gl.cdiv(gl.minimum(start_m + BLOCK_M + diagonal, seq_k) if CAUSAL else seq_k, BLOCK_N)

    q_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, VALUE_DIM], v_desc.layout)
    if VALUE_DIM == HEAD_DIM:
        o_s = q_s  # Q is no longer needed when O is done
    else:
        o_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, VALUE_DIM], out_desc.layout)
    q_full = new_barriers(CONSUMERS, 1)  # each consumer has its own slot
    kv_full, kv_empty = new_ring(STAGES, 1, CONSUMERS)

    tensors = Tensors(q_desc, k_desc, v_desc, out_desc, lse_ptr + batch_head.to(gl.int64) * seq_q)
    problem = Problem(seq_q, seq_k, diagonal, scale)
    tile = Tile(batch_head // heads, head, head // heads_per_kv, start_m, keys)
    queries = Queries(q_s, o_s, q_full)
    ring = Ring(k_s, v_s, kv_full, kv_empty)
    # An SM has 65,536 registers, and a warpgroup has 128 threads. So the registers per thread, summed over all warpgroups, are
    # at most 512. The last list has the registers per thread of all roles except the first. The producer gets 24. The first
    # role runs on the launch's `num_warps` warps and gets the rest.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (tensors, tile, queries, ring, problem, 0, CAUSAL)),
             (_consumer, (tensors, tile, queries, ring, problem, 1, CAUSAL)),
             (_producer, (tensors, tile, queries, ring))],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consumer, (tensors, tile, queries, ring, problem, 0, CAUSAL)),
             (_consumer, (tensors, tile, queries, ring, problem, 1, CAUSAL)),
             (_consumer, (tensors, tile, queries, ring, problem, 2, CAUSAL)),
             (_consumer, (tensors, tile, queries, ring, problem, 3, CAUSAL)),
             (_producer, (tensors, tile, queries, ring))],
            [4, 4, 4, 1], [112, 112, 112, 24],
        )  # fmt: skip


class Shape(NamedTuple):
    """Sizes of a work tile, and numbers of buffers."""

    queries: int  # query rows: 64 for each of two or four consumers
    keys: int  # keys of a key tile
    kv_slots: int  # buffers of K and V
    maxnreg: int  # registers per thread at the launch, before the roles divide the registers anew


# TILES is indexed by the larger of D and Dv.
TILES = dict.fromkeys((16, 32, 64), Shape(queries=256, keys=64, kv_slots=6, maxnreg=96)) | {
    128: Shape(queries=128, keys=128, kv_slots=2, maxnreg=168),
    256: Shape(queries=128, keys=64, kv_slots=2, maxnreg=168),
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
        describe_tile(q, 64), describe_tile(k, shape.keys), describe_tile(v, shape.keys), describe_tile(out, 64), lse,
        scale, heads, heads // kv_heads, seq_q, seq_k, diagonal,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=shape.queries, BLOCK_N=shape.keys, STAGES=shape.kv_slots, CAUSAL=causal,
        num_warps=4, maxnreg=shape.maxnreg,
    )  # fmt: skip
    return out, lse
