"""D = 256: dK and dV of 128 keys do not fit in registers. So a CTA has 64 keys; one consumer keeps dV, and the other dK."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from common.kernels.hopper import (
    LOG2_E,
    ROWS,
    matrix,
    new_barriers,
    new_ring,
    signal,
    slot_and_phase,
    wait_empty,
    wait_full,
    wgmma_layout,
)

from .backward_scheduler import CONSUMERS, Problem, _query_tile, _tile
from .backward_splits import _store_or_add


class WideTensors(NamedTuple):
    """Tensors in global memory."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    do: tma.tensor_descriptor
    stats: tma.tensor_descriptor  # for each query tile: log2(e) * LSE, then delta
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor
    dk_sums: gl.tensor | None  # accumulators of dK and dV; None if each key tile has one CTA
    dv_sums: gl.tensor | None
    dk_ptr: gl.tensor | None  # None without packed sequences
    dv_ptr: gl.tensor | None


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


class PRing(NamedTuple):
    """P in shared memory: the first consumer writes it, and the second consumer reads it."""

    p: gl.shared_memory_descriptor  # [STAGES, ROWS, BLOCK_M]
    full: gl.shared_memory_descriptor  # a barrier for each slot: P has been written


@gluon.jit
def _dkv_producer(tensors, tile, kv, ring):
    """Run on one warp: load K and V of a key tile, and Q and dO of all query tiles that see it, as buffers become free."""
    where = [tile.kv_batch, tile.kv_head, tile.start_n, 0]
    mbarrier.expect(kv.full.index(0), tensors.k.block_type.nbytes + tensors.v.block_type.nbytes)
    tma.async_copy_global_to_shared(tensors.k, where, kv.full.index(0), kv.k)
    tma.async_copy_global_to_shared(tensors.v, where, kv.full.index(0), kv.v)
    for step in range(tile.steps):
        head, number, row = _query_tile(step, tile, HEADS_FIRST=tensors.dk_sums is not None)
        where = [tile.batch, head, tile.query + number * ring.q.shape[3], 0]
        slot = wait_empty(ring.empty, step)
        mbarrier.expect(ring.q_full.index(slot), tensors.q.block_type.nbytes + tensors.stats.block_type.nbytes)
        tma.async_copy_global_to_shared(tensors.q, where, ring.q_full.index(slot), ring.q.index(slot))
        tma.async_copy_global_to_shared(tensors.stats, [row * 2, 0], ring.q_full.index(slot), ring.stats.index(slot))
        mbarrier.expect(ring.do_full.index(slot), tensors.do.block_type.nbytes)
        tma.async_copy_global_to_shared(tensors.do, where, ring.do_full.index(slot), ring.do.index(slot))


@gluon.jit
def _compute_p_t(s_t, tile, ring, p_ring, step, problem, seen_from):
    """Return a step's P, transposed and rounded, from its scores. Also store P for the other consumer."""
    BLOCK_M: gl.constexpr = ring.q.shape[3]
    s_layout: gl.constexpr = s_t.type.layout
    slot, _ = slot_and_phase(step, ring.q.shape[0])
    lse_log2 = ring.stats.index(slot).slice(0, 1).load(s_layout)  # [1, queries]
    p_t = s_t * (problem.scale * LOG2_E) - lse_log2
    _, number, _ = _query_tile(step, tile, HEADS_FIRST=problem.splits is not None)
    offs_m = number * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, s_layout))
    p_t = gl.exp2(gl.where(offs_m[None, :] >= seen_from[:, None], p_t, float("-inf"))).to(ring.q.dtype)
    p_ring.p.index(slot).store(p_t)
    signal(p_ring.full, step)
    return p_t


