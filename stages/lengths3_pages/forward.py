"""FlashAttention-3 forward (arXiv 2407.08608, Algorithm 1), warp-specialized, in Gluon, for Hopper."""

import functools
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from common.kernels.hopper import (
    LOG2_E,
    ROWS,
    describe_tile,
    new_barriers,
    new_ring,
    per_row,
    require_hopper,
    signal,
    slot_and_phase,
    store_rows,
    wait_full,
    wgmma_layout,
)
from common.layout import cdiv, empty_rows
from common.runtime import num_sms
from stages.v6_tile_order.forward import forward as forward_of_v6

from .forward_list import _store_inside, describe_sequences, list_tiles
from .forward_load import _load
from .forward_merge import merge
from .forward_scheduler import NextTiles, Problem, _key_tiles, _next, _pass_on, _place, _row, _rows_before, _share, _tile
from .forward_softmax import _accumulate, _scores


class Tensors(NamedTuple):
    """Tensors in global memory, as TMA descriptors or pointers.

    If PACKED > 1 query heads share a K/V head and a tile, tiles of Q and O are [1, 1, 64 // PACKED, PACKED, D], and otherwise
    [1, 1, 64, D]. With packed heads, few queries fill a tile, and a CTA reads K and V once for all heads of the tile.
    """

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    out: tma.tensor_descriptor
    out_ptr: gl.tensor | None  # pointer to O if the first query tile starts before query 0
    lse: gl.tensor  # pointer to [B, H, Sq]; with split keys, to [splits, B, H, Sq]
    part: gl.tensor | None  # pointer to the splits' O, [splits, B, H, Sq, VALUE_DIM]; None if keys are not split
    counter: gl.tensor | None  # tiles taken so far, except each CTA's first tile; None: CTAs take tiles in fixed strides


class Queries(NamedTuple):
    """Buffers in shared memory: Q, and O until TMA has stored it."""

    q: gl.shared_memory_descriptor  # [Q_STAGES * CONSUMERS, *Q's tile]
    o: gl.shared_memory_descriptor  # [Q_STAGES * CONSUMERS, *O's tile]
    full: gl.shared_memory_descriptor  # barriers, TMA → consumers: Q has arrived
    empty: gl.shared_memory_descriptor  # barriers, consumer → producer: TMA has stored O


class Ring(NamedTuple):
    """K and V in shared memory: a ring buffer with STAGES slots.

    One arrival stands for all warps of a role, because the compiler lets them meet before it.
    """

    k: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_N, HEAD_DIM]
    v: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_N, VALUE_DIM]
    full: gl.shared_memory_descriptor  # barriers, TMA → consumers: K and V have arrived
    empty: gl.shared_memory_descriptor  # barriers, consumers → producer: K and V have been read


@gluon.jit
def _skip(ring, fill, tiles):
    """Release the next `tiles` key tiles without reading them, and return the number of the key tile after them."""
    for _ in range(tiles):
        wait_full(ring.full, fill)
        signal(ring.empty, fill)
        fill += 1
    return fill


