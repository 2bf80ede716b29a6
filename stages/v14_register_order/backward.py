"""FlashAttention-2 backward (arXiv 2307.08691, Algorithm 2) in one kernel, in Gluon, for Hopper.

S, dP and the exponentials are computed once, for dK, dV and dQ, so a pair of tiles takes five matmuls. With a separate kernel
for dQ, it would take seven. In return, dQ is a sum in memory, to which key tiles add in any order.

The query tiles of all heads that share keys form one sequence of steps, and the steps that need a mask come first. So two loops
take the tiles of all heads. A loop loads the next steps' tiles while it computes, so only its first steps wait for memory. Two
loops for each head would wait at each head.

In Gluon, a kernel itself decides where a tile lies, which warp does what, and when it waits. In Triton, the compiler decides.
A consumer is a warp that computes with what TMA loads. Here, all warps are consumers.
"""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from common.kernels.descriptors import describe
from common.kernels.hopper import (
    LOG2_E,
    async_reduce_add,
    describe_rows,
    describe_tile,
    matrix,
    new_barriers,
    require_hopper,
    slot_and_phase,
    wgmma_layout,
    widened,
)
from common.layout import cdiv, empty_rows
from stages.v6_tile_order.backward import backward as backward_of_v6

from .backward_prepare import _finish_kernel, _prepare_kernel
from .backward_scheduler import BLOCK_N, Problem, _query_tile, _tile

# dQ's accumulator lies in the order of registers (`_add_dq`), because rows of dQ would cause bank conflicts in shared memory.
SUM_COLUMNS = 256  # it is cut into rows of this length, the longest that TMA takes


class Tensors(NamedTuple):
    """Tensors in global memory."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    do: tma.tensor_descriptor
    stats: tma.tensor_descriptor  # for each query tile: log2(e) * LSE, then delta
    sums: tma.tensor_descriptor  # dQ's accumulator
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor


class KeysValues(NamedTuple):
    """Buffers in shared memory: K and V, then dK and dV until TMA has stored them."""

    k: gl.shared_memory_descriptor  # [1, 1, 1, BLOCK_N, HEAD_DIM]
    v: gl.shared_memory_descriptor  # [1, 1, 1, BLOCK_N, VALUE_DIM]
    full: gl.shared_memory_descriptor  # a barrier, TMA → consumers: K and V have arrived


class Ring(NamedTuple):
    """The tiles of a step in shared memory: a ring buffer with STAGES slots."""

    q: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_M, HEAD_DIM]
    do: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_M, VALUE_DIM]
    stats: gl.shared_memory_descriptor  # [STAGES, 2, BLOCK_M]: log2(e) * LSE and delta, loaded ahead, so no step waits for them
    q_full: gl.shared_memory_descriptor  # barriers, TMA → consumers: Q and the statistics have arrived
    do_full: gl.shared_memory_descriptor  # barriers, TMA → consumers: dO has arrived


class DsRing(NamedTuple):
    """A ring with one slot, because the same warps write and read it: dS for dQ's matmul, and parts of dQ for TMA to add."""

    ds: gl.shared_memory_descriptor  # [1, BLOCK_N, BLOCK_M]
    dq: gl.shared_memory_descriptor  # [PARTS, ...], in register order, which has no bank conflicts


@gluon.jit
def _load(tensors, tile, ring, step):
    """Start to load a step's Q and dO, with LSE and delta, into free buffers: the compiler lets all warps meet before it."""
    slot, _ = slot_and_phase(step, ring.q.shape[0])
    head, number, row = _query_tile(step, tile)
    where = [tile.batch, head, number * ring.q.shape[3], 0]
    mbarrier.expect(ring.q_full.index(slot), tensors.q.block_type.nbytes + tensors.stats.block_type.nbytes)
    tma.async_copy_global_to_shared(tensors.q, where, ring.q_full.index(slot), ring.q.index(slot))
    tma.async_copy_global_to_shared(tensors.stats, [row * 2, 0], ring.q_full.index(slot), ring.stats.index(slot))
    mbarrier.expect(ring.do_full.index(slot), tensors.do.block_type.nbytes)
    tma.async_copy_global_to_shared(tensors.do, where, ring.do_full.index(slot), ring.do.index(slot))


