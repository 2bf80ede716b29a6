"""v14's forward with split keys (Flash-Decoding) where tiles do not fill the GPU, and with the query heads of a K/V head in
one tile, in Gluon, for Hopper."""

import functools
from math import ceil
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from common.kernels.descriptors import addressable
from common.kernels.hopper import describe_tile, new_barriers, new_ring, require_hopper, slot_and_phase, store_rows
from common.kernels.replay import replayed
from common.operator import empty_rows
from common.runtime import num_sms
from stages.v7_one_backward.forward import forward as forward_of_v7

LOG2_E = gl.constexpr(1.4426950408889634)
FEW_TILES = gl.constexpr(8)  # up to so many key tiles rows rarely fail, and a second tile in the guess costs most
ROWS = gl.constexpr(64)  # query rows of a consumer, as many as a warpgroup's wgmma has


class Tensors(NamedTuple):
    """Tensors in global memory: a descriptor each, a pointer to LSE."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    out: tma.tensor_descriptor
    out_ptr: gl.tensor | None  # pointer, if the first query tile starts before query 0
    lse: gl.tensor  # pointer to [B, H, Sq]; with splits, to [splits, B, H, Sq]
    part: gl.tensor  # with splits, pointer to their outputs, [splits, B, H, Sq, VALUE_DIM]
    counter: gl.tensor  # number of tiles taken after each CTA's first
    failed: gl.tensor  # Flags


class Flags(NamedTuple):
    """Pointers to int32 flags, which are parts of one tensor."""

    any_failed: gl.tensor  # 1: the second launch has work
    tile_failed: gl.tensor  # one for each tile and split


class Problem(NamedTuple):
    """Sizes that all CTAs share."""

    batch_heads: gl.tensor  # B * H
    heads: gl.tensor
    heads_per_kv: gl.tensor
    group: gl.tensor  # heads whose tiles follow each other
    tiles_m: gl.tensor  # query tiles of a head
    seq_q: gl.tensor
    seq_k: gl.tensor
    diagonal: gl.tensor  # with a causal mask, query i sees key j where j <= i + diagonal
    splits: gl.tensor
    scale: gl.tensor


class Tile(NamedTuple):
    """A work tile: BLOCK_M query rows of one head, and the key tiles that they see."""

    batch_head: gl.tensor  # batch * H + head
    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    start_m: gl.tensor  # its first query row
    split: gl.tensor  # which part of the keys
    keys: gl.tensor  # number of key tiles


class Queries(NamedTuple):
    """Q in shared memory, and O on its way out."""

    q: gl.shared_memory_descriptor  # [Q_STAGES * CONSUMERS, 1, 1, 64, HEAD_DIM]
    o: gl.shared_memory_descriptor  # [Q_STAGES * CONSUMERS, 1, 1, 64, VALUE_DIM]
    full: gl.shared_memory_descriptor  # a barrier for each slot: Q has arrived
    empty: gl.shared_memory_descriptor  # O has left the slot


class Ring(NamedTuple):
    """K and V in shared memory: a ring buffer with STAGES slots."""

    k: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_N, HEAD_DIM]
    v: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_N, VALUE_DIM]
    full: gl.shared_memory_descriptor  # a barrier for each slot: K and V have arrived
    empty: gl.shared_memory_descriptor  # all consumers have read K and V


class NextTiles(NamedTuple):
    """The numbers of tiles, which the producer passes on to the consumers."""

    number: gl.shared_memory_descriptor  # [Q_STAGES, 1]
    full: gl.shared_memory_descriptor  # a barrier for each slot: the number has been written


@gluon.jit
def _rows_before(diagonal, PACKED: gl.constexpr):
    """Return how many rows the first tile starts before query 0. Then all rows of a consumer see keys up to the same tile."""
    return diagonal % (ROWS // PACKED) * PACKED


@gluon.jit
def _share(tiles, split, splits, SPLIT: gl.constexpr):
    """Return how many key tiles a split has: number `split`, and every `splits`-th one after it. CTAs that run together thus
    read neighbouring keys."""
    return gl.cdiv(gl.maximum(tiles - split, 0), splits) if SPLIT else tiles


@gluon.jit
def _tile(
    number, problem,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Return the work tile with a number. A split without key tiles loads one and does not use it.

    Tiles of `group` heads follow each other, so that the K and V of these heads stay in the L2 cache; with a mask the longest
    tiles, of the last rows, come first.
    """
    split = 0
    if SPLIT:
        split = number % problem.splits
        number = number // problem.splits
    first = number // (problem.group * problem.tiles_m) * problem.group
    inside = number % (problem.group * problem.tiles_m)
    group = gl.minimum(problem.group, problem.batch_heads - first)
    start_m = inside // group * BLOCK_M
    seq_k = problem.seq_k
    if CAUSAL:
        start_m = (problem.tiles_m - 1) * BLOCK_M - start_m - _rows_before(problem.diagonal, PACKED)
        seq_k = gl.minimum(seq_k, (start_m + BLOCK_M) // PACKED + problem.diagonal)
    keys = _share(gl.cdiv(seq_k, BLOCK_N), split, problem.splits, SPLIT)
    if SPLIT:
        keys = gl.maximum(keys, 1)
    batch_head = first + inside % group
    head = batch_head % problem.heads
    return Tile(batch_head, batch_head // problem.heads, head, head // problem.heads_per_kv, start_m, split, keys)


@gluon.jit
def _place(row, problem, PACKED: gl.constexpr):
    """Return where a row of a tile lies among the rows of the tile's PACKED heads, which follow each other in memory."""
    return row % PACKED * (problem.seq_q // PACKED) + row // PACKED


@gluon.jit
def _seen(start_m, problem, BLOCK_N: gl.constexpr, PACKED: gl.constexpr, CAUSAL: gl.constexpr):
    """Return how many key tiles the rows of a consumer see, which start at start_m."""
    return gl.cdiv(
        gl.minimum((start_m + ROWS) // PACKED + problem.diagonal, problem.seq_k) if CAUSAL else problem.seq_k, BLOCK_N
    )


@gluon.jit
def _row(batch, head, row, PACKED: gl.constexpr):
    """Return the coordinates of a tile's row in Q and O."""
    return [batch, head, row // PACKED, 0, 0] if PACKED > 1 else [batch, head, row, 0]


@gluon.jit
def _flags(failed_ptr):
    """Return the parts of the flags in memory."""
    return Flags(failed_ptr, failed_ptr + 1)


@gluon.jit
def _next_failed(number, tiles, flags):
    """Return the first failed tile among `number`, `number` + number of CTAs, …"""
    while gl.load(flags.tile_failed + number, mask=number < tiles, other=1) == 0:
        number += gl.num_programs(0)
    return number


@gluon.jit
def _load(tensors, tile, ring, fill, start_n, step, K: gl.constexpr, V: gl.constexpr):
    """Start to load the next slot of the ring, when the consumers have released it. It holds two tiles that one step uses
    together: K of the key tile at start_n, and V of the tile one `step` after that one."""
    STAGES: gl.constexpr = ring.k.shape[0]
    NBYTES: gl.constexpr = (tensors.k.block_type.nbytes if K else 0) + (tensors.v.block_type.nbytes if V else 0)
    slot, phase = slot_and_phase(fill, STAGES)
    mbarrier.wait(ring.empty.index(slot), phase ^ 1)
    mbarrier.expect(ring.full.index(slot), NBYTES)
    if K:
        where = [tile.batch, tile.kv_head, start_n, 0]
        tma.async_copy_global_to_shared(tensors.k, where, ring.full.index(slot), ring.k.index(slot))
    if V:
        where = [tile.batch, tile.kv_head, start_n + step, 0]
        tma.async_copy_global_to_shared(tensors.v, where, ring.full.index(slot), ring.v.index(slot))


@gluon.jit
def _scores(q, ring, fill, ROWS: gl.constexpr):
    """Start to compute the scores of a key tile, once its K has arrived."""
    STAGES: gl.constexpr = ring.k.shape[0]
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    no_s = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    slot, phase = slot_and_phase(fill, STAGES)
    mbarrier.wait(ring.full.index(slot), phase)
    k = ring.k.index(slot).reshape([BLOCK_N, ring.k.shape[4]])
    return warpgroup_mma(q, k.permute([1, 0]), no_s, use_acc=False, is_async=True)


@gluon.jit
def _sums(p):
    """Sum each row of p into four parts, one for each of the four threads that hold it, so that no thread waits for another."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _accumulate(
    acc, s, q, ring, fill, tiles, start_n, problem, last, scale_log2,
    CONSUMERS: gl.constexpr, PACKED: gl.constexpr, MODE: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A consumer's online softmax over `tiles` key tiles, from the last one, at start_n, backwards; its scores s are in flight.

    Returns acc, whose matmul for the first tile is still in flight, m (maximum) and l (sum).
    """
    STAGES: gl.constexpr = ring.k.shape[0]
    ROWS: gl.constexpr = acc.shape[0]
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = acc.type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    s = warpgroup_mma_wait(0, [s])  # [rows, BLOCK_N]
    slot, phase = slot_and_phase(fill, STAGES)
    mbarrier.arrive(ring.empty.index(slot), count=1)
    # Only the last tile can pass the last key or contain the diagonal. The first query tile starts `_rows_before` query 0. So
    # the number of keys that a consumer's rows see is a multiple of ROWS // PACKED.
    if CAUSAL or start_n + BLOCK_N > problem.seq_k:
        offs_n = start_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
        visible = (offs_n < problem.seq_k)[None, :]
        if CAUSAL:
            last_n = last + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout)) // PACKED  # the last key that each row sees
            visible = visible & (last_n[:, None] >= offs_n[None, :])
        s = gl.where(visible, s, float("-inf"))
    m = gl.max(s, 1) * scale_log2  # finite: every row sees the first key of this tile
    first = 1
    if CAUSAL and tiles > FEW_TILES:
        # The upper rows of the diagonal's tile see few keys, so the guess includes the next tile.
        first = 2
        fill += 1
        slot, phase = slot_and_phase(fill, STAGES)
        s_next = warpgroup_mma_wait(0, [_scores(q, ring, fill, ROWS)])
        m = gl.maximum(m, gl.max(s_next, 1) * scale_log2)
        p = gl.exp2(s * scale_log2 - m[:, None])
        l = _sums(p)
        p = gl.convert_layout(p.to(ring.k.dtype), p_layout)
        acc = warpgroup_mma(p, ring.v.index(slot).reshape([BLOCK_N, ring.v.shape[4]]), acc, is_async=True)
        p_next = gl.exp2(s_next * scale_log2 - m[:, None])
        l = l + _sums(p_next)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(ring.empty.index(slot), count=1)
    else:
        p_next = gl.exp2(s * scale_log2 - m[:, None])
        l = _sums(p_next)
    p = gl.convert_layout(p_next.to(ring.k.dtype), p_layout)

    for _ in range(first, tiles):
        # Issue both matmuls together, so that the tensor cores have work while other consumers compute their softmax.
        fill += 1
        slot, phase = slot_and_phase(fill, STAGES)
        s = _scores(q, ring, fill, ROWS)
        acc = warpgroup_mma(p, ring.v.index(slot).reshape([BLOCK_N, ring.v.shape[4]]), acc, is_async=True)
        if CONSUMERS == 2:
            s = warpgroup_mma_wait(1, [s])  # [rows, BLOCK_N]
        else:  # three other consumers' matmuls run under these exponentials: release the buffers before them
            s, acc = warpgroup_mma_wait(0, [s, acc])
            mbarrier.arrive(ring.empty.index(slot), count=1)
        if MODE != "guess":
            m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
            rescale = gl.exp2(m - m_new)  # rescales what was computed with the old maximum
            l = l * gl.convert_layout(rescale, gl.SliceLayout(1, l.type.layout))[:, None]
            m = m_new
        p = gl.exp2(s * scale_log2 - m[:, None])
        l = l + _sums(p)
        if CONSUMERS == 2:
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(ring.empty.index(slot), count=1)
        if MODE != "guess":
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc_layout))[:, None]
        p = gl.convert_layout(p.to(ring.k.dtype), p_layout)

    fill += 1
    slot, phase = slot_and_phase(fill, STAGES)
    mbarrier.wait(ring.full.index(slot), phase)
    acc = warpgroup_mma(p, ring.v.index(slot).reshape([BLOCK_N, ring.v.shape[4]]), acc, is_async=True)
    return acc, m, gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, s_layout))


