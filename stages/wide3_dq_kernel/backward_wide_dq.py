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


class QueryTile(NamedTuple):
    """A work tile: BLOCK_M query rows of one head, and the key tiles that they see."""

    batch: gl.tensor
    kv_head: gl.tensor
    head: gl.tensor
    batch_head: gl.tensor  # batch * H + head
    start_m: gl.tensor  # the first row
    steps: gl.tensor  # number of key tiles


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


@gluon.jit(do_not_specialize=["kv_heads", "seq_q", "seq_k", "diagonal"])  # compile once for all lengths
def _wide_dq_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_ptr, dq_desc, scale,
    kv_heads, heads_per_kv, seq_q, seq_k, diagonal,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Compute dQ of a query tile from K and V of all key tiles that it sees, the last one first."""
    BLOCK_M: gl.constexpr = q_desc.block_shape[2]
    s_layout: gl.constexpr = wgmma_layout(BLOCK_M, ROWS)
    dq_layout: gl.constexpr = wgmma_layout(BLOCK_M, HEAD_DIM)
    ds_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dq_layout, k_width=2)
    q_s = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_shape, q_desc.layout)
    do_s = gl.allocate_shared_memory(q_desc.dtype, do_desc.block_shape, do_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, k_desc.block_shape, k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, v_desc.block_shape, v_desc.layout)
    full = new_barriers(1, 1)  # Q and dO have arrived
    kv_full = new_barriers(1, 1)  # a step's K and V have arrived

    problem = Problem(kv_heads, heads_per_kv, seq_q, seq_k, diagonal, scale)
    tile = _work_tile(problem, BLOCK_M, 2 * (HEAD_DIM + VALUE_DIM), CAUSAL)
    where = [tile.batch, tile.head, tile.start_m, 0]
    mbarrier.expect(full.index(0), q_desc.block_type.nbytes + do_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, where, full.index(0), q_s)
    tma.async_copy_global_to_shared(do_desc, where, full.index(0), do_s)
    offs_m = tile.start_m + gl.arange(0, BLOCK_M, gl.SliceLayout(1, s_layout))
    tiles = gl.cdiv(seq_q, ROWS)
    stats_ptrs = stats_ptr + (tile.batch_head.to(gl.int64) * tiles + offs_m // ROWS) * (2 * ROWS) + offs_m % ROWS
    lse_log2 = gl.load(stats_ptrs, mask=offs_m < tiles * ROWS, other=float("inf"))
    delta = gl.load(stats_ptrs + ROWS, mask=offs_m < tiles * ROWS, other=0.0)
    # A key past the end counts as masked, so that its p is 0. Otherwise p may be infinite, and infinity times 0 is NaN.
    seen_to = seq_k + gl.zeros([BLOCK_M], gl.int32, gl.SliceLayout(1, s_layout))  # number of keys that each row sees
    if CAUSAL:
        seen_to = gl.minimum(seen_to, offs_m + diagonal + 1)
    zeros = gl.zeros([BLOCK_M, ROWS], gl.float32, s_layout)
    dq = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, dq_layout)
    mbarrier.wait(full.index(0), 0)
    for step in range(tile.steps):
        start_n = (tile.steps - 1 - step) * ROWS
        where_n = [tile.batch, tile.kv_head, start_n, 0]
        # NOTE: the tensor cores wait for each load; wide5 loads the next keys meanwhile.
        # The compiler makes all warps wait for each other before a copy starts. So both warpgroups have read the old tile.
        mbarrier.expect(kv_full.index(0), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, where_n, kv_full.index(0), k_s)
        tma.async_copy_global_to_shared(v_desc, where_n, kv_full.index(0), v_s)
        wait_full(kv_full, step)
        s = warpgroup_mma(matrix(q_s), matrix(k_s).permute([1, 0]), zeros, use_acc=False, is_async=True)
        dp = warpgroup_mma(matrix(do_s), matrix(v_s).permute([1, 0]), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, [s])  # [queries, keys]
        offs_n = start_n + gl.arange(0, ROWS, gl.SliceLayout(0, s_layout))
        s = gl.where(offs_n[None, :] < seen_to[:, None], s * (scale * LOG2_E) - lse_log2[:, None], float("-inf"))
        p = gl.exp2(s)
        dp = warpgroup_mma_wait(0, [dp])  # [queries, keys]
        ds = (p * (dp - delta[:, None])).to(k_desc.dtype)
        dq = warpgroup_mma(gl.convert_layout(ds, ds_layout), matrix(k_s), dq, is_async=True)  # dQ += dS K
        dq = warpgroup_mma_wait(0, [dq])

    matrix(q_s).store((dq * scale).to(q_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dq_desc, where, q_s)
    tma.store_wait(0)
