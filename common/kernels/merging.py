"""Merge attention over two sets of keys, and add gradients."""

import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096  # elements in a program's tile: 32 for each thread


@triton.jit
def _place(heads, tiles, BLOCK_M: tl.constexpr):
    """Return this program's batch, head and rows."""
    batch_head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    rows = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    return (batch_head // heads).to(tl.int64), (batch_head % heads).to(tl.int64), rows


@triton.jit
def _elements(ptr, b, h, rows, stride_b, stride_h, stride_s, COLUMNS: tl.constexpr):
    """Return pointers to the elements of some rows."""
    return ptr + b * stride_b + h * stride_h + rows[:, None] * stride_s + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _merge_kernel(
    out_ptr, lse_ptr, more_ptr, more_lse_ptr, into_ptr,
    stride_ob, stride_oh, stride_os, stride_lb, stride_lh, stride_mb, stride_mh, stride_ms, stride_nb, stride_nh,
    stride_ib, stride_ih, stride_is, heads, seq, tiles,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    b, h, offs_m = _place(heads, tiles, BLOCK_M)
    inside = offs_m < seq
    lse_ptrs = lse_ptr + b * stride_lb + h * stride_lh + offs_m
    lse = tl.load(lse_ptrs, mask=inside, other=0.0)  # [BLOCK_M]
    more_lse = tl.load(more_lse_ptr + b * stride_nb + h * stride_nh + offs_m, mask=inside, other=0.0)
    m = tl.maximum(lse, more_lse)
    weight, more_weight = tl.exp(lse - m), tl.exp(more_lse - m)
    l = weight + more_weight  # the larger weight is 1, so l is from 1 to 2
    tl.debug_barrier()  # all warps must load the old lse before any warp stores the new lse
    tl.store(lse_ptrs, m + tl.log(l), mask=inside)
    out_ptrs = _elements(out_ptr, b, h, offs_m, stride_ob, stride_oh, stride_os, VALUE_DIM)
    more_ptrs = _elements(more_ptr, b, h, offs_m, stride_mb, stride_mh, stride_ms, VALUE_DIM)
    into_ptrs = _elements(into_ptr, b, h, offs_m, stride_ib, stride_ih, stride_is, VALUE_DIM)
    out = tl.load(out_ptrs, mask=inside[:, None], other=0.0).to(tl.float32)  # [BLOCK_M, VALUE_DIM]
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
    batch, heads, seq, value_dim = out.shape
    block_m = max(1, ELEMENTS // value_dim)
    tiles = triton.cdiv(seq, block_m)
    _merge_kernel[batch * heads * tiles,](
        out, lse, more, more_lse, into, *out.stride()[:3], *lse.stride()[:2], *more.stride()[:3], *more_lse.stride()[:2],
        *into.stride()[:3], heads, seq, tiles,
        VALUE_DIM=value_dim, BLOCK_M=block_m,
    )  # fmt: skip


@triton.jit
def _add_kernel(
    whole_ptr, part_ptr, into_ptr,
    stride_wb, stride_wh, stride_ws, stride_pb, stride_ph, stride_ps, stride_ib, stride_ih, stride_is,
    heads, seq, first, part_seq, tiles,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    b, h, offs_m = _place(heads, tiles, BLOCK_M)
    inside = (offs_m < seq)[:, None]
    in_part = ((offs_m >= first) & (offs_m < first + part_seq))[:, None]
    whole_ptrs = _elements(whole_ptr, b, h, offs_m, stride_wb, stride_wh, stride_ws, HEAD_DIM)
    part_ptrs = _elements(part_ptr, b, h, offs_m - first, stride_pb, stride_ph, stride_ps, HEAD_DIM)
    into_ptrs = _elements(into_ptr, b, h, offs_m, stride_ib, stride_ih, stride_is, HEAD_DIM)
    whole = tl.load(whole_ptrs, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, HEAD_DIM]
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
    batch, heads, seq, head_dim = whole.shape
    block_m = max(1, ELEMENTS // head_dim)
    tiles = triton.cdiv(seq, block_m)
    _add_kernel[batch * heads * tiles,](
        whole, part, into, *whole.stride()[:3], *part.stride()[:3], *into.stride()[:3],
        heads, seq, first, part.shape[2], tiles,
        HEAD_DIM=head_dim, BLOCK_M=block_m,
    )  # fmt: skip