@gluon.jit
def _producer(
    tensors, queries, ring, next_tiles, problem,
    PACKED: gl.constexpr, SPLIT: gl.constexpr, MODE: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One warp: keep the buffers of Q, K and V full, also for the next tile while the current one ends.

    The first tile is the CTA's number. A counter that all CTAs share gives the others. If keys are split, or MODE is "running",
    the CTA takes tiles in fixed strides. If MODE is "again", it takes failed tiles and splits, in fixed strides.
    """
    if SPLIT:
        gdc_launch_dependents()  # the merge may start: all CTAs are running, and the merge's CTAs fit beside them
    Q_STAGES: gl.constexpr = next_tiles.number.shape[0]
    CONSUMERS: gl.constexpr = queries.q.shape[0] // Q_STAGES
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    fill = 0
    turn = 0
    number = gl.program_id(0)
    tiles = problem.batch_heads * problem.tiles_m * problem.splits
    if MODE == "again":
        number = _next_failed(number, tiles, _flags(tensors.failed))
    while number < tiles:
        tile = _tile(number, problem, BLOCK_M, BLOCK_N, PACKED, SPLIT, CAUSAL)
        step = BLOCK_N * problem.splits if SPLIT else BLOCK_N
        keys = tile.keys
        start_n = tile.split * BLOCK_N + (keys - 1) * step
        for w in gl.static_range(CONSUMERS):
            slot, phase = slot_and_phase(turn, Q_STAGES)
            slot = slot * CONSUMERS + w
            mbarrier.wait(queries.empty.index(slot), phase ^ 1)
            mbarrier.expect(queries.full.index(slot), tensors.q.block_type.nbytes)
            where = _row(tile.batch, tile.head, tile.start_m + w * ROWS, PACKED)
            tma.async_copy_global_to_shared(tensors.q, where, queries.full.index(slot), queries.q.index(slot))
            if w == 0:
                _load(tensors, tile, ring, fill, start_n, step, True, False)
        if MODE == "again":
            number = _next_failed(number + gl.num_programs(0), tiles, _flags(tensors.failed))
        elif SPLIT or MODE == "running":
            number += gl.num_programs(0)
        else:
            number = gl.num_programs(0) + gl.atomic_add(tensors.counter, 1)
        for _ in range(1, keys):
            fill += 1
            start_n -= step
            _load(tensors, tile, ring, fill, start_n, step, True, True)
        _load(tensors, tile, ring, fill + 1, start_n - step, step, False, True)
        fill += 2
        # A number past the last tile is passed on too: it tells the consumers to end.
        slot, phase = slot_and_phase(turn, Q_STAGES)
        next_tiles.number.index(slot).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
        mbarrier.arrive(next_tiles.full.index(slot), count=1)
        turn += 1


@gluon.jit
def _consumer(
    tensors, queries, ring, next_tiles, problem, w: gl.constexpr,
    PACKED: gl.constexpr, SPLIT: gl.constexpr, MODE: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A warpgroup that computes the w-th 64 query rows of each tile."""
    Q_STAGES: gl.constexpr = next_tiles.number.shape[0]
    CONSUMERS: gl.constexpr = queries.q.shape[0] // Q_STAGES
    STAGES: gl.constexpr = ring.k.shape[0]
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    HEAD_DIM: gl.constexpr = ring.k.shape[4]
    VALUE_DIM: gl.constexpr = ring.v.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, VALUE_DIM, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    # With Q in registers, the matmul need not read Q from shared memory for every key tile. Two consumers have enough registers
    # for this, four do not.
    Q_IN_REGISTERS: gl.constexpr = CONSUMERS == 2 and HEAD_DIM <= 128
    # exp(x) = exp2(x * log2(e)), and exp2 is one instruction; never 0, because a masked score, -inf, times 0 is NaN
    scale_log2 = gl.maximum(problem.scale * LOG2_E, 1e-37)
    fill = 0
    turn = 0
    number = gl.program_id(0)
    tiles = problem.batch_heads * problem.tiles_m * problem.splits
    if MODE == "again":
        number = _next_failed(number, tiles, _flags(tensors.failed))
    while number < tiles:
        done = number
        tile = _tile(number, problem, BLOCK_M, BLOCK_N, PACKED, SPLIT, CAUSAL)
        start_m = tile.start_m + w * ROWS
        seen = _seen(start_m, problem, BLOCK_N, PACKED, CAUSAL)

        offs_m = start_m + gl.arange(0, ROWS, rows)
        last = start_m // PACKED + problem.diagonal  # the last key of the first row
        nothing = False
        if SPLIT or MODE == "running":  # such a consumer computes one tile, which is not used
            seen = gl.minimum(_share(seen, tile.split, problem.splits, SPLIT), tile.keys)
            nothing = (seen <= 0) | (start_m >= problem.seq_q)
            seen = gl.where(nothing, 1, seen)
            last = gl.where(nothing, 2**30, last)
        acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, acc_layout)
        slot, phase = slot_and_phase(turn, Q_STAGES)
        own = slot * CONSUMERS + w  # this consumer's slot of `queries`
        mbarrier.wait(queries.full.index(own), phase)
        q_buffer = queries.q.index(own).reshape([ROWS, HEAD_DIM])
        q = q_buffer.load(q_layout) if Q_IN_REGISTERS else q_buffer
        for _ in range(tile.keys - seen):  # skip key tiles that only the CTA's later consumers see
            kv_slot, kv_phase = slot_and_phase(fill, STAGES)
            mbarrier.wait(ring.full.index(kv_slot), kv_phase)
            mbarrier.arrive(ring.empty.index(kv_slot), count=1)
            fill += 1
        s = _scores(q, ring, fill, ROWS)
        if Q_STAGES == 2:
            # TMA has stored the last tile's O from the other buffer, so the next Q may arrive there.
            tma.store_wait(0)
            slot, phase = slot_and_phase(turn + 1, Q_STAGES)
            mbarrier.arrive(queries.empty.index(slot * CONSUMERS + w), count=1, pred=turn > 0)
        start_n = (tile.split + (seen - 1) * problem.splits) * BLOCK_N
        acc, m, l = _accumulate(
            acc, s, q, ring, fill, seen, start_n, problem, last, scale_log2, CONSUMERS, PACKED, MODE, CAUSAL
        )
        fill += seen

        lse = gl.where(nothing, float("-inf"), (m + gl.log2(l)) / LOG2_E)
        part = (tile.split * problem.batch_heads + tile.batch_head).to(gl.int64) * problem.seq_q
        gl.store(tensors.lse + part + _place(offs_m, problem, PACKED), lse, mask=(offs_m >= 0) & (offs_m < problem.seq_q))
        normalize = gl.convert_layout(1.0 / l, gl.SliceLayout(1, acc_layout))[:, None]
        slot, phase = slot_and_phase(turn, Q_STAGES)
        mbarrier.wait(next_tiles.full.index(slot), phase)
        number = gl.max(next_tiles.number.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        acc = warpgroup_mma_wait(0, [acc])
        kv_slot, kv_phase = slot_and_phase(fill, STAGES)
        mbarrier.arrive(ring.empty.index(kv_slot), count=1)
        fill += 1
        if MODE == "guess":
            # An infinite P, or an overflowing sum, makes l or part of a row of O infinite or NaN.
            fails = ~(gl.abs(gl.sum(acc, 1) + gl.convert_layout(l, gl.SliceLayout(1, acc_layout))) < float("inf"))
            same = gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, acc_layout))
            flags = _flags(tensors.failed)
            gl.store(flags.any_failed + same, 1, mask=fails)
            gl.store(flags.tile_failed + done + same, 1, mask=fails)
        batch, head = tile.batch_head // problem.heads, tile.batch_head % problem.heads  # only now: saves registers
        if SPLIT and problem.splits > 1:
            offs_o = start_m + gl.arange(0, ROWS, gl.SliceLayout(1, acc_layout))
            offs_d = gl.arange(0, VALUE_DIM, gl.SliceLayout(0, acc_layout))
            part_ptrs = tensors.part + (part + _place(offs_o, problem, PACKED))[:, None] * VALUE_DIM
            part_o = gl.where(nothing, 0.0, acc * normalize)
            gl.store(part_ptrs + offs_d[None, :], part_o, mask=((offs_o >= 0) & (offs_o < problem.seq_q))[:, None])
        elif tensors.out_ptr is not None and start_m < 0:
            out = (acc * normalize).to(queries.q.dtype)
            store_rows(tensors.out_ptr, tensors.out, batch, head, start_m // PACKED, out)
        else:
            queries.o.index(own).reshape([ROWS, VALUE_DIM]).store((acc * normalize).to(queries.q.dtype))
            fence_async_shared()
            where = _row(batch, head, start_m, PACKED)
            tma.async_copy_shared_to_global(tensors.out, where, queries.o.index(own))
        if Q_STAGES == 1:
            tma.store_wait(0)
            mbarrier.arrive(queries.empty.index(own), count=1)
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch_heads", "heads", "group", "seq_q", "seq_k", "diagonal", "splits"])
def _forward_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, part_ptr, lse_ptr, counter_ptr, failed_ptr, scale,
    batch_heads, heads, heads_per_kv, group, seq_q, seq_k, diagonal, splits,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, MODE: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    tiles_m = gl.cdiv(seq_q + _rows_before(diagonal, PACKED), BLOCK_M)
    if MODE == "again":
        gdc_wait()  # for the first launch
        if gl.load(failed_ptr) == 0:
            return
    q_s = gl.allocate_shared_memory(q_desc.dtype, [Q_STAGES * CONSUMERS] + q_desc.block_shape, q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, VALUE_DIM], v_desc.layout)
    if VALUE_DIM == HEAD_DIM:
        o_s = q_s  # Q is no longer needed when O is done
    else:
        o_s = gl.allocate_shared_memory(q_desc.dtype, [Q_STAGES * CONSUMERS] + out_desc.block_shape, out_desc.layout)
    tile_s = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = new_ring(Q_STAGES * CONSUMERS, 1, 1)  # each consumer has its own buffers
    kv_full, kv_empty = new_ring(STAGES, 1, CONSUMERS)
    tensors = Tensors(q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, part_ptr, counter_ptr, failed_ptr)
    splits = splits if SPLIT else 1
    problem = Problem(batch_heads, heads, heads_per_kv, group, tiles_m, seq_q, seq_k, diagonal, splits, scale)
    queries = Queries(q_s, o_s, q_full, q_empty)
    ring = Ring(k_s, v_s, kv_full, kv_empty)
    next_tiles = NextTiles(tile_s, new_barriers(Q_STAGES, 1))  # no empty barriers: `queries.empty` follows the reading
    # An SM has 65,536 registers, 512 for each thread of a warpgroup. The producer keeps 24 per thread, and the consumers get
    # the rest.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (tensors, queries, ring, next_tiles, problem, 0, PACKED, SPLIT, MODE, CAUSAL)),
             (_consumer, (tensors, queries, ring, next_tiles, problem, 1, PACKED, SPLIT, MODE, CAUSAL)),
             (_producer, (tensors, queries, ring, next_tiles, problem, PACKED, SPLIT, MODE, CAUSAL))],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consumer, (tensors, queries, ring, next_tiles, problem, 0, PACKED, SPLIT, MODE, CAUSAL)),
             (_consumer, (tensors, queries, ring, next_tiles, problem, 1, PACKED, SPLIT, MODE, CAUSAL)),
             (_consumer, (tensors, queries, ring, next_tiles, problem, 2, PACKED, SPLIT, MODE, CAUSAL)),
             (_consumer, (tensors, queries, ring, next_tiles, problem, 3, PACKED, SPLIT, MODE, CAUSAL)),
             (_producer, (tensors, queries, ring, next_tiles, problem, PACKED, SPLIT, MODE, CAUSAL))],
            [4, 4, 4, 1], [112, 112, 112, 24],
        )  # fmt: skip


