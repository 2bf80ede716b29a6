"""The kernel that runs before the other kernels of the backward: it computes delta, and zeroes dQ's accumulator."""

import triton
import triton.language as tl

DELTA_ROWS = 64  # rows per program of the delta kernel


@triton.jit
def _delta_kernel(
    out_desc, do_desc, delta_ptr, sums_ptr, heads, seq_q: tl.int32,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute delta = rowsum(dO * O), [B, H, Sq] float32, which the softmax's gradient subtracts from each row of dP. Also zero
    dQ's accumulator, to which the backward kernel adds. No tuner repeats that kernel, so zeroing once is enough, and here
    it needs no launch of its own."""
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    start_m = tl.program_id(0) % tiles_m * BLOCK_M
    batch_head = tl.program_id(0) // tiles_m
    batch = batch_head // heads
    head = batch_head % heads
    offs_m = start_m + tl.arange(0, BLOCK_M)
    do = do_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, VALUE_DIM)
    out = out_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, VALUE_DIM)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    rows = batch_head.to(tl.int64) * seq_q + offs_m
    tl.store(delta_ptr + rows, delta, mask=offs_m < seq_q)
    sums_ptrs = sums_ptr + rows[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)
    tl.store(sums_ptrs, tl.zeros([BLOCK_M, HEAD_DIM], tl.float32), mask=(offs_m < seq_q)[:, None])
