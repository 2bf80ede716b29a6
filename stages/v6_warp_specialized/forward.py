"""FlashAttention-3 forward (arXiv 2407.08608, Algorithm 1 and section 3.2), warps specialised, in Gluon, for Hopper."""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from common.kernels.descriptors import addressable
from common.kernels.hopper import describe_tile, new_barriers, new_ring, require_hopper
from common.operator import empty_rows
from common.runtime import multiprocessors
from stages.v5_tuned.forward import forward as forward_of_v5

LOG2_E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(64)  # query rows of a consumer: what the four warps of a warpgroup multiply at once


@gluon.jit
def _tile(tile, batch_heads, group, tiles_m, seq_k, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """The `tile`-th of all tiles: batch and head, first query row, number of key tiles that it sees.

    The tiles of `group` heads follow each other, so that these heads' K and V stay in the L2 cache; among them, the longest
    (where causal: the last rows) come first.
    """
    first = tile // (group * tiles_m) * group
    inside = tile % (group * tiles_m)
    heads = gl.minimum(group, batch_heads - first)
    start_m = inside // heads * BLOCK_M
    if CAUSAL:
        start_m = (tiles_m - 1) * BLOCK_M - start_m
        seq_k = gl.minimum(seq_k, start_m + BLOCK_M)
    return first + inside % heads, start_m, gl.cdiv(seq_k, BLOCK_N)


@gluon.jit
def _claim(full, empty, fill, nbytes: gl.constexpr, STAGES: gl.constexpr):
    """The buffer for the `fill`-th tile of a ring, once its readers have emptied it; so many bytes will fill it."""
    slot = fill % STAGES
    mbarrier.wait(empty.index(slot), (fill // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(slot), nbytes)
    return slot


@gluon.jit
def _producer(load, CAUSAL: gl.constexpr):
    """One warp: keeps the buffers of Q, K and V full, the next tile's too while this one's is still being finished.

    K and V come as they are used, each key tile's K with the V of the tile before: n + 1 fills for n key tiles. The producer
    also takes the tiles: the first by the program's number, then one after another by a counter that all programs share.
    """
    q_desc, k_desc, v_desc, counter_ptr, buffers, barriers, problem = load
    q_s, k_s, v_s, o_s, tile_s = buffers
    q_full, q_empty, kv_full, kv_empty, tile_full = barriers
    batch_heads, heads, heads_per_kv, group, seq_q, seq_k = problem
    CONSUMERS: gl.constexpr = q_s.shape[0] // tile_s.shape[0]
    Q_STAGES: gl.constexpr = tile_s.shape[0]
    STAGES: gl.constexpr = k_s.shape[0]
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = k_s.shape[3]
    tiles_m = gl.cdiv(seq_q, BLOCK_M)
    tiles = batch_heads * tiles_m
    K_BYTES: gl.constexpr = k_desc.block_type.nbytes
    V_BYTES: gl.constexpr = v_desc.block_type.nbytes
    fill = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        batch_head, start_m, n = _tile(tile, batch_heads, group, tiles_m, seq_k, BLOCK_M, BLOCK_N, CAUSAL)
        batch = batch_head // heads
        head = batch_head % heads
        kv_head = head // heads_per_kv
        start_n = (n - 1) * BLOCK_N
        for w in gl.static_range(CONSUMERS):
            slot = turn % Q_STAGES * CONSUMERS + w
            mbarrier.wait(q_empty.index(slot), (turn // Q_STAGES & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [batch, head, start_m + w * ROWS, 0], q_full.index(slot), q_s.index(slot))
            if w == 0:
                slot = _claim(kv_full, kv_empty, fill, K_BYTES, STAGES)
                tma.async_copy_global_to_shared(k_desc, [batch, kv_head, start_n, 0], kv_full.index(slot), k_s.index(slot))
        tile = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)
        for _ in range(1, n):
            fill += 1
            slot = _claim(kv_full, kv_empty, fill, K_BYTES + V_BYTES, STAGES)
            tma.async_copy_global_to_shared(
                k_desc, [batch, kv_head, start_n - BLOCK_N, 0], kv_full.index(slot), k_s.index(slot)
            )
            tma.async_copy_global_to_shared(v_desc, [batch, kv_head, start_n, 0], kv_full.index(slot), v_s.index(slot))
            start_n -= BLOCK_N
        fill += 1
        slot = _claim(kv_full, kv_empty, fill, V_BYTES, STAGES)
        tma.async_copy_global_to_shared(v_desc, [batch, kv_head, start_n, 0], kv_full.index(slot), v_s.index(slot))
        fill += 1
        # A number past the last tile goes on too: it tells the consumers to end.
        slot = turn % Q_STAGES
        tile_s.index(slot).store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
        mbarrier.arrive(tile_full.index(slot), count=1)
        turn += 1


@gluon.jit
def _sums(p):
    """Four sums of each row of p, one for each of the four threads that hold it: none has to wait for others'."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _consumer(work, w: gl.constexpr, CAUSAL: gl.constexpr):
    """A warpgroup with the w-th 64 query rows of each tile: all of the arithmetic."""
    out_desc, lse_ptr, scale_log2, buffers, barriers, problem = work
    q_s, k_s, v_s, o_s, tile_s = buffers
    q_full, q_empty, kv_full, kv_empty, tile_full = barriers
    batch_heads, heads, heads_per_kv, group, seq_q, seq_k = problem
    CONSUMERS: gl.constexpr = q_s.shape[0] // tile_s.shape[0]
    Q_STAGES: gl.constexpr = tile_s.shape[0]
    STAGES: gl.constexpr = k_s.shape[0]
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = k_s.shape[3]
    HEAD_DIM: gl.constexpr = k_s.shape[4]
    VALUE_DIM: gl.constexpr = v_s.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    dtype: gl.constexpr = q_s.dtype
    # From there it need not be read for every key tile; two consumers have the registers for that, four have not.
    Q_IN_REGISTERS: gl.constexpr = CONSUMERS == 2 and HEAD_DIM <= 128
    tiles_m = gl.cdiv(seq_q, BLOCK_M)
    tiles = batch_heads * tiles_m
    no_s = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    fill = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        batch_head, start_m, n = _tile(tile, batch_heads, group, tiles_m, seq_k, BLOCK_M, BLOCK_N, CAUSAL)
        start_m += w * ROWS
        offs_m = start_m + gl.arange(0, ROWS, rows)
        q_slot = turn % Q_STAGES * CONSUMERS + w
        q_buffer = q_s.index(q_slot).reshape([ROWS, HEAD_DIM])
        mbarrier.wait(q_full.index(q_slot), turn // Q_STAGES & 1)
        q = q_buffer.load(q_layout) if Q_IN_REGISTERS else q_buffer
        seen = n
        if CAUSAL and BLOCK_M > BLOCK_N:
            # Key tiles that only later consumers see: let them pass.
            seen = gl.cdiv(gl.minimum(seq_k, start_m + ROWS), BLOCK_N)
            for _ in range(n - seen):
                slot = fill % STAGES
                phase = fill // STAGES & 1
                mbarrier.wait(kv_full.index(slot), phase)
                mbarrier.arrive(kv_empty.index(slot), count=1)
                fill += 1

        # The last tile first: it alone can end past the last key, or lie on the diagonal.
        slot = fill % STAGES
        phase = fill // STAGES & 1
        mbarrier.wait(kv_full.index(slot), phase)
        k = k_s.index(slot).reshape([BLOCK_N, HEAD_DIM])
        s = warpgroup_mma(q, k.permute([1, 0]), no_s, use_acc=False, is_async=True)
        if Q_STAGES == 2:
            # O of the tile before has left the other buffer: its Q may come.
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index((turn + 1) % Q_STAGES * CONSUMERS + w), count=1, pred=turn > 0)
        s = warpgroup_mma_wait(0, [s])  # [ROWS, BLOCK_N]
        mbarrier.arrive(kv_empty.index(slot), count=1)
        start_n = (seen - 1) * BLOCK_N
        if CAUSAL or start_n + BLOCK_N > seq_k:
            offs_n = start_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
            visible = (offs_n < seq_k)[None, :]
            if CAUSAL:
                visible = visible & (offs_m[:, None] >= offs_n[None, :])
            s = gl.where(visible, s, float("-inf"))
        m = gl.max(s, 1) * scale_log2  # finite: every row sees the first key of this tile
        p = gl.exp2(s * scale_log2 - m[:, None])
        l = _sums(p)
        p = gl.convert_layout(p.to(dtype), p_layout)
        acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, acc_layout)

        for _ in range(1, seen):
            # Both products at once, so that the tensor cores have work for as long as possible while others take their softmax.
            fill += 1
            slot = fill % STAGES
            phase = fill // STAGES & 1
            mbarrier.wait(kv_full.index(slot), phase)
            k = k_s.index(slot).reshape([BLOCK_N, HEAD_DIM])
            s = warpgroup_mma(q, k.permute([1, 0]), no_s, use_acc=False, is_async=True)
            acc = warpgroup_mma(p, v_s.index(slot).reshape([BLOCK_N, VALUE_DIM]), acc, is_async=True)
            s = warpgroup_mma_wait(1, [s])  # [ROWS, BLOCK_N]
            # NOTE: every tile pays for a new maximum, and mostly rescales by 1; v7 takes the first tile's.
            m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
            p = gl.exp2(s * scale_log2 - m_new[:, None])
            rescale = gl.exp2(m - m_new)  # what was summed under the old maximum
            l = l * gl.convert_layout(rescale, gl.SliceLayout(1, l.type.layout))[:, None] + _sums(p)
            acc = warpgroup_mma_wait(0, [acc])  # the compiler puts it before the exponentials
            mbarrier.arrive(kv_empty.index(slot), count=1)
            acc = acc * gl.convert_layout(rescale, acc_rows)[:, None]
            m = m_new
            p = gl.convert_layout(p.to(dtype), p_layout)

        fill += 1
        slot = fill % STAGES
        mbarrier.wait(kv_full.index(slot), fill // STAGES & 1)
        acc = warpgroup_mma(p, v_s.index(slot).reshape([BLOCK_N, VALUE_DIM]), acc, is_async=True)
        l = gl.convert_layout(gl.sum(l, 1), rows)
        lse_ptrs = lse_ptr + batch_head.to(gl.int64) * seq_q + offs_m
        gl.store(lse_ptrs, (m + gl.log2(l)) / LOG2_E, mask=offs_m < seq_q)
        normalize = gl.convert_layout(1.0 / l, acc_rows)
        tile_slot = turn % Q_STAGES
        mbarrier.wait(tile_full.index(tile_slot), turn // Q_STAGES & 1)
        tile = gl.max(tile_s.index(tile_slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(kv_empty.index(slot), count=1)
        fill += 1
        o_s.index(q_slot).reshape([ROWS, VALUE_DIM]).store((acc * normalize[:, None]).to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [batch_head // heads, batch_head % heads, start_m, 0], o_s.index(q_slot))
        if Q_STAGES == 1:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(q_slot), count=1)
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch_heads", "heads", "group", "seq_q", "seq_k"])
def _forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, counter_ptr, scale,
    batch_heads, heads, heads_per_kv, group, seq_q, seq_k,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    q_s = gl.allocate_shared_memory(q_desc.dtype, [Q_STAGES * CONSUMERS, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, VALUE_DIM], v_desc.layout)
    if VALUE_DIM == HEAD_DIM:
        o_s = q_s  # Q is no longer needed when O is done
    else:
        o_s = gl.allocate_shared_memory(q_desc.dtype, [Q_STAGES * CONSUMERS, 1, 1, ROWS, VALUE_DIM], out_desc.layout)
    tile_s = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = new_ring(Q_STAGES * CONSUMERS, 1, 1)  # each consumer has buffers of its own
    kv_full, kv_empty = new_ring(STAGES, 1, CONSUMERS)
    tile_full = new_barriers(Q_STAGES, 1)  # a number has been read when its buffer of Q is empty
    # exp(x) = exp2(x * log2(e)), and exp2 is one instruction; never 0, because a masked score, -inf, times 0 is NaN
    scale_log2 = gl.maximum(scale * LOG2_E, 1e-37)

    buffers = (q_s, k_s, v_s, o_s, tile_s)
    barriers = (q_full, q_empty, kv_full, kv_empty, tile_full)
    problem = (batch_heads, heads, heads_per_kv, group, seq_q, seq_k)
    # The registers of a multiprocessor, 512 for each of 128 threads, go where the tiles are: the producer keeps 24.
    work = (out_desc, lse_ptr, scale_log2, buffers, barriers, problem)
    load = (q_desc, k_desc, v_desc, counter_ptr, buffers, barriers, problem)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (work, 0, CAUSAL)),
                (_consumer, (work, 1, CAUSAL)),
                (_producer, (load, CAUSAL)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (work, 0, CAUSAL)),
                (_consumer, (work, 1, CAUSAL)),
                (_consumer, (work, 2, CAUSAL)),
                (_consumer, (work, 3, CAUSAL)),
                (_producer, (load, CAUSAL)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )


# Bytes of K and V that heads whose tiles are done at the same time may have. Programs that read the same K and V at the same
# time share what comes from the L2 cache; where tiles differ in length, more heads to mix keep the programs busy to the end.
L2_SHARE = {"full": 8 * 2**20, "causal": 32 * 2**20}
# By head dimension, the larger of the two: query rows of a tile, 64 for each of two or four consumers; keys of a tile; buffers
# of K and V, and of Q.
TILES = {16: (256, 64, 6, 2), 32: (256, 64, 6, 2), 64: (256, 64, 6, 2), 128: (128, 128, 2, 2), 256: (128, 64, 2, 1)}


def forward(q, k, v, *, causal, scale):
    """Attention output and log-sum-exp; see `common.operator` for shapes, dtypes and errors. float32 is left to v5.

    Raises:
        Unavailable: the GPU is not a Hopper GPU.
    """
    require_hopper(__package__, instead="stages.v5_tuned")
    if q.dtype == torch.float32:
        return forward_of_v5(q, k, v, causal=causal, scale=scale)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    out = empty_rows(q, value_dim)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if scale < 0:
        q, scale = -q, -scale  # the same scores; the largest one is then the largest before scaling too
    q, k, v = addressable(q), addressable(k), addressable(v)
    block_m, block_n, stages, q_stages = TILES[max(head_dim, value_dim)]
    tiles = triton.cdiv(seq_q, block_m) * batch * heads
    programs = min(tiles, multiprocessors())
    kv_bytes = seq_k * (head_dim + value_dim) * k.element_size()
    group = heads // kv_heads * max(1, min(batch * kv_heads, L2_SHARE["causal" if causal else "full"] // kv_bytes))
    counter = lse.new_zeros(1, dtype=torch.int32)  # of the tiles taken beyond each program's first
    _forward_kernel[programs,](
        describe_tile(q, 64), describe_tile(k, block_n), describe_tile(v, block_n), describe_tile(out, 64), lse, counter, scale,
        batch * heads, heads, heads // kv_heads, group, seq_q, seq_k,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=block_m, BLOCK_N=block_n, STAGES=stages, Q_STAGES=q_stages,
        CAUSAL=causal, num_warps=4, maxnreg={128: 168, 256: 96}[block_m],
    )  # fmt: skip
    return out, lse
