"""A forward that guesses each row's maximum from the scores that it computes first, and checks the guess afterwards
(FlashDecoding++, arXiv 2311.01282, section 3), in Gluon, for Hopper.

While guesses hold, no step waits for a maximum, and nothing is rescaled. A second launch computes the tiles whose guess failed.
"""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from common.kernels.hopper import (
    LOG2_E,
    ROWS,
    describe_tile,
    matrix,
    new_barriers,
    new_ring,
    per_row,
    require_hopper,
    signal,
    slot_and_phase,
    store_clipped,
    wait_empty,
    wait_full,
    wgmma_layout,
)
from common.layout import cdiv, empty_rows
from common.runtime import num_sms
from stages.v6_tile_order.forward import forward as forward_of_v6

from .forward_plan import is_short
from .forward_sample import SAMPLE_LIMIT, _sample_kernel
from .forward_scheduler import (
    LATELY,
    NextTiles,
    Problem,
    _gives_up,
    _key_tiles,
    _leave,
    _next,
    _next_again,
    _pass_on,
    _started,
    _state,
    _tile,
)
from .forward_softmax import _accumulate, _scores, _scores_of


class Tensors(NamedTuple):
    """Tensors in global memory, as TMA descriptors or pointers."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    first: tma.tensor_descriptor  # K of the first keys
    out: tma.tensor_descriptor
    out_ptr: gl.tensor | None  # pointer to O if the first query tile starts before query 0
    lse: gl.tensor  # pointer to [B, H, Sq]
    state: gl.tensor | None  # pointer to `State`; None if a running maximum needs no other launch


class Queries(NamedTuple):
    """Buffers in shared memory: Q with the first keys, and O until TMA has stored it."""

    q: gl.shared_memory_descriptor  # [Q_STAGES * CONSUMERS, 1, 1, 64, HEAD_DIM]
    o: gl.shared_memory_descriptor  # [Q_STAGES * CONSUMERS, 1, 1, 64, VALUE_DIM]
    first: gl.shared_memory_descriptor | None  # K of the first keys, [Q_STAGES * CONSUMERS, 1, 1, FIRST_KEYS, HEAD_DIM]
    full: gl.shared_memory_descriptor  # a barrier for each slot: Q and the first keys have arrived
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
def _load(tensors, tile, ring, fill, start_n, K: gl.constexpr, V: gl.constexpr):
    """Start to fill the next slot of the ring, when the consumers have released the slot.

    A step reads K of the key tile at start_n, and V of the key tile visited before it, whose P is known. (Keys go from last to
    first.) A consumer reads both before the step's softmax. So the slot is free, and refilled, during the softmax.
    """
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    NBYTES: gl.constexpr = (tensors.k.block_type.nbytes if K else 0) + (tensors.v.block_type.nbytes if V else 0)
    slot = wait_empty(ring.empty, fill)
    mbarrier.expect(ring.full.index(slot), NBYTES)
    if K:
        where = [tile.batch, tile.kv_head, start_n, 0]
        tma.async_copy_global_to_shared(tensors.k, where, ring.full.index(slot), ring.k.index(slot))
    if V:
        where = [tile.batch, tile.kv_head, start_n + BLOCK_N, 0]
        tma.async_copy_global_to_shared(tensors.v, where, ring.full.index(slot), ring.v.index(slot))


@gluon.jit
def _skip(ring, fill, tiles):
    """Release the next `tiles` key tiles without reading them, and return the number of the key tile after them."""
    for _ in range(tiles):
        wait_full(ring.full, fill)
        signal(ring.empty, fill)
        fill += 1
    return fill


@gluon.jit
def _producer(tensors, queries, ring, next_tiles, problem, MODE: gl.constexpr, CAUSAL: gl.constexpr):
    """Run on one warp: keep the buffers of Q, K and V full, also for the next tile while the current tile ends.

    The shared counter lets a CTA with short tiles take more of them, so that all CTAs end at about the same time.
    A CTA's first tile has the CTA's own number. The CTA takes its other tiles from a counter that all CTAs share, until too
    many samples or tiles have failed. If MODE is "again", CTA n of N CTAs takes failed tile n, and every N-th failed tile after
    it. Then it takes tiles that never started. If MODE is "running", the CTA takes tiles in fixed strides, because a counter
    would need one more launch, which sets it to zero.
    """
    Q_STAGES: gl.constexpr = next_tiles.number.shape[0] - 1  # the last slot is for the number of the CTA's first tile
    CONSUMERS: gl.constexpr = queries.q.shape[0] // Q_STAGES
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    ROW_BYTES: gl.constexpr = 2 * (ring.k.shape[4] + ring.v.shape[4])  # bytes of a key's K and V
    NBYTES: gl.constexpr = tensors.q.block_type.nbytes + (tensors.first.block_type.nbytes if MODE == "guess" else 0)
    if MODE != "running":
        state = _state(tensors.state)
    fill = 0
    turn = 0
    number = gl.program_id(0)
    tiles = problem.batch_heads * problem.tiles_m
    if MODE == "again":
        started = _started(tiles, state)
        failed, number = _next_again(gl.to_tensor(0), number, started, state)
        _pass_on(number, next_tiles, Q_STAGES)  # the consumers need not search themselves
    while number < tiles:
        tile = _tile(number, problem, ROW_BYTES, BLOCK_M, BLOCK_N, CAUSAL)
        key_tiles = tile.key_tiles
        start_n = (key_tiles - 1) * BLOCK_N
        for w in gl.static_range(CONSUMERS):
            slot, phase = slot_and_phase(turn, Q_STAGES)
            slot = slot * CONSUMERS + w
            mbarrier.wait(queries.empty.index(slot), phase ^ 1)
            mbarrier.expect(queries.full.index(slot), NBYTES)
            where = [tile.batch, tile.head, tile.start_m + w * ROWS, 0]
            tma.async_copy_global_to_shared(tensors.q, where, queries.full.index(slot), queries.q.index(slot))
            if MODE == "guess":  # each consumer has its own copy, so it waits for nothing but its slot
                where = [tile.batch, tile.kv_head, 0, 0]
                tma.async_copy_global_to_shared(tensors.first, where, queries.full.index(slot), queries.first.index(slot))
            if w == 0:  # consumers start at their own pace: the first need not wait for the others' Q
                _load(tensors, tile, ring, fill, start_n, K=True, V=False)
        if MODE == "guess":
            if turn == 0:
                # PDL lets this launch start before the samples' launch ends. So Q and K of this tile load while the samples are
                # computed, and a prediction costs little time.
                gdc_wait()
                stops = _gives_up(number, state)
                _pass_on(gl.where(stops, tiles, number), next_tiles, Q_STAGES)
                if stops:  # most guesses would fail, so this CTA computes no tile
                    _leave(number, state)
                    key_tiles = 0  # load no more; `_gives_up` says so below, too, because flags are only raised
                    for w in gl.static_range(CONSUMERS):  # no consumer waits for these loads, which end before the CTA may end
                        mbarrier.wait(queries.full.index(w), 0)
                    mbarrier.wait(ring.full.index(0), 0)
        for _ in range(1, key_tiles):
            fill += 1
            start_n -= BLOCK_N
            _load(tensors, tile, ring, fill, start_n, K=True, V=True)
        # Ask late, while the last V waits for its slot. If CTAs asked when a tile begins, long tiles would follow long tiles.
        if MODE == "again":
            failed, number = _next_again(failed + 1, gl.num_programs(0) - 1, started, state)
        elif MODE == "running":
            number += gl.num_programs(0)
        elif _gives_up(number, state):
            number = tiles
        else:
            number = gl.num_programs(0) + gl.atomic_add(state.counter, 1)
        if key_tiles > 0:
            _load(tensors, tile, ring, fill + 1, start_n - BLOCK_N, K=False, V=True)
        fill += 2
        slot, _ = slot_and_phase(turn, Q_STAGES)
        _pass_on(number, next_tiles, slot)
        turn += 1


@gluon.jit
def _check(acc, l, l_capped, number, tensors):
    """Flag tile `number` as failed if its guess was too low: P or a sum has overflowed, or a few keys far above the guess
    dominate a row.

    Such keys do harm without overflow, too. P is rounded for the matmul with V, but not for the sum l. With a running maximum,
    a key that dominates has P = 1, which is exact. With a guess, its rounding error stays in O. In the backward, dP - delta
    should nearly cancel, and this error remains. `l_capped` finds such rows: it sums P like l, but counts at most CAP of a
    thread's share of a key tile. So l is far above `l_capped` only if few keys dominate.
    """
    of_rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    # LIMIT times P's relative rounding error (float16: 2^-12, bfloat16: 2^-9) is 1/16.
    LIMIT: gl.constexpr = 256.0 if tensors.q.dtype == gl.float16 else 32.0
    fails = ~(gl.abs(gl.sum(acc, 1) + gl.convert_layout(l, of_rows)) < float("inf"))
    fails = fails | gl.convert_layout(l >= LIMIT * l_capped, of_rows)
    same = gl.zeros([acc.shape[0]], gl.int32, of_rows)
    state = _state(tensors.state)
    gl.store(state.any_failed + same, 1, mask=fails)
    gl.store(state.tile_failed + number + same, 1, mask=fails)


@gluon.jit
def _store_out(acc, normalize, tensors, queries, own, tile, start_m):
    """Store a consumer's rows of O, from its slot `own` of `queries`."""
    if tensors.out_ptr is not None and start_m < 0:
        out = (acc * normalize).to(queries.q.dtype)
        store_clipped(tensors.out_ptr, tensors.out, tile.batch, tile.head, start_m, out)
    else:
        queries.o.index(own).reshape(acc.shape).store((acc * normalize).to(queries.q.dtype))
        fence_async_shared()
        where = [tile.batch, tile.head, start_m, 0]
        tma.async_copy_shared_to_global(tensors.out, where, queries.o.index(own))


