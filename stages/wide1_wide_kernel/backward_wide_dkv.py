"""D = 256: dK and dV of 128 keys do not fit in registers. So a CTA has 64 keys; one consumer keeps dV, and the other dK."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from common.kernels.hopper import (
    LOG2_E,
    ROWS,
    async_reduce_add,
    matrix,
    new_barriers,
    new_ring,
    signal,
    wait_empty,
    wait_full,
    wgmma_layout,
)

from .backward_scheduler import CONSUMERS, Problem, _query_tile, _tile


class WideTensors(NamedTuple):
    """Tensors in global memory."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    do: tma.tensor_descriptor
    stats: tma.tensor_descriptor  # for each query tile: log2(e) * LSE, then delta
    sums: tma.tensor_descriptor  # dQ's accumulator
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor


class KeyTile(NamedTuple):
    """Buffers in shared memory: a work tile's K and V, then its dK and dV until TMA has stored them."""

    k: gl.shared_memory_descriptor  # [1, 1, ROWS, HEAD_DIM]
    v: gl.shared_memory_descriptor  # [1, 1, ROWS, VALUE_DIM]
    full: gl.shared_memory_descriptor  # a barrier, TMA → consumers: K and V have arrived


class StepRing(NamedTuple):
    """The tiles of a step in shared memory: a ring buffer with STAGES slots."""

    q: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_M, HEAD_DIM]
    do: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_M, VALUE_DIM]
    stats: gl.shared_memory_descriptor  # [STAGES, 2, BLOCK_M]: log2(e) * LSE and delta, loaded ahead, so no step waits for them
    q_full: gl.shared_memory_descriptor  # barriers, TMA → consumers: Q and the statistics have arrived
    do_full: gl.shared_memory_descriptor  # barriers, TMA → consumers: dO has arrived
    empty: gl.shared_memory_descriptor  # barriers, consumers → producer: Q, dO and the statistics have been read


@gluon.jit
def _dkv_producer(tensors, tile, kv, ring):
    """Run on one warp: load K and V of a key tile, and Q and dO of all query tiles that see it, as buffers become free."""
    where = [tile.batch, tile.kv_head, tile.start_n, 0]
    mbarrier.expect(kv.full.index(0), tensors.k.block_type.nbytes + tensors.v.block_type.nbytes)
    tma.async_copy_global_to_shared(tensors.k, where, kv.full.index(0), kv.k)
    tma.async_copy_global_to_shared(tensors.v, where, kv.full.index(0), kv.v)
    for step in range(tile.steps):
        head, number, row = _query_tile(step, tile)
        where = [tile.batch, head, number * ring.q.shape[3], 0]
        slot = wait_empty(ring.empty, step)
        mbarrier.expect(ring.q_full.index(slot), tensors.q.block_type.nbytes + tensors.stats.block_type.nbytes)
        tma.async_copy_global_to_shared(tensors.q, where, ring.q_full.index(slot), ring.q.index(slot))
        tma.async_copy_global_to_shared(tensors.stats, [row * 2, 0], ring.q_full.index(slot), ring.stats.index(slot))
        mbarrier.expect(ring.do_full.index(slot), tensors.do.block_type.nbytes)
        tma.async_copy_global_to_shared(tensors.do, where, ring.do_full.index(slot), ring.do.index(slot))


@gluon.jit
def _wide_add_dq(tensors, ds_s, dq_s, k, row):
    """Compute a step's contribution to dQ, and let TMA add it to dQ's accumulator."""
    COLUMNS: gl.constexpr = dq_s.shape[0] * dq_s.shape[1] // 64
    PARTS: gl.constexpr = k.shape[1] // COLUMNS
    zeros = gl.zeros([64, COLUMNS], gl.float32, wgmma_layout(64, COLUMNS))
    for part in gl.static_range(PARTS):
        dq = warpgroup_mma(ds_s.permute([1, 0]), k.slice(part * COLUMNS, COLUMNS, dim=1), zeros, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, [dq])  # [64, COLUMNS]
        dq = dq.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])  # in the order of the registers
        tma.store_wait(0)
        dq_s.store(dq.reshape(dq_s.shape))
        fence_async_shared()
        # NOTE: every CTA adds its part of dQ to memory in float32; wide3's dQ kernel needs no such additions.
        async_reduce_add(tensors.sums, [(row * PARTS + part) * dq_s.shape[0], 0], dq_s)