@gluon.jit(do_not_specialize=["rows", "heads", "seq_q", "splits"])
def _merge_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, stride_ob, stride_oh, stride_om, rows, heads, seq_q, splits,
    VALUE_DIM: gl.constexpr, ROWS: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Merge some rows of out and lse from the splits: their outputs, weighted by exp(lse of the split - lse)."""
    # Each thread holds its columns of all splits, or of a quarter of them. So it can add them without waiting for other
    # threads.
    WARP_ROWS: gl.constexpr = max(1, 128 // VALUE_DIM)
    threads: gl.constexpr = [WARP_ROWS, 1, 32 // WARP_ROWS]
    by_rows: gl.constexpr = gl.BlockedLayout([1, AT_ONCE, 4], threads, [4, 1, 1], [2, 1, 0])
    by_splits: gl.constexpr = gl.BlockedLayout([1, AT_ONCE // 4, 4], threads, [1, 4, 1], [2, 1, 0])
    layout: gl.constexpr = by_rows if ROWS > WARP_ROWS else by_splits
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    of_out: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, layout))
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, of_rows)
    offs_s = gl.arange(0, AT_ONCE, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    offs_d = gl.arange(0, VALUE_DIM, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    gdc_wait()  # for the splits
    m = gl.full([ROWS], float("-inf"), gl.float32, of_rows)
    l = gl.zeros([ROWS], gl.float32, of_rows)
    acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, gl.SliceLayout(1, layout))
    for first in range(0, splits, AT_ONCE):
        part = (first + offs_s).to(gl.int64)[None, :] * rows + row[:, None]
        inside = (first + offs_s < splits)[None, :] & (row < rows)[:, None]
        lse = gl.load(part_lse_ptr + part, mask=inside, other=float("-inf"))
        o = gl.load(part_ptr + (part * VALUE_DIM)[:, :, None] + offs_d[None, None, :], mask=inside[:, :, None], other=0.0)
        m_new = gl.maximum(gl.maximum(m, gl.max(lse, 1)), -1e38)  # finite: some splits have no key for this row
        rescale = gl.exp2((m - m_new) * LOG2_E)
        weight = gl.exp2((lse - m_new[:, None]) * LOG2_E)
        l = l * rescale + gl.sum(weight, 1)
        acc = acc * gl.convert_layout(rescale, of_out)[:, None] + gl.sum(weight[:, :, None] * o, 1)
        m = m_new
    gl.store(lse_ptr + row, m + gl.log2(l) / LOG2_E, mask=row < rows)
    out = acc / gl.convert_layout(l, of_out)[:, None]
    row = gl.convert_layout(row, of_out)
    head = row // seq_q
    offs_o = (head // heads).to(gl.int64) * stride_ob + (head % heads).to(gl.int64) * stride_oh
    offs_o += (row % seq_q).to(gl.int64) * stride_om
    gl.store(out_ptr + offs_o[:, None] + offs_d[None, :], out.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None])


# Bytes of K and V of the heads whose tiles run at the same time. CTAs that read the same K and V at the same time share them
# through the L2 cache. If tiles differ in length, more heads keep the CTAs busy to the end.
L2_SHARE = {"full": 8 * 2**20, "causal": 32 * 2**20}


class Shape(NamedTuple):
    """The sizes of a work tile, and how many of its buffers there are."""

    queries: int  # query rows: 64 for each of two or four consumers
    keys: int  # keys of a key tile
    kv_slots: int  # buffers of K and V
    q_slots: int  # buffers of Q
    maxnreg: int  # registers per thread at the launch; 65,536 for all warps, of which each role then takes its own number


# By the larger head dimension. FEW_ROWS: if there are few rows, where long tiles keep loads of K and V in flight.
TILES = dict.fromkeys((16, 32, 64), Shape(queries=256, keys=64, kv_slots=6, q_slots=2, maxnreg=96)) | {
    128: Shape(queries=128, keys=64, kv_slots=3, q_slots=2, maxnreg=168),
    256: Shape(queries=128, keys=64, kv_slots=2, q_slots=1, maxnreg=168),
}
FEW_ROWS = dict.fromkeys((16, 32, 64), Shape(queries=128, keys=128, kv_slots=3, q_slots=2, maxnreg=168)) | {
    128: Shape(queries=128, keys=128, kv_slots=2, q_slots=2, maxnreg=168),
    256: Shape(queries=128, keys=64, kv_slots=2, q_slots=1, maxnreg=168),
}
FEW_SQUARES = 8  # squares of 128 queries and 128 keys per CTA, up to which FEW_ROWS is used where TILES has 256 rows
# Key tiles per CTA up to which the extra launches take longer than a running maximum.
SHORT = {16: 16, 32: 16, 64: 16, 128: 32, 256: 32}
# Constants of `splits_of`, fitted to times on an H200. The unit is the time in which a CTA reads an element of K or V while few
# others read: 1/30 ns.
CROWDED = 0.75  # extra time if all CTAs read: memory then has the rate of 75 of the 132 CTAs
ROWS_READ = 75  # a tile with more rows computes for longer than it reads keys
MERGE = 75_000  # a launch


@functools.cache
def splits_of(tiles: int, key_tiles: int, rows: int, keys: int, width: int, programs: int) -> int:
    """Return the number of parts of the keys for which query tiles finish soonest: the fewest within 1 % of the best.

    The CTAs take ceil(tiles * splits / programs) rounds of ceil(key_tiles / splits) key tiles. Then one more launch merges the
    parts, whose outputs all CTAs write and read in float32.

    Args:
        tiles: query tiles of all heads, of `rows` rows each.
        key_tiles: key tiles of each, of `keys` keys.
        width: elements per key in K and V together.
        programs: CTAs that run at a time.
    """

    def cost(splits):
        turns = ceil(tiles * splits / programs)
        busy = tiles * splits / (turns * programs)
        key_tile = keys * width * max(1 + CROWDED * busy**2, rows / ROWS_READ)
        parts = 2 * tiles * splits * rows * width * (1 + CROWDED) / programs
        return turns * ceil(key_tiles / splits) * key_tile + (MERGE + parts) * (splits > 1)

    costs = {splits: cost(splits) for splits in range(1, min(key_tiles, programs) + 1)}
    return next(splits for splits, cost in costs.items() if cost <= 1.01 * min(costs.values()))


class Plan(NamedTuple):
    """How a forward's work is divided."""

    shape: Shape
    packed: int  # query heads side by side in a tile
    splits: int
    tiles: int  # of all heads; each is taken once per split
    short: bool  # a running maximum costs less than the extra launches


