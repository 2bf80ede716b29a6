"""FlashAttention-3 backward (arXiv 2407.08608, section 3.1 and appendix B), warp-specialized, in Gluon, for Hopper.

S, dP and the exponentials are computed once, for dK, dV and dQ, so a pair of tiles takes five matmuls. With a separate kernel
for dQ, it would take seven. In return, dQ is a sum in memory, to which key tiles add in any order.

The query tiles of all heads that share keys form one sequence of steps, and the steps that need a mask come first. So two loops
take the tiles of all heads. A loop loads the next steps' tiles while it computes, so only its first steps wait for memory. Two
loops for each head would wait at each head.

Two consumers have 64 keys each and wait neither for each other nor for dQ. So one consumer's matmuls run while the other
computes P and dS. A step's dQ is a sum over the keys of both, for which consumers would have to meet. So a third warpgroup
computes dQ from their dS.
"""

from typing import NamedTuple

import torch
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
    ROWS,
    async_reduce_add,
    describe_rows,
    describe_tile,
    matrix,
    new_barriers,
    new_ring,
    require_hopper,
    slot_and_phase,
    wait_empty,
    wait_full,
    wgmma_layout,
    widened,
)
from common.layout import cdiv, empty_rows
from common.runtime import num_sms
from stages.shortbwd10_packed_backward.backward import backward as backward_of_shortbwd
from stages.v6_tile_order.backward import backward as backward_of_v6

from .backward_packed import packed_backward
from .backward_prepare import _finish_kernel, _prepare_kernel
from .backward_scheduler import CONSUMERS, Problem, _query_tile, _tile
from .backward_splits import query_splits_of, splits_of
from .backward_wide_dkv import _wide_dkv_kernel
from .backward_wide_dq import _wide_dq_kernel

# dQ's accumulator lies in the order of registers (`_add_dq`), because rows of dQ would cause bank conflicts in shared memory.
SUM_COLUMNS = 256  # it is cut into rows of this length, the longest that TMA takes


class Tensors(NamedTuple):
    """Tensors in global memory."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    do: tma.tensor_descriptor
    stats: tma.tensor_descriptor  # for each query tile: log2(e) * LSE, then delta
    sums: tma.tensor_descriptor  # dQ's accumulator
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor


class KeysValues(NamedTuple):
    """Buffers in shared memory: K and V, then dK and dV until TMA has stored them."""

    k: gl.shared_memory_descriptor  # [CONSUMERS, 1, 1, ROWS, HEAD_DIM]
    v: gl.shared_memory_descriptor  # [CONSUMERS, 1, 1, ROWS, VALUE_DIM]
    full: gl.shared_memory_descriptor  # a barrier, TMA → consumers: K and V have arrived
    dk_full: gl.shared_memory_descriptor  # barriers, consumer → producer: dK is where K was
    dv_full: gl.shared_memory_descriptor  # barriers, consumer → producer: dV is where V was


class Ring(NamedTuple):
    """The tiles of a step in shared memory: a ring buffer with STAGES slots."""

    q: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_M, HEAD_DIM]
    do: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_M, VALUE_DIM]
    stats: gl.shared_memory_descriptor  # [STAGES, 2, BLOCK_M]: log2(e) * LSE and delta, loaded ahead, so no step waits for them
    q_full: gl.shared_memory_descriptor  # barriers, TMA → consumers: Q and the statistics have arrived
    do_full: gl.shared_memory_descriptor  # barriers, TMA → consumers: dO has arrived
    empty: gl.shared_memory_descriptor  # barriers, consumers → producer: Q, dO and the statistics have been read


class DsRing(NamedTuple):
    """A ring in shared memory: dS for the matmul of dQ, and parts of dQ until TMA has added them.

    dS has STAGES slots, so the consumers can compute a step's dS while dQ's warpgroup reads that of the step before.
    """

    ds: gl.shared_memory_descriptor  # [STAGES * CONSUMERS, ROWS, BLOCK_M]
    dq: gl.shared_memory_descriptor  # [PARTS, ...], in register order, which has no bank conflicts
    full: gl.shared_memory_descriptor  # barriers, consumers → dQ's warpgroup: dS has been written
    empty: gl.shared_memory_descriptor  # barriers, dQ's warpgroup → consumers: dS has been read


@gluon.jit
def _load(tensors, tile, ring, step):
    """Start to load a step's Q and dO, with LSE and delta, when the consumers have released the buffers."""
    head, number, row = _query_tile(step, tile)
    where = [tile.batch, head, number * ring.q.shape[3], 0]
    slot = wait_empty(ring.empty, step)
    mbarrier.expect(ring.q_full.index(slot), tensors.q.block_type.nbytes + tensors.stats.block_type.nbytes)
    tma.async_copy_global_to_shared(tensors.q, where, ring.q_full.index(slot), ring.q.index(slot))
    tma.async_copy_global_to_shared(tensors.stats, [row * 2, 0], ring.q_full.index(slot), ring.stats.index(slot))
    mbarrier.expect(ring.do_full.index(slot), tensors.do.block_type.nbytes)
    tma.async_copy_global_to_shared(tensors.do, where, ring.do_full.index(slot), ring.do.index(slot))