@gluon.jit
def _dv_consumer(tensors, tile, kv, ring, p_ring, problem, CAUSAL: gl.constexpr):
    """Run on a warpgroup: compute P of a key tile, and dV, which stays in registers. P is transposed, so that it enters the
    matmul for dV from registers."""
    BLOCK_M: gl.constexpr = ring.q.shape[3]
    VALUE_DIM: gl.constexpr = kv.v.shape[3]
    s_layout: gl.constexpr = wgmma_layout(ROWS, BLOCK_M)
    dv_layout: gl.constexpr = wgmma_layout(ROWS, VALUE_DIM)
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv_layout, k_width=2)
    # The first query that sees each key. For a key past the end, it is 2**30: p may be infinite, and infinity times 0 is NaN.
    offs_n = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    seen_from = gl.where(offs_n < tile.keys, tile.start_n + offs_n - tile.diagonal if CAUSAL else 0, 2**30)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, s_layout)
    dv = gl.zeros([ROWS, VALUE_DIM], gl.float32, dv_layout)
    mbarrier.wait(kv.full.index(0), 0)
    q = matrix(ring.q.index(wait_full(ring.q_full, 0)))
    s_t = warpgroup_mma(matrix(kv.k), q.permute([1, 0]), zeros, use_acc=False, is_async=True)
    s_t = warpgroup_mma_wait(0, [s_t])  # [keys, queries]
    for step in range(tile.steps - 1):
        p_t = _compute_p_t(s_t, tile, ring, p_ring, step, problem, seen_from)
        # The matmul for dV and the next S run back to back, so that the tensor cores do not idle while this consumer waits for
        # one and starts the other. The matmul for dV is first, because the producer waits for it to refill the slot.
        do = matrix(ring.do.index(wait_full(ring.do_full, step)))
        dv = warpgroup_mma(gl.convert_layout(p_t, p_layout), do, dv, is_async=True)  # dV += Pᵀ dO
        q = matrix(ring.q.index(wait_full(ring.q_full, step + 1)))
        s_t = warpgroup_mma(matrix(kv.k), q.permute([1, 0]), zeros, use_acc=False, is_async=True)
        dv = warpgroup_mma_wait(1, [dv])
        signal(ring.empty, step)
        s_t = warpgroup_mma_wait(0, [s_t])  # [keys, queries]
    p_t = _compute_p_t(s_t, tile, ring, p_ring, tile.steps - 1, problem, seen_from)
    do = matrix(ring.do.index(wait_full(ring.do_full, tile.steps - 1)))
    dv = warpgroup_mma(gl.convert_layout(p_t, p_layout), do, dv, is_async=True)  # dV += Pᵀ dO
    dv = warpgroup_mma_wait(0, [dv])
    signal(ring.empty, tile.steps - 1)

    # TMA stores dV from V's buffer, once the other consumer has read V.
    wait_full(ring.empty, tile.steps - 1)
    place = (tile.kv_batch, tile.kv_head, problem.kv_heads, tile.start_n, problem.seq_k)
    _store_or_add(dv, tensors.dv_sums, tensors.dv_ptr, tensors.dv, kv.v, *place)


@gluon.jit
def _compute_ds_t(dp_t, ring, p_ring, step):
    """Return a step's dS, transposed and rounded, from its dP and P. Wait until P is ready."""
    slot = wait_full(p_ring.full, step)
    p_t = p_ring.p.index(slot).load(dp_t.type.layout)
    delta = ring.stats.index(slot).slice(1, 1).load(dp_t.type.layout)  # [1, queries]
    return (p_t.to(gl.float32) * (dp_t - delta)).to(ring.q.dtype)


