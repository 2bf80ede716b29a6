"""dQ for D = 256: a CTA computes all of dQ for its query rows, so it need not add to memory."""

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

from common.kernels.hopper import LOG2_E, ROWS, new_barriers, new_ring, slot_and_phase
from common.kernels.order import tile_and_head

from .backward_scheduler import CONSUMERS


class QueryTensors(NamedTuple):
    """Tensors in global memory, for dQ."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    do: tma.tensor_descriptor
    stats: gl.tensor  # pointer; for each 64 queries: log2(e) * LSE, then delta
    dq: tma.tensor_descriptor


class QueryProblem(NamedTuple):
    """Sizes that all CTAs share."""

    heads: gl.tensor
    heads_per_kv: gl.tensor
    seq_q: gl.tensor
    seq_k: gl.tensor
    diagonal: gl.tensor  # with a causal mask, query i sees key j if j <= i + diagonal
    scale: gl.tensor


class QueryTile(NamedTuple):
    """A work tile: BLOCK_M query rows of one head, and the key tiles that they see."""

    batch_head: gl.tensor  # batch * H + head
    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    start_m: gl.tensor  # the first row
    steps: gl.tensor  # key tiles


class Queries(NamedTuple):
    """Q and dO of a work tile in shared memory."""

    q: gl.shared_memory_descriptor  # [CONSUMERS, 1, 1, ROWS, HEAD_DIM]
    do: gl.shared_memory_descriptor  # [CONSUMERS, 1, 1, ROWS, VALUE_DIM]
    q_full: gl.shared_memory_descriptor  # a barrier for each consumer
    do_full: gl.shared_memory_descriptor


class KeyRing(NamedTuple):
    """K and V in shared memory: two ring buffers, with K_STAGES and V_STAGES slots."""

    k: gl.shared_memory_descriptor  # [K_STAGES, 1, 1, ROWS, HEAD_DIM]
    v: gl.shared_memory_descriptor  # [V_STAGES, 1, 1, ROWS, VALUE_DIM]
    k_full: gl.shared_memory_descriptor  # a barrier for each slot
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor


class RowStats(NamedTuple):
    """The values that dS needs for each row of a consumer."""

    lse_log2: gl.tensor  # log2(e) * LSE
    delta: gl.tensor
    seen_to: gl.tensor  # number of keys that the row sees
    scale_log2: gl.tensor


@gluon.jit
def _query_work(problem, BLOCK_M: gl.constexpr, ROW_BYTES: gl.constexpr, CAUSAL: gl.constexpr):
    """Return this CTA's work tile."""
    tiles_m = gl.cdiv(problem.seq_q, BLOCK_M)
    number, batch_head = tile_and_head(tiles_m, gl.cdiv(problem.seq_k, problem.heads_per_kv), ROW_BYTES, CAUSAL)
    start_m = number * BLOCK_M
    seq_k = problem.seq_k
    if CAUSAL:
        start_m = (tiles_m - 1 - number) * BLOCK_M
        seq_k = gl.minimum(seq_k, start_m + BLOCK_M + problem.diagonal)
    head = batch_head % problem.heads
    return QueryTile(
        batch_head, batch_head // problem.heads, head, head // problem.heads_per_kv, start_m, gl.cdiv(seq_k, ROWS)
    )  # fmt: skip


@gluon.jit
def _dq_producer(tensors, queries, ring, problem, CAUSAL: gl.constexpr):
    """Run on one warp: load Q and dO of a query tile, and K and V of all key tiles that it sees, the last one first."""
    BLOCK_M: gl.constexpr = queries.q.shape[0] * ROWS
    ROW_BYTES: gl.constexpr = 2 * (ring.k.shape[4] + ring.v.shape[4])
    tile = _query_work(problem, BLOCK_M, ROW_BYTES, CAUSAL)
    for w in gl.static_range(CONSUMERS):
        where = [tile.batch, tile.head, tile.start_m + w * ROWS, 0]
        mbarrier.expect(queries.q_full.index(w), tensors.q.block_type.nbytes)
        tma.async_copy_global_to_shared(tensors.q, where, queries.q_full.index(w), queries.q.index(w))
        mbarrier.expect(queries.do_full.index(w), tensors.do.block_type.nbytes)
        tma.async_copy_global_to_shared(tensors.do, where, queries.do_full.index(w), queries.do.index(w))
    for step in range(tile.steps):
        where = [tile.batch, tile.kv_head, (tile.steps - 1 - step) * ROWS, 0]
        slot, phase = slot_and_phase(step, ring.k.shape[0])
        mbarrier.wait(ring.k_empty.index(slot), phase ^ 1)
        mbarrier.expect(ring.k_full.index(slot), tensors.k.block_type.nbytes)
        tma.async_copy_global_to_shared(tensors.k, where, ring.k_full.index(slot), ring.k.index(slot))
        slot, phase = slot_and_phase(step, ring.v.shape[0])
        mbarrier.wait(ring.v_empty.index(slot), phase ^ 1)
        mbarrier.expect(ring.v_full.index(slot), tensors.v.block_type.nbytes)
        tma.async_copy_global_to_shared(tensors.v, where, ring.v_full.index(slot), ring.v.index(slot))


