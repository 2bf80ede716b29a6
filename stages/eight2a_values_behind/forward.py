"""FlashAttention-3 forward (arXiv 2407.08608, Algorithm 1), warp-specialized, in Gluon, for Hopper."""

import math
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

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
)
from common.layout import cdiv, empty_rows
from common.runtime import num_sms
from stages.v26_second_q.forward import forward as forward_of_v26

from .forward_quantize import quantized
from .forward_scheduler import NextTiles, Problem, _key_tiles, _next, _pass_on, _tile
from .forward_softmax import P_SHIFT, _accumulate, _layout, _quantize, _scores


class Tensors(NamedTuple):
    """Tensors in global memory, as TMA descriptors or pointers."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    out: tma.tensor_descriptor
    out_ptr: gl.tensor | None  # pointer to O if the first query tile starts before query 0
    scales: gl.tensor  # pointer to [B, Hkv, key tiles, 2]: K's scale, and the log2 of V's scale
    lse: gl.tensor  # pointer to [B, H, Sq]
    counter: gl.tensor  # tiles taken so far, except each CTA's first tile


class Queries(NamedTuple):
    """Buffers in shared memory: Q, and O until TMA has stored it."""

    q8: gl.shared_memory_descriptor  # [CONSUMERS, 64, HEAD_DIM]: Q in 8 bits
    q: gl.shared_memory_descriptor  # [Q_STAGES * CONSUMERS, 1, 1, 64, HEAD_DIM]
    o: gl.shared_memory_descriptor  # [Q_STAGES * CONSUMERS, 1, 1, 64, VALUE_DIM]
    full: gl.shared_memory_descriptor  # barriers, TMA → consumers: Q has arrived
    empty: gl.shared_memory_descriptor  # barriers, consumer → producer: TMA has stored O


class Ring(NamedTuple):
    """K and V in shared memory: a ring buffer with STAGES slots.

    One arrival stands for all warps of a role, because the compiler lets them meet before it.
    """

    k: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_N, HEAD_DIM]
    v: gl.shared_memory_descriptor  # Vᵀ, [STAGES, 1, 1, VALUE_DIM, BLOCK_N]
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
        where = [tile.batch, tile.kv_head, 0, start_n + BLOCK_N]
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
def _producer(tensors, queries, ring, next_tiles, problem, CAUSAL: gl.constexpr):
    """Run on one warp: keep the buffers of Q, K and V full, also for the next tile while the current tile ends.

    The shared counter lets a CTA with short tiles take more of them, so that all CTAs end at about the same time.
    A CTA's first tile has the CTA's own number. The CTA takes its other tiles from a counter that all CTAs share.
    """
    Q_STAGES: gl.constexpr = next_tiles.number.shape[0]
    CONSUMERS: gl.constexpr = queries.q.shape[0] // Q_STAGES
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    ROW_BYTES: gl.constexpr = ring.k.shape[4] + ring.v.shape[3]  # bytes of a key's K and V
    fill = 0
    turn = 0
    number = gl.program_id(0)
    while number < problem.batch_heads * problem.tiles_m:
        tile = _tile(number, problem, ROW_BYTES, BLOCK_M, BLOCK_N, CAUSAL)
        start_n = (tile.key_tiles - 1) * BLOCK_N
        for w in gl.static_range(CONSUMERS):
            slot, phase = slot_and_phase(turn, Q_STAGES)
            slot = slot * CONSUMERS + w
            mbarrier.wait(queries.empty.index(slot), phase ^ 1)
            mbarrier.expect(queries.full.index(slot), tensors.q.block_type.nbytes)
            where = [tile.batch, tile.head, tile.start_m + w * ROWS, 0]
            tma.async_copy_global_to_shared(tensors.q, where, queries.full.index(slot), queries.q.index(slot))
            if w == 0:  # consumers start at their own pace: the first need not wait for the others' Q
                _load(tensors, tile, ring, fill, start_n, K=True, V=False)
        for _ in range(1, tile.key_tiles):
            fill += 1
            start_n -= BLOCK_N
            _load(tensors, tile, ring, fill, start_n, K=True, V=True)
        # Ask late, while the last V waits for its slot. If CTAs asked when a tile begins, long tiles would follow long tiles.
        number = gl.num_programs(0) + gl.atomic_add(tensors.counter, 1)
        _load(tensors, tile, ring, fill + 1, start_n - BLOCK_N, K=False, V=True)
        fill += 2
        slot, _ = slot_and_phase(turn, Q_STAGES)
        _pass_on(number, next_tiles, slot)
        turn += 1


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
def _consumer(tensors, queries, ring, next_tiles, problem, w: gl.constexpr, CAUSAL: gl.constexpr):
    """Run on a warpgroup: compute the w-th 64 query rows of each tile.

    Consumers run at their own pace. So while one computes its softmax, the tensor cores run another's matmuls.
    """
    Q_STAGES: gl.constexpr = next_tiles.number.shape[0]
    CONSUMERS: gl.constexpr = queries.q.shape[0] // Q_STAGES
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    ROW_BYTES: gl.constexpr = ring.k.shape[4] + ring.v.shape[3]  # bytes of a key's K and V
    VALUE_DIM: gl.constexpr = ring.v.shape[3]
    s_layout: gl.constexpr = _layout(BLOCK_N)
    acc_layout: gl.constexpr = _layout(VALUE_DIM)
    q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=4)
    of_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    fill = 0
    turn = 0
    number = gl.program_id(0)
    while number < problem.batch_heads * problem.tiles_m:
        tile = _tile(number, problem, ROW_BYTES, BLOCK_M, BLOCK_N, CAUSAL)
        start_m = tile.start_m + w * ROWS
        seen = _key_tiles(start_m + ROWS, problem, BLOCK_N, CAUSAL)

        offs_m = start_m + gl.arange(0, ROWS, of_rows)
        slot, phase = slot_and_phase(turn, Q_STAGES)
        own = slot * CONSUMERS + w  # this consumer's slot of `queries`
        mbarrier.wait(queries.full.index(own), phase)
        q = queries.q8.index(w)
        q_factor = _quantize(matrix(queries.q.index(own)).load(q_layout), q, problem.scale)
        q_factor = gl.convert_layout(q_factor, of_rows)
        head_scales = tensors.scales + tile.batch_head // problem.heads_per_kv * gl.cdiv(problem.seq_k, BLOCK_N) * 2
        fill = _skip(ring, fill, tile.key_tiles - seen)  # key tiles that only the CTA's later consumers see
        s = _scores(q, ring, wait_full(ring.full, fill))
        # While S is computed, wait until TMA has stored the previous tile's O from the other buffer. Then the next Q may
        # arrive there.
        tma.store_wait(0)
        slot, _ = slot_and_phase(turn + 1, Q_STAGES)
        mbarrier.arrive(queries.empty.index(slot * CONSUMERS + w), count=1, pred=turn > 0)
        last = start_m + problem.diagonal  # the last key that the first row sees
        acc, o, rescale, m, l, unit = _accumulate(
            s, q, q_factor, head_scales, ring, fill, seen, problem, last, CAUSAL,
        )  # fmt: skip
        fill += seen

        # The last P V is still in flight, and only O needs it. So all else that only a tile's end needs is computed meanwhile:
        # the whole row sums (in `_accumulate`), and from them LSE and 1 / l.
        lse_ptrs = tensors.lse + tile.batch_head.to(gl.int64) * problem.seq_q + offs_m
        gl.store(lse_ptrs, (m - P_SHIFT + gl.log2(l)) / LOG2_E, mask=(offs_m >= 0) & (offs_m < problem.seq_q))
        normalize = per_row(gl.exp2(unit) / l, acc_layout)
        slot, phase = slot_and_phase(turn, Q_STAGES)
        number = _next(next_tiles, slot, phase)
        o = warpgroup_mma_wait(0, [o])
        acc = acc * per_row(rescale, acc_layout) + o
        signal(ring.empty, fill)
        fill += 1
        _store_out(acc, normalize, tensors, queries, own, tile, start_m)
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch_heads", "heads", "seq_q", "seq_k", "diagonal"])  # compile once for all lengths
def _forward_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, scales_ptr, lse_ptr, counter_ptr, scale,
    batch_heads, heads, heads_per_kv, seq_q, seq_k, diagonal,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    tiles_m = gl.cdiv(seq_q + diagonal % ROWS, BLOCK_M)
    q_s = gl.allocate_shared_memory(q_desc.dtype, [Q_STAGES * CONSUMERS, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    q8_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], k_desc.dtype)
    q8_s = gl.allocate_shared_memory(k_desc.dtype, [CONSUMERS, ROWS, HEAD_DIM], q8_layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, VALUE_DIM, BLOCK_N], v_desc.layout)
    tile_s = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = new_ring(Q_STAGES * CONSUMERS, 1, 1)  # each consumer has its own buffers
    kv_full, kv_empty = new_ring(STAGES, 1, CONSUMERS)
    tensors = Tensors(q_desc, k_desc, v_desc, out_desc, out_ptr, scales_ptr, lse_ptr, counter_ptr)
    problem = Problem(batch_heads, heads, heads_per_kv, tiles_m, seq_q, seq_k, diagonal, scale)
    queries = Queries(q8_s, q_s, q_s, q_full, q_empty)
    ring = Ring(k_s, v_s, kv_full, kv_empty)
    next_tiles = NextTiles(tile_s, new_barriers(Q_STAGES, 1))  # no empty barriers: the producer first waits at `queries.empty`
    # An SM has 65,536 registers, and a warpgroup has 128 threads. So the registers per thread, summed over all warpgroups, are
    # at most 512. The last list has the registers per thread of all roles except the first. The producer gets 24. The first
    # role runs on the launch's `num_warps` warps and gets the rest.
    gl.warp_specialize(
        [(_consumer, (tensors, queries, ring, next_tiles, problem, 0, CAUSAL)),
         (_consumer, (tensors, queries, ring, next_tiles, problem, 1, CAUSAL)),
         (_producer, (tensors, queries, ring, next_tiles, problem, CAUSAL))],
        [4, 1], [240, 24],  # registers: 3 × maxnreg = 504 = 240 (the first role gets the rest) + 240 + 24
    )  # fmt: skip


class Shape(NamedTuple):
    """Sizes of a work tile, and numbers of buffers."""

    queries: int  # query rows: 64 for each of two consumers
    keys: int  # keys of a key tile, which share a scale of K and one of V
    kv_slots: int  # buffers of K and V
    q_slots: int  # buffers of Q
    maxnreg: int  # registers per thread at the launch, before the roles divide the registers anew


# TILES is indexed by D. No tuner chooses the tiles, because Gluon's layouts and buffers depend on them.
TILES = {
    64: Shape(queries=128, keys=128, kv_slots=6, q_slots=2, maxnreg=168),
    128: Shape(queries=128, keys=128, kv_slots=4, q_slots=2, maxnreg=168),
}
# By D, the fewest queries and keys for which 8 bits gain: the shorter the sequences, the more of the time goes into rounding K
# and V. At D = 64 they gain nothing.
FEWEST = {128: 2048}


def eight_bits(q, k, v, causal=False) -> bool:
    """Return whether `forward` computes with these tensors in 8 bits, if no input requires gradients.

    A causal mask leaves half of the scores, so such sequences must be twice as long.
    """
    fewest = FEWEST.get(q.shape[3], math.inf) * (2 if causal else 1)
    return q.dtype != torch.float32 and q.shape[3] == v.shape[3] and min(q.shape[2], k.shape[2]) >= fewest


def forward(q, k, v, *, causal, scale, diagonal=0, differentiable=False):
    """Return attention output and log-sum-exp. `common.operator` lists shapes, dtypes and errors.

    This falls back to v26 if the results are `differentiable`, because the LSE of 8 bits would bias the gradients; for short
    sequences; for float32; and for other head dimensions than D = Dv = 128.

    Raises:
        Unavailable: the GPU is not a Hopper GPU.
    """
    require_hopper(__package__)
    if differentiable or not eight_bits(q, k, v, causal):
        return forward_of_v26(q, k, v, causal=causal, scale=scale, diagonal=diagonal)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    shape = TILES[head_dim]
    k8, v8, scales = quantized(k, v, shape.keys)
    out = empty_rows(q, value_dim)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if scale < 0:
        q, scale = -q, -scale  # the scores stay the same, and max(scale * s) = scale * max(s)
    out_ptr = out if diagonal % 64 else None  # needed if the first query tile starts before query 0
    programs = min(cdiv(seq_q + diagonal % 64, shape.queries) * batch * heads, num_sms())  # persistent: one CTA per SM
    counter = lse.new_zeros(1, dtype=torch.int32)  # tiles taken so far, except each CTA's first tile
    _forward_kernel[programs,](
        describe_tile(q, 64), describe_tile(k8, shape.keys), describe_tile(v8, value_dim, columns=shape.keys),
        describe_tile(out, 64), out_ptr,
        scales, lse, counter, scale, batch * heads, heads, heads // kv_heads, seq_q, seq_k, diagonal,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=shape.queries, BLOCK_N=shape.keys,
        STAGES=shape.kv_slots, Q_STAGES=shape.q_slots, CAUSAL=causal, num_warps=4, maxnreg=shape.maxnreg,
    )  # fmt: skip
    return out, lse
