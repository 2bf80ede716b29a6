"""The kernel for D = 256 whose CTAs have 128 queries each: they compute dQ, and keep it in registers.

It computes S and dP again. These two matmuls take less time than additions of dQ to an accumulator in memory in each step.
"""

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
from common.kernels.order import tile_and_head
from common.kernels.packed import first_tile

from .backward_list import _listed
from .backward_scheduler import CONSUMERS, Problem
from .backward_splits import _steps_of, _store_or_add, _tile_and_split


class QueryTensors(NamedTuple):
    """Tensors in global memory."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    do: tma.tensor_descriptor
    stats: gl.tensor  # pointer; for each 64 queries: log2(e) * LSE, then delta
    dq: tma.tensor_descriptor
    sums: gl.tensor | None  # dQ's accumulator; None if each query tile has one CTA
    dq_ptr: gl.tensor | None  # None without packed sequences


class QueryTile(NamedTuple):
    """A work tile: BLOCK_M query rows of one head, and the key tiles that they see."""

    batch: gl.tensor  # coordinate of the tile's sequence in Q and dO
    kv_batch: gl.tensor  # coordinate of the tile's sequence in K and V
    kv_head: gl.tensor
    head: gl.tensor
    row: gl.tensor  # number of the sequence's first 64 queries, from `query` on, among those of all heads
    query: gl.tensor  # their first row: 0, or negative for rows before a packed sequence
    start_m: gl.tensor  # the tile's first row, likewise
    key: gl.tensor  # the first key of key tile 0, likewise
    keys: gl.tensor  # number of the sequence's keys
    diagonal: gl.tensor  # with a causal mask, query i sees key j if j <= i + diagonal
    begin: gl.tensor  # this CTA's first key tile
    end: gl.tensor  # the end of its key tiles
    steps: gl.tensor  # number of key tiles, at least one; see `_steps_of`


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
    PACKED: gl.constexpr = problem.listed is not None
    heads = problem.kv_heads * problem.heads_per_kv
    tiles_m = gl.cdiv(problem.seq_q, BLOCK_M)
    number = None
    query_tiles = None
    if problem.splits is not None:
        number, split, query_tiles = _tile_and_split(problem.splits)
    if PACKED:
        tiles_m = gl.load(problem.listed)
        number, query_tiles = gl.program_id(0), tiles_m * heads
    seq = gl.cdiv(problem.seq_k, problem.heads_per_kv)
    number, batch_head = tile_and_head(tiles_m, seq, ROW_BYTES, CAUSAL or PACKED, program=number, programs=query_tiles)
    head = batch_head % heads
    batch, kv_head = batch_head // heads, head // problem.heads_per_kv
    kv_batch, query, key, keys, diagonal = batch, 0, 0, problem.seq_k, problem.diagonal
    row, first_m = batch_head * gl.cdiv(problem.seq_q, ROWS), 0  # first_m: the first row of query tile 0
    if PACKED:  # tiles end with their sequence, so the first ones may begin before it
        number, part, batch, seq_q, kv_batch, keys = _listed(problem.listed, number)
        tiles_m = gl.cdiv(seq_q, BLOCK_M)
        first_m, query = seq_q - tiles_m * BLOCK_M, seq_q - gl.cdiv(seq_q, ROWS) * ROWS
        key = keys - gl.maximum(gl.cdiv(keys, ROWS), 1) * ROWS
        diagonal = keys - seq_q
        row = head * gl.load(problem.listed + 1) + first_tile(part, batch, ROWS)
    start_m = first_m + number * BLOCK_M
    seq_k = keys
    if CAUSAL:
        start_m = first_m + (tiles_m - 1 - number) * BLOCK_M
        seq_k = gl.minimum(seq_k, start_m + BLOCK_M + diagonal)
    begin = 0
    steps = gl.cdiv(seq_k - key, ROWS)
    if PACKED:  # rows that see no key take one step, and mask all its keys
        steps = gl.maximum(steps, 1)
    end = steps
    if problem.splits is not None:
        begin, end, steps = _steps_of(split, problem.splits, steps)
    return QueryTile(batch, kv_batch, kv_head, head, row, query, start_m, key, keys, diagonal, begin, end, steps)


@gluon.jit
def _row_stats(tensors, tile, problem, start_m, BLOCK_M: gl.constexpr, layout: gl.constexpr, CAUSAL: gl.constexpr):
    """Return what dS needs for the BLOCK_M rows from start_m on: a work tile's rows, or one consumer's."""
    offs_m = start_m + gl.arange(0, BLOCK_M, layout)
    row = offs_m - tile.query
    inside = row < gl.cdiv(problem.seq_q, ROWS) * ROWS
    if problem.listed is not None:
        inside &= row >= 0
    stats_ptrs = tensors.stats + (tile.row + row // ROWS).to(gl.int64) * (2 * ROWS) + row % ROWS
    lse_log2 = gl.load(stats_ptrs, mask=inside, other=float("inf"))
    delta = gl.load(stats_ptrs + ROWS, mask=inside, other=0.0)
    # A key past the end counts as masked, so that its p is 0. Otherwise p may be infinite, and infinity times 0 is NaN.
    seen_to = tile.keys + gl.zeros([BLOCK_M], gl.int32, layout)
    if CAUSAL:
        seen_to = gl.minimum(seen_to, offs_m + tile.diagonal + 1)
    if problem.splits is not None:  # masks the step of a CTA that has none of its own
        seen_to = gl.minimum(seen_to, tile.end * ROWS)
    return RowStats(lse_log2, delta, seen_to)


@gluon.jit
def _start_n(tile, step):
    """Return the first key of a step. The last key tile comes first."""
    return tile.key + (tile.begin + tile.steps - 1 - step) * ROWS


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
        where = [tile.kv_batch, tile.kv_head, _start_n(tile, step), 0]
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
def _compute_ds(s, dp, stats, scale_log2, start_n, PACKED: gl.constexpr):
    """Return a step's dS from its scores and dP. Wait until dP is ready."""
    offs_n = start_n + gl.arange(0, ROWS, gl.SliceLayout(0, s.type.layout))
    if PACKED:  # a key before the sequence gets a number past all keys, so that no row sees it
        offs_n &= 2**31 - 1
    s = gl.where(offs_n[None, :] < stats.seen_to[:, None], s * scale_log2 - stats.lse_log2[:, None], float("-inf"))
    p = gl.exp2(s)
    dp = warpgroup_mma_wait(0, [dp])  # [queries, keys]
    return p * (dp - stats.delta[:, None])


