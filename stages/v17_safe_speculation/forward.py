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
LATELY = gl.constexpr(128)  # tiles, about as many as run at a time: if a quarter of them failed, most others will too
LOOKED_AT = gl.constexpr(512)  # flags that a warp loads at once
ROWS = gl.constexpr(64)  # query rows of a consumer, as many as a warpgroup's wgmma has


class Tensors(NamedTuple):
    """Tensors in global memory: a descriptor each, a pointer to LSE."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    first: tma.tensor_descriptor  # the first keys' K
    out: tma.tensor_descriptor
    out_ptr: gl.tensor | None  # pointer, if the first query tile starts before query 0
    lse: gl.tensor  # pointer to [B, H, Sq]; with splits, to [splits, B, H, Sq]
    part: gl.tensor  # with splits, pointer to their outputs, [splits, B, H, Sq, VALUE_DIM]
    counter: gl.tensor  # number of tiles taken after each CTA's first
    failed: gl.tensor  # Flags


class Flags(NamedTuple):
    """Pointers to int32 flags, which are parts of one tensor."""

    any_failed: gl.tensor  # 1: the second launch has work
    sample_failed: gl.tensor  # LATELY
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
    first: gl.shared_memory_descriptor  # the first keys' K, [Q_STAGES * CONSUMERS, 1, 1, FIRST_KEYS, HEAD_DIM]
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

    number: gl.shared_memory_descriptor  # [Q_STAGES + 1, 1]
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
def _add(a, b):
    return a + b


@gluon.jit
def _begun(tiles, counter_ptr):
    """Return an upper bound of the tile numbers that the first launch has started; its counter goes on in this launch."""
    return gl.minimum(gl.num_programs(0) + gl.load(counter_ptr), tiles)


@gluon.jit
def _flags(failed_ptr):
    """Return the parts of the flags in memory."""
    return Flags(failed_ptr, failed_ptr + 1, failed_ptr + 1 + LATELY)


@gluon.jit
def _leave(number, flags):
    """Leave a tile to the second launch, as if it had failed."""
    gl.store(flags.any_failed, 1)
    gl.store(flags.tile_failed + number, 1)


@gluon.jit
def _next_failed(number, others, begun, flags):
    """Search from tile `number` on: skip `others` failed tiles and return the next failed one, or at least `begun` if there is
    none."""
    offs = gl.arange(0, LOOKED_AT, gl.BlockedLayout([LOOKED_AT // 32], [32], [1], [0]))
    while (others >= 0) & (number < begun):
        failed = gl.load(flags.tile_failed + number + offs, mask=number + offs < begun, other=0)
        number += gl.sum((gl.associative_scan(failed, 0, _add) <= others).to(gl.int32), 0)
        others -= gl.sum(failed, 0)
    return number


@gluon.jit
def _next_again(failed, others, begun, counter_ptr, flags):
    """Return where `_next_failed` ended, and the tile to take: the failed tile that it found, or else a tile that never
    started."""
    failed = _next_failed(failed, others, begun, flags)
    number = failed
    if failed >= begun:
        number = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)
    return failed, number


@gluon.jit
def _in_vain(number, tiles, flags):
    """Return whether, of the LATELY tiles that started a round before this one, more than a quarter failed. The samples
    count as the tiles before the first."""
    before = gl.maximum(number + 1 - LATELY, 0) + gl.arange(0, LATELY, gl.BlockedLayout([LATELY // 32], [32], [1], [0]))
    failed = gl.load(flags.sample_failed + before, mask=before - LATELY < tiles, other=0, volatile=True)
    return gl.sum(failed, 0) * 4 > LATELY


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
def _maxima(s):
    """Four maxima of each row of s, one per thread, as in `_sums`."""
    return gl.max(gl.max(s.reshape([s.shape[0], s.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _visible(s, start_n, seq_k, last, PACKED: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the scores s of the key tile at start_n, with -inf for masked keys. `last`: the last key that row 0 sees."""
    offs_n = start_n + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    visible = (offs_n < seq_k)[None, :]
    if CAUSAL:
        last_n = last + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout)) // PACKED  # the last key that each row sees
        visible = visible & (last_n[:, None] >= offs_n[None, :])
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def _accumulate(
    acc, s, q, k_first, ring, fill, tiles, start_n, problem, last, sees_first, scale_log2,
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
    if MODE != "guess":
        s = warpgroup_mma_wait(0, [s])  # [rows, BLOCK_N]
    else:
        FIRST_KEYS: gl.constexpr = k_first.shape[0]
        first_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, FIRST_KEYS, 16])
        s_first = gl.zeros([ROWS, FIRST_KEYS], gl.float32, first_layout)
        s_first = warpgroup_mma(q, k_first.permute([1, 0]), s_first, use_acc=False, is_async=True)
        s, s_first = warpgroup_mma_wait(0, [s, s_first])
    slot, phase = slot_and_phase(fill, STAGES)
    mbarrier.arrive(ring.empty.index(slot), count=1)
    # Only the last tile can pass the last key or contain the diagonal. The first query tile starts `_rows_before` query 0. So
    # the number of keys that a consumer's rows see is a multiple of ROWS // PACKED.
    if CAUSAL or start_n + BLOCK_N > problem.seq_k:
        s = _visible(s, start_n, problem.seq_k, last, PACKED, CAUSAL)
    maxima = _maxima(s)
    if MODE == "guess":
        # The guess includes the first keys: an attention sink is one of them, and the upper rows of the diagonal's tile see few
        # others.
        of_first = gl.where(sees_first, _maxima(s_first), float("-inf"))
        maxima = gl.maximum(maxima, gl.convert_layout(of_first, maxima.type.layout))
    # Finite: every row sees the first key of this tile.
    m = gl.convert_layout(gl.max(maxima, 1), gl.SliceLayout(1, s_layout)) * scale_log2
    p = gl.exp2(s * scale_log2 - m[:, None])
    l = _sums(p)
    p = gl.convert_layout(p.to(ring.k.dtype), p_layout)

    for _ in range(1, tiles):
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
def _pass_on(number, next_tiles, slot):
    """Tell the consumers a tile's number; one past the last tile tells them to end."""
    next_tiles.number.index(slot).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(next_tiles.full.index(slot), count=1)