@gluon.jit
def _dk_consumer(tensors, tile, kv, ring, p_ring, problem):
    """Run on a warpgroup: compute dS of a key tile, and dK, which stays in registers."""
    BLOCK_M: gl.constexpr = ring.q.shape[3]
    HEAD_DIM: gl.constexpr = kv.k.shape[3]
    s_layout: gl.constexpr = wgmma_layout(ROWS, BLOCK_M)
    dk_layout: gl.constexpr = wgmma_layout(ROWS, HEAD_DIM)
    ds_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk_layout, k_width=2)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, s_layout)
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, dk_layout)
    mbarrier.wait(kv.full.index(0), 0)
    do = matrix(ring.do.index(wait_full(ring.do_full, 0)))
    dp_t = warpgroup_mma(matrix(kv.v), do.permute([1, 0]), zeros, use_acc=False, is_async=True)
    dp_t = warpgroup_mma_wait(0, [dp_t])  # [keys, queries]
    for step in range(tile.steps - 1):
        slot = wait_full(ring.q_full, step)
        ds_t = _compute_ds_t(dp_t, ring, p_ring, step)
        # As in `_dv_consumer`, two matmuls run back to back. The matmul for dK is first, because it frees the slot.
        dk = warpgroup_mma(gl.convert_layout(ds_t, ds_layout), matrix(ring.q.index(slot)), dk, is_async=True)  # dK += dSᵀ Q
        do = matrix(ring.do.index(wait_full(ring.do_full, step + 1)))
        dp_t = warpgroup_mma(matrix(kv.v), do.permute([1, 0]), zeros, use_acc=False, is_async=True)
        dk = warpgroup_mma_wait(1, [dk])
        signal(ring.empty, step)
        dp_t = warpgroup_mma_wait(0, [dp_t])  # [keys, queries]
    signal(ring.empty, tile.steps - 1)  # V has been read, so dV may take its place; no load follows that would replace Q
    slot = wait_full(ring.q_full, tile.steps - 1)
    ds_t = _compute_ds_t(dp_t, ring, p_ring, tile.steps - 1)
    dk = warpgroup_mma(gl.convert_layout(ds_t, ds_layout), matrix(ring.q.index(slot)), dk, is_async=True)  # dK += dSᵀ Q
    dk = warpgroup_mma_wait(0, [dk])

    # TMA stores dK from K's buffer. The other consumer no longer needs K: the last P is ready.
    place = (tile.kv_batch, tile.kv_head, problem.kv_heads, tile.start_n, problem.seq_k)
    if problem.listed is not None:  # V that no query sees may be NaN, and so is dS
        dk = gl.where(tile.keys > 0, dk, 0.0)
    _store_or_add(dk * problem.scale, tensors.dk_sums, tensors.dk_ptr, tensors.dk, kv.k, *place)


@gluon.jit(do_not_specialize=["kv_heads", "seq_q", "seq_k", "diagonal", "splits"])  # compile once for all lengths
def _wide_dkv_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, dk_sums_ptr, dv_sums_ptr, dk_ptr, dv_ptr,
    list_ptr, scale, kv_heads, heads_per_kv, seq_q, seq_k, diagonal, splits,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    HEAD_DIM: gl.constexpr = q_desc.block_shape[3]
    VALUE_DIM: gl.constexpr = v_desc.block_shape[3]
    if list_ptr is not None:
        if gl.program_id(0) >= gl.load(list_ptr) * kv_heads:
            return
    q_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], q_desc.layout)
    do_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, VALUE_DIM], do_desc.layout)
    stats_s = gl.allocate_shared_memory(gl.float32, [STAGES, 2, BLOCK_M], stats_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [1, 1, ROWS, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [1, 1, ROWS, VALUE_DIM], v_desc.layout)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], q_desc.dtype)
    p_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, ROWS, BLOCK_M], p_layout)
    q_full, empty = new_ring(STAGES, 1, CONSUMERS)
    p_full = new_barriers(STAGES, 1)  # no empty barriers: a slot's old P has been read before its next Q arrives

    tensors = WideTensors(
        q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, dk_sums_ptr, dv_sums_ptr, dk_ptr, dv_ptr
    )
    problem = Problem(kv_heads, heads_per_kv, seq_q, seq_k, diagonal, scale, splits, list_ptr)
    tile = _tile(problem, BLOCK_M, HEAD_DIM, VALUE_DIM, CAUSAL)
    kv = KeyTile(k_s, v_s, new_barriers(1, 1))
    ring = StepRing(q_s, do_s, stats_s, q_full, new_barriers(STAGES, 1), empty)
    p_ring = PRing(p_s, p_full)
    gl.warp_specialize(
        [(_dv_consumer, (tensors, tile, kv, ring, p_ring, problem, CAUSAL)),
         (_dk_consumer, (tensors, tile, kv, ring, p_ring, problem)),
         (_dkv_producer, (tensors, tile, kv, ring))],
        [4, 1],
        [240, 24],  # registers: 3 × maxnreg = 504 = 240 (the first role gets the rest) + 240 + 24
    )  # fmt: skip