@gluon.jit
def _consumer(tensors, queries, ring, next_tiles, problem, w: gl.constexpr, MODE: gl.constexpr, CAUSAL: gl.constexpr):
    """Run on a warpgroup: compute the w-th 64 query rows of each tile.

    Consumers run at their own pace. So while one computes its softmax, the tensor cores run another's matmuls.
    """
    Q_STAGES: gl.constexpr = next_tiles.number.shape[0] - 1
    CONSUMERS: gl.constexpr = queries.q.shape[0] // Q_STAGES
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    ROW_BYTES: gl.constexpr = 2 * (ring.k.shape[4] + ring.v.shape[4])  # bytes of a key's K and V
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
    # The producer passes on a first number if it has searched for a failed tile, or looked at the samples.
    number = gl.program_id(0) if MODE == "running" else _next(next_tiles, Q_STAGES, 0)
    tiles = problem.batch_heads * problem.tiles_m
    while number < tiles:
        tile = _tile(number, problem, ROW_BYTES, BLOCK_M, BLOCK_N, CAUSAL)
        start_m = tile.start_m + w * ROWS
        seen = _key_tiles(start_m + ROWS, problem, BLOCK_N, CAUSAL)

        offs_m = start_m + gl.arange(0, ROWS, of_rows)
        acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, acc_layout)
        slot, phase = slot_and_phase(turn, Q_STAGES)
        own = slot * CONSUMERS + w  # this consumer's slot of `queries`
        mbarrier.wait(queries.full.index(own), phase)
        q_buffer = matrix(queries.q.index(own))
        q = q_buffer.load(q_layout) if Q_IN_REGISTERS else q_buffer
        fill = _skip(ring, fill, tile.key_tiles - seen)  # key tiles that only the CTA's later consumers see
        s = _scores(q, ring, fill)
        s_first = _scores_of(q, queries.first.index(own)) if MODE == "guess" else None
        if Q_STAGES == 2:
            # While S is computed, wait until TMA has stored the previous tile's O from the other buffer. Then the next Q may
            # arrive there.
            tma.store_wait(0)
            slot, _ = slot_and_phase(turn + 1, Q_STAGES)
            mbarrier.arrive(queries.empty.index(slot * CONSUMERS + w), count=1, pred=turn > 0)
        last = start_m + problem.diagonal  # the last key that the first row sees
        acc, m, l, l_capped = _accumulate(
            acc, s, s_first, q, ring, fill, seen, problem, last, scale_log2, CONSUMERS, MODE, CAUSAL
        )  # fmt: skip
        fill += seen

        # The last P V is still in flight, and only O needs it. So all else that only a tile's end needs is computed meanwhile:
        # the whole row sums (in `_accumulate`), and from them LSE and 1 / l.
        lse_ptrs = tensors.lse + tile.batch_head.to(gl.int64) * problem.seq_q + offs_m
        gl.store(lse_ptrs, (m + gl.log2(l)) / LOG2_E, mask=(offs_m >= 0) & (offs_m < problem.seq_q))
        normalize = per_row(1.0 / l, acc_layout)
        slot, phase = slot_and_phase(turn, Q_STAGES)
        next_number = _next(next_tiles, slot, phase)
        acc = warpgroup_mma_wait(0, [acc])
        signal(ring.empty, fill)
        fill += 1
        if MODE == "guess":
            _check(acc, l, l_capped, number, tensors)
        _store_out(acc, normalize, tensors, queries, own, tile, start_m)
        if Q_STAGES == 1:
            tma.store_wait(0)
            mbarrier.arrive(queries.empty.index(own), count=1)
        number = next_number
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch_heads", "heads", "seq_q", "seq_k", "diagonal"])  # compile once for all lengths
def _forward_kernel(
    q_desc, k_desc, v_desc, first_desc, out_desc, out_ptr, lse_ptr, state_ptr, scale,
    batch_heads, heads, heads_per_kv, seq_q, seq_k, diagonal,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, MODE: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    tiles_m = gl.cdiv(seq_q + diagonal % ROWS, BLOCK_M)
    if MODE == "again":
        if gl.load(_state(state_ptr).any_failed) == 0:
            return  # the usual case: all guesses hold
    q_s = gl.allocate_shared_memory(q_desc.dtype, [Q_STAGES * CONSUMERS, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, VALUE_DIM], v_desc.layout)
    if VALUE_DIM == HEAD_DIM:
        o_s = q_s  # Q is no longer needed when O is done
    else:
        o_s = gl.allocate_shared_memory(q_desc.dtype, [Q_STAGES * CONSUMERS, 1, 1, ROWS, VALUE_DIM], out_desc.layout)
    first_s = None
    if MODE == "guess":
        first_s = gl.allocate_shared_memory(k_desc.dtype, [Q_STAGES * CONSUMERS] + first_desc.block_shape, first_desc.layout)
    tile_s = gl.allocate_shared_memory(gl.int32, [Q_STAGES + 1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = new_ring(Q_STAGES * CONSUMERS, 1, 1)  # each consumer has its own buffers
    kv_full, kv_empty = new_ring(STAGES, 1, CONSUMERS)
    tensors = Tensors(q_desc, k_desc, v_desc, first_desc, out_desc, out_ptr, lse_ptr, state_ptr)
    problem = Problem(batch_heads, heads, heads_per_kv, tiles_m, seq_q, seq_k, diagonal, scale)
    queries = Queries(q_s, o_s, first_s, q_full, q_empty)
    ring = Ring(k_s, v_s, kv_full, kv_empty)
    # No empty barriers: the producer first waits at `queries.empty`, or uses the last slot, which it fills only once.
    next_tiles = NextTiles(tile_s, new_barriers(Q_STAGES + 1, 1))
    # An SM has 65,536 registers, and a warpgroup has 128 threads. So the registers per thread, summed over all warpgroups, are
    # at most 512. The last list has the registers per thread of all roles except the first. The producer gets 24. The first
    # role runs on the launch's `num_warps` warps and gets the rest.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (tensors, queries, ring, next_tiles, problem, 0, MODE, CAUSAL)),
             (_consumer, (tensors, queries, ring, next_tiles, problem, 1, MODE, CAUSAL)),
             (_producer, (tensors, queries, ring, next_tiles, problem, MODE, CAUSAL))],
            [4, 1], [240, 24],  # registers: 3 × maxnreg = 504 = 240 (the first role gets the rest) + 240 + 24
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consumer, (tensors, queries, ring, next_tiles, problem, 0, MODE, CAUSAL)),
             (_consumer, (tensors, queries, ring, next_tiles, problem, 1, MODE, CAUSAL)),
             (_consumer, (tensors, queries, ring, next_tiles, problem, 2, MODE, CAUSAL)),
             (_consumer, (tensors, queries, ring, next_tiles, problem, 3, MODE, CAUSAL)),
             (_producer, (tensors, queries, ring, next_tiles, problem, MODE, CAUSAL))],
            [4, 4, 4, 1], [112, 112, 112, 24],  # 5 × maxnreg = 480 = 120 (the first role gets the rest) + 3 × 112 + 24
        )  # fmt: skip


