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

from common.kernels.hopper import LOG2_E, ROWS, matrix, new_barriers, wait_full, wgmma_layout
from common.kernels.order import tile_and_head

from .backward_scheduler import Problem


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

    q: gl.shared_memory_descriptor  # [1, 1, BLOCK_M, HEAD_DIM]
    do: gl.shared_memory_descriptor  # [1, 1, BLOCK_M, VALUE_DIM]
    full: gl.shared_memory_descriptor  # a barrier: Q and dO have arrived


class KeyBuffer(NamedTuple):
    """K and V of a step in shared memory."""

    k: gl.shared_memory_descriptor  # [1, 1, ROWS, HEAD_DIM]
    v: gl.shared_memory_descriptor  # [1, 1, ROWS, VALUE_DIM]
    full: gl.shared_memory_descriptor  # a barrier: K and V have arrived


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
def _load_kv(tensors, tile, keys, step):
    """Start to load a step's K and V. The first step has the last keys."""
    where = [tile.batch, tile.kv_head, (tile.steps - 1 - step) * ROWS, 0]
    # The compiler makes all warps wait for each other before a copy starts. So both warpgroups have read the old tile.
    mbarrier.expect(keys.full.index(0), tensors.k.block_type.nbytes + tensors.v.block_type.nbytes)
    tma.async_copy_global_to_shared(tensors.k, where, keys.full.index(0), keys.k)
    tma.async_copy_global_to_shared(tensors.v, where, keys.full.index(0), keys.v)


@gluon.jit
def _matmul(a, b):
    """Start the matmul of `a` with the transposed `b`: of a work tile's Q with a step's K, or of its dO with a step's V."""
    BLOCK_M: gl.constexpr = a.shape[0]
    zeros = gl.zeros([BLOCK_M, ROWS], gl.float32, wgmma_layout(BLOCK_M, ROWS))
    return warpgroup_mma(a, matrix(b).permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _compute_ds(s, dp, stats, scale_log2, start_n):
    """Return a step's dS from its scores and dP. Wait until dP is ready."""
    offs_n = start_n + gl.arange(0, ROWS, gl.SliceLayout(0, s.type.layout))
    s = gl.where(offs_n[None, :] < stats.seen_to[:, None], s * scale_log2 - stats.lse_log2[:, None], float("-inf"))
    p = gl.exp2(s)
    dp = warpgroup_mma_wait(0, [dp])  # [queries, keys]
    return p * (dp - stats.delta[:, None])


@gluon.jit
def _compute_dq(tensors, tile, queries, keys, problem, CAUSAL: gl.constexpr):
    """Compute dQ of a query tile from K and V of all key tiles that it sees, the last one first. Also load all tiles.

    A step's parts are functions, so that they can be called at other times, to load and compute ahead, and by several roles.
    """
    BLOCK_M: gl.constexpr = queries.q.shape[2]
    HEAD_DIM: gl.constexpr = queries.q.shape[3]
    s_layout: gl.constexpr = wgmma_layout(BLOCK_M, ROWS)
    dq_layout: gl.constexpr = wgmma_layout(BLOCK_M, HEAD_DIM)
    ds_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dq_layout, k_width=2)
    where = [tile.batch, tile.head, tile.start_m, 0]
    mbarrier.expect(queries.full.index(0), tensors.q.block_type.nbytes + tensors.do.block_type.nbytes)
    tma.async_copy_global_to_shared(tensors.q, where, queries.full.index(0), queries.q)
    tma.async_copy_global_to_shared(tensors.do, where, queries.full.index(0), queries.do)
    stats = _row_stats(tensors, tile, problem, tile.start_m, BLOCK_M, gl.SliceLayout(1, s_layout), CAUSAL)
    dq = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, dq_layout)
    mbarrier.wait(queries.full.index(0), 0)
    for step in range(tile.steps):
        # NOTE: the tensor cores wait for each load; wide5 loads the next keys meanwhile.
        _load_kv(tensors, tile, keys, step)
        wait_full(keys.full, step)
        s = _matmul(matrix(queries.q), keys.k)
        dp = _matmul(matrix(queries.do), keys.v)
        s = warpgroup_mma_wait(1, [s])  # [queries, keys]
        ds = _compute_ds(s, dp, stats, problem.scale * LOG2_E, (tile.steps - 1 - step) * ROWS).to(keys.k.dtype)
        dq = warpgroup_mma(gl.convert_layout(ds, ds_layout), matrix(keys.k), dq, is_async=True)  # dQ += dS K
        dq = warpgroup_mma_wait(0, [dq])

    matrix(queries.q).store((dq * problem.scale).to(queries.q.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(tensors.dq, where, queries.q)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kv_heads", "seq_q", "seq_k", "diagonal"])  # compile once for all lengths
def _wide_dq_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_ptr, dq_desc, scale,
    kv_heads, heads_per_kv, seq_q, seq_k, diagonal,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    q_s = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_shape, q_desc.layout)
    do_s = gl.allocate_shared_memory(q_desc.dtype, do_desc.block_shape, do_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, k_desc.block_shape, k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, v_desc.block_shape, v_desc.layout)
    full = new_barriers(1, 1)
    kv_full = new_barriers(1, 1)

    tensors = QueryTensors(q_desc, k_desc, v_desc, do_desc, stats_ptr, dq_desc)
    problem = Problem(kv_heads, heads_per_kv, seq_q, seq_k, diagonal, scale)
    tile = _work_tile(problem, q_desc.block_shape[2], 2 * (HEAD_DIM + VALUE_DIM), CAUSAL)
    queries = Queries(q_s, do_s, full)
    keys = KeyBuffer(k_s, v_s, kv_full)
    _compute_dq(tensors, tile, queries, keys, problem, CAUSAL)