@gluon.jit
def _producer(tensors, queries, ring, next_tiles, problem, CAUSAL: gl.constexpr):
    """Run on one warp: keep the buffers of Q, K and V full, also for the next tile while the current tile ends.

    The shared counter lets a CTA with short tiles take more of them, so that all CTAs end at about the same time.
    A CTA's first tile has the CTA's own number. The CTA takes its other tiles from a counter that all CTAs share. Without a
    counter, CTA n of N takes the tiles n, n + N, n + 2N, … This saves the launch that sets the counter to 0.
    """
    if problem.is_split is not None:  # splits need one more launch, the merge; PDL hides its latency
        gdc_launch_dependents()  # the merge's CTAs may start when all CTAs of this launch are here
    Q_STAGES: gl.constexpr = next_tiles.number.shape[0]
    CONSUMERS: gl.constexpr = queries.q.shape[0] // Q_STAGES
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    ROW_BYTES: gl.constexpr = 2 * (ring.k.shape[4] + ring.v.shape[4])  # bytes of a key's K and V
    PACKED: gl.constexpr = tensors.q.block_shape[3] if len(tensors.q.block_shape) == 5 else 1
    fill = 0
    turn = 0
    number = gl.program_id(0)
    while number < problem.batch_heads * problem.tiles_m * problem.splits:
        tile = _tile(number, problem, ROW_BYTES, BLOCK_M, BLOCK_N, PACKED, CAUSAL)
        start_n = tile.split * BLOCK_N + (tile.key_tiles - 1) * tile.step
        for w in gl.static_range(CONSUMERS):
            slot, phase = slot_and_phase(turn, Q_STAGES)
            slot = slot * CONSUMERS + w
            mbarrier.wait(queries.empty.index(slot), phase ^ 1)
            mbarrier.expect(queries.full.index(slot), tensors.q.block_type.nbytes)
            where = _row(tile.batch, tile.head, tile.first_q + tile.start_m + w * ROWS, PACKED)
            tma.async_copy_global_to_shared(tensors.q, where, queries.full.index(slot), queries.q.index(slot))
            if w == 0:  # consumers start at their own pace: the first need not wait for the others' Q
                _load(tensors, tile, ring, fill, start_n, problem, K=True, V=False)
        for _ in range(1, tile.key_tiles):
            fill += 1
            start_n -= tile.step
            _load(tensors, tile, ring, fill, start_n, problem, K=True, V=True)
        # Ask late, while the last V waits for its slot. If CTAs asked when a tile begins, long tiles would follow long tiles.
        if tensors.counter is None:
            number += gl.num_programs(0)
        else:
            number = gl.num_programs(0) + gl.atomic_add(tensors.counter, 1)
        _load(tensors, tile, ring, fill + 1, start_n - tile.step, problem, K=False, V=True)
        fill += 2
        slot, _ = slot_and_phase(turn, Q_STAGES)
        _pass_on(number, next_tiles, slot)
        turn += 1


