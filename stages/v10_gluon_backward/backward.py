"""FlashAttention-2 backward (arXiv 2307.08691, Algorithm 2) in one kernel, in Gluon, for Hopper."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from common.kernels.descriptors import describe
from common.kernels.hopper import (
    LOG2_E,
    async_reduce_add,
    describe_tile,
    new_barriers,
    require_hopper,
    slot_and_phase,
    widened,
)
from common.kernels.order import tile_and_head
from common.layout import empty_rows
from stages.v6_tile_order.backward import backward as backward_of_v6

DELTA_ROWS = 64  # rows per program of the delta kernel
KEYS = gl.constexpr(128)  # number of keys of a CTA; their dK and dV stay in registers


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


class Tensors(NamedTuple):
    """Tensors in global memory."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    do: tma.tensor_descriptor
    lse: gl.tensor  # pointer to [B, H, Sq]
    delta: gl.tensor  # pointer to [B, H, Sq]
    sums: tma.tensor_descriptor  # dQ's accumulator
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor


class Tile(NamedTuple):
    """A work tile: KEYS keys of one head, and the query tiles that see them."""

    batch: gl.tensor
    kv_head: gl.tensor
    head: gl.tensor  # the first of the query heads that share these keys
    batch_head: gl.tensor  # batch * H + head
    heads_per_kv: gl.tensor  # number of query heads that share these keys
    start_n: gl.tensor  # the first key
    keys: gl.tensor  # number of keys from start_n on
    diagonal: gl.tensor  # with a causal mask, query i sees key j if j <= i + diagonal
    first: gl.tensor  # the first query tile that sees one of the keys
    seq_q: gl.tensor
    steps: gl.tensor  # number of query tiles from `first` on, of all these query heads
    masked: gl.tensor  # number of steps at the start that need a mask


class KeysValues(NamedTuple):
    """Buffers in shared memory: K and V, then dK and dV until TMA has stored them."""

    k: gl.shared_memory_descriptor  # [1, 1, 1, KEYS, HEAD_DIM]
    v: gl.shared_memory_descriptor  # [1, 1, 1, KEYS, VALUE_DIM]
    full: gl.shared_memory_descriptor  # a barrier: K and V have arrived


class Ring(NamedTuple):
    """Q and dO in shared memory: a ring buffer with STAGES slots."""

    q: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_M, HEAD_DIM]
    do: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_M, VALUE_DIM]
    q_full: gl.shared_memory_descriptor  # a barrier for each slot: Q has arrived
    do_full: gl.shared_memory_descriptor  # a barrier for each slot: dO has arrived


class DsRing(NamedTuple):
    """Buffers in shared memory: dS for the matmul of dQ, and parts of dQ until TMA has added them to dQ's accumulator."""

    ds: gl.shared_memory_descriptor  # [1, KEYS, BLOCK_M]
    dq: gl.shared_memory_descriptor  # [PARTS, 1, 1, 64, HEAD_DIM]


@gluon.jit
def _query_tile(step, tile):
    """Return the head and the query tile of a step, and where that head begins in LSE and delta.

    The steps take one query tile of each query head that shares the keys, then the next query tile of each head.
    """
    shared = step % tile.heads_per_kv
    number = tile.first + step // tile.heads_per_kv
    return tile.head + shared, number, (tile.batch_head + shared).to(gl.int64) * tile.seq_q


@gluon.jit
def _load(tensors, tile, ring, step):
    """Start to load a step's Q and dO into free buffers."""
    STAGES: gl.constexpr = ring.q.shape[0]
    slot, _ = slot_and_phase(step, STAGES)
    head, number, _ = _query_tile(step, tile)
    where = [tile.batch, head, number * ring.q.shape[3], 0]
    mbarrier.expect(ring.q_full.index(slot), tensors.q.block_type.nbytes)
    tma.async_copy_global_to_shared(tensors.q, where, ring.q_full.index(slot), ring.q.index(slot))
    mbarrier.expect(ring.do_full.index(slot), tensors.do.block_type.nbytes)
    tma.async_copy_global_to_shared(tensors.do, where, ring.do_full.index(slot), ring.do.index(slot))


@gluon.jit
def _add_dq(tensors, ds_ring, kv, tile, head, start_m):
    """Compute a step's contribution to dQ, and let TMA add it to dQ's accumulator."""
    HEAD_DIM: gl.constexpr = kv.k.shape[4]
    PARTS: gl.constexpr = ds_ring.dq.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HEAD_DIM // 2, 16])
    zeros = gl.zeros([64, HEAD_DIM], gl.float32, layout)
    for part in gl.static_range(PARTS):
        ds_t = ds_ring.ds.index(0).slice(part * 64, 64, dim=1)
        k = kv.k.index(0).reshape([KEYS, HEAD_DIM])
        dq = warpgroup_mma(ds_t.permute([1, 0]), k, zeros, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, [dq])  # [64, HEAD_DIM]
        tma.store_wait(PARTS - 1)
        # NOTE: threads of a warp store to different rows in the same banks; v12 stores dQ in register order.
        ds_ring.dq.index(part).reshape([64, HEAD_DIM]).store(dq)
        fence_async_shared()
        where = [tile.batch, head, start_m + part * 64, 0]
        async_reduce_add(tensors.sums, where, ds_ring.dq.index(part))


