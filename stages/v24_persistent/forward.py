"""FlashAttention-3 forward (arXiv 2407.08608, Algorithm 1), warp-specialized, in Gluon, for Hopper."""

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

from .forward_scheduler import Problem, _key_tiles, _tile
from .forward_softmax import _accumulate


class Tensors(NamedTuple):
    """Tensors in global memory, as TMA descriptors or pointers."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    out: tma.tensor_descriptor
    out_ptr: gl.tensor | None  # pointer to O if the first query tile starts before query 0
    lse: gl.tensor  # pointer to [B, H, Sq]


class Queries(NamedTuple):
    """Buffers in shared memory: Q, and O until TMA has stored it."""

    q: gl.shared_memory_descriptor  # [CONSUMERS, 1, 1, 64, HEAD_DIM]
    o: gl.shared_memory_descriptor  # [CONSUMERS, 1, 1, 64, VALUE_DIM]
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
def _producer(tensors, queries, ring, problem, CAUSAL: gl.constexpr):
    """Run on one warp: keep the buffers of Q, K and V full, tile after tile.

    The next tile's loads start when the first consumer has stored its O, while other consumers still compute.
    """
    CONSUMERS: gl.constexpr = queries.q.shape[0]
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    ROW_BYTES: gl.constexpr = 2 * (ring.k.shape[4] + ring.v.shape[4])  # bytes of a key's K and V
    fill = 0
    turn = 0
    number = gl.program_id(0)
    while number < problem.batch_heads * problem.tiles_m:
        tile = _tile(number, problem, ROW_BYTES, BLOCK_M, BLOCK_N, CAUSAL)
        start_n = (tile.key_tiles - 1) * BLOCK_N
        for w in gl.static_range(CONSUMERS):
            _, phase = slot_and_phase(turn, 1)
            mbarrier.wait(queries.empty.index(w), phase ^ 1)
            mbarrier.expect(queries.full.index(w), tensors.q.block_type.nbytes)
            where = [tile.batch, tile.head, tile.start_m + w * ROWS, 0]
            tma.async_copy_global_to_shared(tensors.q, where, queries.full.index(w), queries.q.index(w))
            if w == 0:  # consumers start at their own pace: the first need not wait for the others' Q
                _load(tensors, tile, ring, fill, start_n, K=True, V=False)
        for _ in range(1, tile.key_tiles):
            fill += 1
            start_n -= BLOCK_N
            _load(tensors, tile, ring, fill, start_n, K=True, V=True)
        _load(tensors, tile, ring, fill + 1, start_n - BLOCK_N, K=False, V=True)
        fill += 2
        turn += 1
        number += gl.num_programs(0)


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
def _consumer(tensors, queries, ring, problem, w: gl.constexpr, CAUSAL: gl.constexpr):
    """Run on a warpgroup: compute the w-th 64 query rows of each tile.

    Consumers run at their own pace. So while one computes its softmax, the tensor cores run another's matmuls.
    """
    CONSUMERS: gl.constexpr = queries.q.shape[0]
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
    number = gl.program_id(0)
    while number < problem.batch_heads * problem.tiles_m:
        tile = _tile(number, problem, ROW_BYTES, BLOCK_M, BLOCK_N, CAUSAL)
        start_m = tile.start_m + w * ROWS
        seen = _key_tiles(start_m + ROWS, problem, BLOCK_N, CAUSAL)

        offs_m = start_m + gl.arange(0, ROWS, of_rows)
        acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, acc_layout)
        _, phase = slot_and_phase(turn, 1)
        mbarrier.wait(queries.full.index(w), phase)
        q_buffer = matrix(queries.q.index(w))
        q = q_buffer.load(q_layout) if Q_IN_REGISTERS else q_buffer
        fill = _skip(ring, fill, tile.key_tiles - seen)  # key tiles that only the CTA's later consumers see
        last = start_m + problem.diagonal  # the last key that the first row sees
        acc, m, l = _accumulate(acc, q, ring, fill, seen, problem, last, scale_log2, CONSUMERS, CAUSAL)
        fill += seen

        # The last P V is still in flight, and only O needs it. So all else that only a tile's end needs is computed meanwhile:
        # the whole row sums (in `_accumulate`), and from them LSE and 1 / l.
        lse_ptrs = tensors.lse + tile.batch_head.to(gl.int64) * problem.seq_q + offs_m
        gl.store(lse_ptrs, (m + gl.log2(l)) / LOG2_E, mask=(offs_m >= 0) & (offs_m < problem.seq_q))
        normalize = per_row(1.0 / l, acc_layout)
        acc = warpgroup_mma_wait(0, [acc])
        signal(ring.empty, fill)
        fill += 1
        _store_out(acc, normalize, tensors, queries, w, tile, start_m)
        tma.store_wait(0)
        mbarrier.arrive(queries.empty.index(w), count=1)
        turn += 1
        # NOTE: each CTA's tiles are fixed. With a mask some CTAs get longer tiles; v25 gives the next tile to a free CTA.
        number += gl.num_programs(0)


@gluon.jit(do_not_specialize=["batch_heads", "heads", "seq_q", "seq_k", "diagonal"])  # compile once for all lengths
def _forward_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, scale,
    batch_heads, heads, heads_per_kv, seq_q, seq_k, diagonal,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    tiles_m = gl.cdiv(seq_q + diagonal % ROWS, BLOCK_M)
    q_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, VALUE_DIM], v_desc.layout)
    if VALUE_DIM == HEAD_DIM:
        o_s = q_s  # Q is no longer needed when O is done
    else:
        o_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, VALUE_DIM], out_desc.layout)
    q_full, q_empty = new_ring(CONSUMERS, 1, 1)  # each consumer has its own slot
    kv_full, kv_empty = new_ring(STAGES, 1, CONSUMERS)
    tensors = Tensors(q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr)
    problem = Problem(batch_heads, heads, heads_per_kv, tiles_m, seq_q, seq_k, diagonal, scale)
    queries = Queries(q_s, o_s, q_full, q_empty)
    ring = Ring(k_s, v_s, kv_full, kv_empty)
    # An SM has 65,536 registers, and a warpgroup has 128 threads. So the registers per thread, summed over all warpgroups, are
    # at most 512. The last list has the registers per thread of all roles except the first. The producer gets 24. The first
    # role runs on the launch's `num_warps` warps and gets the rest.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (tensors, queries, ring, problem, 0, CAUSAL)),
             (_consumer, (tensors, queries, ring, problem, 1, CAUSAL)),
             (_producer, (tensors, queries, ring, problem, CAUSAL))],
            [4, 1], [240, 24],  # registers: 3 × maxnreg = 504 = 240 (the first role gets the rest) + 240 + 24
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consumer, (tensors, queries, ring, problem, 0, CAUSAL)),
             (_consumer, (tensors, queries, ring, problem, 1, CAUSAL)),
             (_consumer, (tensors, queries, ring, problem, 2, CAUSAL)),
             (_consumer, (tensors, queries, ring, problem, 3, CAUSAL)),
             (_producer, (tensors, queries, ring, problem, CAUSAL))],
            [4, 4, 4, 1], [112, 112, 112, 24],  # 5 × maxnreg = 480 = 120 (the first role gets the rest) + 3 × 112 + 24
        )  # fmt: skip


class Shape(NamedTuple):
    """Sizes of a work tile, and numbers of buffers."""

    queries: int  # query rows: 64 for each of two or four consumers
    keys: int  # keys of a key tile
    kv_slots: int  # buffers of K and V
    maxnreg: int  # registers per thread at the launch, before the roles divide the registers anew


# TILES is indexed by the larger of D and Dv. No tuner chooses the tiles, because Gluon's layouts and buffers depend on them.
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
    if q.dtype == torch.float32:  # exact float32 has no wgmma, and its tiles take twice the space
        return forward_of_v6(q, k, v, causal=causal, scale=scale, diagonal=diagonal)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    out = empty_rows(q, value_dim)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if scale < 0:
        q, scale = -q, -scale  # the scores stay the same, and max(scale * s) = scale * max(s)
    out_ptr = out if diagonal % 64 else None  # needed if the first query tile starts before query 0
    shape = TILES[max(head_dim, value_dim)]
    programs = min(cdiv(seq_q + diagonal % 64, shape.queries) * batch * heads, num_sms())  # persistent: one CTA per SM
    _forward_kernel[programs,](
        describe_tile(q, 64), describe_tile(k, shape.keys), describe_tile(v, shape.keys), describe_tile(out, 64), out_ptr,
        lse, scale, batch * heads, heads, heads // kv_heads, seq_q, seq_k, diagonal,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=shape.queries, BLOCK_N=shape.keys,
        STAGES=shape.kv_slots, CAUSAL=causal, num_warps=4, maxnreg=shape.maxnreg,
    )  # fmt: skip
    return out, lse