@gluon.jit
def _store_out(acc, normalize, tensors, queries, own, problem, tile, start_m, part, idle, PACKED: gl.constexpr):
    """Store a consumer's rows of O, from its slot `own` of `queries`."""
    out = acc * normalize
    if problem.is_split is not None or problem.lengths is not None:
        out = gl.where(idle, 0.0, out)
    if tensors.part is not None:  # `part` is the head's first row in `tensors.part`
        offs_m = start_m + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        offs_d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        part_ptrs = tensors.part + (part + _place(offs_m, problem, PACKED))[:, None] * acc.shape[1] + offs_d[None, :]
        gl.store(part_ptrs, out, mask=((offs_m >= 0) & (offs_m < problem.seq_q))[:, None])
    elif problem.listed is not None and ((start_m < 0) | (start_m + ROWS > tile.seq_q)):
        _store_inside(tensors.out_ptr, tensors.out, tile, start_m, out.to(queries.q.dtype))
    elif problem.listed is None and tensors.out_ptr is not None and start_m < 0:
        store_rows(tensors.out_ptr, tensors.out, tile.batch, tile.head, start_m // PACKED, out.to(queries.q.dtype))
    else:
        queries.o.index(own).reshape(acc.shape).store(out.to(queries.q.dtype))
        fence_async_shared()
        where = _row(tile.batch, tile.head, tile.first_q + start_m, PACKED)
        tma.async_copy_shared_to_global(tensors.out, where, queries.o.index(own))


@gluon.jit
def _consumer(tensors, queries, ring, next_tiles, problem, w: gl.constexpr, CAUSAL: gl.constexpr):
    """Run on a warpgroup: compute the w-th 64 query rows of each tile.

    Consumers run at their own pace. So while one computes its softmax, the tensor cores run another's matmuls.
    """
    Q_STAGES: gl.constexpr = next_tiles.number.shape[0]
    CONSUMERS: gl.constexpr = queries.q.shape[0] // Q_STAGES
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    ROW_BYTES: gl.constexpr = 2 * (ring.k.shape[4] + ring.v.shape[4])  # bytes of a key's K and V
    PACKED: gl.constexpr = tensors.q.block_shape[3] if len(tensors.q.block_shape) == 5 else 1
    COPIED: gl.constexpr = tensors.k.block_shape[2]  # keys of a TMA copy: a key tile's, or fewer if pages are smaller
    HEAD_DIM: gl.constexpr = ring.k.shape[4]
    VALUE_DIM: gl.constexpr = ring.v.shape[4]
    s_layout: gl.constexpr = wgmma_layout(ROWS, BLOCK_N)
    acc_layout: gl.constexpr = wgmma_layout(ROWS, VALUE_DIM)
    q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=2)
    of_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    # With Q in registers, the matmul need not read Q from shared memory for every key tile. Up to D = 128, two consumers have
    # enough registers for Q. More consumers do not.
    Q_IN_REGISTERS: gl.constexpr = CONSUMERS == 2 and HEAD_DIM <= 128
    # exp(x) = exp2(x * log2(e)), and exp2 is one instruction. Never scale by 0, because a masked score (-inf) times 0 is NaN.
    scale_log2 = gl.maximum(problem.scale * LOG2_E, 1e-37)
    fill = 0
    turn = 0
    number = gl.program_id(0)
    while number < problem.batch_heads * problem.tiles_m * problem.splits:
        tile = _tile(number, problem, ROW_BYTES, BLOCK_M, BLOCK_N, PACKED, CAUSAL)
        start_m = tile.start_m + w * ROWS
        seen = _key_tiles(start_m + ROWS, tile.keys, tile.diagonal, BLOCK_N, PACKED, CAUSAL)
        # With few queries, a tile has consumers without rows. They leave the tensor cores to the others, after one key tile.
        seen = gl.where(start_m < tile.seq_q, seen, 1)
        seen = gl.minimum(_share(seen, tile.split, problem), tile.key_tiles)
        idle = seen <= 0  # the rows see none of the split's keys; the result of a first key tile is not used
        seen = gl.where(idle, 1, seen)

        offs_m = start_m + gl.arange(0, ROWS, of_rows)
        acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, acc_layout)
        slot, phase = slot_and_phase(turn, Q_STAGES)
        own = slot * CONSUMERS + w  # this consumer's slot of `queries`
        mbarrier.wait(queries.full.index(own), phase)
        q_buffer = queries.q.index(own).reshape([ROWS, HEAD_DIM])
        q = q_buffer.load(q_layout) if Q_IN_REGISTERS else q_buffer
        fill = _skip(ring, fill, tile.key_tiles - seen)  # key tiles that only the CTA's later consumers see
        s = _scores(q, ring, fill)
        if Q_STAGES == 2:
            # While S is computed, wait until TMA has stored the previous tile's O from the other buffer. Then the next Q may
            # arrive there.
            tma.store_wait(0)
            slot, _ = slot_and_phase(turn + 1, Q_STAGES)
            mbarrier.arrive(queries.empty.index(slot * CONSUMERS + w), count=1, pred=turn > 0)
        last = start_m // PACKED + tile.diagonal  # the last key that the first row sees
        last = gl.where(idle, 2**30, last)  # without a visible key, the tile's maximum would be -inf, and P NaN
        acc, m, l = _accumulate(acc, s, q, ring, fill, seen, tile, problem, last, scale_log2, COPIED, CONSUMERS, PACKED, CAUSAL)
        fill += seen

        # The last P V is still in flight, and only O needs it. So all else that only a tile's end needs is computed meanwhile:
        # the whole row sums (in `_accumulate`), and from them LSE and 1 / l.
        part = (tile.split * problem.batch_heads + tile.batch_head).to(gl.int64) * problem.seq_q + tile.first_q
        lse_ptrs = tensors.lse + part + _place(offs_m, problem, PACKED)
        lse = gl.where(idle, float("-inf"), (m + gl.log2(l)) / LOG2_E)
        gl.store(lse_ptrs, lse, mask=(offs_m >= 0) & (offs_m < tile.seq_q))
        normalize = per_row(1.0 / l, acc_layout)
        slot, phase = slot_and_phase(turn, Q_STAGES)
        number = _next(next_tiles, slot, phase)
        acc = warpgroup_mma_wait(0, [acc])
        signal(ring.empty, fill)
        fill += 1
        _store_out(acc, normalize, tensors, queries, own, problem, tile, start_m, part, idle, PACKED)
        if Q_STAGES == 1:
            tma.store_wait(0)
            mbarrier.arrive(queries.empty.index(own), count=1)
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch_heads", "heads", "seq_q", "seq_k", "diagonal", "splits"])  # compile once for all lengths
def _forward_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, part_ptr, counter_ptr, lengths_ptr, list_ptr, table_ptr, scale,
    batch_heads, heads, heads_per_kv, seq_q, seq_k, diagonal, splits,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    HEAD_DIM: gl.constexpr = q_desc.block_shape[-1]
    VALUE_DIM: gl.constexpr = out_desc.block_shape[-1]
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    PACKED: gl.constexpr = q_desc.block_shape[3] if len(q_desc.block_shape) == 5 else 1
    tiles_m = gl.cdiv(seq_q + _rows_before(diagonal, PACKED), BLOCK_M) if list_ptr is None else gl.load(list_ptr + 1)
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
    tensors = Tensors(q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, part_ptr, counter_ptr)
    splits = 1 if part_ptr is None else splits  # a constant 1, which the compiler removes
    problem = Problem(
        batch_heads, heads, heads_per_kv, tiles_m, seq_q, seq_k, diagonal, scale, splits, part_ptr, lengths_ptr, list_ptr,
        table_ptr,
    )  # fmt: skip
    queries = Queries(q_s, o_s, q_full, q_empty)
    ring = Ring(k_s, v_s, kv_full, kv_empty)
    next_tiles = NextTiles(tile_s, new_barriers(Q_STAGES, 1))  # no empty barriers: the producer first waits at `queries.empty`
    # An SM has 65,536 registers, and a warpgroup has 128 threads. So the registers per thread, summed over all warpgroups, are
    # at most 512. The last list has the registers per thread of all roles except the first. The producer gets 24. The first
    # role runs on the launch's `num_warps` warps and gets the rest.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (tensors, queries, ring, next_tiles, problem, 0, CAUSAL)),
             (_consumer, (tensors, queries, ring, next_tiles, problem, 1, CAUSAL)),
             (_producer, (tensors, queries, ring, next_tiles, problem, CAUSAL))],
            [4, 1], [240, 24],  # registers: 3 × maxnreg = 504 = 240 (the first role gets the rest) + 240 + 24
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consumer, (tensors, queries, ring, next_tiles, problem, 0, CAUSAL)),
             (_consumer, (tensors, queries, ring, next_tiles, problem, 1, CAUSAL)),
             (_consumer, (tensors, queries, ring, next_tiles, problem, 2, CAUSAL)),
             (_consumer, (tensors, queries, ring, next_tiles, problem, 3, CAUSAL)),
             (_producer, (tensors, queries, ring, next_tiles, problem, CAUSAL))],
            [4, 4, 4, 1], [112, 112, 112, 24],  # 5 × maxnreg = 480 = 120 (the first role gets the rest) + 3 × 112 + 24
        )  # fmt: skip


