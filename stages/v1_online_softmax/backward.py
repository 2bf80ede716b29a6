"""Backward (arXiv 2205.14135, Appendix B.2) with one Triton kernel wherever elementwise operations lie between matmuls.

`_p_kernel` and `_ds_kernel` read and write each element of S, P, dP and dS at most once. The forward's log-sum-exp takes the
place of maximum and sum, so no online softmax is needed here.
"""

import torch
import triton
import triton.language as tl

from common.kernels.matmul import matmul_float32, transposed_matmul_float32
from common.kernels.tiles import query_tile
from common.layout import cdiv, empty_rows

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _p_kernel(
    s_ptr, lse_ptr, p_ptr, scale, seq_q: tl.int32, seq_k: tl.int32, diagonal: tl.int32,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Compute P = exp(scale * S - lse) for BLOCK_M rows of one head."""
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    offs_m = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = (tl.program_id(0) // tiles_m).to(tl.int64) * seq_q + offs_m  # int64: S can have over 2**31 elements
    in_q = offs_m < seq_q
    lse_log2 = tl.load(lse_ptr + rows, mask=in_q, other=0.0) * LOG2_E
    scale_log2 = scale * LOG2_E
    for start_n in range(0, seq_k, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        inside = in_q[:, None] & (offs_n[None, :] < seq_k)
        visible = inside
        if CAUSAL:
            visible = visible & (offs_m[:, None] + diagonal >= offs_n[None, :])  # nothing past the diagonal is read
        offs = rows[:, None] * seq_k + offs_n[None, :]
        s = tl.load(s_ptr + offs, mask=visible, other=0.0)  # [BLOCK_M, BLOCK_N]
        p = tl.where(visible, tl.exp2(s * scale_log2 - lse_log2[:, None]), 0.0)
        tl.store(p_ptr + offs, p.to(p_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _ds_kernel(
    p_ptr, dp_ptr, out_ptr, do_ptr, ds_ptr,
    stride_ob: tl.int64, stride_oh: tl.int64, stride_om: tl.int64,
    stride_dob: tl.int64, stride_doh: tl.int64, stride_dom: tl.int64,
    heads, seq_q: tl.int32, seq_k: tl.int32, diagonal: tl.int32,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Compute dS = P * (dP - delta) for BLOCK_M rows of one head, with delta = rowsum(dO * O)."""
    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    offs_m = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    batch_head = tl.program_id(0) // tiles_m
    batch = batch_head // heads
    head = batch_head % heads
    rows = batch_head.to(tl.int64) * seq_q + offs_m  # int64: S can have over 2**31 elements
    in_q = offs_m < seq_q
    offs_d = tl.arange(0, VALUE_DIM)
    out_ptrs = out_ptr + batch * stride_ob + head * stride_oh + offs_m[:, None] * stride_om + offs_d[None, :]
    do_ptrs = do_ptr + batch * stride_dob + head * stride_doh + offs_m[:, None] * stride_dom + offs_d[None, :]
    out = tl.load(out_ptrs, mask=in_q[:, None], other=0.0).to(tl.float32)  # [BLOCK_M, VALUE_DIM]
    do = tl.load(do_ptrs, mask=in_q[:, None], other=0.0).to(tl.float32)  # [BLOCK_M, VALUE_DIM]
    delta = tl.sum(out * do, 1)
    for start_n in range(0, seq_k, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        inside = in_q[:, None] & (offs_n[None, :] < seq_k)
        visible = inside
        if CAUSAL:
            visible = visible & (offs_m[:, None] + diagonal >= offs_n[None, :])  # nothing past the diagonal is read
        offs = rows[:, None] * seq_k + offs_n[None, :]
        p = tl.load(p_ptr + offs, mask=visible, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
        dp = tl.load(dp_ptr + offs, mask=visible, other=0.0)  # [BLOCK_M, BLOCK_N]
        ds = p * (dp - delta[:, None])
        tl.store(ds_ptr + offs, ds.to(ds_ptr.dtype.element_ty), mask=inside)


def backward(grad_out, q, k, v, out, lse, *, causal, scale, diagonal=0):
    """Return the gradients of q, k and v. `common.operator` lists shapes, dtypes and errors."""
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    tile = query_tile(max(head_dim, value_dim), q.dtype)  # as for FlashAttention, so that times compare algorithms, not tiles
    grid = (cdiv(seq_q, tile["BLOCK_M"]) * batch * heads,)
    s = matmul_float32(q, k.mT)  # [B, H, Sq, Sk]
    p = torch.empty_like(s, dtype=q.dtype)
    _p_kernel[grid](s, lse, p, scale, seq_q, seq_k, diagonal, CAUSAL=causal, **tile)
    del s  # frees memory for the next matmul
    dv = transposed_matmul_float32(p, grad_out, kv_heads)
    dp = matmul_float32(grad_out, v.mT)  # [B, H, Sq, Sk]
    ds = torch.empty_like(p)
    _ds_kernel[grid](
        p, dp, out, grad_out, ds, *out.stride()[:3], *grad_out.stride()[:3],
        heads, seq_q, seq_k, diagonal, VALUE_DIM=value_dim, CAUSAL=causal, **tile,
    )  # fmt: skip
    dq = matmul_float32(ds, k) * scale
    dk = transposed_matmul_float32(ds, q, kv_heads) * scale
    return empty_rows(q).copy_(dq), empty_rows(k).copy_(dk), empty_rows(v).copy_(dv)
