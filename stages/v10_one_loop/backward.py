"""FlashAttention-2 backward (arXiv 2307.08691, Algorithm 2) in one kernel: dQ accumulates in memory.

S, dP and the exponentials are computed once, for dK, dV and dQ, so a pair of tiles takes five matmuls. With a separate kernel
for dQ, it would take seven. In return, dQ is a sum in memory, to which key tiles add in any order.

The query tiles of all heads that share keys form one sequence of steps, and the steps that need a mask come first. So two loops
take the tiles of all heads. A loop loads the next steps' tiles while it computes, so only its first steps wait for memory. Two
loops for each head would wait at each head.
"""

import torch
import triton
import triton.language as tl

from common.kernels.descriptors import describe
from common.kernels.tuning import autotune, bucket, configs
from common.layout import cdiv, empty_rows
from stages.v6_tile_order.backward import backward as backward_of_v6

from .backward_prepare import DELTA_ROWS, _delta_kernel
from .backward_scheduler import Problem, _query_tile, _tile

LOG2_E = tl.constexpr(1.4426950408889634)


def _before_launch(args):
    """Run before each launch, also before the tuner's launches: write the tile sizes of the chosen configuration into the
    descriptors, and zero dQ's accumulator."""
    for name, rows, columns in (
        ("q_desc", "BLOCK_M", "HEAD_DIM"),
        ("do_desc", "BLOCK_M", "VALUE_DIM"),
        ("sums_desc", "BLOCK_M", "HEAD_DIM"),
        ("k_desc", "BLOCK_N", "HEAD_DIM"),
        ("v_desc", "BLOCK_N", "VALUE_DIM"),
        ("dk_desc", "BLOCK_N", "HEAD_DIM"),
        ("dv_desc", "BLOCK_N", "VALUE_DIM"),
    ):
        args[name].block_shape = [1, 1, args[rows], args[columns]]
    args["sums_desc"].base.zero_()


@triton.jit
def _accumulate(
    dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, sums_desc, tile, lo, hi, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
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
        s_t = tl.dot(k, q.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        lse_log2 = tl.load(lse_ptr + row + offs_m, mask=offs_m < tile.seq_q, other=float("inf")) * LOG2_E  # no query: p = 0
        p_t = s_t * scale_log2 - lse_log2[None, :]
        if MASKED:
            p_t = tl.where(offs_m[None, :] >= seen_from[:, None], p_t, float("-inf"))
        p_t = tl.exp2(p_t).to(q.dtype)  # 16 bits: P waits in registers until dS needs it, and dQ takes some, too
        do = do_desc.load([tile.batch, head, start_m, 0]).reshape(BLOCK_M, v.shape[1])
        dv = tl.dot(p_t, do, dv, input_precision=PRECISION)
        dp_t = tl.dot(v, do.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < tile.seq_q, other=0.0)
        ds_t = (p_t.to(tl.float32) * (dp_t - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds_t, q, dk, input_precision=PRECISION)
        # NOTE: the compiler decides when to wait for a matmul and where its operands lie; v12 makes this explicit.
        dq = tl.dot(ds_t.T, k, input_precision=PRECISION)  # [BLOCK_M, HEAD_DIM]
        sums_desc.atomic_add([tile.batch, head, start_m, 0], dq.reshape(1, 1, BLOCK_M, HEAD_DIM))
    return dk, dv


TILES = (  # BLOCK_M, BLOCK_N, num_warps, num_stages
    (32, 64, 4, 2), (64, 64, 4, 2), (32, 128, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3),
    (32, 32, 8, 1), (16, 32, 8, 1),
)  # fmt: skip


@autotune(configs(TILES, _before_launch))
@triton.jit
def _backward_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, sums_desc, dk_desc, dv_desc, scale,
    kv_heads, heads_per_kv, seq_q: tl.int32, seq_k: tl.int32, diagonal: tl.int32, bucket,  # tuned once per `bucket` of lengths
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    problem = Problem(kv_heads, heads_per_kv, seq_q, seq_k, diagonal, scale)
    tile = _tile(problem, BLOCK_M, BLOCK_N, HEAD_DIM, VALUE_DIM, CAUSAL)

    k = k_desc.load([tile.batch, tile.kv_head, tile.start_n, 0]).reshape(BLOCK_N, HEAD_DIM)
    v = v_desc.load([tile.batch, tile.kv_head, tile.start_n, 0]).reshape(BLOCK_N, VALUE_DIM)
    scale_log2 = problem.scale * LOG2_E
    dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, VALUE_DIM], tl.float32)

    # The diagonal needs a mask. So do keys past the end: their p may be infinite, and infinity times 0 is NaN.
    dk, dv = _accumulate(
        dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, sums_desc, tile, 0, tile.masked, scale_log2,
        HEAD_DIM, BLOCK_M, CAUSAL, True, PRECISION,
    )  # fmt: skip
    dk, dv = _accumulate(
        dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, sums_desc, tile, tile.masked, tile.steps, scale_log2,
        HEAD_DIM, BLOCK_M, CAUSAL, False, PRECISION,
    )  # fmt: skip

    dk_desc.store([tile.batch, tile.kv_head, tile.start_n, 0], (dk * scale).to(dk_desc.dtype).reshape(1, 1, BLOCK_N, HEAD_DIM))
    dv_desc.store([tile.batch, tile.kv_head, tile.start_n, 0], dv.to(dv_desc.dtype).reshape(1, 1, BLOCK_N, VALUE_DIM))


def backward(grad_out, q, k, v, out, lse, *, causal, scale, diagonal=0):
    """Return the gradients of q, k and v. `common.operator` lists shapes, dtypes and errors.

    Under `torch.use_deterministic_algorithms` this falls back to v6, because key tiles add to dQ in any order.
    """
    if torch.are_deterministic_algorithms_enabled():
        return backward_of_v6(grad_out, q, k, v, out, lse, causal=causal, scale=scale, diagonal=diagonal)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    dq, dk, dv = empty_rows(q), empty_rows(k), empty_rows(v)
    sums = torch.empty_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)  # dQ's accumulator
    delta = torch.empty_like(lse)
    _delta_kernel[cdiv(seq_q, DELTA_ROWS) * batch * heads,](
        describe(out, DELTA_ROWS, value_dim), describe(grad_out, DELTA_ROWS, value_dim), delta,
        heads, seq_q, VALUE_DIM=value_dim, BLOCK_M=DELTA_ROWS,
    )  # fmt: skip
    _backward_kernel[lambda args: (cdiv(seq_k, args["BLOCK_N"]) * batch * kv_heads,)](
        describe(q), describe(k), describe(v), describe(grad_out), lse, delta, describe(sums), describe(dk), describe(dv),
        scale, kv_heads, heads // kv_heads, seq_q, seq_k, diagonal, bucket(seq_q, seq_k),
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, CAUSAL=causal, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    torch.mul(sums, scale, out=dq)
    return dq, dk, dv