class Shape(NamedTuple):
    """Sizes of a work tile, and numbers of buffers."""

    queries: int  # query rows: 64 for each of two or four consumers
    keys: int  # keys of a key tile
    kv_slots: int  # buffers of K and V
    q_slots: int  # buffers of Q
    maxnreg: int  # registers per thread at the launch, before the roles divide the registers anew


# TILES and FEW_ROWS are indexed by the larger of D and Dv. No tuner chooses the tiles, because Gluon's layouts and buffers
# depend on them. FEW_ROWS has shapes for few query rows: two consumers, because others would idle (see `plan`). Two consumers
# have registers for longer key tiles, with which a consumer waits for fewer loads and matmuls.
TILES = dict.fromkeys((16, 32, 64), Shape(queries=256, keys=64, kv_slots=6, q_slots=2, maxnreg=96)) | {
    128: Shape(queries=128, keys=128, kv_slots=2, q_slots=2, maxnreg=168),
    256: Shape(queries=128, keys=64, kv_slots=2, q_slots=1, maxnreg=168),
}
FEW_ROWS = TILES | dict.fromkeys((16, 32, 64), Shape(queries=128, keys=128, kv_slots=3, q_slots=2, maxnreg=168))
FEW_SQUARES = 8  # up to D = 64, the most squares of 128 x 128 scores per CTA of a small problem (fitted on an H200)
# Constants of `splits_of`, fitted to times on an H200. results/constants-h200.json has the times of all numbers of splits.
# `splits_of` counts time in units of 1/30 ns. In one unit, a CTA reads one element of K or V, if few other CTAs read.
CROWDED = 0.75  # reading takes this fraction longer if all 132 CTAs read, because memory is only fast enough for 75 CTAs
ROWS_READ = 75  # if a tile has more rows than this, computing takes longer than reading keys
MERGE = 75_000  # time of the merge's launch
FEW_WAVES = 4  # without a mask, keys are split up to this many waves: with more, an empty last one costs little (not measured)


