"""The kernels that run before and after the backward kernel: they prepare LSE and delta, and round dQ."""

import triton
import triton.language as tl

from common.kernels.hopper import LOG2_E
from common.kernels.packed import place_of


@triton.jit(do_not_specialize=["chunks", "heads", "seq_q", "sequences"])
def _prepare_kernel(
    out_desc, do_desc, lse_ptr, stats_ptr, sums_ptr, chunks, heads, seq_q, starts_ptr, sequences,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """For each query tile: store log2(e) * lse and delta = rowsum(dO * O) side by side, and zero dQ's accumulator, if any.
    If CTAs share other tiles, all programs together zero the `chunks` chunks of these tiles' accumulators instead."""
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    if starts_ptr is not None:
        tiles_m = tl.num_programs(0) // heads
    tile = tl.program_id(0).to(tl.int64)
    start_m = tl.program_id(0) % tiles_m * BLOCK_M
    batch_head = tl.program_id(0) // tiles_m
    batch = batch_head // heads
    head = batch_head % heads
    queries = seq_q
    if starts_ptr is not None:  # the sequence's first token replaces the batch element
        batch, start_m, queries = place_of(tl.program_id(0) % tiles_m, starts_ptr, sequences, seq_q, BLOCK_M)
        lse_ptr += batch
    if chunks is not None:
        CHUNK: tl.constexpr = 64 * 16  # elements of 64 rows in 16 columns, which divides D and Dv
        sums_ptrs = sums_ptr + tile * CHUNK + tl.arange(0, CHUNK)
        for _ in range(tl.program_id(0), chunks, tl.num_programs(0)):
            tl.store(sums_ptrs, tl.zeros([CHUNK], tl.float32))
            sums_ptrs += tl.num_programs(0).to(tl.int64) * CHUNK
    elif sums_ptr is not None:
        # In register order, a query tile's accumulator is one contiguous block.
        offs = tl.arange(0, BLOCK_M * HEAD_DIM)
        tl.store(sums_ptr + tile * BLOCK_M * HEAD_DIM + offs, tl.zeros_like(offs).to(tl.float32))
    rows = tl.arange(0, BLOCK_M)
    inside = start_m + rows < queries
    if starts_ptr is not None:
        inside &= start_m + rows >= 0
    do = do_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, VALUE_DIM)
    out = out_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, VALUE_DIM)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    lse_ptrs = lse_ptr + batch_head.to(tl.int64) * seq_q + start_m + rows
    lse = tl.load(lse_ptrs, mask=inside, other=float("inf"))  # p = 0 past the end
    tl.store(stats_ptr + tile * 2 * BLOCK_M + rows, lse * LOG2_E)
    tl.store(stats_ptr + (tile * 2 + 1) * BLOCK_M + rows, delta)


@triton.jit(do_not_specialize=["heads", "seq_q"])
def _finish_kernel(
    sums_ptr, dq_ptr, stride_b, stride_h, stride_m, scale, heads, seq_q,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Multiply dQ's accumulator by the scale, round it, and store it as dQ. The accumulator lies in the order of a warpgroup's
    registers. Its dimensions, from the outermost to the innermost, are blocks of 64 rows, groups of 8 columns, 4 warps,
    8 x 4 threads, the 2 halves of a warp's 16 rows, and 2 neighbouring columns."""
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    tile = tl.program_id(0).to(tl.int64)
    start_m = tl.program_id(0) % tiles_m * BLOCK_M
    batch_head = tl.program_id(0) // tiles_m
    sums = tl.load(sums_ptr + tile * BLOCK_M * HEAD_DIM + tl.arange(0, BLOCK_M * HEAD_DIM)) * scale
    dq = sums.to(dq_ptr.dtype.element_ty).reshape(BLOCK_M // 64, HEAD_DIM // 8, 4, 8, 4, 2, 2)
    dq = dq.permute(0, 2, 5, 3, 1, 4, 6).reshape(BLOCK_M, HEAD_DIM)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    dq_ptr += (batch_head // heads).to(tl.int64) * stride_b + (batch_head % heads).to(tl.int64) * stride_h
    dq_ptrs = dq_ptr + offs_m.to(tl.int64)[:, None] * stride_m + tl.arange(0, HEAD_DIM)
    tl.store(dq_ptrs, dq, mask=(offs_m < seq_q)[:, None])
