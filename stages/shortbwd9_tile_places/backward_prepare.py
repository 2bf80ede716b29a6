"""The kernels that run before and after the backward kernel: they prepare LSE and delta, and round accumulators."""

import triton
import triton.language as tl

from common.kernels.hopper import LOG2_E


@triton.jit
def _query_tile_of(heads, head_tiles, seq_q, BLOCK_M: tl.constexpr):
    """Return where this program's query tile lies: its batch element, its head, its first row, and the number of rows."""
    batch_head = tl.program_id(0) // head_tiles
    batch, start_m, queries = batch_head // heads, tl.program_id(0) % head_tiles * BLOCK_M, seq_q
    return batch, batch_head % heads, start_m, queries


@triton.jit(do_not_specialize=["chunks", "heads", "head_tiles", "seq_q"])
def _prepare_kernel(
    out_desc, do_desc, lse_ptr, stats_ptr, tickets_ptr, counter_ptr, dkv_sums_ptr, chunks, heads, head_tiles, seq_q,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """For each query tile: store log2(e) * lse and delta = rowsum(dO * O) side by side, and zero the tile's number of
    tickets. If there are any, also zero the counter of tiles, and the accumulators of dK and dV, which have `chunks` chunks."""
    tile = tl.program_id(0).to(tl.int64)
    batch, head, start_m, queries = _query_tile_of(heads, head_tiles, seq_q, BLOCK_M)
    batch_head = batch * heads + head
    if counter_ptr is not None:
        if tile == 0:
            tl.store(counter_ptr, 0)
    tl.store(tickets_ptr + tile, 0)
    if dkv_sums_ptr is not None:
        CHUNK: tl.constexpr = 128 * 16  # elements of 128 keys in 16 columns, which divides D and Dv
        sums_ptrs = dkv_sums_ptr + tile * CHUNK + tl.arange(0, CHUNK)
        for _ in range(tl.program_id(0), chunks, tl.num_programs(0)):
            tl.store(sums_ptrs, tl.zeros([CHUNK], tl.float32))
            sums_ptrs += tl.num_programs(0).to(tl.int64) * CHUNK
    rows = tl.arange(0, BLOCK_M)
    inside = start_m + rows < queries
    do = do_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, VALUE_DIM)
    out = out_desc.load([batch, head, start_m, 0]).reshape(BLOCK_M, VALUE_DIM)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    lse_ptrs = lse_ptr + batch_head.to(tl.int64) * seq_q + start_m + rows
    lse = tl.load(lse_ptrs, mask=inside, other=float("inf"))  # p = 0 past the end
    tl.store(stats_ptr + tile * 2 * BLOCK_M + rows, lse * LOG2_E)
    tl.store(stats_ptr + (tile * 2 + 1) * BLOCK_M + rows, delta)


@triton.jit
def _rounded(sums_ptr, scale, dtype: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load an accumulator, multiply it by the scale, round it, and return its rows."""
    sums = tl.load(sums_ptr + tl.arange(0, ROWS * COLUMNS)) * scale
    rounded = sums.to(dtype).reshape(ROWS // 64, COLUMNS // 8, 4, 8, 4, 2, 2)
    return rounded.permute(0, 2, 5, 3, 1, 4, 6).reshape(ROWS, COLUMNS)


@triton.jit(do_not_specialize=["heads", "head_tiles", "seq_q", "kv_heads", "seq_k", "programs_of_dq"])
def _finish_kernel(
    sums_ptr, dq_ptr, stride_b, stride_h, stride_m, scale, heads, head_tiles, seq_q, dkv_sums_ptr, dk_desc, dv_desc,
    kv_heads, seq_k, programs_of_dq, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Multiply dQ's accumulator by the scale, round it, and store it as dQ. The accumulator lies in the order of a warpgroup's
    registers. Its dimensions, from the outermost to the innermost, are blocks of 64 rows, groups of 8 columns, 4 warps,
    8 x 4 threads, the 2 halves of a warp's 16 rows, and 2 neighbouring columns. If there are accumulators
    of dK and dV, programs from `programs_of_dq` on round 64 rows of them, and store them as dK and dV."""
    if dkv_sums_ptr is not None:
        if tl.program_id(0) >= programs_of_dq:
            block = tl.program_id(0) - programs_of_dq
            blocks_n = tl.cdiv(seq_k, 128) * 2
            where = [block // blocks_n // kv_heads, block // blocks_n % kv_heads, block % blocks_n * 64, 0]
            dkv_sums_ptr += block.to(tl.int64) * 64 * (HEAD_DIM + VALUE_DIM)
            dk_desc.store(where, _rounded(dkv_sums_ptr, 1.0, dk_desc.dtype, 64, HEAD_DIM).reshape(1, 1, 64, HEAD_DIM))
            dkv_sums_ptr += 64 * HEAD_DIM
            dv_desc.store(where, _rounded(dkv_sums_ptr, 1.0, dv_desc.dtype, 64, VALUE_DIM).reshape(1, 1, 64, VALUE_DIM))
            return
    tile = tl.program_id(0).to(tl.int64)
    batch, head, start_m, queries = _query_tile_of(heads, head_tiles, seq_q, BLOCK_M)
    dq = _rounded(sums_ptr + tile * BLOCK_M * HEAD_DIM, scale, dq_ptr.dtype.element_ty, BLOCK_M, HEAD_DIM)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    dq_ptr += batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    dq_ptrs = dq_ptr + offs_m.to(tl.int64)[:, None] * stride_m + tl.arange(0, HEAD_DIM)
    tl.store(dq_ptrs, dq, mask=(offs_m < queries)[:, None])
