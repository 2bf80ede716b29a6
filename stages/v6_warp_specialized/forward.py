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

from common.descriptors import addressable
from common.hopper import describe_tile, require_hopper
from common.runtime import multiprocessors
from stages.v5_tuned.forward import forward as forward_of_v5

LOG2_E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(64)  # query rows of a consumer: what the four warps of a warpgroup multiply at once


@gluon.jit
def _turns(tiles):
    """How many tiles this program takes, of `tiles` in all."""
    programs = gl.num_programs(0)
    return tiles // programs + (_place(tiles // programs) < tiles % programs).to(gl.int32)


@gluon.jit
def _place(turn):
    """Which of the tiles of a turn this program takes: the other way round in every second turn, so that no program always
    gets the longest one of them."""
    place = gl.program_id(0)
    return gl.where(turn % 2 == 0, place, gl.num_programs(0) - 1 - place)


@gluon.jit
def _tile(turn, batch_heads, group, tiles_m, seq_k, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """The tile that this program takes in its `turn`: batch and head, first query row, number of key tiles that it sees.

    The tiles of `group` heads follow each other, so that these heads' K and V stay in the L2 cache; among them, the longest
    (where causal: the last rows) come first.
    """
    tile = turn * gl.num_programs(0) + _place(turn)
    first = tile // (group * tiles_m) * group
    inside = tile % (group * tiles_m)
    heads = gl.minimum(group, batch_heads - first)
    start_m = inside // heads * BLOCK_M
    if CAUSAL:
        start_m = (tiles_m - 1) * BLOCK_M - start_m
        seq_k = gl.minimum(seq_k, start_m + BLOCK_M)
    return first + inside % heads, start_m, gl.cdiv(seq_k, BLOCK_N)


@gluon.jit
def _load(desc, batch, head, row, buffers, full, empty, fill, STAGES: gl.constexpr):
    """Load a tile as the `fill`-th one of its ring, as soon as the consumers have emptied the buffer."""
    slot = fill % STAGES
    mbarrier.wait(empty.index(slot), (fill // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [batch, head, row, 0], full.index(slot), buffers.index(slot))


@gluon.jit
def _producer(load, CAUSAL: gl.constexpr):
    """One warp: keeps the buffers of Q, K and V full, the next tile's too while this one's is still being finished."""
    q_desc, k_desc, v_desc, buffers, barriers, problem = load
    q_s, k_s, v_s, out_s = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, go = barriers
    batch_heads, heads, group, seq_q, seq_k = problem
    CONSUMERS: gl.constexpr = q_s.shape[0]
    STAGES: gl.constexpr = k_s.shape[0]
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = k_s.shape[3]
    tiles_m = gl.cdiv(seq_q, BLOCK_M)
    fill = 0
    for turn in range(_turns(batch_heads * tiles_m)):
        batch_head, start_m, n = _tile(turn, batch_heads, group, tiles_m, seq_k, BLOCK_M, BLOCK_N, CAUSAL)
        batch = batch_head // heads
        head = batch_head % heads
        last = (n - 1) * BLOCK_N
        _load(k_desc, batch, head, last, k_s, k_full, k_empty, fill, STAGES)
        for w in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(w), (turn & 1) ^ 1)
            mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [batch, head, start_m + w * ROWS, 0], q_full.index(w), q_s.index(w))
        _load(v_desc, batch, head, last, v_s, v_full, v_empty, fill, STAGES)
        for i in range(1, n):
            _load(k_desc, batch, head, last - i * BLOCK_N, k_s, k_full, k_empty, fill + i, STAGES)
            _load(v_desc, batch, head, last - i * BLOCK_N, v_s, v_full, v_empty, fill + i, STAGES)
        fill += n


@gluon.jit
def _consumer(
    work, w: gl.constexpr, CAUSAL: gl.constexpr, OUT_IN_Q: gl.constexpr, PINGPONG: gl.constexpr, RESCALE_FROM: gl.constexpr
):
    """A warpgroup with the w-th 64 query rows of each tile: all of the arithmetic."""
    out_desc, lse_ptr, scale_log2, buffers, barriers, problem = work
    q_s, k_s, v_s, out_s = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, go = barriers
    batch_heads, heads, group, seq_q, seq_k = problem
    CONSUMERS: gl.constexpr = q_s.shape[0]
    STAGES: gl.constexpr = k_s.shape[0]
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = k_s.shape[3]
    HEAD_DIM: gl.constexpr = k_s.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    dtype: gl.constexpr = q_s.dtype
    tiles_m = gl.cdiv(seq_q, BLOCK_M)
    q = q_s.index(w).reshape([ROWS, HEAD_DIM])
    no_s = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    fill = 0
    turn_to_go = 0
    if PINGPONG and w == 0:
        mbarrier.arrive(go.index(0), count=1)
    for turn in range(_turns(batch_heads * tiles_m)):
        batch_head, start_m, n = _tile(turn, batch_heads, group, tiles_m, seq_k, BLOCK_M, BLOCK_N, CAUSAL)
        start_m += w * ROWS
        offs_m = start_m + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        mbarrier.wait(q_full.index(w), turn & 1)
        if CAUSAL and BLOCK_M != BLOCK_N:
            # Key tiles that only later consumers see: let them pass.
            seen = gl.cdiv(gl.minimum(seq_k, start_m + ROWS), BLOCK_N)
            for _ in range(n - seen):
                slot = fill % STAGES
                phase = fill // STAGES & 1
                mbarrier.wait(k_full.index(slot), phase)
                mbarrier.arrive(k_empty.index(slot), count=1)
                mbarrier.wait(v_full.index(slot), phase)
                mbarrier.arrive(v_empty.index(slot), count=1)
                if PINGPONG:
                    mbarrier.wait(go.index(w), turn_to_go & 1)
                    mbarrier.arrive(go.index((w + 1) % CONSUMERS), count=1)
                    turn_to_go += 1
                fill += 1
            n = seen

        # The last tile first: it alone can end past the last key, or lie on the diagonal.
        slot = fill % STAGES
        phase = fill // STAGES & 1
        mbarrier.wait(k_full.index(slot), phase)
        k = k_s.index(slot).reshape([BLOCK_N, HEAD_DIM])
        s = warpgroup_mma(q, k.permute([1, 0]), no_s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s])  # [ROWS, BLOCK_N]
        mbarrier.arrive(k_empty.index(slot), count=1)
        start_n = (n - 1) * BLOCK_N
        if CAUSAL or start_n + BLOCK_N > seq_k:
            offs_n = start_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
            visible = (offs_n < seq_k)[None, :]
            if CAUSAL:
                visible = visible & (offs_m[:, None] >= offs_n[None, :])
            s = gl.where(visible, s, float("-inf"))
        m = gl.max(s, 1) * scale_log2  # finite: every row sees the first key of this tile
        p = gl.exp2(s * scale_log2 - m[:, None])
        l = gl.sum(p, 1)
        p = gl.convert_layout(p.to(dtype), p_layout)
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, acc_layout)
        mbarrier.wait(v_full.index(slot), phase)

        for _ in range(1, n):
            # While the softmax of this tile runs, so does the last tile's product with V.
            v_slot = slot
            fill += 1
            slot = fill % STAGES
            phase = fill // STAGES & 1
            mbarrier.wait(k_full.index(slot), phase)
            if PINGPONG:
                mbarrier.wait(go.index(w), turn_to_go & 1)
                turn_to_go += 1
            k = k_s.index(slot).reshape([BLOCK_N, HEAD_DIM])
            s = warpgroup_mma(q, k.permute([1, 0]), no_s, use_acc=False, is_async=True)
            acc = warpgroup_mma(p, v_s.index(v_slot).reshape([BLOCK_N, HEAD_DIM]), acc, is_async=True)
            if PINGPONG:
                mbarrier.arrive(go.index((w + 1) % CONSUMERS), count=1)
            s = warpgroup_mma_wait(1, [s])  # [ROWS, BLOCK_N]
            mbarrier.arrive(k_empty.index(slot), count=1)
            m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
            if RESCALE_FROM > 0:
                m_new = gl.where(m_new - m > RESCALE_FROM, m_new, m)
            p = gl.exp2(s * scale_log2 - m_new[:, None])
            rescale = gl.exp2(m - m_new)  # what was summed under the old maximum
            l = l * rescale + gl.sum(p, 1)
            mbarrier.wait(v_full.index(slot), phase)
            acc, l = warpgroup_mma_wait(0, [acc, l])  # l as well: else the compiler waits before it computes p
            mbarrier.arrive(v_empty.index(v_slot), count=1)
            if RESCALE_FROM > 0:
                if gl.max(m_new - m, 0) > 0:
                    acc = acc * gl.convert_layout(rescale, acc_rows)[:, None]
            else:
                acc = acc * gl.convert_layout(rescale, acc_rows)[:, None]
            m = m_new
            p = gl.convert_layout(p.to(dtype), p_layout)

        if not OUT_IN_Q:
            mbarrier.arrive(q_empty.index(w), count=1)
        acc = warpgroup_mma(p, v_s.index(slot).reshape([BLOCK_N, HEAD_DIM]), acc, is_async=True)
        lse_ptrs = lse_ptr + batch_head.to(gl.int64) * seq_q + offs_m
        gl.store(lse_ptrs, (m + gl.log2(l)) / LOG2_E, mask=offs_m < seq_q)
        normalize = gl.convert_layout(1.0 / l, acc_rows)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_empty.index(slot), count=1)
        fill += 1
        tma.store_wait(0)  # the tile before has left the buffer
        out_s.index(w).reshape([ROWS, HEAD_DIM]).store((acc * normalize[:, None]).to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [batch_head // heads, batch_head % heads, start_m, 0], out_s.index(w))
        if OUT_IN_Q:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(w), count=1)
    tma.store_wait(0)


@gluon.jit
def _ring(STAGES: gl.constexpr, producers: gl.constexpr, consumers: gl.constexpr):
    """The barriers of a ring of buffers: `full` completes when all producers have filled one, `empty` when all consumers have
    read it."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=producers)
        mbarrier.init(empty.index(slot), count=consumers)
    return full, empty


@gluon.jit
def _forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, scale, batch_heads, heads, group, seq_q, seq_k,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    OUT_IN_Q: gl.constexpr, PINGPONG: gl.constexpr, RESCALE_FROM: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    q_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], v_desc.layout)
    out_s = q_s
    if not OUT_IN_Q:
        out_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    q_full, q_empty = _ring(CONSUMERS, 1, 1)  # each consumer has a buffer of its own
    k_full, k_empty = _ring(STAGES, 1, CONSUMERS)
    v_full, v_empty = _ring(STAGES, 1, CONSUMERS)
    go = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for w in gl.static_range(CONSUMERS):
        mbarrier.init(go.index(w), count=1)
    # exp(x) = exp2(x * log2(e)), and exp2 is one instruction; never 0, because a masked score, -inf, times 0 is NaN
    scale_log2 = gl.maximum(scale * LOG2_E, 1e-30)

    buffers = (q_s, k_s, v_s, out_s)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, go)
    problem = (batch_heads, heads, group, seq_q, seq_k)
    # The registers of a multiprocessor, 512 for each of 128 threads, go where the tiles are: the producer keeps 24 or 32.
    work = (out_desc, lse_ptr, scale_log2, buffers, barriers, problem)
    load = (q_desc, k_desc, v_desc, buffers, barriers, problem)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (work, 0, CAUSAL, OUT_IN_Q, PINGPONG, RESCALE_FROM)),
                (_consumer, (work, 1, CAUSAL, OUT_IN_Q, PINGPONG, RESCALE_FROM)),
                (_producer, (load, CAUSAL)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (work, 0, CAUSAL, OUT_IN_Q, PINGPONG, RESCALE_FROM)),
                (_consumer, (work, 1, CAUSAL, OUT_IN_Q, PINGPONG, RESCALE_FROM)),
                (_consumer, (work, 2, CAUSAL, OUT_IN_Q, PINGPONG, RESCALE_FROM)),
                (_producer, (load, CAUSAL)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


# Bytes of K and V that the heads whose tiles are done at the same time may have, to stay in the L2 cache.
L2_SHARE = 32 * 2**20


def schedule(head_dim: int, causal: bool) -> dict:
    """The tile and the order of a launch: `BLOCK_M` of 128 or 192 query rows, `persistent` or a program for each tile."""
    tiles = {16: (192, 128, 4), 32: (192, 128, 4), 64: (192, 128, 2), 128: (128, 128, 2), 256: (128, 64, 2)}
    block_m, block_n, stages = tiles[head_dim]
    return {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "STAGES": stages, "OUT_IN_Q": head_dim == 256,
        "PINGPONG": False, "RESCALE_FROM": 0, "persistent": True, "l2_share": L2_SHARE,
    }  # fmt: skip


def forward(q, k, v, *, causal, scale):
    """Attention output and log-sum-exp; see `common.operator` for shapes, dtypes and errors. float32 is left to v5.

    Raises:
        Unavailable: the GPU is not a Hopper GPU.
    """
    require_hopper("v6_warp_specialized", instead="v5_tuned")
    if q.dtype == torch.float32:
        return forward_of_v5(q, k, v, causal=causal, scale=scale)
    batch, heads, seq_q, head_dim = q.shape
    seq_k = k.shape[2]
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if scale < 0:
        q, scale = -q, -scale  # the same scores; the largest one is then the largest before scaling too
    q, k, v = addressable(q), addressable(k), addressable(v)
    chosen = schedule(head_dim, causal)
    persistent, l2_share = chosen.pop("persistent"), chosen.pop("l2_share")
    block_m, block_n = chosen["BLOCK_M"], chosen["BLOCK_N"]
    tiles = triton.cdiv(seq_q, block_m) * batch * heads
    programs = min(tiles, multiprocessors()) if persistent else tiles
    group = max(1, min(batch * heads, l2_share // (2 * seq_k * head_dim * k.element_size())))
    _forward_kernel[programs,](
        describe_tile(q, 64), describe_tile(k, block_n), describe_tile(v, block_n), describe_tile(out, 64), lse, scale,
        batch * heads, heads, group, seq_q, seq_k,
        HEAD_DIM=head_dim, CAUSAL=causal, **chosen, num_warps=4, maxnreg={128: 168, 192: 128}[block_m],
    )  # fmt: skip
    return out, lse