class Shape(NamedTuple):
    """Sizes of a work tile, and numbers of buffers."""

    queries: int  # query rows: 64 for each of two or four consumers
    keys: int  # keys of a key tile
    kv_slots: int  # buffers of K and V
    q_slots: int  # buffers of Q
    maxnreg: int  # registers per thread at the launch, before the roles divide the registers anew


# TILES is indexed by the larger of D and Dv. No tuner chooses the tiles, because Gluon's layouts and buffers depend on them.
# A guess rescales nothing for each key tile, so short key tiles cost no more. At the diagonal, they have fewer masked scores.
# Also, a short slot is free for the next load sooner.
TILES = dict.fromkeys((16, 32, 64), Shape(queries=256, keys=64, kv_slots=6, q_slots=2, maxnreg=96)) | {
    128: Shape(queries=128, keys=64, kv_slots=4, q_slots=2, maxnreg=168),
    256: Shape(queries=128, keys=64, kv_slots=2, q_slots=1, maxnreg=168),
}
# A running maximum rescales O for each key tile, so fewer and longer key tiles suit it.
TILES_AGAIN = TILES | {128: Shape(queries=128, keys=128, kv_slots=2, q_slots=2, maxnreg=168)}
FIRST_KEYS = 16  # number of first keys in a row's guess