@gluon.jit
def _accumulate(
    dk, dv, k, v, scale_log2, tensors, tile, kv, ring, ds_ring, lo, hi, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add the contribution of the steps [lo, hi) to one K/V tile's dk and dv, and to dq in memory. P and dS are computed
    transposed, so that they enter the matmuls for dV and dK from registers."""
    STAGES: gl.constexpr = ring.q.shape[0]
    ROWS: gl.constexpr = dk.shape[0]
    BLOCK_M: gl.constexpr = ring.q.shape[3]
    HEAD_DIM: gl.constexpr = ring.q.shape[4]
    VALUE_DIM: gl.constexpr = ring.do.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_M, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv.type.layout, k_width=2)
    ds_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    of_columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    row_layout: gl.constexpr = gl.BlockedLayout([1], [32], [ROWS // 16], [0])  # layout of loads: one row per thread
    dtype: gl.constexpr = ring.q.dtype
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, s_layout)
    if MASKED:
        # The first query that sees each key. For a key past the end it is 2**30, so that no query sees the key.
        offs_n = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        seen_from = gl.where(offs_n < tile.keys, tile.start_n + offs_n - tile.diagonal if CAUSAL else 0, 2**30)
    for step in range(lo, hi):
        slot, phase = slot_and_phase(step, STAGES)
        head, number, row = _query_tile(step, tile)
        offs_m = number * BLOCK_M + gl.arange(0, BLOCK_M, row_layout)
        q = ring.q.index(slot).reshape([BLOCK_M, HEAD_DIM])
        do = ring.do.index(slot).reshape([BLOCK_M, VALUE_DIM])
        mbarrier.wait(ring.q_full.index(slot), phase)
        s_t = warpgroup_mma(k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)
        s_t = warpgroup_mma_wait(0, [s_t])  # [keys, queries]
        # NOTE: the warps load LSE and delta themselves and wait for them; in v11 TMA loads them with Q.
        lse_log2 = gl.load(tensors.lse + row + offs_m, mask=offs_m < tile.seq_q, other=float("inf")) * LOG2_E  # no query: p = 0
        p_t = s_t * scale_log2 - gl.convert_layout(lse_log2, of_columns)[None, :]
        if MASKED:
            p_t = gl.where(gl.convert_layout(offs_m, of_columns)[None, :] >= seen_from[:, None], p_t, float("-inf"))
        p_t = gl.exp2(p_t).to(dtype)
        mbarrier.wait(ring.do_full.index(slot), phase)
        dv = warpgroup_mma(gl.convert_layout(p_t, p_layout), do, dv, is_async=True)
        dv = warpgroup_mma_wait(0, [dv])
        dp_t = warpgroup_mma(v, do.permute([1, 0]), zeros, use_acc=False, is_async=True)
        dp_t = warpgroup_mma_wait(0, [dp_t])  # [keys, queries]
        delta = gl.load(tensors.delta + row + offs_m, mask=offs_m < tile.seq_q, other=0.0)
        ds_t = (widened(p_t) * (dp_t - gl.convert_layout(delta, of_columns)[None, :])).to(dtype)
        ds_ring.ds.index(0).store(ds_t)
        fence_async_shared()
        dk = warpgroup_mma(gl.convert_layout(ds_t, ds_layout), q, dk, is_async=True)
        dk = warpgroup_mma_wait(0, [dk])
        if step + STAGES < tile.steps:
            _load(tensors, tile, ring, step + STAGES)
        _add_dq(tensors, ds_ring, kv, tile, head, number * BLOCK_M)
    return dk, dv


@gluon.jit
def _consumer(tensors, tile, kv, ring, ds_ring, scale, CAUSAL: gl.constexpr):
    """Compute a CTA's part of the gradients."""
    ROWS: gl.constexpr = kv.k.shape[3]
    HEAD_DIM: gl.constexpr = kv.k.shape[4]
    VALUE_DIM: gl.constexpr = kv.v.shape[4]
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, HEAD_DIM, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, VALUE_DIM, 16])
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, dk_layout)
    dv = gl.zeros([ROWS, VALUE_DIM], gl.float32, dv_layout)
    k = kv.k.index(0).reshape([ROWS, HEAD_DIM])
    v = kv.v.index(0).reshape([ROWS, VALUE_DIM])
    scale_log2 = scale * LOG2_E
    mbarrier.wait(kv.full.index(0), 0)
    # The diagonal needs a mask. So do keys past the end: their p may be infinite, and infinity times 0 is NaN.
    dk, dv = _accumulate(dk, dv, k, v, scale_log2, tensors, tile, kv, ring, ds_ring, 0, tile.masked, CAUSAL, True)
    dk, dv = _accumulate(dk, dv, k, v, scale_log2, tensors, tile, kv, ring, ds_ring, tile.masked, tile.steps, CAUSAL, False)

    # dV and dK go into the buffers of V and K, and TMA stores them from there.
    v.store(dv.to(kv.v.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(tensors.dv, [tile.batch, tile.kv_head, tile.start_n, 0], kv.v.index(0))
    k.store((dk * (scale_log2 / LOG2_E)).to(kv.k.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(tensors.dk, [tile.batch, tile.kv_head, tile.start_n, 0], kv.k.index(0))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kv_heads", "seq_q", "seq_k", "diagonal"])
def _backward_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, sums_desc, dk_desc, dv_desc, scale,
    kv_heads, heads_per_kv, seq_q, seq_k, diagonal,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    tiles_m = gl.cdiv(seq_q, BLOCK_M)
    ROW_BYTES: gl.constexpr = 6 * HEAD_DIM + 2 * VALUE_DIM  # bytes of a query's Q, dQ accumulator and dO
    tile_n, batch_head = tile_and_head(gl.cdiv(seq_k, KEYS), seq_q, ROW_BYTES, CAUSAL)
    start_n = tile_n * KEYS
    batch = batch_head // kv_heads
    kv_head = batch_head % kv_heads
    first = 0  # the first query tile that sees one of these keys; if no tile does, the last tile, with all scores masked
    masked = 0  # number of query tiles, from `first` on, that need a mask
    if CAUSAL:
        first = gl.minimum(gl.maximum(start_n - diagonal, 0) // BLOCK_M, tiles_m - 1)
        full = gl.cdiv(gl.maximum(start_n + KEYS - 1 - diagonal, 0), BLOCK_M)  # the first query tile that sees every key
        masked = gl.minimum(full, tiles_m) - first
    tiles = tiles_m - first
    masked = gl.where(start_n + KEYS > seq_k, tiles, masked)

    q_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], q_desc.layout)
    do_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, VALUE_DIM], do_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [1, 1, 1, KEYS, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [1, 1, 1, KEYS, VALUE_DIM], v_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK_M], q_desc.dtype)
    ds_s = gl.allocate_shared_memory(q_desc.dtype, [1, KEYS, BLOCK_M], ds_layout)
    dq_s = gl.allocate_shared_memory(gl.float32, [BLOCK_M // 64] + sums_desc.block_shape, sums_desc.layout)
    kv_full = new_barriers(1, 1)
    q_full = new_barriers(STAGES, 1)
    do_full = new_barriers(STAGES, 1)

    tensors = Tensors(q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, sums_desc, dk_desc, dv_desc)
    tile = Tile(
        batch, kv_head, kv_head * heads_per_kv, batch_head * heads_per_kv, heads_per_kv, start_n, seq_k - start_n, diagonal,
        first, seq_q, tiles * heads_per_kv, masked * heads_per_kv,
    )  # fmt: skip
    ring = Ring(q_s, do_s, q_full, do_full)
    ds_ring = DsRing(ds_s, dq_s)
    kv = KeysValues(k_s, v_s, kv_full)
    mbarrier.expect(kv_full.index(0), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [batch, kv_head, start_n, 0], kv_full.index(0), k_s.index(0))
    tma.async_copy_global_to_shared(v_desc, [batch, kv_head, start_n, 0], kv_full.index(0), v_s.index(0))
    for step in range(gl.minimum(tile.steps, STAGES)):  # `_consumer` loads the other query tiles
        _load(tensors, tile, ring, step)
    _consumer(tensors, tile, kv, ring, ds_ring, scale, CAUSAL)


def backward(grad_out, q, k, v, out, lse, *, causal, scale, diagonal=0):
    """Return the gradients of q, k and v. `common.operator` lists shapes, dtypes and errors.

    This falls back to v6 for float32 and under `torch.use_deterministic_algorithms`, because CTAs add to dQ in any order.
    It also falls back for D or Dv = 256.
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
    _backward_kernel[triton.cdiv(seq_k, 128) * batch * kv_heads,](
        describe_tile(q, block_m), describe_tile(k, 128), describe_tile(v, 128), describe_tile(grad_out, block_m),
        lse, delta, describe_tile(sums, 64),
        describe_tile(dk, 128), describe_tile(dv, 128), scale,
        kv_heads, heads // kv_heads, seq_q, seq_k, diagonal,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=block_m, STAGES=2, CAUSAL=causal, num_warps=8,
    )  # fmt: skip
    torch.mul(sums, scale, out=dq)
    return dq, dk, dv