def cost_of(splits: int, tiles: int, key_tiles: int, rows: int, keys: int, width: int, programs: int) -> float:
    """Return the predicted time of a forward with this number of splits. `splits_of` describes the other arguments."""
    turns = cdiv(tiles * splits, programs)  # query tiles that a CTA takes one after the other
    busy = tiles * splits / (turns * programs)  # fraction of the CTAs that have a tile
    key_tile = keys * width * max(1 + CROWDED * busy**2, rows / ROWS_READ)  # time to read it or to compute
    parts = 2 * tiles * splits * rows * width * (1 + CROWDED) / programs  # time to write and read the splits' outputs
    return turns * cdiv(key_tiles, splits) * key_tile + (MERGE + parts) * (splits > 1)


@functools.cache
def splits_of(tiles: int, key_tiles: int, rows: int, keys: int, width: int, programs: int) -> int:
    """Return the smallest number of splits whose predicted time is within 1 % of the best time.

    More splits give each CTA fewer keys, but cost time: CTAs that read together slow each other down, the splits' outputs are
    written in float32 and read again for the merge, and the merge is one more launch.

    Args:
        tiles: number of query tiles of all heads. Each has `rows` rows.
        key_tiles: number of key tiles of each query tile. Each has `keys` keys.
        width: number of elements of a key in K and V together.
        programs: number of CTAs that run at the same time.
    """
    # If the longest split has equally many key tiles for two numbers of splits, the larger number costs more. So skip it.
    costs, splits = {}, 1
    while splits <= min(key_tiles, programs):
        costs[splits] = cost_of(splits, tiles, key_tiles, rows, keys, width, programs)
        longest = cdiv(key_tiles, splits)
        splits = cdiv(key_tiles, longest - 1) if longest > 1 else key_tiles + 1
    good = 1.01 * min(costs.values())
    return next(splits for splits, cost in costs.items() if cost <= good)


class Plan(NamedTuple):
    """How a forward's work is divided."""

    shape: Shape
    packed: int  # number of query heads side by side in a tile
    tiles: int  # query tiles of all heads
    splits: int  # number of CTAs that share a query tile
    counted: bool  # whether CTAs take their tiles from a counter, not in fixed strides