def forward(q, k, v, *, causal, scale, diagonal=0):
    """Return attention output and log-sum-exp. `common.operator` lists shapes, dtypes and errors. Float32 falls back to v6.

    Raises:
        Unavailable: the GPU is not a Hopper GPU.
    """
    require_hopper(__package__)
    if q.dtype == torch.float32:  # exact float32 has no wgmma, and its tiles take twice the space
        return forward_of_v6(q, k, v, causal=causal, scale=scale, diagonal=diagonal)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    out = empty_rows(q, value_dim)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if scale < 0:
        q, scale = -q, -scale  # the scores stay the same, and max(scale * s) = scale * max(s)
    out_ptr = out if diagonal % 64 else None  # needed if the first query tile starts before query 0
    width = max(head_dim, value_dim)
    tiles = cdiv(seq_q + diagonal % 64, TILES[width].queries) * batch * heads
    programs = min(tiles, num_sms())
    launches, state = [("running", TILES[width])], None
    if not is_short(tiles, seq_q, seq_k, diagonal, causal, TILES[width], width, num_sms()):
        # The second launch computes the tiles that the first leaves. A tile's number means the same rows in both.
        launches = [("guess", TILES[width]), ("again", TILES_AGAIN[width])]
        state = lse.new_empty(3 + LATELY.value + tiles, dtype=torch.int32)  # see `State`; `_sample_kernel` zeroes it
        _sample_kernel[min(LATELY.value, num_sms()),](
            describe_tile(q, 64), describe_tile(k, TILES[width].keys), describe_tile(k, FIRST_KEYS), state, scale, SAMPLE_LIMIT,
            batch * heads, heads, heads // kv_heads, seq_q, seq_k, diagonal,
            BLOCK_M=TILES[width].queries, CAUSAL=causal, num_warps=4,
        )  # fmt: skip
    for mode, shape in launches:
        _forward_kernel[programs,](
            describe_tile(q, 64), describe_tile(k, shape.keys), describe_tile(v, shape.keys), describe_tile(k, FIRST_KEYS),
            describe_tile(out, 64), out_ptr, lse, state, scale, batch * heads, heads, heads // kv_heads, seq_q, seq_k, diagonal,
            HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=shape.queries, BLOCK_N=shape.keys,
            STAGES=shape.kv_slots, Q_STAGES=shape.q_slots, MODE=mode, CAUSAL=causal,
            num_warps=4, maxnreg=shape.maxnreg, launch_pdl=mode == "guess",
        )  # fmt: skip
    return out, lse
