"""Merge attention over two sets of keys, and add gradients."""

import triton
import triton.language as tl
from torch import Tensor

from common.kernels.pointers import head_ptr, strides, tile_ptrs
from common.layout import cdiv

ELEMENTS = 4096  # elements in a program's tile: 32 for each thread


@triton.jit
def _place(heads, tiles, BLOCK_M: tl.constexpr):
    """Return this program's batch, head and rows."""
    batch_head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    return batch_head // heads, batch_head % heads, tile * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def _tile_ptrs(ptr, strides, batch, head, rows, COLUMNS: tl.constexpr):
    return tile_ptrs(head_ptr(ptr, strides, batch, head), strides, rows, tl.arange(0, COLUMNS))


def _launch(kernel, batch, heads, seq, columns, *args):
    """Launch programs for the tiles of a [B, H, S, `columns`] tensor."""
    block_m = max(1, ELEMENTS // columns)
    tiles = cdiv(seq, block_m)
    kernel[batch * heads * tiles,](*args, heads, seq, tiles, COLUMNS=columns, BLOCK_M=block_m)


@triton.jit
def _merge_kernel(
    out_ptr, lse_ptr, more_ptr, more_lse_ptr, into_ptr, strides, heads, seq, tiles, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr
):
    b, h, offs_m = _place(heads, tiles, BLOCK_M)
    inside = offs_m < seq
    lse_ptrs = head_ptr(lse_ptr, strides.lse, b, h) + offs_m
    lse = tl.load(lse_ptrs, mask=inside, other=0.0)  # [BLOCK_M]
    more_lse = tl.load(head_ptr(more_lse_ptr, strides.more_lse, b, h) + offs_m, mask=inside, other=0.0)
    m = tl.maximum(lse, more_lse)
    weight, more_weight = tl.exp(lse - m), tl.exp(more_lse - m)
    l = weight + more_weight  # the larger weight is 1, so l is from 1 to 2
    tl.debug_barrier()  # all warps must load the old lse before any warp stores the new lse
    tl.store(lse_ptrs, m + tl.log(l), mask=inside)
    out_ptrs = _tile_ptrs(out_ptr, strides.out, b, h, offs_m, COLUMNS)
    more_ptrs = _tile_ptrs(more_ptr, strides.more, b, h, offs_m, COLUMNS)
    into_ptrs = _tile_ptrs(into_ptr, strides.into, b, h, offs_m, COLUMNS)
    out = tl.load(out_ptrs, mask=inside[:, None], other=0.0).to(tl.float32)  # [BLOCK_M, COLUMNS]
    more = tl.load(more_ptrs, mask=inside[:, None], other=0.0).to(tl.float32)
    merged = out * (weight / l)[:, None] + more * (more_weight / l)[:, None]
    tl.store(into_ptrs, merged.to(into_ptr.dtype.element_ty), mask=inside[:, None])


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, into: Tensor | None = None):
    """Merge attention over two sets of keys in float32.

    The function writes the output to `into` and the new log-sum-exps to `lse`. The softmax over both sets has the denominator
    l = exp(lse) + exp(more_lse). The output is (exp(lse) out + exp(more_lse) more) / l, and lse becomes log l.
    (FlashAttention-2, arXiv 2307.08691, section 3.1.)

    Args:
        out: [B, H, S, Dv], attention over the first set of keys. Any dtype; any strides with contiguous rows.
        lse: [B, H, S] float32, the log-sum-exps of `out`; the last stride is 1.
        more: [B, H, S, Dv], attention over the second set of keys. Its dtype and strides may differ from those of `out`.
        more_lse: [B, H, S] float32, the log-sum-exps of `more`; the last stride is 1.
        into: [B, H, S, Dv], where the function writes the result, rounded once. None means `out`.
    """
    into = out if into is None else into
    steps = strides(out=out, more=more, into=into, lse=lse[..., None], more_lse=more_lse[..., None])
    _launch(_merge_kernel, *out.shape, out, lse, more, more_lse, into, steps)


@triton.jit
def _add_kernel(
    whole_ptr, part_ptr, into_ptr, strides, first, part_seq, heads, seq, tiles, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr
):
    b, h, offs_m = _place(heads, tiles, BLOCK_M)
    inside = (offs_m < seq)[:, None]
    in_part = ((offs_m >= first) & (offs_m < first + part_seq))[:, None]
    whole_ptrs = _tile_ptrs(whole_ptr, strides.whole, b, h, offs_m, COLUMNS)
    part_ptrs = _tile_ptrs(part_ptr, strides.part, b, h, offs_m - first, COLUMNS)
    into_ptrs = _tile_ptrs(into_ptr, strides.into, b, h, offs_m, COLUMNS)
    whole = tl.load(whole_ptrs, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, COLUMNS]
    part = tl.load(part_ptrs, mask=in_part, other=0.0).to(tl.float32)
    tl.store(into_ptrs, (whole + part).to(into_ptr.dtype.element_ty), mask=inside)


def add(whole: Tensor, part: Tensor, first: int, into: Tensor):
    """Add `part` to some rows of `whole`, and write all rows to `into`.

    The kernel adds in float32 and rounds each sum once.

    Args:
        whole: [B, H, S, D]. Any dtype; any strides with contiguous rows.
        part: [B, H, Sp, D], added to the rows [first, first + Sp) of `whole`. Its dtype and strides may differ from those of
            `whole`.
        first: the row of `whole` to which row 0 of `part` is added.
        into: [B, H, S, D], where the function writes the result. `into` may be `whole`.
    """
    steps = strides(whole=whole, part=part, into=into)
    _launch(_add_kernel, *whole.shape, whole, part, into, steps, first, part.shape[2])