@gluon.jit
def _producer(
    tensors, queries, ring, next_tiles, problem,
    PACKED: gl.constexpr, SPLIT: gl.constexpr, MODE: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One warp: keep the buffers of Q, K and V full, also for the next tile while the current one ends.

    The first tile is the CTA's number. A counter that all CTAs share gives the others, unless too many tiles fail. If MODE is
    "again", the CTA takes failed tiles. If MODE is "running", its tiles follow each other in strides of the number of CTAs.
    """
    if MODE != "running":
        flags = _flags(tensors.failed)
    gdc_launch_dependents()  # all CTAs are running, so the next launch may start its CTAs when these end, or beside them
    Q_STAGES: gl.constexpr = next_tiles.number.shape[0] - 1
    CONSUMERS: gl.constexpr = queries.q.shape[0] // Q_STAGES
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    NBYTES: gl.constexpr = tensors.q.block_type.nbytes + (tensors.first.block_type.nbytes if MODE == "guess" else 0)
    fill = 0
    turn = 0
    number = gl.program_id(0)
    tiles = problem.batch_heads * problem.tiles_m * problem.splits
    if MODE == "again":
        begun = _begun(tiles, tensors.counter)
        failed, number = _next_again(gl.to_tensor(0), number, begun, tensors.counter, flags)
        _pass_on(number, next_tiles, Q_STAGES)
    while number < tiles:
        tile = _tile(number, problem, BLOCK_M, BLOCK_N, PACKED, SPLIT, CAUSAL)
        step = BLOCK_N * problem.splits if SPLIT else BLOCK_N
        keys = tile.keys
        start_n = tile.split * BLOCK_N + (keys - 1) * step
        for w in gl.static_range(CONSUMERS):
            slot, phase = slot_and_phase(turn, Q_STAGES)
            slot = slot * CONSUMERS + w
            mbarrier.wait(queries.empty.index(slot), phase ^ 1)
            mbarrier.expect(queries.full.index(slot), NBYTES)
            where = _row(tile.batch, tile.head, tile.start_m + w * ROWS, PACKED)
            tma.async_copy_global_to_shared(tensors.q, where, queries.full.index(slot), queries.q.index(slot))
            if MODE == "guess":
                where = [tile.batch, tile.kv_head, 0, 0]
                tma.async_copy_global_to_shared(tensors.first, where, queries.full.index(slot), queries.first.index(slot))
            if w == 0:
                _load(tensors, tile, ring, fill, start_n, step, True, False)
        if MODE == "guess":
            if turn == 0:
                gdc_wait()  # wait for the samples while Q and K load
            in_vain = _in_vain(number, tiles, flags)
            if turn == 0:
                _pass_on(gl.where(in_vain, tiles, number), next_tiles, Q_STAGES)
                if in_vain:
                    _leave(number, flags)
                    keys = 0
                    for w in gl.static_range(CONSUMERS):  # the CTA must wait, as no consumer will
                        mbarrier.wait(queries.full.index(w), 0)
                    mbarrier.wait(ring.full.index(0), 0)
        if MODE == "again":
            failed, number = _next_again(failed + 1, gl.num_programs(0) - 1, begun, tensors.counter, flags)
        elif MODE == "running":
            number += gl.num_programs(0)
        elif in_vain:
            number = tiles
        else:
            number = gl.num_programs(0) + gl.atomic_add(tensors.counter, 1)
        for _ in range(1, keys):
            fill += 1
            start_n -= step
            _load(tensors, tile, ring, fill, start_n, step, True, True)
        if MODE != "guess" or keys > 0:
            _load(tensors, tile, ring, fill + 1, start_n - step, step, False, True)
        fill += 2
        slot, phase = slot_and_phase(turn, Q_STAGES)
        _pass_on(number, next_tiles, slot)
        turn += 1


@gluon.jit
def _consumer(
    tensors, queries, ring, next_tiles, problem, w: gl.constexpr,
    PACKED: gl.constexpr, SPLIT: gl.constexpr, MODE: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A warpgroup that computes the w-th 64 query rows of each tile."""
    Q_STAGES: gl.constexpr = next_tiles.number.shape[0] - 1
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
    if MODE != "running":
        mbarrier.wait(next_tiles.full.index(Q_STAGES), 0)
        number = gl.max(next_tiles.number.index(Q_STAGES).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
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
        sees_first = seen > 1
        if SPLIT:
            sees_first = sees_first & (tile.split == 0)
        k_first = q_buffer
        if MODE == "guess":
            k_first = queries.first.index(own).reshape([queries.first.shape[3], HEAD_DIM])
        acc, m, l = _accumulate(
            acc, s, q, k_first, ring, fill, seen, start_n, problem, last, sees_first, scale_log2,
            CONSUMERS, PACKED, MODE, CAUSAL,
        )  # fmt: skip
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
def _sample_kernel(
    q_desc, k_desc, first_desc, counter_ptr, failed_ptr, scale, highest,
    batch_heads, heads, heads_per_kv, group, seq_q, seq_k, diagonal, splits,
    BLOCK_M: gl.constexpr, PACKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Score samples that are spread over all tiles, one per CTA, and zero the counter and the flags of all tiles. A sample
    is a consumer's 64 rows with two key tiles. Its flag is set if a score exceeds the guessed maximum by a factor of more
    than 2^highest. The LATELY flags of samples lie before the flags of tiles."""
    gdc_launch_dependents()  # the speculating launch may start its setup before this launch ends
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    HEAD_DIM: gl.constexpr = k_desc.block_shape[3]
    FIRST_KEYS: gl.constexpr = first_desc.block_shape[2]
    tiles_m = gl.cdiv(seq_q + _rows_before(diagonal, PACKED), BLOCK_M)
    tiles = batch_heads * tiles_m
    sample = gl.program_id(0)
    samples = gl.num_programs(0)
    problem = Problem(batch_heads, heads, heads_per_kv, group, tiles_m, seq_q, seq_k, diagonal, 1, scale)
    tile = _tile((sample.to(gl.int64) * tiles // samples).to(gl.int32), problem, BLOCK_M, BLOCK_N, PACKED, False, CAUSAL)
    start_m = tile.start_m + sample % (BLOCK_M // ROWS) * ROWS
    seen = _seen(start_m, problem, BLOCK_N, PACKED, CAUSAL)
    flags = _flags(failed_ptr)

    q_s = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_shape, q_desc.layout)
    first_s = gl.allocate_shared_memory(k_desc.dtype, first_desc.block_shape, first_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [3] + k_desc.block_shape, k_desc.layout)
    full = new_barriers(1, 1)
    mbarrier.expect(full.index(0), q_desc.block_type.nbytes + first_desc.block_type.nbytes + 3 * k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, _row(tile.batch, tile.head, start_m, PACKED), full.index(0), q_s)
    tma.async_copy_global_to_shared(first_desc, [tile.batch, tile.kv_head, 0, 0], full.index(0), first_s)
    last_n = (seen - 1) * BLOCK_N
    one_n = sample % seen * BLOCK_N
    other_n = (sample + gl.cdiv(seen, 2)) % seen * BLOCK_N
    tma.async_copy_global_to_shared(k_desc, [tile.batch, tile.kv_head, last_n, 0], full.index(0), k_s.index(0))
    tma.async_copy_global_to_shared(k_desc, [tile.batch, tile.kv_head, one_n, 0], full.index(0), k_s.index(1))
    tma.async_copy_global_to_shared(k_desc, [tile.batch, tile.kv_head, other_n, 0], full.index(0), k_s.index(2))

    if sample == 0:
        gl.store(counter_ptr, 0)
        gl.store(flags.any_failed, 0)
    layout: gl.constexpr = gl.BlockedLayout([LOOKED_AT // 128], [32], [4], [0])
    share = gl.cdiv(tiles * splits, samples)
    for start in range(0, share, LOOKED_AT):
        offs = start + gl.arange(0, LOOKED_AT, layout)
        own = (offs < share) & (sample * share + offs < tiles * splits)
        gl.store(flags.tile_failed + sample * share + offs, gl.zeros([LOOKED_AT], gl.int32, layout), mask=own)

    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    first_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, FIRST_KEYS, 16])
    s_last = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    s_first = gl.zeros([ROWS, FIRST_KEYS], gl.float32, first_layout)
    mbarrier.wait(full.index(0), 0)
    q = q_s.reshape([ROWS, HEAD_DIM])
    s_one = warpgroup_mma(q, k_s.index(1).reshape([BLOCK_N, HEAD_DIM]).permute([1, 0]), s_last, use_acc=False, is_async=True)
    s_other = warpgroup_mma(q, k_s.index(2).reshape([BLOCK_N, HEAD_DIM]).permute([1, 0]), s_last, use_acc=False, is_async=True)
    s_first = warpgroup_mma(q, first_s.reshape([FIRST_KEYS, HEAD_DIM]).permute([1, 0]), s_first, use_acc=False, is_async=True)
    s_last = warpgroup_mma(q, k_s.index(0).reshape([BLOCK_N, HEAD_DIM]).permute([1, 0]), s_last, use_acc=False, is_async=True)
    s_one, s_other, s_first, s_last = warpgroup_mma_wait(0, [s_one, s_other, s_first, s_last])
    last = start_m // PACKED + diagonal
    m = gl.max(_visible(s_last, last_n, seq_k, last, PACKED, CAUSAL), 1)
    m_first = gl.convert_layout(gl.max(_visible(s_first, 0, seq_k, last, PACKED, CAUSAL), 1), m.type.layout)
    m = gl.where(seen > 1, gl.maximum(m, m_first), m)
    s = gl.maximum(_visible(s_one, one_n, seq_k, last, PACKED, CAUSAL), _visible(s_other, other_n, seq_k, last, PACKED, CAUSAL))
    above = gl.max((gl.max(s, 1) - m) * gl.maximum(scale * LOG2_E, 1e-37), 0)
    lately: gl.constexpr = gl.BlockedLayout([LATELY // 128], [32], [4], [0])
    offs = gl.arange(0, LATELY, lately)
    gl.store(
        flags.sample_failed + offs,
        gl.full([LATELY], gl.where(above > highest, 1, 0), gl.int32, lately),
        mask=offs % samples == sample,
    )


@gluon.jit(do_not_specialize=["batch_heads", "heads", "group", "seq_q", "seq_k", "diagonal", "splits"])
def _forward_kernel(
    q_desc, k_desc, v_desc, first_desc, out_desc, out_ptr, part_ptr, lse_ptr, counter_ptr, failed_ptr, scale,
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
    first_s = q_s
    if MODE == "guess":
        first_s = gl.allocate_shared_memory(k_desc.dtype, [Q_STAGES * CONSUMERS] + first_desc.block_shape, first_desc.layout)
    tile_s = gl.allocate_shared_memory(gl.int32, [Q_STAGES + 1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = new_ring(Q_STAGES * CONSUMERS, 1, 1)  # each consumer has its own buffers
    kv_full, kv_empty = new_ring(STAGES, 1, CONSUMERS)
    tensors = Tensors(q_desc, k_desc, v_desc, first_desc, out_desc, out_ptr, lse_ptr, part_ptr, counter_ptr, failed_ptr)
    splits = splits if SPLIT else 1
    problem = Problem(batch_heads, heads, heads_per_kv, group, tiles_m, seq_q, seq_k, diagonal, splits, scale)
    queries = Queries(q_s, o_s, first_s, q_full, q_empty)
    ring = Ring(k_s, v_s, kv_full, kv_empty)
    # No empty barriers: `queries.empty` follows the reading. The CTA's first number has a slot of its own.
    next_tiles = NextTiles(tile_s, new_barriers(Q_STAGES + 1, 1))
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
# Failed tiles run again with a running maximum, for which longer key tiles are faster.
TILES_AGAIN = TILES | {128: Shape(queries=128, keys=128, kv_slots=2, q_slots=2, maxnreg=168)}
FIRST_KEYS = 32  # of each row that sees them, included in the guess; half of them …
SHORT_ROW = 512  # … if rows have no more keys than this: there the extra matmul costs most
OVERFLOW = {torch.float16: 16, torch.bfloat16: 128}  # the power of 2 at which P overflows
HEADROOM = 7  # powers of 2 below OVERFLOW that a sample must stay, because a whole tile has larger scores
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
    kv_bytes = seq_k * (head_dim + value_dim) * k.element_size()
    per_kv = heads // kv_heads // packed
    group = per_kv * max(1, min(batch * kv_heads, L2_SHARE["causal" if causal else "full"] // kv_bytes))
    queries, outputs, held = q, out, (64,)
    if packed > 1:
        queries, outputs = (t.unflatten(1, (-1, packed)).transpose(2, 3) for t in (q, out))  # [B, H / packed, Sq, packed, D]
        held = 64 // packed, packed
    out_ptr = outputs if diagonal % (64 // packed) else None  # if the first query tile starts before query 0
    parts = None, lse
    if splits > 1:
        parts = lse.new_empty(splits, lse.numel(), value_dim), lse.new_empty(splits, lse.numel())

    first_keys = FIRST_KEYS if keys > SHORT_ROW else FIRST_KEYS // 2

    def launch(counter, failed, mode):
        longer = mode == "again" and splits == 1
        shape = TILES_AGAIN[max(head_dim, value_dim)] if longer else cut.shape
        _forward_kernel[min(tiles * splits, num_sms()),](
            describe_tile(queries, *held), describe_tile(k, shape.keys), describe_tile(v, shape.keys),
            describe_tile(k, first_keys),
            describe_tile(outputs, *held), out_ptr, *parts, counter, failed,
            scale=scale, batch_heads=batch * heads // packed, heads=heads // packed, heads_per_kv=per_kv, group=group,
            seq_q=seq_q * packed, seq_k=seq_k, diagonal=diagonal, splits=splits,
            HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=shape.queries, BLOCK_N=shape.keys,
            STAGES=shape.kv_slots, Q_STAGES=shape.q_slots, PACKED=packed, SPLIT=splits > 1, MODE=mode, CAUSAL=causal,
            num_warps=4, maxnreg=shape.maxnreg, launch_pdl=mode != "running",
        )  # fmt: skip

    if cut.short:
        launch(None, None, "running")
    else:
        # The counter of tiles that were taken after each CTA's first; a flag if any tile failed; a flag for each sample and
        # each tile.
        flags = 1 + LATELY.value + tiles * splits
        counter, failed = lse.new_empty(1 + flags, dtype=torch.int32).split([1, flags])
        _sample_kernel[min(LATELY.value, num_sms()),](
            describe_tile(queries, *held), describe_tile(k, cut.shape.keys), describe_tile(k, first_keys), counter, failed,
            scale, OVERFLOW[q.dtype] - HEADROOM, batch * heads // packed, heads // packed, per_kv, group, seq_q * packed, seq_k,
            diagonal, splits, BLOCK_M=cut.shape.queries, PACKED=packed, CAUSAL=causal, num_warps=4,
        )  # fmt: skip
        for mode in ("guess", "again"):
            launch(counter, failed, mode)
    if splits > 1:
        own = min(16, 2048 // value_dim)  # splits whose outputs fit into a thread's registers
        at_once = next((n for n in (4, 8, 16) if splits <= n <= own), 4 * own)
        merged = max(1, 128 // value_dim) * (4 if at_once <= own else 1)  # rows per CTA
        _merge_kernel[ceil(lse.numel() / merged),](
            *parts, out, lse, *out.stride()[:3], lse.numel(), heads, seq_q, splits,
            VALUE_DIM=value_dim, ROWS=merged, AT_ONCE=at_once, num_warps=4, launch_pdl=True,
        )  # fmt: skip
    return out, lse