@gluon.jit
def _add_dq(tensors, ds_ring, kv, row):
    """Compute a step's contribution to dQ, and let TMA add it to dQ's accumulator."""
    PARTS: gl.constexpr = ds_ring.dq.shape[0]
    COLUMNS: gl.constexpr = kv.k.shape[4]
    SUM_ROWS: gl.constexpr = tensors.sums.block_shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, COLUMNS // 2, 16])
    zeros = gl.zeros([64, COLUMNS], gl.float32, layout)
    k = matrix(kv.k.index(0))
    tma.store_wait(0)  # dQ's buffer is free: TMA has read the last step's dQ while this step was computed
    # A part has 64 rows, as many as a warpgroup's matmul, because the order of the registers repeats every 64 rows.
    for part in gl.static_range(PARTS):
        ds_t = ds_ring.ds.index(0).slice(part * 64, 64, dim=1)
        dq = warpgroup_mma(ds_t.permute([1, 0]), k, zeros, use_acc=False, is_async=True)  # dS K
        dq = warpgroup_mma_wait(0, [dq])  # [64, COLUMNS]
        # In the order of the registers, a warp writes 512 consecutive bytes. Rows would put several threads on the same bank.
        dq = dq.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
        ds_ring.dq.index(part).store(dq.reshape(tensors.sums.block_shape))
        fence_async_shared()
        async_reduce_add(tensors.sums, [(row * PARTS + part) * SUM_ROWS, 0], ds_ring.dq.index(part))


