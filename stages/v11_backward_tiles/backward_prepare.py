"""The kernel that runs before the other kernels of the backward: it computes delta."""

import triton
import triton.language as tl

DELTA_ROWS = 64  # rows per program of the delta kernel


@triton.jit
def _delta_kernel(out_desc, do_desc, delta_ptr, heads, seq_q: tl.int32, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr):
    """Compute delta = rowsum(dO * O), [B, H, Sq] float32, which the softmax's gradient subtracts from each row of dP."""
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    start_m = tl.program_id(0) % tiles_m * BLOCK_M
    batch_head = tl.program_id(0) // tiles_m
    batch = batch_head // heads
    head = batch_head % heads
    offs_m = start_m + tl.arange(0, BLOCK_M)
    do = do_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, VALUE_DIM)
    out = out_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, VALUE_DIM)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + batch_head.to(tl.int64) * seq_q + offs_m, delta, mask=offs_m < seq_q)
