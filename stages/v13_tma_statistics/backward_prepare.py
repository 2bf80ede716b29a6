"""The kernel that runs before the backward kernel: it prepares LSE and delta, and zeroes dQ's accumulator."""

import triton
import triton.language as tl

from common.kernels.hopper import LOG2_E


@triton.jit(do_not_specialize=["heads", "seq_q"])
def _prepare_kernel(
    out_desc, do_desc, lse_ptr, stats_ptr, sums_ptr, heads, seq_q,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """For each query tile: store log2(e) * lse and delta = rowsum(dO * O) side by side, and zero dQ's accumulator."""
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    tile = tl.program_id(0).to(tl.int64)
    start_m = tl.program_id(0) % tiles_m * BLOCK_M
    batch_head = tl.program_id(0) // tiles_m
    batch = batch_head // heads
    head = batch_head % heads
    rows = tl.arange(0, BLOCK_M)
    inside = start_m + rows < seq_q
    sums_ptrs = sums_ptr + (batch_head.to(tl.int64) * seq_q + start_m + rows)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)
    tl.store(sums_ptrs, tl.zeros([BLOCK_M, HEAD_DIM], tl.float32), mask=inside[:, None])
    do = do_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, VALUE_DIM)
    out = out_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, VALUE_DIM)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    lse_ptrs = lse_ptr + batch_head.to(tl.int64) * seq_q + start_m + rows
    lse = tl.load(lse_ptrs, mask=inside, other=float("inf"))  # p = 0 past the end
    tl.store(stats_ptr + tile * 2 * BLOCK_M + rows, lse * LOG2_E)
    tl.store(stats_ptr + (tile * 2 + 1) * BLOCK_M + rows, delta)