@gluon.jit
def _accumulate(
    dk, dv, k, v, scale_log2, tensors, tile, kv, ring, ds_ring, lo, hi, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add the contribution of the steps [lo, hi) to one K/V tile's dk and dv, and to dq in memory. P and dS are computed
    transposed, so that they enter the matmuls for dV and dK from registers."""
    STAGES: gl.constexpr = ring.q.shape[0]
    ROWS: gl.constexpr = dk.shape[0]
    BLOCK_M: gl.constexpr = ring.q.shape[3]
    s_layout: gl.constexpr = wgmma_layout(ROWS, BLOCK_M)
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv.type.layout, k_width=2)
    ds_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, s_layout)
    if MASKED:
        # The first query that sees each key. For a key past the end it is 2**30, so that no query sees the key.
        offs_n = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        seen_from = gl.where(offs_n < tile.keys, tile.start_n + offs_n - tile.diagonal if CAUSAL else 0, 2**30)
    for step in range(lo, hi):
        slot, phase = slot_and_phase(step, STAGES)
        q = matrix(ring.q.index(slot))
        do = matrix(ring.do.index(slot))
        mbarrier.wait(ring.q_full.index(slot), phase)
        s_t = warpgroup_mma(k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)  # Sᵀ = K Qᵀ
        s_t = warpgroup_mma_wait(0, [s_t])  # [keys, queries]
        lse_log2 = ring.stats.index(slot).slice(0, 1).load(s_layout)  # [1, queries]
        p_t = s_t * scale_log2 - lse_log2
        if MASKED:
            _, number, _ = _query_tile(step, tile)
            offs_m = number * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, s_layout))
            p_t = gl.where(offs_m[None, :] >= seen_from[:, None], p_t, float("-inf"))
        p_t = gl.exp2(p_t).to(q.dtype)
        mbarrier.wait(ring.do_full.index(slot), phase)
        dv = warpgroup_mma(gl.convert_layout(p_t, p_layout), do, dv, is_async=True)  # dV += Pᵀ dO
        dv = warpgroup_mma_wait(0, [dv])
        dp_t = warpgroup_mma(v, do.permute([1, 0]), zeros, use_acc=False, is_async=True)  # dPᵀ = V dOᵀ
        dp_t = warpgroup_mma_wait(0, [dp_t])  # [keys, queries]
        delta = ring.stats.index(slot).slice(1, 1).load(s_layout)  # [1, queries]
        ds_t = (widened(p_t) * (dp_t - delta)).to(q.dtype)
        ds_ring.ds.index(0).store(ds_t)
        fence_async_shared()
        dk = warpgroup_mma(gl.convert_layout(ds_t, ds_layout), q, dk, is_async=True)  # dK += dSᵀ Q
        dk = warpgroup_mma_wait(0, [dk])
        if step + STAGES < tile.steps:
            _load(tensors, tile, ring, step + STAGES)
        _, _, row = _query_tile(step, tile)
        _add_dq(tensors, ds_ring, kv, row)
    return dk, dv


@gluon.jit
def _consumer(tensors, tile, kv, ring, ds_ring, problem, CAUSAL: gl.constexpr):
    """Compute the CTA's part of the gradients from what TMA loads."""
    ROWS: gl.constexpr = kv.k.shape[3]
    HEAD_DIM: gl.constexpr = kv.k.shape[4]
    VALUE_DIM: gl.constexpr = kv.v.shape[4]
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, wgmma_layout(ROWS, HEAD_DIM))
    dv = gl.zeros([ROWS, VALUE_DIM], gl.float32, wgmma_layout(ROWS, VALUE_DIM))
    k = matrix(kv.k.index(0))
    v = matrix(kv.v.index(0))
    scale_log2 = problem.scale * LOG2_E
    mbarrier.wait(kv.full.index(0), 0)
    # The diagonal needs a mask. So do keys past the end: their p may be infinite, and infinity times 0 is NaN.
    dk, dv = _accumulate(dk, dv, k, v, scale_log2, tensors, tile, kv, ring, ds_ring, 0, tile.masked, CAUSAL, MASKED=True)
    dk, dv = _accumulate(
        dk, dv, k, v, scale_log2, tensors, tile, kv, ring, ds_ring, tile.masked, tile.steps, CAUSAL, MASKED=False
    )

    # No other step reads V and K, so dV and dK go into their buffers, and TMA stores them from there.
    v.store(dv.to(kv.v.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(tensors.dv, [tile.batch, tile.kv_head, tile.start_n, 0], kv.v.index(0))
    k.store((dk * problem.scale).to(kv.k.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(tensors.dk, [tile.batch, tile.kv_head, tile.start_n, 0], kv.k.index(0))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kv_heads", "seq_q", "seq_k", "diagonal"])  # compile once for all lengths
def _backward_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_desc, sums_desc, dk_desc, dv_desc, scale,
    kv_heads, heads_per_kv, seq_q, seq_k, diagonal,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    HEAD_DIM: gl.constexpr = q_desc.block_shape[3]
    VALUE_DIM: gl.constexpr = v_desc.block_shape[3]
    q_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], q_desc.layout)
    do_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, VALUE_DIM], do_desc.layout)
    stats_s = gl.allocate_shared_memory(gl.float32, [STAGES, 2, BLOCK_M], stats_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [1, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [1, 1, 1, BLOCK_N, VALUE_DIM], v_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], q_desc.dtype)
    ds_s = gl.allocate_shared_memory(q_desc.dtype, [1, BLOCK_N, BLOCK_M], ds_layout)
    PARTS: gl.constexpr = BLOCK_M * HEAD_DIM // (sums_desc.block_shape[0] * sums_desc.block_shape[1])
    dq_s = gl.allocate_shared_memory(gl.float32, [PARTS] + sums_desc.block_shape, sums_desc.layout)

    tensors = Tensors(q_desc, k_desc, v_desc, do_desc, stats_desc, sums_desc, dk_desc, dv_desc)
    problem = Problem(kv_heads, heads_per_kv, seq_q, seq_k, diagonal, scale)
    tile = _tile(problem, BLOCK_M, HEAD_DIM, VALUE_DIM, CAUSAL)
    ring = Ring(q_s, do_s, stats_s, new_barriers(STAGES, 1), new_barriers(STAGES, 1))
    ds_ring = DsRing(ds_s, dq_s)
    kv = KeysValues(k_s, v_s, new_barriers(1, 1))
    mbarrier.expect(kv.full.index(0), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [tile.batch, tile.kv_head, tile.start_n, 0], kv.full.index(0), k_s.index(0))
    tma.async_copy_global_to_shared(v_desc, [tile.batch, tile.kv_head, tile.start_n, 0], kv.full.index(0), v_s.index(0))
    for step in range(gl.minimum(tile.steps, STAGES)):  # `_consumer` loads the other query tiles
        _load(tensors, tile, ring, step)
    _consumer(tensors, tile, kv, ring, ds_ring, problem, CAUSAL)


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
    block_m = 64 if max(head_dim, value_dim) >= 128 else 128  # the most rows of S and dP that fit in registers beside dK and dV
    tiles_m = cdiv(seq_q, block_m) * batch * heads
    stats = lse.new_empty(tiles_m * 2, block_m)
    sums = lse.new_empty(tiles_m * block_m * head_dim // SUM_COLUMNS, SUM_COLUMNS)
    _prepare_kernel[tiles_m,](
        describe(out, block_m, value_dim), describe(grad_out, block_m, value_dim), lse, stats, sums, heads, seq_q,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=block_m,
    )  # fmt: skip
    _backward_kernel[cdiv(seq_k, 128) * batch * kv_heads,](
        describe_tile(q, block_m), describe_tile(k, 128), describe_tile(v, 128), describe_tile(grad_out, block_m),
        describe_rows(stats, 2), describe_rows(sums, 64 * head_dim // SUM_COLUMNS),
        describe_tile(dk, 128), describe_tile(dv, 128), scale,
        kv_heads, heads // kv_heads, seq_q, seq_k, diagonal,
        BLOCK_M=block_m, STAGES=2, CAUSAL=causal, num_warps=8,
    )  # fmt: skip
    _finish_kernel[tiles_m,](
        sums, dq, *dq.stride()[:3], scale, heads, seq_q, HEAD_DIM=head_dim, BLOCK_M=block_m,
    )  # fmt: skip
    return dq, dk, dv
