"""FlashAttention-3 backward (arXiv 2407.08608, section 3.1 and appendix B), warp-specialized, in Gluon, for Hopper.

S, dP and the exponentials are computed once, for dK, dV and dQ, so a pair of tiles takes five matmuls. With a separate kernel
for dQ, it would take seven. In return, dQ is a sum in memory, to which key tiles add in any order. If key tiles are too few for
all SMs, fill the last wave badly, or use more query heads at a time than the L2 cache holds, several CTAs divide the heads or
steps of a key tile, and dK and dV are sums in memory, too.

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
from stages.v6_tile_order.backward import backward as backward_of_v6

from .backward_prepare import _finish_kernel, _prepare_kernel
from .backward_scheduler import CONSUMERS, NextTiles, Problem, _next, _pass_on, _query_tile, _tile
from .backward_splits import splits_of
from .backward_store import KeysValues, Place, _store_dkv, _store_or_add
from .backward_writer import DqParts, _dq_writer

# dQ's accumulator lies in the order of registers (`_compute_dq`); rows of dQ would cause bank conflicts in shared memory.
SUM_COLUMNS = 256  # it is cut into rows of this length, the longest that TMA takes


class Tensors(NamedTuple):
    """Tensors in global memory."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    do: tma.tensor_descriptor
    stats: tma.tensor_descriptor  # for each query tile: log2(e) * LSE, then delta
    sums: tma.tensor_descriptor  # dQ's accumulator
    tickets: gl.tensor  # for each query tile: number of tickets, plus `STORED` (backward_writer.py)
    counter: gl.tensor | None  # tiles taken so far, except each CTA's first tile; None if CTAs are not persistent


class Ring(NamedTuple):
    """The tiles of a step in shared memory: a ring buffer with STAGES slots."""

    q: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_M, HEAD_DIM]
    do: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_M, VALUE_DIM]
    stats: gl.shared_memory_descriptor  # [STAGES, 2, BLOCK_M]: log2(e) * LSE and delta, loaded ahead, so no step waits for them
    q_full: gl.shared_memory_descriptor  # barriers, TMA → consumers: Q and the statistics have arrived
    do_full: gl.shared_memory_descriptor  # barriers, TMA → consumers: dO has arrived
    empty: gl.shared_memory_descriptor  # barriers, consumers → producer: Q, dO and the statistics have been read


class DsRing(NamedTuple):
    """dS in shared memory. It has STAGES slots, so consumers compute a step's dS while dQ's warpgroup reads the one before."""

    ds: gl.shared_memory_descriptor  # [STAGES * CONSUMERS, ROWS, BLOCK_M]
    full: gl.shared_memory_descriptor  # barriers, consumers → dQ's warpgroup: dS has been written
    empty: gl.shared_memory_descriptor  # barriers, dQ's warpgroup → consumers: dS has been read


@gluon.jit
def _load(tensors, tile, ring, fill, step):
    """Start to load a step's Q and dO, with LSE and delta, when the consumers have released the buffers."""
    head, number, row = _query_tile(step, tile)
    where = [tile.batch, head, tile.query + number * ring.q.shape[3], 0]
    slot = wait_empty(ring.empty, fill + step)
    mbarrier.expect(ring.q_full.index(slot), tensors.q.block_type.nbytes + tensors.stats.block_type.nbytes)
    tma.async_copy_global_to_shared(tensors.q, where, ring.q_full.index(slot), ring.q.index(slot))
    tma.async_copy_global_to_shared(tensors.stats, [row * 2, 0], ring.q_full.index(slot), ring.stats.index(slot))
    mbarrier.expect(ring.do_full.index(slot), tensors.do.block_type.nbytes)
    tma.async_copy_global_to_shared(tensors.do, where, ring.do_full.index(slot), ring.do.index(slot))


