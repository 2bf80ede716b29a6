"""FlashAttention backward (arXiv 2205.14135, Algorithm 4): K/V tiles outer, query tiles inner, dQ rewritten per K/V tile."""

import torch
import triton
import triton.language as tl

from common.kernels.pointers import head_ptr, strides, tile_ptrs
from common.kernels.replay import replayed
from common.kernels.tiles import key_tile
from common.operator import contiguous_rows, empty_rows


@triton.jit
def _backward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, lse_ptr, dq_ptr, dk_ptr, dv_ptr, scale, strides,
    kv_heads, heads_per_kv, seq_q: tl.int32, seq_k: tl.int32, diagonal: tl.int32,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A program owns one K/V head. dq [B, H, Sq, D] is float32, contiguous and initially 0."""
    batch = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    offs_d = tl.arange(0, HEAD_DIM)
    offs_v = tl.arange(0, VALUE_DIM)
    k_ptr = head_ptr(k_ptr, strides.k, batch, kv_head)
    v_ptr = head_ptr(v_ptr, strides.v, batch, kv_head)
    dk_ptr = head_ptr(dk_ptr, strides.dk, batch, kv_head)
    dv_ptr = head_ptr(dv_ptr, strides.dv, batch, kv_head)

    for start_n in range(0, seq_k, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        in_k = offs_n[:, None] < seq_k
        k = tl.load(tile_ptrs(k_ptr, strides.k, offs_n, offs_d), mask=in_k, other=0.0)  # [BLOCK_N, HEAD_DIM]
        v = tl.load(tile_ptrs(v_ptr, strides.v, offs_n, offs_v), mask=in_k, other=0.0)  # [BLOCK_N, VALUE_DIM]
        dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
        dv = tl.zeros([BLOCK_N, VALUE_DIM], tl.float32)
        # Start at the diagonal: earlier queries do not see this tile.
        first_m = tl.maximum(start_n - diagonal, 0) // BLOCK_M * BLOCK_M if CAUSAL else 0
        for shared in range(heads_per_kv):  # the query heads that share these keys
            head = kv_head * heads_per_kv + shared
            q_head = head_ptr(q_ptr, strides.q, batch, head)
            out_head = head_ptr(out_ptr, strides.out, batch, head)
            do_head = head_ptr(do_ptr, strides.do, batch, head)
            # int64: row * HEAD_DIM can pass 2**31 elements
            first_row = (tl.program_id(0).to(tl.int64) * heads_per_kv + shared) * seq_q
            for start_m in range(first_m, seq_q, BLOCK_M):
                offs_m = start_m + tl.arange(0, BLOCK_M)
                in_q = offs_m < seq_q
                q = tl.load(tile_ptrs(q_head, strides.q, offs_m, offs_d), mask=in_q[:, None], other=0.0)
                do = tl.load(tile_ptrs(do_head, strides.do, offs_m, offs_v), mask=in_q[:, None], other=0.0)
                out = tl.load(tile_ptrs(out_head, strides.out, offs_m, offs_v), mask=in_q[:, None], other=0.0)
                lse = tl.load(lse_ptr + first_row + offs_m, mask=in_q, other=float("inf"))  # past the end: p = 0
                delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)

                s = tl.dot(q, k.T, input_precision=PRECISION) * scale  # [BLOCK_M, BLOCK_N]
                visible = offs_n[None, :] < seq_k
                if CAUSAL:
                    visible = visible & (offs_m[:, None] >= offs_n[None, :] - diagonal)
                p = tl.where(visible, tl.exp(s - lse[:, None]), 0.0)
                dv = tl.dot(p.to(do.dtype).T, do, dv, input_precision=PRECISION)
                dp = tl.dot(do, v.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
                ds = (p * (dp - delta[:, None])).to(k.dtype)
                dk = tl.dot(ds.T, q, dk, input_precision=PRECISION)

                dq_ptrs = dq_ptr + (first_row + offs_m[:, None]) * HEAD_DIM + offs_d[None, :]
                dq = tl.load(dq_ptrs, mask=in_q[:, None], other=0.0)  # [BLOCK_M, HEAD_DIM]
                dq += tl.dot(ds, k, input_precision=PRECISION) * scale
                tl.store(dq_ptrs, dq, mask=in_q[:, None])
        dk_ptrs = tile_ptrs(dk_ptr, strides.dk, offs_n, offs_d)
        dv_ptrs = tile_ptrs(dv_ptr, strides.dv, offs_n, offs_v)
        tl.store(dk_ptrs, (dk * scale).to(dk_ptr.dtype.element_ty), mask=in_k)
        tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), mask=in_k)
        # The next K/V tile reads dq that other threads of this program have just written. The barrier makes their stores
        # visible.
        tl.debug_barrier()


@replayed
def backward(grad_out, q, k, v, out, lse, *, causal, scale, diagonal=0):
    """Gradients of q, k and v; see `common.operator` for shapes, dtypes and errors."""
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    grad_out = contiguous_rows(grad_out)
    dq = q.new_zeros(q.shape, dtype=torch.float32)
    dk, dv = empty_rows(k), empty_rows(v)
    # With more stages, tiles of dQ would be buffered too, and these do not fit on the chip.
    tile = {**key_tile(max(head_dim, value_dim), q.dtype), "num_stages": 1}
    _backward_kernel[batch * kv_heads,](
        q, k, v, out, grad_out, lse, dq, dk, dv, scale, strides(q=q, k=k, v=v, out=out, do=grad_out, dk=dk, dv=dv),
        kv_heads, heads // kv_heads, seq_q, seq_k, diagonal,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, CAUSAL=causal,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **tile,
    )  # fmt: skip
    return empty_rows(q).copy_(dq), dk, dv
