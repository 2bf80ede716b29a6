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
from common.kernels.hopper import describe_tile, new_barriers, new_ring, require_hopper, store_rows
from common.kernels.replay import replayed
from common.operator import empty_rows
from common.runtime import num_sms
from stages.v7_one_backward.forward import forward as forward_of_v7

LOG2_E = gl.constexpr(1.4426950408889634)
LATELY = gl.constexpr(128)  # tiles, about as many as run at a time: if a quarter of them failed, most others will too
LOOKED_AT = gl.constexpr(512)  # flags that a warp loads at once
ROWS = gl.constexpr(64)  # query rows of a consumer, as many as a warpgroup's wgmma has


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
    tile, problem,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Return batch and head, first query row, split and number of key tiles of a work unit. A split without key tiles loads one
    and does not use it.

    Tiles of `group` heads follow each other, so that the K and V of these heads stay in the L2 cache; with a mask the longest
    tiles, of the last rows, come first.
    """
    batch_heads, heads, heads_per_kv, group, tiles_m, seq_q, seq_k, diagonal, splits = problem
    split = 0
    if SPLIT:
        split = tile % splits
        tile = tile // splits
    first = tile // (group * tiles_m) * group
    inside = tile % (group * tiles_m)
    group = gl.minimum(group, batch_heads - first)
    start_m = inside // group * BLOCK_M
    if CAUSAL:
        start_m = (tiles_m - 1) * BLOCK_M - start_m - _rows_before(diagonal, PACKED)
        seq_k = gl.minimum(seq_k, (start_m + BLOCK_M) // PACKED + diagonal)
    share = _share(gl.cdiv(seq_k, BLOCK_N), split, splits, SPLIT)
    return first + inside % group, start_m, split, gl.maximum(share, 1) if SPLIT else share


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _begun(tiles, counter_ptr):
    """Return an upper bound of the tile numbers that the first launch has started; its counter goes on in this launch."""
    return gl.minimum(gl.num_programs(0) + gl.load(counter_ptr), tiles)


@gluon.jit
def _leave(tile, failed_ptr):
    """Leave a tile to the second launch, as if it had failed."""
    gl.store(failed_ptr, 1)
    gl.store(failed_ptr + 1 + LATELY + tile, 1)


@gluon.jit
def _next_failed(tile, others, begun, failed_ptr):
    """Search from `tile` on: skip `others` failed tiles and return the next failed one, or at least `begun` if there is
    none."""
    offs = gl.arange(0, LOOKED_AT, gl.BlockedLayout([LOOKED_AT // 32], [32], [1], [0]))
    while (others >= 0) & (tile < begun):
        failed = gl.load(failed_ptr + 1 + LATELY + tile + offs, mask=tile + offs < begun, other=0)
        tile += gl.sum((gl.associative_scan(failed, 0, _add) <= others).to(gl.int32), 0)
        others -= gl.sum(failed, 0)
    return tile


@gluon.jit
def _next_again(failed, others, begun, counter_ptr, failed_ptr):
    """Return where `_next_failed` ended, and the tile to take: the failed tile that it found, or else a tile that never
    started."""
    failed = _next_failed(failed, others, begun, failed_ptr)
    tile = failed
    if failed >= begun:
        tile = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)
    return failed, tile


@gluon.jit
def _in_vain(tile, tiles, failed_ptr):
    """Return whether, of the LATELY tiles that started a round before this one, more than a quarter failed. The samples
    count as the tiles before the first."""
    before = gl.maximum(tile + 1 - LATELY, 0) + gl.arange(0, LATELY, gl.BlockedLayout([LATELY // 32], [32], [1], [0]))
    failed = gl.load(failed_ptr + 1 + before, mask=before - LATELY < tiles, other=0, volatile=True)
    return gl.sum(failed, 0) * 4 > LATELY


@gluon.jit
def _load(load, ring, fill, start_n, K: gl.constexpr, V: gl.constexpr):
    """Start to load the next slot of the ring, when the consumers have released it. It holds two tiles that one step uses
    together: K of the key tile at start_n, and V of the tile one `step` after that one."""
    k_desc, v_desc, batch, kv_head, step = load
    k_s, v_s, kv_full, kv_empty = ring
    STAGES: gl.constexpr = k_s.shape[0]
    NBYTES: gl.constexpr = (k_desc.block_type.nbytes if K else 0) + (v_desc.block_type.nbytes if V else 0)
    slot = fill % STAGES
    mbarrier.wait(kv_empty.index(slot), (fill // STAGES & 1) ^ 1)
    mbarrier.expect(kv_full.index(slot), NBYTES)
    if K:
        tma.async_copy_global_to_shared(k_desc, [batch, kv_head, start_n, 0], kv_full.index(slot), k_s.index(slot))
    if V:
        tma.async_copy_global_to_shared(v_desc, [batch, kv_head, start_n + step, 0], kv_full.index(slot), v_s.index(slot))


@gluon.jit
def _scores(q, ring, fill, ROWS: gl.constexpr):
    """Start to compute the scores of a key tile, once its K has arrived."""
    k_s, v_s, kv_full, kv_empty = ring
    STAGES: gl.constexpr = k_s.shape[0]
    BLOCK_N: gl.constexpr = k_s.shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    no_s = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    mbarrier.wait(kv_full.index(fill % STAGES), fill // STAGES & 1)
    k = k_s.index(fill % STAGES).reshape([BLOCK_N, k_s.shape[4]])
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
    acc, s, q, k_first, ring, fill, tiles, start_n, seq_k, last, sees_first, scale_log2,
    CONSUMERS: gl.constexpr, PACKED: gl.constexpr, RUNNING: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A consumer's online softmax over `tiles` key tiles, from the last one, at start_n, backwards; its scores s are in flight.

    Returns acc, whose matmul for the first tile is still in flight, m (maximum) and l (sum).
    """
    k_s, v_s, kv_full, kv_empty = ring
    STAGES: gl.constexpr = k_s.shape[0]
    ROWS: gl.constexpr = acc.shape[0]
    BLOCK_N: gl.constexpr = k_s.shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = acc.type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    if RUNNING:
        s = warpgroup_mma_wait(0, [s])  # [rows, BLOCK_N]
    else:
        FIRST_KEYS: gl.constexpr = k_first.shape[0]
        first_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, FIRST_KEYS, 16])
        s_first = gl.zeros([ROWS, FIRST_KEYS], gl.float32, first_layout)
        s_first = warpgroup_mma(q, k_first.permute([1, 0]), s_first, use_acc=False, is_async=True)
        s, s_first = warpgroup_mma_wait(0, [s, s_first])
    mbarrier.arrive(kv_empty.index(fill % STAGES), count=1)
    # Only the last tile can pass the last key or contain the diagonal. The first query tile starts `_rows_before` query 0. So
    # the number of keys that a consumer's rows see is a multiple of ROWS // PACKED.
    if CAUSAL or start_n + BLOCK_N > seq_k:
        s = _visible(s, start_n, seq_k, last, PACKED, CAUSAL)
    maxima = _maxima(s)
    if not RUNNING:
        # The guess includes the first keys: an attention sink is one of them, and the upper rows of the diagonal's tile see few
        # others.
        of_first = gl.where(sees_first, _maxima(s_first), float("-inf"))
        maxima = gl.maximum(maxima, gl.convert_layout(of_first, maxima.type.layout))
    # Finite: every row sees the first key of this tile.
    m = gl.convert_layout(gl.max(maxima, 1), gl.SliceLayout(1, s_layout)) * scale_log2
    p = gl.exp2(s * scale_log2 - m[:, None])
    l = _sums(p)
    p = gl.convert_layout(p.to(k_s.dtype), p_layout)

    for _ in range(1, tiles):
        # Issue both matmuls together, so that the tensor cores have work while other consumers compute their softmax.
        fill += 1
        slot = fill % STAGES
        s = _scores(q, ring, fill, ROWS)
        acc = warpgroup_mma(p, v_s.index(slot).reshape([BLOCK_N, v_s.shape[4]]), acc, is_async=True)
        if CONSUMERS == 2:
            s = warpgroup_mma_wait(1, [s])  # [rows, BLOCK_N]
        else:  # three other consumers' matmuls run under these exponentials: release the buffers before them
            s, acc = warpgroup_mma_wait(0, [s, acc])
            mbarrier.arrive(kv_empty.index(slot), count=1)
        if RUNNING:
            m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
            rescale = gl.exp2(m - m_new)  # rescales what was computed with the old maximum
            l = l * gl.convert_layout(rescale, gl.SliceLayout(1, l.type.layout))[:, None]
            m = m_new
        p = gl.exp2(s * scale_log2 - m[:, None])
        l = l + _sums(p)
        if CONSUMERS == 2:
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(kv_empty.index(slot), count=1)
        if RUNNING:
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc_layout))[:, None]
        p = gl.convert_layout(p.to(k_s.dtype), p_layout)

    fill += 1
    slot = fill % STAGES
    mbarrier.wait(kv_full.index(slot), fill // STAGES & 1)
    acc = warpgroup_mma(p, v_s.index(slot).reshape([BLOCK_N, v_s.shape[4]]), acc, is_async=True)
    return acc, m, gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, s_layout))


@gluon.jit
def _pass_on(tile, turns, slot):
    """Tell the consumers a tile's number; one past the last tile tells them to end."""
    tile_s, tile_full = turns
    tile_s.index(slot).store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(tile_full.index(slot), count=1)


@gluon.jit
def _producer(
    load, PACKED: gl.constexpr, SPLIT: gl.constexpr, RUNNING: gl.constexpr, AGAIN: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """One warp: keep the buffers of Q, K and V full, also for the next tile while the current one ends.

    The first tile is the CTA's number. A counter that all CTAs share gives the others, unless too many tiles fail. With AGAIN
    the CTA takes failed tiles. With RUNNING and not AGAIN, tiles go in strides of the number of CTAs.
    """
    q_desc, k_desc, v_desc, first_desc, counter_ptr, failed_ptr, ring, queries, turns, problem = load
    gdc_launch_dependents()  # all CTAs are running, so the next launch may start its CTAs when these end, or beside them
    q_s, first_s, q_full, q_empty = queries
    tile_s, tile_full = turns
    batch_heads, heads, heads_per_kv, group, tiles_m, seq_q, seq_k, diagonal, splits = problem
    Q_STAGES: gl.constexpr = tile_s.shape[0] - 1
    CONSUMERS: gl.constexpr = q_s.shape[0] // Q_STAGES
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = ring[0].shape[3]
    fill = 0
    turn = 0
    tile = gl.program_id(0)
    tiles = batch_heads * tiles_m * splits
    if AGAIN:
        begun = _begun(tiles, counter_ptr)
        failed, tile = _next_again(gl.to_tensor(0), tile, begun, counter_ptr, failed_ptr)
        _pass_on(tile, turns, Q_STAGES)
    while tile < tiles:
        batch_head, start_m, split, share = _tile(tile, problem, BLOCK_M, BLOCK_N, PACKED, SPLIT, CAUSAL)
        batch, head = batch_head // heads, batch_head % heads
        step = BLOCK_N * splits if SPLIT else BLOCK_N
        kv = (k_desc, v_desc, batch, head // heads_per_kv, step)
        start_n = split * BLOCK_N + (share - 1) * step
        for w in gl.static_range(CONSUMERS):
            slot = turn % Q_STAGES * CONSUMERS + w
            mbarrier.wait(q_empty.index(slot), (turn // Q_STAGES & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes + (0 if RUNNING else first_desc.block_type.nbytes))
            row = start_m + w * ROWS
            where = [batch, head, row // PACKED, 0, 0] if PACKED > 1 else [batch, head, row, 0]
            tma.async_copy_global_to_shared(q_desc, where, q_full.index(slot), q_s.index(slot))
            if not RUNNING:
                where = [batch, head // heads_per_kv, 0, 0]
                tma.async_copy_global_to_shared(first_desc, where, q_full.index(slot), first_s.index(slot))
            if w == 0:
                _load(kv, ring, fill, start_n, True, False)
        if not RUNNING:
            if turn == 0:
                gdc_wait()  # wait for the samples while Q and K load
            in_vain = _in_vain(tile, tiles, failed_ptr)
            if turn == 0:
                _pass_on(gl.where(in_vain, tiles, tile), turns, Q_STAGES)
                if in_vain:
                    _leave(tile, failed_ptr)
                    share = 0
                    for w in gl.static_range(CONSUMERS):  # the CTA must wait, as no consumer will
                        mbarrier.wait(q_full.index(w), 0)
                    mbarrier.wait(ring[2].index(0), 0)
        if AGAIN:
            failed, tile = _next_again(failed + 1, gl.num_programs(0) - 1, begun, counter_ptr, failed_ptr)
        elif RUNNING:
            tile += gl.num_programs(0)
        elif in_vain:
            tile = tiles
        else:
            tile = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)
        for _ in range(1, share):
            fill += 1
            start_n -= step
            _load(kv, ring, fill, start_n, True, True)
        if RUNNING or share > 0:
            _load(kv, ring, fill + 1, start_n - step, False, True)
        fill += 2
        _pass_on(tile, turns, turn % Q_STAGES)
        turn += 1


@gluon.jit
def _consumer(
    work, w: gl.constexpr,
    PACKED: gl.constexpr, SPLIT: gl.constexpr, RUNNING: gl.constexpr, AGAIN: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A warpgroup that computes the w-th 64 query rows of each tile."""
    out_desc, out_ptr, lse_ptr, part_ptr, failed_ptr, scale, o_s, ring, queries, turns, problem = work
    k_s, v_s, kv_full, kv_empty = ring
    q_s, first_s, q_full, q_empty = queries
    tile_s, tile_full = turns
    batch_heads, heads, heads_per_kv, group, tiles_m, seq_q, seq_k, diagonal, splits = problem
    Q_STAGES: gl.constexpr = tile_s.shape[0] - 1
    CONSUMERS: gl.constexpr = q_s.shape[0] // Q_STAGES
    STAGES: gl.constexpr = k_s.shape[0]
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = k_s.shape[3]
    HEAD_DIM: gl.constexpr = k_s.shape[4]
    VALUE_DIM: gl.constexpr = v_s.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, VALUE_DIM, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    # With Q in registers, the matmul need not read Q from shared memory for every key tile. Two consumers have enough registers
    # for this, four do not.
    Q_IN_REGISTERS: gl.constexpr = CONSUMERS == 2 and HEAD_DIM <= 128
    # exp(x) = exp2(x * log2(e)), and exp2 is one instruction; never 0, because a masked score, -inf, times 0 is NaN
    scale_log2 = gl.maximum(scale * LOG2_E, 1e-37)
    fill = 0
    turn = 0
    tile = gl.program_id(0)
    tiles = batch_heads * tiles_m * splits
    if AGAIN or not RUNNING:
        mbarrier.wait(tile_full.index(Q_STAGES), 0)
        tile = gl.max(tile_s.index(Q_STAGES).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    while tile < tiles:
        done = tile
        batch_head, start_m, split, share = _tile(tile, problem, BLOCK_M, BLOCK_N, PACKED, SPLIT, CAUSAL)
        start_m += w * ROWS
        seen = gl.cdiv(gl.minimum((start_m + ROWS) // PACKED + diagonal, seq_k) if CAUSAL else seq_k, BLOCK_N)

        offs_m = start_m + gl.arange(0, ROWS, rows)
        last = start_m // PACKED + diagonal  # the last key of the first row
        nothing = False
        if SPLIT:  # such a consumer computes one tile, which is not used
            seen = gl.minimum(_share(seen, split, splits, SPLIT), share)
            nothing = (seen <= 0) | (start_m >= seq_q)
            seen = gl.where(nothing, 1, seen)
            last = gl.where(nothing, 2**30, last)
        acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, acc_layout)
        slot = turn % Q_STAGES * CONSUMERS + w
        mbarrier.wait(q_full.index(slot), turn // Q_STAGES & 1)
        q_buffer = q_s.index(slot).reshape([ROWS, HEAD_DIM])
        q = q_buffer.load(q_layout) if Q_IN_REGISTERS else q_buffer
        for _ in range(share - seen):  # skip key tiles that only the CTA's later consumers see
            mbarrier.wait(kv_full.index(fill % STAGES), fill // STAGES & 1)
            mbarrier.arrive(kv_empty.index(fill % STAGES), count=1)
            fill += 1
        s = _scores(q, ring, fill, ROWS)
        if Q_STAGES == 2:
            # TMA has stored the last tile's O from the other buffer, so the next Q may arrive there.
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index((turn + 1) % Q_STAGES * CONSUMERS + w), count=1, pred=turn > 0)
        start_n = (split + (seen - 1) * splits) * BLOCK_N
        sees_first = seen > 1
        if SPLIT:
            sees_first = sees_first & (split == 0)
        k_first = q_buffer
        if not RUNNING:
            k_first = first_s.index(slot).reshape([first_s.shape[3], HEAD_DIM])
        acc, m, l = _accumulate(
            acc, s, q, k_first, ring, fill, seen, start_n, seq_k, last, sees_first, scale_log2,
            CONSUMERS, PACKED, RUNNING, CAUSAL,
        )  # fmt: skip
        fill += seen

        lse = gl.where(nothing, float("-inf"), (m + gl.log2(l)) / LOG2_E)
        part = (split * batch_heads + batch_head).to(gl.int64) * seq_q
        lse_ptrs = lse_ptr + part + offs_m % PACKED * (seq_q // PACKED) + offs_m // PACKED
        gl.store(lse_ptrs, lse, mask=(offs_m >= 0) & (offs_m < seq_q))
        normalize = gl.convert_layout(1.0 / l, gl.SliceLayout(1, acc_layout))[:, None]
        mbarrier.wait(tile_full.index(turn % Q_STAGES), turn // Q_STAGES & 1)
        tile = gl.max(tile_s.index(turn % Q_STAGES).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(kv_empty.index(fill % STAGES), count=1)
        fill += 1
        if not RUNNING:
            # An infinite P, or an overflowing sum, makes l or part of a row of O infinite or NaN.
            fails = ~(gl.abs(gl.sum(acc, 1) + gl.convert_layout(l, gl.SliceLayout(1, acc_layout))) < float("inf"))
            same = gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, acc_layout))
            gl.store(failed_ptr + same, 1, mask=fails)
            gl.store(failed_ptr + 1 + LATELY + done + same, 1, mask=fails)
        if SPLIT and splits > 1:
            offs_o = start_m + gl.arange(0, ROWS, gl.SliceLayout(1, acc_layout))
            offs_d = gl.arange(0, VALUE_DIM, gl.SliceLayout(0, acc_layout))
            part_ptrs = part_ptr + (part + offs_o % PACKED * (seq_q // PACKED) + offs_o // PACKED)[:, None] * VALUE_DIM
            part_o = gl.where(nothing, 0.0, acc * normalize)
            gl.store(part_ptrs + offs_d[None, :], part_o, mask=((offs_o >= 0) & (offs_o < seq_q))[:, None])
        elif out_ptr is not None and start_m < 0:
            out = (acc * normalize).to(q_s.dtype)
            store_rows(out_ptr, out_desc, batch_head // heads, batch_head % heads, start_m // PACKED, out)
        else:
            o_s.index(slot).reshape([ROWS, VALUE_DIM]).store((acc * normalize).to(q_s.dtype))
            fence_async_shared()
            batch, head = batch_head // heads, batch_head % heads
            where = [batch, head, start_m // PACKED, 0, 0] if PACKED > 1 else [batch, head, start_m, 0]
            tma.async_copy_shared_to_global(out_desc, where, o_s.index(slot))
        if Q_STAGES == 1:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(slot), count=1)
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
    gdc_launch_dependents()  # the speculating launch may prepare meanwhile
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    HEAD_DIM: gl.constexpr = k_desc.block_shape[3]
    FIRST_KEYS: gl.constexpr = first_desc.block_shape[2]
    tiles_m = gl.cdiv(seq_q + _rows_before(diagonal, PACKED), BLOCK_M)
    tiles = batch_heads * tiles_m
    sample = gl.program_id(0)
    samples = gl.num_programs(0)
    problem = (batch_heads, heads, heads_per_kv, group, tiles_m, seq_q, seq_k, diagonal, 1)
    tile = (sample.to(gl.int64) * tiles // samples).to(gl.int32)
    batch_head, start_m, _, _ = _tile(tile, problem, BLOCK_M, BLOCK_N, PACKED, False, CAUSAL)
    batch, head = batch_head // heads, batch_head % heads
    start_m += sample % (BLOCK_M // ROWS) * ROWS
    seen = gl.cdiv(gl.minimum((start_m + ROWS) // PACKED + diagonal, seq_k) if CAUSAL else seq_k, BLOCK_N)

    q_s = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_shape, q_desc.layout)
    first_s = gl.allocate_shared_memory(k_desc.dtype, first_desc.block_shape, first_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [3] + k_desc.block_shape, k_desc.layout)
    full = new_barriers(1, 1)
    mbarrier.expect(full.index(0), q_desc.block_type.nbytes + first_desc.block_type.nbytes + 3 * k_desc.block_type.nbytes)
    where = [batch, head, start_m // PACKED, 0, 0] if PACKED > 1 else [batch, head, start_m, 0]
    tma.async_copy_global_to_shared(q_desc, where, full.index(0), q_s)
    kv_head = head // heads_per_kv
    tma.async_copy_global_to_shared(first_desc, [batch, kv_head, 0, 0], full.index(0), first_s)
    last_n = (seen - 1) * BLOCK_N
    one_n = sample % seen * BLOCK_N
    other_n = (sample + gl.cdiv(seen, 2)) % seen * BLOCK_N
    tma.async_copy_global_to_shared(k_desc, [batch, kv_head, last_n, 0], full.index(0), k_s.index(0))
    tma.async_copy_global_to_shared(k_desc, [batch, kv_head, one_n, 0], full.index(0), k_s.index(1))
    tma.async_copy_global_to_shared(k_desc, [batch, kv_head, other_n, 0], full.index(0), k_s.index(2))

    if sample == 0:
        gl.store(counter_ptr, 0)
        gl.store(failed_ptr, 0)
    flags: gl.constexpr = gl.BlockedLayout([LOOKED_AT // 128], [32], [4], [0])
    share = gl.cdiv(tiles * splits, samples)
    for start in range(0, share, LOOKED_AT):
        offs = start + gl.arange(0, LOOKED_AT, flags)
        own = (offs < share) & (sample * share + offs < tiles * splits)
        gl.store(failed_ptr + 1 + LATELY + sample * share + offs, gl.zeros([LOOKED_AT], gl.int32, flags), mask=own)

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
        failed_ptr + 1 + offs,
        gl.full([LATELY], gl.where(above > highest, 1, 0), gl.int32, lately),
        mask=offs % samples == sample,
    )


@gluon.jit(do_not_specialize=["batch_heads", "heads", "group", "seq_q", "seq_k", "diagonal", "splits"])
def _forward_kernel(
    q_desc, k_desc, v_desc, first_desc, out_desc, out_ptr, part_ptr, lse_ptr, counter_ptr, failed_ptr, scale,
    batch_heads, heads, heads_per_kv, group, seq_q, seq_k, diagonal, splits,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, RUNNING: gl.constexpr, AGAIN: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    tiles_m = gl.cdiv(seq_q + _rows_before(diagonal, PACKED), BLOCK_M)
    if AGAIN:
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
    if not RUNNING:
        first_s = gl.allocate_shared_memory(k_desc.dtype, [Q_STAGES * CONSUMERS] + first_desc.block_shape, first_desc.layout)
    tile_s = gl.allocate_shared_memory(gl.int32, [Q_STAGES + 1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = new_ring(Q_STAGES * CONSUMERS, 1, 1)  # each consumer has its own buffers
    kv_full, kv_empty = new_ring(STAGES, 1, CONSUMERS)
    ring = (k_s, v_s, kv_full, kv_empty)
    tile_full = new_barriers(Q_STAGES + 1, 1)  # a number has been read when its buffer of Q is released; the first has its own

    queries = (q_s, first_s, q_full, q_empty)
    turns = (tile_s, tile_full)
    problem = (batch_heads, heads, heads_per_kv, group, tiles_m, seq_q, seq_k, diagonal, splits if SPLIT else 1)
    work = (out_desc, out_ptr, lse_ptr, part_ptr, failed_ptr, scale, o_s, ring, queries, turns, problem)
    load = (q_desc, k_desc, v_desc, first_desc, counter_ptr, failed_ptr, ring, queries, turns, problem)
    # An SM has 65,536 registers, 512 for each thread of a warpgroup. The producer keeps 24 per thread, and the consumers get
    # the rest.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (work, 0, PACKED, SPLIT, RUNNING, AGAIN, CAUSAL)),
             (_consumer, (work, 1, PACKED, SPLIT, RUNNING, AGAIN, CAUSAL)),
             (_producer, (load, PACKED, SPLIT, RUNNING, AGAIN, CAUSAL))],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consumer, (work, 0, PACKED, SPLIT, RUNNING, AGAIN, CAUSAL)),
             (_consumer, (work, 1, PACKED, SPLIT, RUNNING, AGAIN, CAUSAL)),
             (_consumer, (work, 2, PACKED, SPLIT, RUNNING, AGAIN, CAUSAL)),
             (_consumer, (work, 3, PACKED, SPLIT, RUNNING, AGAIN, CAUSAL)),
             (_producer, (load, PACKED, SPLIT, RUNNING, AGAIN, CAUSAL))],
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
# By the larger head dimension: query rows per tile, 64 for each of two or four consumers; keys per tile; buffers of K and V;
# buffers of Q. FEW_ROWS: the same if there are few rows, where long tiles keep loads of K and V in flight.
TILES = {16: (256, 64, 6, 2), 32: (256, 64, 6, 2), 64: (256, 64, 6, 2), 128: (128, 64, 3, 2), 256: (128, 64, 2, 1)}
FEW_ROWS = {16: (128, 128, 3, 2), 32: (128, 128, 3, 2), 64: (128, 128, 3, 2), 128: (128, 128, 2, 2), 256: (128, 64, 2, 1)}
FEW_SQUARES = 8  # squares of 128 queries and 128 keys per CTA, up to which FEW_ROWS is used where TILES has 256 rows
# Failed tiles run again with a running maximum, for which longer key tiles are faster.
TILES_AGAIN = TILES | {128: (128, 128, 2, 2)}
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

    tile: tuple[int, int, int, int]  # as in TILES
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
    few = rows <= 128 or (TILES[width][0] > 128 and squares <= FEW_SQUARES * programs)
    block_m, block_n, stages, q_stages = (FEW_ROWS if few else TILES)[width]
    tiles = ceil(rows / block_m) * groups
    key_tiles = ceil(keys / block_n)
    splits = 1
    if few or tiles < programs:
        splits = splits_of(tiles, key_tiles, min(rows, block_m), block_n, head_dim + value_dim, programs)
    if few and key_tiles <= splits and block_n > ROWS.value:  # two tiles of half the keys are ready sooner
        block_n, stages, key_tiles = block_n // 2, stages * 2, key_tiles * 2
    packed = together if few or splits > 1 or tiles < ceil(seq_q / block_m) * batch * heads else 1
    before = diagonal % (64 // packed)  # positions
    tiles = ceil((seq_q + before) * packed / block_m) * batch * (heads // packed)
    turns = ceil(tiles * splits / programs)
    short = few or turns * ceil(key_tiles / splits) <= SHORT[width]
    return Plan((block_m, block_n, stages, q_stages), packed, splits, tiles, short)


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
    block_m, block_n, stages, q_stages = cut.tile
    kv_bytes = seq_k * (head_dim + value_dim) * k.element_size()
    per_kv = heads // kv_heads // packed
    group = per_kv * max(1, min(batch * kv_heads, L2_SHARE["causal" if causal else "full"] // kv_bytes))
    queries, outputs, held = q, out, (64,)
    if packed > 1:
        queries, outputs = (t.unflatten(1, (-1, packed)).transpose(2, 3) for t in (q, out))  # [B, H / packed, Sq, packed, D]
        held = 64 // packed, packed
    out_ptr = outputs if diagonal % (64 // packed) else None  # if the first query tile starts before query 0
    parts = lse, lse  # the first is unused then
    if splits > 1:
        parts = lse.new_empty(splits, lse.numel(), value_dim), lse.new_empty(splits, lse.numel())

    first_keys = FIRST_KEYS if keys > SHORT_ROW else FIRST_KEYS // 2

    def launch(counter, failed, SPLIT, RUNNING, AGAIN):
        block_m, block_n, stages, q_stages = TILES_AGAIN[max(head_dim, value_dim)] if AGAIN and splits == 1 else cut.tile
        _forward_kernel[min(tiles * splits, num_sms()),](
            describe_tile(queries, *held), describe_tile(k, block_n), describe_tile(v, block_n), describe_tile(k, first_keys),
            describe_tile(outputs, *held), out_ptr, *parts, counter, failed,
            scale=scale, batch_heads=batch * heads // packed, heads=heads // packed, heads_per_kv=per_kv, group=group,
            seq_q=seq_q * packed, seq_k=seq_k, diagonal=diagonal, splits=splits,
            HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=block_m, BLOCK_N=block_n, STAGES=stages, Q_STAGES=q_stages,
            PACKED=packed, SPLIT=SPLIT, RUNNING=RUNNING, AGAIN=AGAIN, CAUSAL=causal,
            num_warps=4, maxnreg={128: 168, 256: 96}[block_m], launch_pdl=AGAIN or not RUNNING,
        )  # fmt: skip

    if cut.short:
        launch(lse, lse, SPLIT=True, RUNNING=True, AGAIN=False)
    else:
        # The counter of tiles that were taken after each CTA's first; a flag if any tile failed; a flag for each sample and
        # each tile.
        flags = 1 + LATELY.value + tiles * splits
        counter, failed = lse.new_empty(1 + flags, dtype=torch.int32).split([1, flags])
        _sample_kernel[min(LATELY.value, num_sms()),](
            describe_tile(queries, *held), describe_tile(k, block_n), describe_tile(k, first_keys), counter, failed,
            scale, OVERFLOW[q.dtype] - HEADROOM, batch * heads // packed, heads // packed, per_kv, group, seq_q * packed, seq_k,
            diagonal, splits, BLOCK_M=block_m, PACKED=packed, CAUSAL=causal, num_warps=4,
        )  # fmt: skip
        for again in (False, True):
            launch(counter, failed, SPLIT=splits > 1, RUNNING=again, AGAIN=again)
    if splits > 1:
        own = min(16, 2048 // value_dim)  # splits whose outputs fit into a thread's registers
        at_once = next((n for n in (4, 8, 16) if splits <= n <= own), 4 * own)
        merged = max(1, 128 // value_dim) * (4 if at_once <= own else 1)  # rows per CTA
        _merge_kernel[ceil(lse.numel() / merged),](
            *parts, out, lse, *out.stride()[:3], lse.numel(), heads, seq_q, splits,
            VALUE_DIM=value_dim, ROWS=merged, AT_ONCE=at_once, num_warps=4, launch_pdl=True,
        )  # fmt: skip
    return out, lse