@gluon.jit
def _query_consumer(tensors, tile, queries, ring, problem, w: gl.constexpr, CAUSAL: gl.constexpr):
    """Run on a warpgroup: compute dQ of the w-th 64 rows of a query tile, and keep it in registers."""
    HEAD_DIM: gl.constexpr = queries.q.shape[4]
    K_STAGES: gl.constexpr = ring.k.shape[0]
    PACKED: gl.constexpr = problem.listed is not None
    s_layout: gl.constexpr = wgmma_layout(ROWS, ROWS)
    dq_layout: gl.constexpr = wgmma_layout(ROWS, HEAD_DIM)
    ds_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dq_layout, k_width=2)
    start_m = tile.start_m + w * ROWS
    # A consumer has rows and a pace of its own, so it computes only the steps whose keys these rows see. The first steps may be
    # the other consumer's alone.
    unseen = 0  # number of those first steps
    if CAUSAL:
        unseen = gl.maximum(tile.begin + tile.steps - gl.cdiv(start_m + ROWS + tile.diagonal - tile.key, ROWS), 0)
        if problem.splits is not None or PACKED:
            unseen = gl.minimum(unseen, tile.steps - 1)  # if these rows see none of the keys, the last step is masked
    stats = _row_stats(tensors, tile, problem, start_m, ROWS, gl.SliceLayout(1, s_layout), CAUSAL)
    dq = gl.zeros([ROWS, HEAD_DIM], gl.float32, dq_layout)
    q = matrix(queries.q.index(w))
    do = matrix(queries.do.index(w))
    for step in range(unseen):
        # Release K and V unread. Without these waits, the next wait would take an earlier phase for its own.
        wait_full(ring.k_full, step)
        signal(ring.k_empty, step)
        wait_full(ring.v_full, step)
        signal(ring.v_empty, step)
    mbarrier.wait(queries.full.index(w), 0)
    s = _matmul(q, ring.k, ring.k_full, unseen)
    dp = _matmul(do, ring.v, ring.v_full, unseen)
    s = warpgroup_mma_wait(1, [s])  # [queries, keys]
    ds = _compute_ds(s, dp, stats, problem.scale * LOG2_E, _start_n(tile, unseen), PACKED).to(ring.k.dtype)
    signal(ring.v_empty, unseen)
    for step in range(unseen + 1, tile.steps):
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
        ds = _compute_ds(s, dp, stats, problem.scale * LOG2_E, _start_n(tile, step), PACKED).to(ring.k.dtype)
        signal(ring.v_empty, step)
    slot, _ = slot_and_phase(tile.steps - 1, K_STAGES)
    k = matrix(ring.k.index(slot))
    dq = warpgroup_mma(gl.convert_layout(ds, ds_layout), k, dq, is_async=True)  # dQ += dS K
    dq = warpgroup_mma_wait(0, [dq])

    # Only this consumer reads these rows of Q, so dQ may take their place.
    place = (tile.batch, tile.head, problem.kv_heads * problem.heads_per_kv, start_m, problem.seq_q)
    if PACKED:  # rows without a key may be NaN
        dq = gl.where(tile.keys > 0, dq, 0.0)
    _store_or_add(dq * problem.scale, tensors.sums, tensors.dq_ptr, tensors.dq, queries.q.index(w), *place)


@gluon.jit(do_not_specialize=["kv_heads", "seq_q", "seq_k", "diagonal", "splits"])  # compile once for all lengths
def _wide_dq_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_ptr, dq_desc, sums_ptr, dq_ptr, list_ptr, scale,
    kv_heads, heads_per_kv, seq_q, seq_k, diagonal, splits,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    if list_ptr is not None:
        if gl.program_id(0) >= gl.load(list_ptr) * (kv_heads * heads_per_kv):
            return
    q_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    do_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, VALUE_DIM], do_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [K_STAGES, 1, 1, ROWS, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [V_STAGES, 1, 1, ROWS, VALUE_DIM], v_desc.layout)
    full = new_barriers(CONSUMERS, 1)
    k_full, k_empty = new_ring(K_STAGES, 1, CONSUMERS)
    v_full, v_empty = new_ring(V_STAGES, 1, CONSUMERS)

    tensors = QueryTensors(q_desc, k_desc, v_desc, do_desc, stats_ptr, dq_desc, sums_ptr, dq_ptr)
    problem = Problem(kv_heads, heads_per_kv, seq_q, seq_k, diagonal, scale, splits, list_ptr)
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