def plan(batch, heads, kv_heads, seq_q, keys, diagonal, head_dim, value_dim, programs) -> Plan:
    """Return the best plan for `seq_q` queries. The last query sees `keys` keys, and `programs` CTAs run at a time."""
    width = max(head_dim, value_dim)
    per_kv = heads // kv_heads
    together = per_kv if 64 % per_kv == 0 else 1
    rows = seq_q * together
    groups = batch * heads // together
    # Few: a tile has all rows of a K/V head (unless its heads cannot be packed), or tiles of 256 rows would be too few CTAs.
    squares = ceil(rows / 128) * ceil(keys / 128) * groups
    few = rows <= 128 or (TILES[width].queries > 128 and squares <= FEW_SQUARES * programs)
    shape = (FEW_ROWS if few else TILES)[width]
    tiles = ceil(rows / shape.queries) * groups
    key_tiles = ceil(keys / shape.keys)
    splits = 1
    if few or tiles < programs:
        splits = splits_of(tiles, key_tiles, min(rows, shape.queries), shape.keys, head_dim + value_dim, programs)
    if few and key_tiles <= splits and shape.keys > ROWS.value:  # two tiles of half the keys are ready sooner
        shape, key_tiles = shape._replace(keys=shape.keys // 2, kv_slots=shape.kv_slots * 2), key_tiles * 2
    packed = together if few or splits > 1 or tiles < ceil(seq_q / shape.queries) * batch * heads else 1
    before = diagonal % (64 // packed)  # positions
    tiles = ceil((seq_q + before) * packed / shape.queries) * batch * (heads // packed)
    turns = ceil(tiles * splits / programs)
    short = few or turns * ceil(key_tiles / splits) <= SHORT[width]
    return Plan(shape, packed, splits, tiles, short)


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
    keys = min(seq_k, seq_q + diagonal) if causal else seq_k
    cut = plan(batch, heads, kv_heads, seq_q, keys, diagonal, head_dim, value_dim, num_sms())
    packed, splits, tiles = cut.packed, cut.splits, cut.tiles
    shape = cut.shape
    kv_bytes = seq_k * (head_dim + value_dim) * k.element_size()
    per_kv = heads // kv_heads // packed
    group = per_kv * max(1, min(batch * kv_heads, L2_SHARE["causal" if causal else "full"] // kv_bytes))
    queries, outputs, held = q, out, (64,)
    if packed > 1:
        queries, outputs = (t.unflatten(1, (-1, packed)).transpose(2, 3) for t in (q, out))  # [B, H / packed, Sq, packed, D]
        held = 64 // packed, packed
    out_ptr = outputs if diagonal % (64 // packed) else None  # if the first query tile starts before query 0
    kernel = functools.partial(
        _forward_kernel[min(tiles * splits, num_sms()),],
        describe_tile(queries, *held), describe_tile(k, shape.keys), describe_tile(v, shape.keys),
        describe_tile(outputs, *held), out_ptr,
        scale=scale, batch_heads=batch * heads // packed, heads=heads // packed, heads_per_kv=per_kv, group=group,
        seq_q=seq_q * packed, seq_k=seq_k, diagonal=diagonal, splits=splits,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=shape.queries, BLOCK_N=shape.keys,
        STAGES=shape.kv_slots, Q_STAGES=shape.q_slots, PACKED=packed, CAUSAL=causal, num_warps=4, maxnreg=shape.maxnreg,
    )  # fmt: skip
    parts = None, lse
    if splits > 1:
        parts = lse.new_empty(splits, lse.numel(), value_dim), lse.new_empty(splits, lse.numel())
    if cut.short:
        kernel(*parts, None, None, SPLIT=splits > 1, MODE="running")
    else:
        # The counter of tiles that were taken after each CTA's first; a flag if any tile failed; a flag for each tile.
        counter, failed = lse.new_zeros(2 + tiles * splits, dtype=torch.int32).split([1, 1 + tiles * splits])
        for mode in ("guess", "again"):
            kernel(*parts, counter, failed, SPLIT=splits > 1, MODE=mode, launch_pdl=mode == "again")
    if splits > 1:
        own = min(16, 2048 // value_dim)  # splits whose outputs fit into a thread's registers
        at_once = next((n for n in (4, 8, 16) if splits <= n <= own), 4 * own)
        merged = max(1, 128 // value_dim) * (4 if at_once <= own else 1)  # rows per CTA
        _merge_kernel[ceil(lse.numel() / merged),](
            *parts, out, lse, *out.stride()[:3], lse.numel(), heads, seq_q, splits,
            VALUE_DIM=value_dim, ROWS=merged, AT_ONCE=at_once, num_warps=4, launch_pdl=True,
        )  # fmt: skip
    return out, lse
