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

from common.kernels.hopper import LOG2_E, ROWS, new_barriers
from common.kernels.order import tile_and_head


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


@gluon.jit(do_not_specialize=["heads", "seq_q", "seq_k", "diagonal"])
def _wide_dq_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_ptr, dq_desc, scale,
    heads, heads_per_kv, seq_q, seq_k, diagonal,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Compute dQ of a query tile from K and V of all key tiles that it sees, the last one first."""
    BLOCK_M: gl.constexpr = q_desc.block_shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BLOCK_M // 16, 1], [16, ROWS, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BLOCK_M // 16, 1], [16, HEAD_DIM, 16])
    ds_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dq_layout, k_width=2)
    of_rows: gl.constexpr = gl.SliceLayout(1, s_layout)

    q_s = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_shape, q_desc.layout)
    do_s = gl.allocate_shared_memory(q_desc.dtype, do_desc.block_shape, do_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, k_desc.block_shape, k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, v_desc.block_shape, v_desc.layout)
    full = new_barriers(1, 1)  # Q and dO have arrived
    kv_full = new_barriers(1, 1)  # a step's K and V have arrived

    problem = QueryProblem(heads, heads_per_kv, seq_q, seq_k, diagonal, scale)
    tile = _query_work(problem, BLOCK_M, 2 * (HEAD_DIM + VALUE_DIM), CAUSAL)
    where = [tile.batch, tile.head, tile.start_m, 0]
    mbarrier.expect(full.index(0), q_desc.block_type.nbytes + do_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, where, full.index(0), q_s)
    tma.async_copy_global_to_shared(do_desc, where, full.index(0), do_s)
    offs_m = gl.arange(0, BLOCK_M, of_rows)
    tiles = gl.cdiv(problem.seq_q, ROWS)
    rows = tile.start_m + offs_m
    stats_ptrs = stats_ptr + (tile.batch_head.to(gl.int64) * tiles + rows // ROWS) * (2 * ROWS) + rows % ROWS
    lse_log2 = gl.load(stats_ptrs, mask=rows < tiles * ROWS, other=float("inf"))
    delta = gl.load(stats_ptrs + ROWS, mask=rows < tiles * ROWS, other=0.0)
    # A key past the end counts as masked, so that its p is 0. Otherwise p may be infinite, and infinity times 0 is NaN.
    seen_to = problem.seq_k + gl.zeros([BLOCK_M], gl.int32, of_rows)
    if CAUSAL:
        seen_to = gl.minimum(seen_to, tile.start_m + problem.diagonal + 1 + offs_m)
    scale_log2 = problem.scale * LOG2_E
    zeros = gl.zeros([BLOCK_M, ROWS], gl.float32, s_layout)
    dq = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, dq_layout)
    q = q_s.reshape([BLOCK_M, HEAD_DIM])
    do = do_s.reshape([BLOCK_M, VALUE_DIM])
    k = k_s.reshape([ROWS, HEAD_DIM])
    v = v_s.reshape([ROWS, VALUE_DIM])
    mbarrier.wait(full.index(0), 0)
    for step in range(tile.steps):
        start_n = (tile.steps - 1 - step) * ROWS
        of_keys = [tile.batch, tile.kv_head, start_n, 0]
        # NOTE: the tensor cores wait for each load; v47 loads the next keys meanwhile.
        mbarrier.expect(kv_full.index(0), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, of_keys, kv_full.index(0), k_s)
        tma.async_copy_global_to_shared(v_desc, of_keys, kv_full.index(0), v_s)
        mbarrier.wait(kv_full.index(0), step & 1)
        s = warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
        dp = warpgroup_mma(do, v.permute([1, 0]), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, [s])  # [queries, keys]
        offs_n = start_n + gl.arange(0, ROWS, gl.SliceLayout(0, s_layout))
        p = gl.exp2(gl.where(offs_n[None, :] < seen_to[:, None], s * scale_log2 - lse_log2[:, None], float("-inf")))
        dp = warpgroup_mma_wait(0, [dp])  # [queries, keys]
        ds = (p * (dp - delta[:, None])).to(k_desc.dtype)
        dq = warpgroup_mma(gl.convert_layout(ds, ds_layout), k, dq, is_async=True)
        dq = warpgroup_mma_wait(0, [dq])

    q.store((dq * problem.scale).to(q_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dq_desc, where, q_s)
    tma.store_wait(0)
