"""FlashAttention-2 backward (arXiv 2307.08691, Algorithm 2) in one kernel: dQ accumulates in memory.

S, dP and the exponentials are computed once, for dK, dV and dQ, so a pair of tiles takes five matmuls. With a separate kernel
for dQ, it would take seven. In return, dQ is a sum in memory, to which key tiles add in any order.

The query tiles of all heads that share keys form one sequence of steps, and the steps that need a mask come first. So two loops
take the tiles of all heads. A loop loads the next steps' tiles while it computes, so only its first steps wait for memory. Two
loops for each head would wait at each head.

The tile sizes are fixed, to prepare the port to Gluon (v12): its layouts and buffers depend on them. They need to suit only
Hopper and 16 bits, so each tile is as large as the registers allow. With larger tiles, programs read Q and dO, and add to dQ,
less often. These tiles are too large for float32 and for D = 256, which fall back to v6. So all matmuls have 16-bit operands,
and need no `input_precision`.
"""

import torch
import triton
import triton.language as tl

from common.kernels.descriptors import describe
from common.kernels.hopper import LOG2_E, require_hopper
from common.layout import cdiv, empty_rows
from stages.v6_tile_order.backward import backward as backward_of_v6

from .backward_prepare import DELTA_ROWS, _delta_kernel
from .backward_scheduler import BLOCK_N, Problem, _query_tile, _tile


@triton.jit
def _accumulate(
    dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, sums_desc, tile, lo, hi, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the steps [lo, hi) to one K/V tile's dk and dv, and to dq in memory. P and dS are computed
    transposed, so that they enter the matmuls for dV and dK from registers."""
    if MASKED:
        # The first query that sees each key. For a key past the end it is 2**30, so that no query sees the key.
        offs_n = tl.arange(0, k.shape[0])
        seen_from = tl.where(offs_n < tile.keys, tile.start_n + offs_n - tile.diagonal if CAUSAL else 0, 2**30)
    for step in range(lo, hi):
        head, number, row = _query_tile(step, tile)
        start_m = number * BLOCK_M
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q = q_desc.load([tile.batch, head, start_m, 0]).reshape(BLOCK_M, HEAD_DIM)
        s_t = tl.dot(k, q.T)  # [BLOCK_N, BLOCK_M]
        lse_log2 = tl.load(lse_ptr + row + offs_m, mask=offs_m < tile.seq_q, other=float("inf")) * LOG2_E  # no query: p = 0
        p_t = s_t * scale_log2 - lse_log2[None, :]
        if MASKED:
            p_t = tl.where(offs_m[None, :] >= seen_from[:, None], p_t, float("-inf"))
        p_t = tl.exp2(p_t).to(q.dtype)  # 16 bits: P waits in registers until dS needs it, and dQ takes some, too
        do = do_desc.load([tile.batch, head, start_m, 0]).reshape(BLOCK_M, v.shape[1])
        dv = tl.dot(p_t, do, dv)
        dp_t = tl.dot(v, do.T)  # [BLOCK_N, BLOCK_M]
        delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < tile.seq_q, other=0.0)
        ds_t = (p_t.to(tl.float32) * (dp_t - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds_t, q, dk)
        # NOTE: the compiler decides when to wait for a matmul and where its operands lie; v12 makes this explicit.
        dq = tl.dot(ds_t.T, k)  # [BLOCK_M, HEAD_DIM]
        sums_desc.atomic_add([tile.batch, head, start_m, 0], dq.reshape(1, 1, BLOCK_M, HEAD_DIM))
    return dk, dv


@triton.jit
def _backward_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, sums_desc, dk_desc, dv_desc, scale,
    kv_heads, heads_per_kv, seq_q: tl.int32, seq_k: tl.int32, diagonal: tl.int32,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    problem = Problem(kv_heads, heads_per_kv, seq_q, seq_k, diagonal, scale)
    tile = _tile(problem, BLOCK_M, HEAD_DIM, VALUE_DIM, CAUSAL)

    k = k_desc.load([tile.batch, tile.kv_head, tile.start_n, 0]).reshape(BLOCK_N, HEAD_DIM)
    v = v_desc.load([tile.batch, tile.kv_head, tile.start_n, 0]).reshape(BLOCK_N, VALUE_DIM)
    scale_log2 = problem.scale * LOG2_E
    dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, VALUE_DIM], tl.float32)

    # The diagonal needs a mask. So do keys past the end: their p may be infinite, and infinity times 0 is NaN.
    dk, dv = _accumulate(
        dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, sums_desc, tile, 0, tile.masked, scale_log2,
        HEAD_DIM, BLOCK_M, CAUSAL, True,
    )  # fmt: skip
    dk, dv = _accumulate(
        dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, sums_desc, tile, tile.masked, tile.steps, scale_log2,
        HEAD_DIM, BLOCK_M, CAUSAL, False,
    )  # fmt: skip

    dk_desc.store([tile.batch, tile.kv_head, tile.start_n, 0], (dk * scale).to(dk_desc.dtype).reshape(1, 1, BLOCK_N, HEAD_DIM))
    dv_desc.store([tile.batch, tile.kv_head, tile.start_n, 0], dv.to(dv_desc.dtype).reshape(1, 1, BLOCK_N, VALUE_DIM))


def backward(grad_out, q, k, v, out, lse, *, causal, scale, diagonal=0):
    """Return the gradients of q, k and v. `common.operator` lists shapes, dtypes and errors.

    This falls back to v6 for float32, whose tiles take twice the space; for D or Dv = 256, where dK and dV of 128 keys do not
    fit in registers; and under `torch.use_deterministic_algorithms`, because key tiles add to dQ in any order.
    """
    require_hopper(__package__)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    if q.dtype == torch.float32 or max(head_dim, value_dim) == 256 or torch.are_deterministic_algorithms_enabled():
        return backward_of_v6(grad_out, q, k, v, out, lse, causal=causal, scale=scale, diagonal=diagonal)
    dq, dk, dv = empty_rows(q), empty_rows(k), empty_rows(v)
    sums = torch.empty_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)  # dQ's accumulator
    delta = torch.empty_like(lse)
    block_m = 64 if max(head_dim, value_dim) >= 128 else 128  # the most rows of S and dP that fit in registers beside dK and dV
    _delta_kernel[cdiv(seq_q, DELTA_ROWS) * batch * heads,](
        describe(out, DELTA_ROWS, value_dim), describe(grad_out, DELTA_ROWS, value_dim), delta, sums,
        heads, seq_q, HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=DELTA_ROWS,
    )  # fmt: skip
    _backward_kernel[cdiv(seq_k, 128) * batch * kv_heads,](
        describe(q, block_m, head_dim), describe(k, 128, head_dim), describe(v, 128, value_dim),
        describe(grad_out, block_m, value_dim), lse, delta, describe(sums, block_m, head_dim),
        describe(dk, 128, head_dim), describe(dv, 128, value_dim), scale,
        kv_heads, heads // kv_heads, seq_q, seq_k, diagonal,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=block_m, CAUSAL=causal, num_warps=8, num_stages=2,
    )  # fmt: skip
    torch.mul(sums, scale, out=dq)
    return dq, dk, dv