@gluon.jit
def _add_dq(tensors, ds_ring, slot, kv, row):
    """Compute a step's contribution to dQ, and let TMA add it to dQ's accumulator."""
    BLOCK_M: gl.constexpr = ds_ring.ds.shape[2]
    HEAD_DIM: gl.constexpr = kv.k.shape[4]
    PARTS: gl.constexpr = ds_ring.dq.shape[0]
    COLUMNS: gl.constexpr = BLOCK_M * HEAD_DIM // PARTS // 64  # of a part, because this warpgroup has few registers
    SUM_ROWS: gl.constexpr = tensors.sums.block_shape[0]
    layout: gl.constexpr = wgmma_layout(ROWS, COLUMNS)
    zeros = gl.zeros([64, COLUMNS], gl.float32, layout)
    # A part has 64 rows, as many as a warpgroup's matmul, because the order of the registers repeats every 64 rows.
    for part in gl.static_range(PARTS):
        dq = zeros
        for w in gl.static_range(CONSUMERS):
            ds_t = ds_ring.ds.index(slot * CONSUMERS + w).slice(part * COLUMNS // HEAD_DIM * 64, 64, dim=1)
            k = matrix(kv.k.index(w)).slice(part * COLUMNS % HEAD_DIM, COLUMNS, dim=1)
            dq = warpgroup_mma(ds_t.permute([1, 0]), k, dq, use_acc=w > 0, is_async=True)  # dQ += dS K
        dq = warpgroup_mma_wait(0, [dq])  # [64, COLUMNS]
        if part == PARTS - 1:  # all parts have read dS
            mbarrier.arrive(ds_ring.empty.index(slot), count=1)
        # In the order of the registers, a warp writes 512 consecutive bytes. Rows would put several threads on the same bank.
        dq = dq.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
        tma.store_wait(PARTS - 1)  # the part's buffer is free; TMA may still read the other parts
        ds_ring.dq.index(part).store(dq.reshape(tensors.sums.block_shape))
        fence_async_shared()
        async_reduce_add(tensors.sums, [(row * PARTS + part) * SUM_ROWS, 0], ds_ring.dq.index(part))


@gluon.jit
def _accumulate(
    dk, dv, k, v, scale_log2, tile, ring, ds_ring, lo, hi, w: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add the contribution of the steps [lo, hi) to a consumer's dk and dv, and store its dS for dQ. P and dS are computed
    transposed, so that they enter the matmuls for dV and dK from registers."""
    STAGES: gl.constexpr = ring.q.shape[0]
    BLOCK_M: gl.constexpr = ring.q.shape[3]
    s_layout: gl.constexpr = wgmma_layout(ROWS, BLOCK_M)
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv.type.layout, k_width=2)
    ds_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, s_layout)
    if MASKED:
        # The first query that sees each key. For a key past the end it is 2**30, so that no query sees the key.
        offs_n = w * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        seen_from = gl.where(offs_n < tile.keys, tile.start_n + offs_n - tile.diagonal if CAUSAL else 0, 2**30)
    for step in range(lo, hi):
        slot, phase = slot_and_phase(step, STAGES)
        q = matrix(ring.q.index(slot))
        do = matrix(ring.do.index(slot))
        mbarrier.wait(ring.q_full.index(slot), phase)
        s_t = warpgroup_mma(k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)  # Sᵀ = K Qᵀ
        s_t = warpgroup_mma_wait(0, [s_t])  # [keys, queries]
        lse_log2 = ring.stats.index(slot).slice(0, 1).load(s_layout)  # [1, queries]
        p_t = s_t * scale_log2 - lse_log2
        if MASKED:
            _, number, _ = _query_tile(step, tile)
            offs_m = number * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, s_layout))
            p_t = gl.where(offs_m[None, :] >= seen_from[:, None], p_t, float("-inf"))
        # Two matmuls in flight, as below, leave few registers. This wait takes no time, because none is in flight here. Without
        # it, the compiler spills more registers.
        p_t = warpgroup_mma_wait(0, [gl.exp2(p_t).to(q.dtype)])
        mbarrier.wait(ring.do_full.index(slot), phase)
        # Two matmuls at once: dPᵀ first, because dS needs it. dV runs while the consumer waits for dS's slot and computes dS.
        dp_t = warpgroup_mma(v, do.permute([1, 0]), zeros, use_acc=False, is_async=True)  # dPᵀ = V dOᵀ
        dv = warpgroup_mma(gl.convert_layout(p_t, p_layout), do, dv, is_async=True)  # dV += Pᵀ dO
        mbarrier.wait(ds_ring.empty.index(slot), phase ^ 1)
        dp_t = warpgroup_mma_wait(1, [dp_t])  # [keys, queries]
        delta = ring.stats.index(slot).slice(1, 1).load(s_layout)  # [1, queries]
        ds_t = (widened(p_t) * (dp_t - delta)).to(q.dtype)
        ds_ring.ds.index(slot * CONSUMERS + w).store(ds_t)
        fence_async_shared()
        dk = warpgroup_mma(gl.convert_layout(ds_t, ds_layout), q, dk, is_async=True)  # dK += dSᵀ Q
        mbarrier.arrive(ds_ring.full.index(slot), count=1)  # after dK has started, because four warps meet here
        dk, dv = warpgroup_mma_wait(0, [dk, dv])
        mbarrier.arrive(ring.empty.index(slot), count=1)
    return dk, dv


@gluon.jit
def _producer(tensors, tile, kv, ring):
    """Run on one warp: load K and V, then Q and dO through a ring, and store dK and dV. So no consumer waits for its stores."""
    # NOTE: the consumers idle until K and V arrive; shortbwd3 loads K and V while the previous tile is computed.
    mbarrier.expect(kv.full.index(0), CONSUMERS * (tensors.k.block_type.nbytes + tensors.v.block_type.nbytes))
    for w in gl.static_range(CONSUMERS):
        where = [tile.batch, tile.kv_head, tile.start_n + w * ROWS, 0]
        tma.async_copy_global_to_shared(tensors.k, where, kv.full.index(0), kv.k.index(w))
        tma.async_copy_global_to_shared(tensors.v, where, kv.full.index(0), kv.v.index(w))
    for step in range(tile.steps):
        _load(tensors, tile, ring, step)
    for w in gl.static_range(CONSUMERS):
        mbarrier.wait(kv.dv_full.index(w), 0)
        where = [tile.batch, tile.kv_head, tile.start_n + w * ROWS, 0]
        tma.async_copy_shared_to_global(tensors.dv, where, kv.v.index(w))
    for w in gl.static_range(CONSUMERS):
        mbarrier.wait(kv.dk_full.index(w), 0)
        where = [tile.batch, tile.kv_head, tile.start_n + w * ROWS, 0]
        tma.async_copy_shared_to_global(tensors.dk, where, kv.k.index(w))
    tma.store_wait(0)


@gluon.jit
def _consumer(tile, kv, ring, ds_ring, problem, w: gl.constexpr, CAUSAL: gl.constexpr):
    """Run on a warpgroup: compute dK and dV of the w-th 64 keys of the CTA, and keep them in registers."""
    BLOCK_M: gl.constexpr = ring.q.shape[3]
    HEAD_DIM: gl.constexpr = kv.k.shape[4]
    VALUE_DIM: gl.constexpr = kv.v.shape[4]
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, wgmma_layout(ROWS, HEAD_DIM))
    dv = gl.zeros([ROWS, VALUE_DIM], gl.float32, wgmma_layout(ROWS, VALUE_DIM))
    k = matrix(kv.k.index(w))
    v = matrix(kv.v.index(w))
    scale_log2 = problem.scale * LOG2_E
    mbarrier.wait(kv.full.index(0), 0)
    # With a causal mask, the first query tiles may see only the first consumer's keys. The second consumer has its own pace, so
    # it skips them. It only hands over dS = 0, because dQ's warpgroup waits for the dS of both.
    unseen = tile.unseen * w
    for step in range(unseen):
        # Without this wait, the next wait for Q would return at once, because an earlier phase has the same parity.
        slot = wait_full(ring.q_full, step)
        wait_empty(ds_ring.empty, step)
        ds_ring.ds.index(slot * CONSUMERS + w).store(gl.zeros([ROWS, BLOCK_M], ring.q.dtype, wgmma_layout(ROWS, BLOCK_M)))
        fence_async_shared()
        mbarrier.arrive(ds_ring.full.index(slot), count=1)
        mbarrier.arrive(ring.empty.index(slot), count=1)
    # The diagonal needs a mask. So do keys past the end: their p may be infinite, and infinity times 0 is NaN.
    dk, dv = _accumulate(dk, dv, k, v, scale_log2, tile, ring, ds_ring, unseen, tile.masked, w, CAUSAL, MASKED=True)
    dk, dv = _accumulate(dk, dv, k, v, scale_log2, tile, ring, ds_ring, tile.masked, tile.steps, w, CAUSAL, MASKED=False)

    # No other step reads V and K, so dV and dK go into their buffers, and TMA stores them from there.
    v.store(dv.to(kv.v.dtype))
    fence_async_shared()
    mbarrier.arrive(kv.dv_full.index(w), count=1)
    wait_full(ds_ring.empty, tile.steps - 1)  # dQ's warpgroup has read K for the last time
    k.store((dk * problem.scale).to(kv.k.dtype))
    fence_async_shared()
    mbarrier.arrive(kv.dk_full.index(w), count=1)


@gluon.jit
def _dq_consumer(tensors, tile, kv, ds_ring):
    """Run on a warpgroup: compute dQ from the consumers' dS, so that the consumers wait neither for dQ's matmul nor for TMA."""
    for step in range(tile.steps):
        _, _, row = _query_tile(step, tile)
        slot = wait_full(ds_ring.full, step)  # dS was computed after K arrived
        _add_dq(tensors, ds_ring, slot, kv, row)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kv_heads", "seq_q", "seq_k", "diagonal"])  # compile once for all lengths
def _backward_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, sums_desc, dk_desc, dv_desc, scale,
    kv_heads, heads_per_kv, seq_q, seq_k, diagonal,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    HEAD_DIM: gl.constexpr = q_desc.block_shape[3]
    VALUE_DIM: gl.constexpr = v_desc.block_shape[3]
    q_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], q_desc.layout)
    do_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, VALUE_DIM], do_desc.layout)
    stats_s = gl.allocate_shared_memory(gl.float32, [STAGES, 2, BLOCK_M], stats_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [CONSUMERS, 1, 1, ROWS, VALUE_DIM], v_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], q_desc.dtype)
    ds_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES * CONSUMERS, ROWS, BLOCK_M], ds_layout)
    PARTS: gl.constexpr = BLOCK_M * HEAD_DIM // (sums_desc.block_shape[0] * sums_desc.block_shape[1])
    dq_s = gl.allocate_shared_memory(gl.float32, [PARTS] + sums_desc.block_shape, sums_desc.layout)
    dk_full = new_barriers(CONSUMERS, 1)
    dv_full = new_barriers(CONSUMERS, 1)
    q_full, q_do_empty = new_ring(STAGES, 1, CONSUMERS)
    do_full = new_barriers(STAGES, 1)
    ds_full, ds_empty = new_ring(STAGES, CONSUMERS, 1)

    tensors = Tensors(q_desc, k_desc, v_desc, do_desc, stats_desc, sums_desc, dk_desc, dv_desc)
    problem = Problem(kv_heads, heads_per_kv, seq_q, seq_k, diagonal, scale, None, None)
    tile = _tile(problem, BLOCK_M, HEAD_DIM, VALUE_DIM, CAUSAL)  # a CTA has one tile, which all roles get
    ring = Ring(q_s, do_s, stats_s, q_full, do_full, q_do_empty)
    ds_ring = DsRing(ds_s, dq_s, ds_full, ds_empty)
    kv = KeysValues(k_s, v_s, new_barriers(1, 1), dk_full, dv_full)
    gl.warp_specialize(
        [(_consumer, (tile, kv, ring, ds_ring, problem, 0, CAUSAL)),
         (_consumer, (tile, kv, ring, ds_ring, problem, 1, CAUSAL)),
         (_dq_consumer, (tensors, tile, kv, ds_ring)),
         (_producer, (tensors, tile, kv, ring))],
        [4, 4, 1],
        [208, 64, 24],  # registers: 4 × maxnreg = 512 = 216 (the first role gets the rest) + 208 + 64 + 24
    )  # fmt: skip


def backward(grad_out, q, k, v, out, lse, *, causal, scale, diagonal=0, starts=None):
    """Return the gradients of q, k and v. `common.operator` lists shapes, dtypes and errors.

    This falls back to v6 for float32, whose tiles take twice the space. Up to D = 128, it also falls back under
    `torch.use_deterministic_algorithms`, because key tiles add to dQ in any order. Packed sequences fall back to the track
    `shortbwd` up to D = 128, and for float32, which it refuses.
    """
    require_hopper(__package__)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    wide = max(head_dim, value_dim) == 256
    if starts:
        run = packed_backward if wide and q.dtype != torch.float32 else backward_of_shortbwd
        return run(grad_out, q, k, v, out, lse, causal=causal, scale=scale, starts=starts)
    if q.dtype == torch.float32 or (not wide and torch.are_deterministic_algorithms_enabled()):
        return backward_of_v6(grad_out, q, k, v, out, lse, causal=causal, scale=scale, diagonal=diagonal)
    dq, dk, dv = empty_rows(q), empty_rows(k), empty_rows(v)
    block_m = 64 if max(head_dim, value_dim) >= 128 else 128  # the most rows of S and dP that fit in registers beside dK and dV
    columns = min(64, head_dim)  # dQ leaves a CTA in parts of 64 rows and this many columns: up to 32 of 64 registers
    tiles_m = cdiv(seq_q, block_m) * batch * heads
    stats = lse.new_empty(tiles_m * 2, block_m)
    sums = None if wide else lse.new_empty(tiles_m * block_m * head_dim // SUM_COLUMNS, SUM_COLUMNS)
    tiles_n = cdiv(seq_k, 64) * batch * kv_heads
    # With few K/V heads, key tiles leave SMs idle. So several CTAs share each, and add dK and dV in float32, in any order.
    splits, chunks, dk_sums, dv_sums = 1, None, None, None
    # With few queries, query tiles leave SMs idle. So several CTAs share the keys of each, and add their dQ.
    query_tiles = cdiv(seq_q, 128) * batch * heads
    query_splits, dq_sums = 1, None
    if wide and not torch.are_deterministic_algorithms_enabled():
        splits = splits_of(tiles_n, heads // kv_heads, seq_q, seq_k, causal, diagonal, num_sms())
        query_splits = query_splits_of(query_tiles, seq_q, seq_k, causal, diagonal, num_sms())
    if max(splits, query_splits) > 1:
        rows_q, rows_k = tiles_m * 64 * (query_splits > 1), tiles_n * 64 * (splits > 1)
        sizes = rows_q * head_dim, rows_k * head_dim, rows_k * value_dim
        sums, chunks = lse.new_empty(sum(sizes)), sum(sizes) // 1024  # of 1024 elements; see `_prepare_kernel`
        dq_sums, dk_sums, dv_sums = (part if len(part) else None for part in sums.split(sizes))
    _prepare_kernel[tiles_m,](
        describe(out, block_m, value_dim), describe(grad_out, block_m, value_dim), lse, stats, sums, chunks, heads, seq_q,
        None, None, HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=block_m,
    )  # fmt: skip
    if wide:
        _wide_dkv_kernel[tiles_n * splits,](
            describe_tile(q, 64), describe_tile(k, 64), describe_tile(v, 64), describe_tile(grad_out, 64),
            describe_rows(stats, 2), describe_tile(dk, 64), describe_tile(dv, 64), dk_sums, dv_sums,
            None, None, None, scale, kv_heads, heads // kv_heads, seq_q, seq_k, diagonal, splits if splits > 1 else None,
            BLOCK_M=block_m, STAGES=2, CAUSAL=causal, num_warps=4, maxnreg=168,
        )  # fmt: skip
        _wide_dq_kernel[query_tiles * query_splits,](
            describe_tile(q, 64), describe_tile(k, 64), describe_tile(v, 64), describe_tile(grad_out, 64), stats,
            describe_tile(dq, 64), dq_sums, None, None, scale, kv_heads, heads // kv_heads, seq_q, seq_k, diagonal,
            query_splits if query_splits > 1 else None,
            HEAD_DIM=head_dim, VALUE_DIM=value_dim, K_STAGES=2, V_STAGES=1, CAUSAL=causal, num_warps=4, maxnreg=168,
        )  # fmt: skip
        for sums, gradient in ((dq_sums, dq), (dk_sums, dk), (dv_sums, dv)):
            if sums is not None:  # CTAs have added to it in float32; round it
                columns = gradient.shape[3]
                _finish_kernel[len(sums) // (64 * columns),](
                    sums, gradient, *gradient.stride()[:3], 1.0, *gradient.shape[1:3], HEAD_DIM=columns, BLOCK_M=64
                )
        return dq, dk, dv
    _backward_kernel[cdiv(seq_k, 128) * batch * kv_heads,](
        describe_tile(q, block_m), describe_tile(k, 64), describe_tile(v, 64), describe_tile(grad_out, block_m),
        describe_rows(stats, 2), describe_rows(sums, 64 * columns // SUM_COLUMNS),
        describe_tile(dk, 64), describe_tile(dv, 64), scale,
        kv_heads, heads // kv_heads, seq_q, seq_k, diagonal,
        BLOCK_M=block_m, STAGES=2, CAUSAL=causal, num_warps=4, maxnreg=128,
    )  # fmt: skip
    _finish_kernel[tiles_m,](
        sums, dq, *dq.stride()[:3], scale, heads, seq_q, HEAD_DIM=head_dim, BLOCK_M=block_m,
    )  # fmt: skip
    return dq, dk, dv