def plan(batch, heads, kv_heads, seq_q, keys, diagonal, head_dim, value_dim, programs, causal=False, uneven=False) -> Plan:
    """Return the plan of a forward with `seq_q` queries. The last query sees `keys` keys, and `programs` CTAs run at once. If
    keys are `uneven`, some sequences have fewer."""
    width = max(head_dim, value_dim)
    per_kv = heads // kv_heads
    packed = per_kv if 64 % per_kv == 0 else 1  # a consumer's 64 rows hold all packed heads of a query
    squares = cdiv(seq_q * packed, 128) * cdiv(keys, 128) * batch * (heads // packed)
    small = width <= 64 and squares <= FEW_SQUARES * programs
    # Rows are few if tiles of 256 rows would leave consumers idle. Then two consumers of each tile have no rows; or the problem
    # is small, and whole CTAs have no tile.
    few = seq_q * packed <= 128 or small
    shape = (FEW_ROWS if few else TILES)[width]
    if cdiv(seq_q * packed, shape.queries) == cdiv(seq_q, shape.queries) * packed:
        packed = 1  # packing would make no fewer tiles
    before = diagonal % (64 // packed)  # positions before query 0
    tiles_m = cdiv((seq_q + before) * packed, shape.queries)
    tiles = tiles_m * batch * (heads // packed)
    key_tiles = cdiv(keys, shape.keys)
    # Without a mask, all tiles take the same time. If they come in few waves, the last wave may leave most SMs idle, and splits
    # fill it. With a mask, tiles of many rows that fill the GPU are balanced better by a counter than by splits.
    splits = 1
    if few or tiles < (programs if causal else FEW_WAVES * programs):
        rows = min(seq_q * packed, shape.queries)
        splits = splits_of(tiles, key_tiles, rows, shape.keys, head_dim + value_dim, programs)
    # Long key tiles do not suit a CTA that gets only one: its matmuls would start late. So two short key tiles replace it.
    if few and key_tiles <= splits and shape.keys > 64:
        shape = shape._replace(keys=shape.keys // 2, kv_slots=shape.kv_slots * 2)
    # A counter gives no CTA less work if no CTA has a second tile, or if all tiles are equal: rows for one tile per head, or
    # splits. A mask may make several tiles of a head unequal. But a small problem's tiles are so short that a counter would
    # save less time than its launch takes.
    counted = splits == 1 and seq_q * packed > shape.queries and tiles > programs and not small
    counted |= uneven and tiles * splits > programs  # sequences with few keys leave a CTA time for more tiles
    return Plan(shape, packed, tiles, splits, counted)


def forward(q, k, v, *, causal, scale, diagonal=0, lengths=None, starts=None):
    """Return attention output and log-sum-exp. `common.operator` lists shapes, dtypes and errors. Float32 falls back to v6.

    Raises:
        Unavailable: the GPU is not a Hopper GPU.
        TypeError: there are `lengths` or `starts`, and the tensors are float32.
    """
    require_hopper(__package__)
    if lengths is not None or starts is not None:
        if q.dtype == torch.float32:
            given = "cu" if lengths is None else "cache"
            raise TypeError(f"with {given}_seqlens, q, k and v must be float16 or bfloat16, got torch.float32")
        causal = causal and (q.shape[2] > 1 or lengths is None)  # a single query sees all keys
        diagonal = 63 if causal else 0  # lengths give each sequence its own; here, the one with the most rows before query 0
    if q.dtype == torch.float32:  # exact float32 has no wgmma, and its tiles take twice the space
        return forward_of_v6(q, k, v, causal=causal, scale=scale, diagonal=diagonal)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    table, page = lengths.pages if lengths else None, seq_k
    seq_k = page if table is None else table.shape[1] * page
    out = empty_rows(q, value_dim)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if scale < 0:
        q, scale = -q, -scale  # the scores stay the same, and max(scale * s) = scale * max(s)
    if starts is None:
        keys = min(seq_k, seq_q + diagonal) if causal and lengths is None else seq_k
        planned = plan(batch, heads, kv_heads, seq_q, keys, diagonal, head_dim, value_dim, num_sms(), causal, bool(lengths))
        counter, listed, describe_keys = lse.new_zeros(1, dtype=torch.int32) if planned.counted else None, None, describe_tile
    else:
        shape = (FEW_ROWS if seq_q <= 128 * (len(starts.queries) - 1) else TILES)[max(head_dim, value_dim)]
        counter = listed = list_tiles(starts, q, k, shape.queries, causal)  # its first number is the counter
        planned, describe_keys = Plan(shape, 1, (len(listed) - 1) * heads, 1, True), describe_sequences
    shape, packed, splits = planned.shape, planned.packed, planned.splits
    copied = shape.keys  # keys that a TMA copy loads
    if table is not None:
        copied, describe_keys = min(copied, page), functools.partial(describe_tile, columns=64)
    queries, outputs, rows = q, out, (64,)
    if packed > 1:
        queries, outputs = (t.unflatten(1, (-1, packed)).transpose(2, 3) for t in (q, out))  # [B, H / packed, Sq, packed, D]
        rows = 64 // packed, packed
    out_ptr = outputs if diagonal % (64 // packed) or starts else None  # needed if a query tile starts before query 0
    lses = lse.new_empty(splits, *lse.shape) if splits > 1 else lse
    parts = lse.new_empty(*lses.shape, value_dim) if splits > 1 else None
    programs = min(planned.tiles * splits, num_sms())
    _forward_kernel[programs,](
        describe_tile(queries, *rows), describe_keys(k, copied), describe_keys(v, copied),
        describe_tile(outputs, *rows), out_ptr, lses, parts, counter, lengths.keys if lengths else listed, listed, table, scale,
        batch * heads // packed, heads // packed, heads // kv_heads // packed, seq_q * packed, seq_k, diagonal, splits,
        BLOCK_M=shape.queries, BLOCK_N=shape.keys,
        STAGES=shape.kv_slots, Q_STAGES=shape.q_slots, CAUSAL=causal, num_warps=4, maxnreg=shape.maxnreg,
    )  # fmt: skip
    if splits > 1:
        merge(parts, lses, out, lse)
    return out, lse