@gluon.jit
def _wide_consumer(tensors, tile, kv, ring, ds_s, dq_s, problem, GRADIENT: gl.constexpr, CAUSAL: gl.constexpr):
    """Run on a warpgroup: compute dV of a key tile, or dK and its part of dQ. Both consumers compute Sᵀ and Pᵀ."""
    BLOCK_M: gl.constexpr = ring.q.shape[3]
    COLUMNS: gl.constexpr = kv.v.shape[3] if GRADIENT == "dv" else kv.k.shape[3]
    s_layout: gl.constexpr = wgmma_layout(ROWS, BLOCK_M)
    # The first query that sees each key. For a key past the end, it is 2**30: p may be infinite, and infinity times 0 is NaN.
    offs_n = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    seen_from = gl.where(offs_n < tile.keys, tile.start_n + offs_n - tile.diagonal if CAUSAL else 0, 2**30)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, s_layout)
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, wgmma_layout(ROWS, COLUMNS))  # dV or dK
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    mbarrier.wait(kv.full.index(0), 0)
    for step in range(tile.steps):
        _, number, row = _query_tile(step, tile)
        slot = wait_full(ring.q_full, step)
        q = matrix(ring.q.index(slot))
        # NOTE: each consumer computes S and P for itself; in wide2 one consumer passes P to the other.
        s_t = warpgroup_mma_wait(0, [warpgroup_mma(matrix(kv.k), q.permute([1, 0]), zeros, use_acc=False, is_async=True)])
        p_t = s_t * (problem.scale * LOG2_E) - ring.stats.index(slot).slice(0, 1).load(s_layout)  # minus log2(e) * LSE
        offs_m = number * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, s_layout))
        p_t = gl.exp2(gl.where(offs_m[None, :] >= seen_from[:, None], p_t, float("-inf"))).to(ring.q.dtype)
        do = matrix(ring.do.index(wait_full(ring.do_full, step)))
        if GRADIENT == "dv":
            acc = warpgroup_mma(gl.convert_layout(p_t, p_layout), do, acc, is_async=True)  # dV += Pᵀ dO
        else:
            dp_t = warpgroup_mma_wait(0, [warpgroup_mma(matrix(kv.v), do.permute([1, 0]), zeros, use_acc=False, is_async=True)])
            delta = ring.stats.index(slot).slice(1, 1).load(s_layout)  # [1, queries]
            ds_t = (p_t.to(gl.float32) * (dp_t - delta)).to(ring.q.dtype)
            acc = warpgroup_mma(gl.convert_layout(ds_t, p_layout), q, acc, is_async=True)  # dK += dSᵀ Q
            ds_s.store(ds_t)
            fence_async_shared()
            _wide_add_dq(tensors, ds_s, dq_s, matrix(kv.k), row)
        acc = warpgroup_mma_wait(0, [acc])
        signal(ring.empty, step)

    # TMA stores dV from V's buffer and dK from K's, once both consumers have read K and V.
    wait_full(ring.empty, tile.steps - 1)
    desc, tile_s, factor = (tensors.dv, kv.v, 1.0) if GRADIENT == "dv" else (tensors.dk, kv.k, problem.scale)
    matrix(tile_s).store((acc * factor).to(tile_s.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [tile.batch, tile.kv_head, tile.start_n, 0], tile_s)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kv_heads", "seq_q", "seq_k", "diagonal"])  # compile once for all lengths
def _wide_dkv_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, sums_desc, dk_desc, dv_desc, scale,
    kv_heads, heads_per_kv, seq_q, seq_k, diagonal,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    HEAD_DIM: gl.constexpr = q_desc.block_shape[3]
    VALUE_DIM: gl.constexpr = v_desc.block_shape[3]
    q_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], q_desc.layout)
    do_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, VALUE_DIM], do_desc.layout)
    stats_s = gl.allocate_shared_memory(gl.float32, [STAGES, 2, BLOCK_M], stats_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [1, 1, ROWS, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [1, 1, ROWS, VALUE_DIM], v_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], q_desc.dtype)
    ds_s = gl.allocate_shared_memory(q_desc.dtype, [ROWS, BLOCK_M], ds_layout)
    dq_s = gl.allocate_shared_memory(gl.float32, sums_desc.block_shape, sums_desc.layout)
    q_full, empty = new_ring(STAGES, 1, CONSUMERS)

    tensors = WideTensors(q_desc, k_desc, v_desc, do_desc, stats_desc, sums_desc, dk_desc, dv_desc)
    problem = Problem(kv_heads, heads_per_kv, seq_q, seq_k, diagonal, scale)
    tile = _tile(problem, BLOCK_M, HEAD_DIM, VALUE_DIM, CAUSAL)
    kv = KeyTile(k_s, v_s, new_barriers(1, 1))
    ring = StepRing(q_s, do_s, stats_s, q_full, new_barriers(STAGES, 1), empty)
    gl.warp_specialize(
        [(_wide_consumer, (tensors, tile, kv, ring, ds_s, dq_s, problem, "dv", CAUSAL)),
         (_wide_consumer, (tensors, tile, kv, ring, ds_s, dq_s, problem, "dk", CAUSAL)),
         (_dkv_producer, (tensors, tile, kv, ring))],
        [4, 1],
        [240, 24],  # registers: 3 × maxnreg = 504 = 240 (the first role gets the rest) + 240 + 24
    )  # fmt: skip