@gluon.jit
def _matmul(a, buffers, full, step):
    """Start the matmul of `a` with a step's transposed K or V, once K or V has arrived. `a` is a consumer's Q or dO."""
    STAGES: gl.constexpr = buffers.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, ROWS, 16])
    zeros = gl.zeros([ROWS, ROWS], gl.float32, layout)
    slot, phase = slot_and_phase(step, STAGES)
    mbarrier.wait(full.index(slot), phase)
    if STAGES == 1:  # this is 0, but ptxas does not know; else ptxas keeps too many addresses in registers, and spills
        slot = step // 2**24
    tile = buffers.index(slot).reshape([ROWS, buffers.shape[4]])
    return warpgroup_mma(a, tile.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _ds_from(s, dp, stats, start_n):
    """Return a step's dS from its scores and dP. Wait until dP is ready."""
    offs_n = start_n + gl.arange(0, ROWS, gl.SliceLayout(0, s.type.layout))
    s = gl.where(offs_n[None, :] < stats.seen_to[:, None], s * stats.scale_log2 - stats.lse_log2[:, None], float("-inf"))
    p = gl.exp2(s)
    dp = warpgroup_mma_wait(0, [dp])  # [queries, keys]
    return p * (dp - stats.delta[:, None])


@gluon.jit
def _query_consumer(tensors, queries, ring, problem, w: gl.constexpr, CAUSAL: gl.constexpr):
    """Run on a warpgroup: compute dQ of the w-th 64 rows of a query tile, and keep it in registers."""
    BLOCK_M: gl.constexpr = queries.q.shape[0] * ROWS
    HEAD_DIM: gl.constexpr = ring.k.shape[4]
    VALUE_DIM: gl.constexpr = ring.v.shape[4]
    K_STAGES: gl.constexpr = ring.k.shape[0]
    V_STAGES: gl.constexpr = ring.v.shape[0]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, ROWS, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, HEAD_DIM, 16])
    ds_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dq_layout, k_width=2)
    of_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    tile = _query_work(problem, BLOCK_M, 2 * (HEAD_DIM + VALUE_DIM), CAUSAL)
    start_m = tile.start_m + w * ROWS
    offs_m = gl.arange(0, ROWS, of_rows)
    tiles = gl.cdiv(problem.seq_q, ROWS)
    number = start_m // ROWS  # past the last tile if the consumer has no rows
    stats_ptr = tensors.stats + (tile.batch_head.to(gl.int64) * tiles + number) * (2 * ROWS)
    inside = number * ROWS + offs_m < tiles * ROWS
    lse_log2 = gl.load(stats_ptr + offs_m, mask=inside, other=float("inf"))
    delta = gl.load(stats_ptr + ROWS + offs_m, mask=inside, other=0.0)
    seen = tile.steps
    # A key past the end counts as masked, so that its p is 0. Otherwise p may be infinite, and infinity times 0 is NaN.
    seen_to = problem.seq_k + gl.zeros([ROWS], gl.int32, of_rows)
    if CAUSAL:
        seen = gl.minimum(tile.steps, gl.cdiv(start_m + ROWS + problem.diagonal, ROWS))
        seen_to = gl.minimum(seen_to, start_m + problem.diagonal + 1 + offs_m)
    stats = RowStats(lse_log2, delta, seen_to, problem.scale * LOG2_E)
    dq = gl.zeros([ROWS, HEAD_DIM], gl.float32, dq_layout)
    q = queries.q.index(w).reshape([ROWS, HEAD_DIM])
    do = queries.do.index(w).reshape([ROWS, VALUE_DIM])
    unseen = tile.steps - seen
    for step in range(unseen):  # skip a key tile that only the other consumer's rows see
        slot, _ = slot_and_phase(step, K_STAGES)
        mbarrier.arrive(ring.k_empty.index(slot), count=1)
        # Without this wait, the next wait for V would return at once, because an earlier phase has the same parity. K needs
        # no such wait, because V's waits imply that K's slot was full.
        slot, phase = slot_and_phase(step, V_STAGES)
        mbarrier.wait(ring.v_full.index(slot), phase)
        mbarrier.arrive(ring.v_empty.index(slot), count=1)
    mbarrier.wait(queries.q_full.index(w), 0)
    s = _matmul(q, ring.k, ring.k_full, unseen)
    mbarrier.wait(queries.do_full.index(w), 0)
    dp = _matmul(do, ring.v, ring.v_full, unseen)
    s = warpgroup_mma_wait(1, [s])  # [queries, keys]
    ds = _ds_from(s, dp, stats, (seen - 1) * ROWS).to(ring.k.dtype)
    slot, _ = slot_and_phase(unseen, V_STAGES)
    mbarrier.arrive(ring.v_empty.index(slot), count=1)
    for step in range(unseen + 1, tile.steps):
        # The matmul for dQ comes first, so that K's buffer is free soon. The matmul for dP comes last, so that the next V can
        # arrive in V's only buffer.
        slot, _ = slot_and_phase(step - 1, K_STAGES)
        k = ring.k.index(slot).reshape([ROWS, HEAD_DIM])
        dq = warpgroup_mma(gl.convert_layout(ds, ds_layout), k, dq, is_async=True)
        s = _matmul(q, ring.k, ring.k_full, step)
        dq = warpgroup_mma_wait(1, [dq])
        mbarrier.arrive(ring.k_empty.index(slot), count=1)
        dp = _matmul(do, ring.v, ring.v_full, step)  # dP takes the previous dS's registers
        s = warpgroup_mma_wait(1, [s])  # [queries, keys]
        ds = _ds_from(s, dp, stats, (tile.steps - 1 - step) * ROWS).to(ring.k.dtype)
        slot, _ = slot_and_phase(step, V_STAGES)
        mbarrier.arrive(ring.v_empty.index(slot), count=1)
    slot, _ = slot_and_phase(tile.steps - 1, K_STAGES)
    k = ring.k.index(slot).reshape([ROWS, HEAD_DIM])
    dq = warpgroup_mma(gl.convert_layout(ds, ds_layout), k, dq, is_async=True)
    dq = warpgroup_mma_wait(0, [dq])

    q.store((dq * problem.scale).to(queries.q.dtype))  # only this consumer reads these rows of Q
    fence_async_shared()
    tma.async_copy_shared_to_global(tensors.dq, [tile.batch, tile.head, start_m, 0], queries.q.index(w))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "seq_q", "seq_k", "diagonal"])
def _wide_dq_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_ptr, dq_desc, scale,
    heads, heads_per_kv, seq_q, seq_k, diagonal,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    q_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    do_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, VALUE_DIM], do_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [K_STAGES, 1, 1, ROWS, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [V_STAGES, 1, 1, ROWS, VALUE_DIM], v_desc.layout)
    q_full = new_barriers(CONSUMERS, 1)
    do_full = new_barriers(CONSUMERS, 1)
    k_full, k_empty = new_ring(K_STAGES, 1, CONSUMERS)
    v_full, v_empty = new_ring(V_STAGES, 1, CONSUMERS)

    tensors = QueryTensors(q_desc, k_desc, v_desc, do_desc, stats_ptr, dq_desc)
    problem = QueryProblem(heads, heads_per_kv, seq_q, seq_k, diagonal, scale)
    queries = Queries(q_s, do_s, q_full, do_full)
    ring = KeyRing(k_s, v_s, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (_query_consumer, (tensors, queries, ring, problem, 0, CAUSAL)),
            (_query_consumer, (tensors, queries, ring, problem, 1, CAUSAL)),
            (_dq_producer, (tensors, queries, ring, problem, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )
