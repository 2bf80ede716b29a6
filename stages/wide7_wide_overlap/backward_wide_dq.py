"""The kernel for D = 256 whose CTAs have 128 queries each: they compute dQ, and keep it in registers.

It computes S and dP again. These two matmuls take less time than additions of dQ to an accumulator in memory in each step.
"""

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
    matrix,
    new_barriers,
    new_ring,
    signal,
    slot_and_phase,
    wait_empty,
    wait_full,
    wgmma_layout,
)
from common.kernels.order import tile_and_head

from .backward_scheduler import CONSUMERS, Problem


class QueryTensors(NamedTuple):
    """Tensors in global memory."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    do: tma.tensor_descriptor
    stats: gl.tensor  # pointer; for each 64 queries: log2(e) * LSE, then delta
    dq: tma.tensor_descriptor


class QueryTile(NamedTuple):
    """A work tile: BLOCK_M query rows of one head, and the key tiles that they see."""

    batch: gl.tensor
    kv_head: gl.tensor
    head: gl.tensor
    batch_head: gl.tensor  # batch * H + head
    start_m: gl.tensor  # the first row
    steps: gl.tensor  # number of key tiles


class Queries(NamedTuple):
    """Buffers in shared memory: a work tile's Q and dO, then its dQ until TMA has stored it."""

    q: gl.shared_memory_descriptor  # [CONSUMERS, 1, 1, ROWS, HEAD_DIM]
    do: gl.shared_memory_descriptor  # [CONSUMERS, 1, 1, ROWS, VALUE_DIM]
    full: gl.shared_memory_descriptor  # a barrier for each consumer: its Q and dO have arrived


class KeyRing(NamedTuple):
    """K and V in shared memory: two ring buffers, with K_STAGES and V_STAGES slots."""

    k: gl.shared_memory_descriptor  # [K_STAGES, 1, 1, ROWS, HEAD_DIM]
    v: gl.shared_memory_descriptor  # [V_STAGES, 1, 1, ROWS, VALUE_DIM]
    k_full: gl.shared_memory_descriptor  # a barrier for each slot: K has arrived
    k_empty: gl.shared_memory_descriptor  # a barrier for each slot: both consumers have read K
    v_full: gl.shared_memory_descriptor  # a barrier for each slot: V has arrived
    v_empty: gl.shared_memory_descriptor  # a barrier for each slot: both consumers have read V


class RowStats(NamedTuple):
    """What dS needs for each row of a tile."""

    lse_log2: gl.tensor  # log2(e) * LSE
    delta: gl.tensor
    seen_to: gl.tensor  # number of keys that the row sees


@gluon.jit
def _work_tile(problem, BLOCK_M: gl.constexpr, ROW_BYTES: gl.constexpr, CAUSAL: gl.constexpr):
    """Return this CTA's work tile."""
    tiles_m = gl.cdiv(problem.seq_q, BLOCK_M)
    number, batch_head = tile_and_head(tiles_m, gl.cdiv(problem.seq_k, problem.heads_per_kv), ROW_BYTES, CAUSAL)
    start_m = number * BLOCK_M
    seq_k = problem.seq_k
    if CAUSAL:
        start_m = (tiles_m - 1 - number) * BLOCK_M
        seq_k = gl.minimum(seq_k, start_m + BLOCK_M + problem.diagonal)
    heads = problem.kv_heads * problem.heads_per_kv
    head = batch_head % heads
    return QueryTile(batch_head // heads, head // problem.heads_per_kv, head, batch_head, start_m, gl.cdiv(seq_k, ROWS))


@gluon.jit
def _row_stats(tensors, tile, problem, start_m, BLOCK_M: gl.constexpr, layout: gl.constexpr, CAUSAL: gl.constexpr):
    """Return what dS needs for the BLOCK_M rows from start_m on: a work tile's rows, or one consumer's."""
    offs_m = start_m + gl.arange(0, BLOCK_M, layout)
    tiles = gl.cdiv(problem.seq_q, ROWS)
    stats_ptrs = tensors.stats + (tile.batch_head.to(gl.int64) * tiles + offs_m // ROWS) * (2 * ROWS) + offs_m % ROWS
    lse_log2 = gl.load(stats_ptrs, mask=offs_m < tiles * ROWS, other=float("inf"))
    delta = gl.load(stats_ptrs + ROWS, mask=offs_m < tiles * ROWS, other=0.0)
    # A key past the end counts as masked, so that its p is 0. Otherwise p may be infinite, and infinity times 0 is NaN.
    seen_to = problem.seq_k + gl.zeros([BLOCK_M], gl.int32, layout)
    if CAUSAL:
        seen_to = gl.minimum(seen_to, offs_m + problem.diagonal + 1)
    return RowStats(lse_log2, delta, seen_to)


@gluon.jit
def _dq_producer(tensors, tile, queries, ring):
    """Run on one warp: load Q and dO of a query tile, and K and V of all key tiles that it sees, the last one first."""
    # This warp alone waits for free buffers. So the consumers never wait for each other: while one computes exponentials, the
    # other can use the tensor cores.
    for w in gl.static_range(CONSUMERS):
        where = [tile.batch, tile.head, tile.start_m + w * ROWS, 0]
        mbarrier.expect(queries.full.index(w), tensors.q.block_type.nbytes + tensors.do.block_type.nbytes)
        tma.async_copy_global_to_shared(tensors.q, where, queries.full.index(w), queries.q.index(w))
        tma.async_copy_global_to_shared(tensors.do, where, queries.full.index(w), queries.do.index(w))
    for step in range(tile.steps):
        where = [tile.batch, tile.kv_head, (tile.steps - 1 - step) * ROWS, 0]
        slot = wait_empty(ring.k_empty, step)
        mbarrier.expect(ring.k_full.index(slot), tensors.k.block_type.nbytes)
        tma.async_copy_global_to_shared(tensors.k, where, ring.k_full.index(slot), ring.k.index(slot))
        slot = wait_empty(ring.v_empty, step)
        mbarrier.expect(ring.v_full.index(slot), tensors.v.block_type.nbytes)
        tma.async_copy_global_to_shared(tensors.v, where, ring.v_full.index(slot), ring.v.index(slot))


@gluon.jit
def _matmul(a, buffers, full, step):
    """Start the matmul of a consumer's Q or dO with a step's transposed K or V, once K or V has arrived."""
    zeros = gl.zeros([ROWS, ROWS], gl.float32, wgmma_layout(ROWS, ROWS))
    slot = wait_full(full, step)
    if buffers.shape[0] == 1:
        # 0, but ptxas does not know. If it knew, it would keep V's addresses in registers. A consumer has only 240 registers,
        # so hundreds of bytes would spill.
        slot = step // 2**24
    return warpgroup_mma(a, matrix(buffers.index(slot)).permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _compute_ds(s, dp, stats, scale_log2, start_n):
    """Return a step's dS from its scores and dP. Wait until dP is ready."""
    offs_n = start_n + gl.arange(0, ROWS, gl.SliceLayout(0, s.type.layout))
    s = gl.where(offs_n[None, :] < stats.seen_to[:, None], s * scale_log2 - stats.lse_log2[:, None], float("-inf"))
    p = gl.exp2(s)
    dp = warpgroup_mma_wait(0, [dp])  # [queries, keys]
    return p * (dp - stats.delta[:, None])


@gluon.jit
def _query_consumer(tensors, tile, queries, ring, problem, w: gl.constexpr, CAUSAL: gl.constexpr):
    """Run on a warpgroup: compute dQ of the w-th 64 rows of a query tile, and keep it in registers."""
    HEAD_DIM: gl.constexpr = queries.q.shape[4]
    K_STAGES: gl.constexpr = ring.k.shape[0]
    s_layout: gl.constexpr = wgmma_layout(ROWS, ROWS)
    dq_layout: gl.constexpr = wgmma_layout(ROWS, HEAD_DIM)
    ds_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dq_layout, k_width=2)
    start_m = tile.start_m + w * ROWS
    stats = _row_stats(tensors, tile, problem, start_m, ROWS, gl.SliceLayout(1, s_layout), CAUSAL)
    dq = gl.zeros([ROWS, HEAD_DIM], gl.float32, dq_layout)
    q = matrix(queries.q.index(w))
    do = matrix(queries.do.index(w))
    mbarrier.wait(queries.full.index(w), 0)
    # NOTE: with a mask, the first consumer's rows see none of the last keys; in wide8 it skips them.
    s = _matmul(q, ring.k, ring.k_full, 0)
    dp = _matmul(do, ring.v, ring.v_full, 0)
    s = warpgroup_mma_wait(1, [s])  # [queries, keys]
    ds = _compute_ds(s, dp, stats, problem.scale * LOG2_E, (tile.steps - 1) * ROWS).to(ring.k.dtype)
    signal(ring.v_empty, 0)
    for step in range(1, tile.steps):
        # The matmul for dQ and the next S run back to back, so that the tensor cores do not idle while this consumer waits for
        # one and starts the other. The next dP follows, because the next V must first arrive in V's only slot.
        slot, _ = slot_and_phase(step - 1, K_STAGES)
        k = matrix(ring.k.index(slot))
        dq = warpgroup_mma(gl.convert_layout(ds, ds_layout), k, dq, is_async=True)  # dQ += dS K
        s = _matmul(q, ring.k, ring.k_full, step)
        dq = warpgroup_mma_wait(1, [dq])
        signal(ring.k_empty, step - 1)
        dp = _matmul(do, ring.v, ring.v_full, step)  # after dQ's matmul: dP takes dS's registers
        s = warpgroup_mma_wait(1, [s])  # [queries, keys]
        ds = _compute_ds(s, dp, stats, problem.scale * LOG2_E, (tile.steps - 1 - step) * ROWS).to(ring.k.dtype)
        signal(ring.v_empty, step)
    slot, _ = slot_and_phase(tile.steps - 1, K_STAGES)
    k = matrix(ring.k.index(slot))
    dq = warpgroup_mma(gl.convert_layout(ds, ds_layout), k, dq, is_async=True)  # dQ += dS K
    dq = warpgroup_mma_wait(0, [dq])

    q.store((dq * problem.scale).to(queries.q.dtype))  # only this consumer reads these rows of Q
    fence_async_shared()
    tma.async_copy_shared_to_global(tensors.dq, [tile.batch, tile.head, start_m, 0], queries.q.index(w))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kv_heads", "seq_q", "seq_k", "diagonal"])  # compile once for all lengths
def _wide_dq_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_ptr, dq_desc, scale,
    kv_heads, heads_per_kv, seq_q, seq_k, diagonal,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    q_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    do_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, VALUE_DIM], do_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [K_STAGES, 1, 1, ROWS, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [V_STAGES, 1, 1, ROWS, VALUE_DIM], v_desc.layout)
    full = new_barriers(CONSUMERS, 1)
    k_full, k_empty = new_ring(K_STAGES, 1, CONSUMERS)
    v_full, v_empty = new_ring(V_STAGES, 1, CONSUMERS)

    tensors = QueryTensors(q_desc, k_desc, v_desc, do_desc, stats_ptr, dq_desc)
    problem = Problem(kv_heads, heads_per_kv, seq_q, seq_k, diagonal, scale)
    tile = _work_tile(problem, CONSUMERS * ROWS, 2 * (HEAD_DIM + VALUE_DIM), CAUSAL)
    queries = Queries(q_s, do_s, full)
    ring = KeyRing(k_s, v_s, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [(_query_consumer, (tensors, tile, queries, ring, problem, 0, CAUSAL)),
         (_query_consumer, (tensors, tile, queries, ring, problem, 1, CAUSAL)),
         (_dq_producer, (tensors, tile, queries, ring))],
        [4, 1],
        [240, 24],  # registers: 3 × maxnreg = 504 = 240 (the first role gets the rest) + 240 + 24
    )  # fmt: skip