@gluon.jit
def _compute_dq(ds_ring, slot, dq_parts, dq_phase, kv, kv_slot):
    """Compute a step's contribution to dQ, and pass it on to the dQ writer."""
    BLOCK_M: gl.constexpr = ds_ring.ds.shape[2]
    HEAD_DIM: gl.constexpr = kv.k.shape[4]
    PARTS: gl.constexpr = dq_parts.dq.shape[0]
    COLUMNS: gl.constexpr = BLOCK_M * HEAD_DIM // PARTS // 64  # of a part, because this warpgroup has few registers
    layout: gl.constexpr = wgmma_layout(ROWS, COLUMNS)
    zeros = gl.zeros([64, COLUMNS], gl.float32, layout)
    # A part has 64 rows, as many as a warpgroup's matmul, because the order of the registers repeats every 64 rows.
    for part in gl.static_range(PARTS):
        dq = zeros
        for w in gl.static_range(CONSUMERS):
            ds_t = ds_ring.ds.index(slot * CONSUMERS + w).slice(part * COLUMNS // HEAD_DIM * 64, 64, dim=1)
            k = matrix(kv.k.index(kv_slot * CONSUMERS + w))
            k = k.slice(part * COLUMNS % HEAD_DIM, COLUMNS, dim=1)
            dq = warpgroup_mma(ds_t.permute([1, 0]), k, dq, use_acc=w > 0, is_async=True)  # dQ += dS K
        dq = warpgroup_mma_wait(0, [dq])  # [64, COLUMNS]
        if part == PARTS - 1:  # all parts have read dS
            mbarrier.arrive(ds_ring.empty.index(slot), count=1)
        # In the order of the registers, a warp writes 512 consecutive bytes. Rows would put several threads on the same bank.
        dq = dq.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
        mbarrier.wait(dq_parts.empty.index(part), dq_phase ^ 1)
        dq_parts.dq.index(part).store(dq.reshape([dq_parts.dq.shape[1], dq_parts.dq.shape[2]]))
        fence_async_shared()
        mbarrier.arrive(dq_parts.full.index(part), count=1)


@gluon.jit
def _accumulate(
    dk, dv, k, v, scale_log2, tile, ring, ds_ring, fill, lo, hi,
    w: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add the contribution of the steps [lo, hi) to a consumer's dk and dv, and store its dS for dQ. P and dS are computed
    transposed, so that they enter the matmuls for dV and dK from registers. The CTA has computed `fill` steps before this tile.
    """
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
        slot, phase = slot_and_phase(fill + step, STAGES)
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
def _load_kv(tensors, tile, kv, turn):
    """Start to load K and V of this CTA's tile number `turn`."""
    slot, _ = slot_and_phase(turn, kv.full.shape[0])
    mbarrier.expect(kv.full.index(slot), CONSUMERS * (tensors.k.block_type.nbytes + tensors.v.block_type.nbytes))
    for w in gl.static_range(CONSUMERS):
        where = [tile.kv_batch, tile.kv_head, tile.key + w * ROWS, 0]
        tma.async_copy_global_to_shared(tensors.k, where, kv.full.index(slot), kv.k.index(slot * CONSUMERS + w))
        tma.async_copy_global_to_shared(tensors.v, where, kv.full.index(slot), kv.v.index(slot * CONSUMERS + w))


@gluon.jit
def _producer(tensors, kv, ring, next_tiles, problem, PERSISTENT: gl.constexpr, CAUSAL: gl.constexpr):
    """Run on one warp: load each tile's K and V once, load Q and dO through a ring, and store dK and dV at the end. A tile's K
    and V, and Q and dO of its first steps, load before the previous tile has ended. So the consumers go on without a pause.

    Persistent CTAs take their tiles from a counter that all CTAs share, except the first: its number is the CTA's own. Tiles
    take different times under a causal mask, so equal numbers of tiles would leave SMs idle at the end.
    """
    STAGES: gl.constexpr = ring.q.shape[0]
    BLOCK_M: gl.constexpr = ring.q.shape[3]
    HEAD_DIM: gl.constexpr = kv.k.shape[4]
    VALUE_DIM: gl.constexpr = kv.v.shape[4]
    fill = 0  # number of steps of this CTA's earlier tiles
    turn = 0  # number of this CTA's earlier tiles
    number = gl.program_id(0)
    previous = Place(0, 0, 0)
    while number < problem.tiles:
        tile = _tile(number, problem, BLOCK_M, HEAD_DIM, VALUE_DIM, CAUSAL)
        _load_kv(tensors, tile, kv, turn)
        early = gl.minimum(tile.steps, STAGES)  # loads that do not wait for this tile's first step
        for step in range(early):
            _load(tensors, tile, ring, fill, step)
        if turn > 0:
            _store_dkv(previous, kv, turn - 1)
        for step in range(early, tile.steps):
            _load(tensors, tile, ring, fill, step)
        # Ask late, after all loads. If CTAs asked when a tile begins, long tiles would follow long tiles.
        number = problem.tiles
        if PERSISTENT:
            number = gl.num_programs(0) + gl.atomic_add(tensors.counter, 1)
            _pass_on(number, next_tiles, turn)
        previous = Place(tile.kv_batch, tile.kv_head, tile.key)
        fill += tile.steps
        turn += 1
    _store_dkv(previous, kv, turn - 1)


@gluon.jit
def _compute_dkv(tile, kv, ring, ds_ring, problem, fill, turn, w: gl.constexpr, CAUSAL: gl.constexpr):
    """Compute dK and dV of the w-th 64 keys of this CTA's tile number `turn`. They stay in registers until the last step."""
    BLOCK_M: gl.constexpr = ring.q.shape[3]
    HEAD_DIM: gl.constexpr = kv.k.shape[4]
    VALUE_DIM: gl.constexpr = kv.v.shape[4]
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, wgmma_layout(ROWS, HEAD_DIM))
    dv = gl.zeros([ROWS, VALUE_DIM], gl.float32, wgmma_layout(ROWS, VALUE_DIM))
    kv_slot, kv_phase = slot_and_phase(turn, kv.full.shape[0])
    k = matrix(kv.k.index(kv_slot * CONSUMERS + w))
    v = matrix(kv.v.index(kv_slot * CONSUMERS + w))
    scale_log2 = problem.scale * LOG2_E
    mbarrier.wait(kv.full.index(kv_slot), kv_phase)
    # With a causal mask, the first query tiles may see only the first consumer's keys. The second consumer has its own pace, so
    # it skips them. It only hands over dS = 0, because dQ's warpgroup waits for the dS of both.
    unseen = tile.unseen * w
    # With two K/V slots, ptxas (CUDA 12.8) computes a slot's addresses only in the loop with a mask, though the loop without a
    # mask uses them, too. So the loop with a mask then takes at least one step, even if none needs a mask, and always runs.
    masked = tile.masked if kv.full.shape[0] == 1 else gl.maximum(tile.masked, 1)
    for step in range(fill, fill + unseen):
        # Without this wait, the next wait for Q would return at once, because an earlier phase has the same parity.
        slot = wait_full(ring.q_full, step)
        wait_empty(ds_ring.empty, step)
        ds_ring.ds.index(slot * CONSUMERS + w).store(gl.zeros([ROWS, BLOCK_M], ring.q.dtype, wgmma_layout(ROWS, BLOCK_M)))
        fence_async_shared()
        mbarrier.arrive(ds_ring.full.index(slot), count=1)
        mbarrier.arrive(ring.empty.index(slot), count=1)
    # The diagonal needs a mask. So do keys past the end: their p may be infinite, and infinity times 0 is NaN.
    dk, dv = _accumulate(dk, dv, k, v, scale_log2, tile, ring, ds_ring, fill, unseen, masked, w, CAUSAL, MASKED=True)
    dk, dv = _accumulate(dk, dv, k, v, scale_log2, tile, ring, ds_ring, fill, masked, tile.steps, w, CAUSAL, MASKED=False)

    # No other step reads V and K. If a key tile has one CTA, dV and dK go into their buffers, and TMA stores them from there.
    _store_or_add(dv, v, kv, tile, problem, w, ROWS * HEAD_DIM)
    mbarrier.arrive(kv.dv_full.index(kv_slot * CONSUMERS + w), count=1)
    wait_full(ds_ring.empty, fill + tile.steps - 1)  # dQ's warpgroup has read K for the last time
    _store_or_add(dk * problem.scale, k, kv, tile, problem, w, 0)
    mbarrier.arrive(kv.dk_full.index(kv_slot * CONSUMERS + w), count=1)


@gluon.jit
def _consumer(kv, ring, ds_ring, next_tiles, problem, w: gl.constexpr, PERSISTENT: gl.constexpr, CAUSAL: gl.constexpr):
    """Run on a warpgroup: compute dK and dV of the w-th 64 keys of each tile."""
    BLOCK_M: gl.constexpr = ring.q.shape[3]
    HEAD_DIM: gl.constexpr = kv.k.shape[4]
    VALUE_DIM: gl.constexpr = kv.v.shape[4]
    fill = 0
    turn = 0
    number = gl.program_id(0)
    while number < problem.tiles:
        tile = _tile(number, problem, BLOCK_M, HEAD_DIM, VALUE_DIM, CAUSAL)
        _compute_dkv(tile, kv, ring, ds_ring, problem, fill, turn, w, CAUSAL)
        fill += tile.steps
        number = _next(next_tiles, turn, problem.tiles, PERSISTENT)
        turn += 1


@gluon.jit
def _dq_consumer(kv, ds_ring, dq_parts, next_tiles, problem, PERSISTENT: gl.constexpr, CAUSAL: gl.constexpr):
    """Run on a warpgroup: compute dQ from the consumers' dS for the dQ writer. So the consumers do not wait for dQ's matmul."""
    BLOCK_M: gl.constexpr = ds_ring.ds.shape[2]
    HEAD_DIM: gl.constexpr = kv.k.shape[4]
    VALUE_DIM: gl.constexpr = kv.v.shape[4]
    fill = 0
    turn = 0
    number = gl.program_id(0)
    while number < problem.tiles:
        tile = _tile(number, problem, BLOCK_M, HEAD_DIM, VALUE_DIM, CAUSAL)
        kv_slot, _ = slot_and_phase(turn, kv.full.shape[0])
        for step in range(tile.steps):
            _, dq_phase = slot_and_phase(fill + step, 1)
            slot = wait_full(ds_ring.full, fill + step)  # dS was computed after K arrived
            _compute_dq(ds_ring, slot, dq_parts, dq_phase, kv, kv_slot)
        fill += tile.steps
        number = _next(next_tiles, turn, problem.tiles, PERSISTENT)
        turn += 1


@gluon.jit(do_not_specialize=["head_tiles", "diagonal", "tiles", "shares", "splits"])
def _backward_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, sums_desc, dk_desc, dv_desc, dkv_sums_ptr, tickets_ptr, counter_ptr,
    scale, heads_per_kv, head_tiles, diagonal, num_sms, tiles, shares, splits,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    HEAD_DIM: gl.constexpr = q_desc.block_shape[3]
    VALUE_DIM: gl.constexpr = v_desc.block_shape[3]
    PERSISTENT: gl.constexpr = counter_ptr is not None
    KV_STAGES: gl.constexpr = 2 if PERSISTENT else 1  # the current tile's K and V, and the next tile's
    q_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], q_desc.layout)
    do_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, VALUE_DIM], do_desc.layout)
    stats_s = gl.allocate_shared_memory(gl.float32, [STAGES, 2, BLOCK_M], stats_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [KV_STAGES * CONSUMERS, 1, 1, ROWS, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [KV_STAGES * CONSUMERS, 1, 1, ROWS, VALUE_DIM], v_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], q_desc.dtype)
    ds_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES * CONSUMERS, ROWS, BLOCK_M], ds_layout)
    PARTS: gl.constexpr = BLOCK_M * HEAD_DIM // (sums_desc.block_shape[0] * sums_desc.block_shape[1])
    dq_s = gl.allocate_shared_memory(gl.float32, [PARTS] + sums_desc.block_shape, sums_desc.layout)
    tile_s = gl.allocate_shared_memory(gl.int32, [3, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kv_full = new_barriers(KV_STAGES, 1)  # no empty barriers: the producer stores dK and dV, and so knows when buffers are free
    dk_full = new_barriers(KV_STAGES * CONSUMERS, 1)
    dv_full = new_barriers(KV_STAGES * CONSUMERS, 1)
    q_full, q_do_empty = new_ring(STAGES, 1, CONSUMERS)
    do_full = new_barriers(STAGES, 1)
    ds_full, ds_empty = new_ring(STAGES, CONSUMERS, 1)
    dq_full, dq_empty = new_ring(PARTS, 1, 1)
    tile_full = new_barriers(3, 1)  # no empty barriers: all warps have read a tile's number when the next tile's dK is ready

    tensors = Tensors(q_desc, k_desc, v_desc, do_desc, stats_desc, sums_desc, tickets_ptr, counter_ptr)
    kv_heads, seq_q, seq_k = k_desc.shape[1], q_desc.shape[2], k_desc.shape[2]
    problem = Problem(kv_heads, heads_per_kv, seq_q, seq_k, head_tiles, diagonal, num_sms, tiles, shares, splits, scale)
    ring = Ring(q_s, do_s, stats_s, q_full, do_full, q_do_empty)
    ds_ring = DsRing(ds_s, ds_full, ds_empty)
    dq_parts = DqParts(dq_s, dq_full, dq_empty)
    kv = KeysValues(k_s, v_s, kv_full, dk_full, dv_full, dk_desc, dv_desc, dkv_sums_ptr)
    next_tiles = NextTiles(tile_s, tile_full)
    gl.warp_specialize(
        [(_consumer, (kv, ring, ds_ring, next_tiles, problem, 0, PERSISTENT, CAUSAL)),
         (_consumer, (kv, ring, ds_ring, next_tiles, problem, 1, PERSISTENT, CAUSAL)),
         (_dq_consumer, (kv, ds_ring, dq_parts, next_tiles, problem, PERSISTENT, CAUSAL)),
         (_producer, (tensors, kv, ring, next_tiles, problem, PERSISTENT, CAUSAL)),
         (_dq_writer, (tensors, dq_parts, next_tiles, problem, PERSISTENT, CAUSAL))],
        [4, 4, 1, 1],
        # Registers: 4 × maxnreg = 512 = 208 (the first role gets the rest) + 216 + 64 + 24. The last two share a warpgroup.
        # Because of the tickets, 216 + 208 for the consumers would be 1 to 2 % slower at D = 128 without a mask (H200).
        [216, 64, 24, 24],
    )  # fmt: skip


def backward(grad_out, q, k, v, out, lse, *, causal, scale, diagonal=0):
    """Return the gradients of q, k and v. `common.operator` lists shapes, dtypes and errors.

    This falls back to v6 for float32, whose tiles take twice the space; for D or Dv = 256, where dK and dV of 128 keys do not
    fit in registers; and under `torch.use_deterministic_algorithms`, because CTAs add to dQ, dK and dV in any order.
    """
    require_hopper(__package__)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    if q.dtype == torch.float32 or max(head_dim, value_dim) == 256 or torch.are_deterministic_algorithms_enabled():
        return backward_of_v6(grad_out, q, k, v, out, lse, causal=causal, scale=scale, diagonal=diagonal)
    dq, dk, dv = empty_rows(q), empty_rows(k), empty_rows(v)
    block_m = 64 if max(head_dim, value_dim) >= 128 else 128  # the most rows of S and dP that fit in registers beside dK and dV
    columns = min(64, head_dim)  # dQ leaves a CTA in parts of 64 rows and this many columns: up to 32 of 64 registers
    head_tiles = cdiv(seq_q, block_m)
    key_tiles = cdiv(seq_k, 128) * batch * kv_heads
    tiles_m = head_tiles * batch * heads
    ways = shares, splits = splits_of(
        key_tiles, heads // kv_heads, seq_q, seq_k, head_dim, value_dim, block_m, causal, diagonal, num_sms()
    )  # fmt: skip
    tiles = key_tiles * shares * splits
    # An SM holds one CTA. A persistent CTA loads its next tile while the last one's dQ still leaves shared memory. A new CTA
    # would start only after that. At D = 128, persistent CTAs are slower for long masked rows.
    persistent = max(head_dim, value_dim) < 128
    counter = lse.new_empty(1, dtype=torch.int32) if persistent else None
    tickets = lse.new_empty(tiles_m, dtype=torch.int32)  # for each query tile; see `_take_ticket`
    stats = lse.new_empty(tiles_m * 2, block_m)
    # dQ's accumulator needs no zeros: each query tile sees the first keys, so one CTA stores to it before others add.
    sums = lse.new_empty(tiles_m * block_m * head_dim // SUM_COLUMNS, SUM_COLUMNS)
    # If several CTAs work on a key tile: accumulators of dK and dV, a row for each 64 keys, dK's first.
    dkv_sums = lse.new_empty(key_tiles * 2, 64 * (head_dim + value_dim)) if tiles > key_tiles else None
    dkv = (describe(dk, 64, head_dim), describe(dv, 64, value_dim)) if tiles > key_tiles else (None, None)
    _prepare_kernel[tiles_m,](
        describe(out, block_m, value_dim), describe(grad_out, block_m, value_dim), lse, stats, tickets, counter,
        dkv_sums, key_tiles * (head_dim + value_dim) // 16, heads, head_tiles, seq_q,
        VALUE_DIM=value_dim, BLOCK_M=block_m,
    )  # fmt: skip
    _backward_kernel[min(tiles, num_sms()) if persistent else tiles,](
        describe_tile(q, block_m), describe_tile(k, 64), describe_tile(v, 64), describe_tile(grad_out, block_m),
        describe_rows(stats, 2), describe_rows(sums, 64 * columns // SUM_COLUMNS), describe_tile(dk, 64), describe_tile(dv, 64),
        dkv_sums, tickets, counter, scale, heads // kv_heads, head_tiles, diagonal, num_sms(), tiles,
        *(ways if tiles > key_tiles else (None, None)), BLOCK_M=block_m, STAGES=2, CAUSAL=causal, num_warps=4, maxnreg=128,
    )  # fmt: skip
    _finish_kernel[tiles_m + (key_tiles * 2 if tiles > key_tiles else 0),](
        sums, dq, *dq.stride()[:3], scale, heads, head_tiles, seq_q, dkv_sums, *dkv, kv_heads, seq_k, tiles_m,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=block_m,
    )  # fmt: skip
    return dq, dk, dv
