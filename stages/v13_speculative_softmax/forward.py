"""v12's forward with a guessed maximum, taken from the first key tiles and checked afterwards (FlashDecoding++, arXiv
2311.01282, section 3), in Gluon, for Hopper."""

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
from triton.language.extra.cuda import gdc_wait

from common.kernels.descriptors import addressable
from common.kernels.hopper import describe_tile, new_barriers, new_ring, require_hopper, store_rows
from common.kernels.replay import replayed
from common.operator import empty_rows
from common.runtime import num_sms
from stages.v7_one_backward.forward import forward as forward_of_v7

LOG2_E = gl.constexpr(1.4426950408889634)
FEW_TILES = gl.constexpr(8)  # up to so many key tiles rows rarely fail, and a second tile in the guess costs most
ROWS = gl.constexpr(64)  # query rows of a consumer, as many as a warpgroup's wgmma has


@gluon.jit
def _tile(tile, problem, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Return batch and head, first query row and number of key tiles of a work tile.

    Tiles of `group` heads follow each other, so that the K and V of these heads stay in the L2 cache; with a mask the longest
    tiles, of the last rows, come first.
    """
    batch_heads, heads, heads_per_kv, group, tiles_m, seq_q, seq_k, diagonal = problem
    first = tile // (group * tiles_m) * group
    inside = tile % (group * tiles_m)
    group = gl.minimum(group, batch_heads - first)
    start_m = inside // group * BLOCK_M
    if CAUSAL:
        start_m = (tiles_m - 1) * BLOCK_M - start_m - diagonal % ROWS
        seq_k = gl.minimum(seq_k, start_m + BLOCK_M + diagonal)
    return first + inside % group, start_m, gl.cdiv(seq_k, BLOCK_N)


@gluon.jit
def _next_failed(tile, tiles, failed_ptr):
    """Return the first failed tile among `tile`, `tile` + number of CTAs, …"""
    while gl.load(failed_ptr + 1 + tile, mask=tile < tiles, other=1) == 0:
        tile += gl.num_programs(0)
    return tile


@gluon.jit
def _load(load, ring, fill, start_n, K: gl.constexpr, V: gl.constexpr):
    """Start to load the next slot of the ring, when the consumers have released it. It holds two tiles that one step uses
    together: K of the key tile at start_n, and V of the tile after that one."""
    k_desc, v_desc, batch, kv_head = load
    k_s, v_s, kv_full, kv_empty = ring
    STAGES: gl.constexpr = k_s.shape[0]
    BLOCK_N: gl.constexpr = k_s.shape[3]
    NBYTES: gl.constexpr = (k_desc.block_type.nbytes if K else 0) + (v_desc.block_type.nbytes if V else 0)
    slot = fill % STAGES
    mbarrier.wait(kv_empty.index(slot), (fill // STAGES & 1) ^ 1)
    mbarrier.expect(kv_full.index(slot), NBYTES)
    if K:
        tma.async_copy_global_to_shared(k_desc, [batch, kv_head, start_n, 0], kv_full.index(slot), k_s.index(slot))
    if V:
        tma.async_copy_global_to_shared(v_desc, [batch, kv_head, start_n + BLOCK_N, 0], kv_full.index(slot), v_s.index(slot))


@gluon.jit
def _scores(q, ring, fill, ROWS: gl.constexpr):
    """Start to compute the scores of a key tile, once its K has arrived."""
    k_s, v_s, kv_full, kv_empty = ring
    STAGES: gl.constexpr = k_s.shape[0]
    BLOCK_N: gl.constexpr = k_s.shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    no_s = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    mbarrier.wait(kv_full.index(fill % STAGES), fill // STAGES & 1)
    k = k_s.index(fill % STAGES).reshape([BLOCK_N, k_s.shape[4]])
    return warpgroup_mma(q, k.permute([1, 0]), no_s, use_acc=False, is_async=True)


@gluon.jit
def _sums(p):
    """Sum each row of p into four parts, one for each of the four threads that hold it, so that no thread waits for another."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _accumulate(
    acc, s, q, ring, fill, tiles, seq_k, last, scale_log2,
    CONSUMERS: gl.constexpr, AGAIN: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A consumer's online softmax over `tiles` key tiles, from the last one backwards; the scores s of the last one are in
    flight.

    Returns acc, whose matmul for the first tile is still in flight, m (maximum) and l (sum).
    """
    k_s, v_s, kv_full, kv_empty = ring
    STAGES: gl.constexpr = k_s.shape[0]
    ROWS: gl.constexpr = acc.shape[0]
    BLOCK_N: gl.constexpr = k_s.shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = acc.type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    s = warpgroup_mma_wait(0, [s])  # [rows, BLOCK_N]
    mbarrier.arrive(kv_empty.index(fill % STAGES), count=1)
    # Only the last tile can pass the last key or contain the diagonal. The first query tile starts diagonal % ROWS rows before
    # query 0. So the number of keys that a consumer's rows see is a multiple of ROWS.
    start_n = (tiles - 1) * BLOCK_N
    if CAUSAL or start_n + BLOCK_N > seq_k:
        offs_n = start_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
        visible = (offs_n < seq_k)[None, :]
        if CAUSAL:
            last_n = last + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))  # the last key that each row sees
            visible = visible & (last_n[:, None] >= offs_n[None, :])
        s = gl.where(visible, s, float("-inf"))
    m = gl.max(s, 1) * scale_log2  # finite: every row sees the first key of this tile
    first = 1
    if CAUSAL and tiles > FEW_TILES:
        # The upper rows of the diagonal's tile see few keys, so the guess includes the next tile.
        first = 2
        fill += 1
        slot = fill % STAGES
        s_next = warpgroup_mma_wait(0, [_scores(q, ring, fill, ROWS)])
        m = gl.maximum(m, gl.max(s_next, 1) * scale_log2)
        p = gl.exp2(s * scale_log2 - m[:, None])
        l = _sums(p)
        p = gl.convert_layout(p.to(k_s.dtype), p_layout)
        acc = warpgroup_mma(p, v_s.index(slot).reshape([BLOCK_N, v_s.shape[4]]), acc, is_async=True)
        p_next = gl.exp2(s_next * scale_log2 - m[:, None])
        l = l + _sums(p_next)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(kv_empty.index(slot), count=1)
    else:
        p_next = gl.exp2(s * scale_log2 - m[:, None])
        l = _sums(p_next)
    p = gl.convert_layout(p_next.to(k_s.dtype), p_layout)

    for _ in range(first, tiles):
        # Issue both matmuls together, so that the tensor cores have work while other consumers compute their softmax.
        fill += 1
        slot = fill % STAGES
        s = _scores(q, ring, fill, ROWS)
        acc = warpgroup_mma(p, v_s.index(slot).reshape([BLOCK_N, v_s.shape[4]]), acc, is_async=True)
        if CONSUMERS == 2:
            s = warpgroup_mma_wait(1, [s])  # [rows, BLOCK_N]
        else:  # three other consumers' matmuls run under these exponentials: release the buffers before them
            s, acc = warpgroup_mma_wait(0, [s, acc])
            mbarrier.arrive(kv_empty.index(slot), count=1)
        if AGAIN:
            m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
            rescale = gl.exp2(m - m_new)  # rescales what was computed with the old maximum
            l = l * gl.convert_layout(rescale, gl.SliceLayout(1, l.type.layout))[:, None]
            m = m_new
        p = gl.exp2(s * scale_log2 - m[:, None])
        l = l + _sums(p)
        if CONSUMERS == 2:
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(kv_empty.index(slot), count=1)
        if AGAIN:
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc_layout))[:, None]
        p = gl.convert_layout(p.to(k_s.dtype), p_layout)

    fill += 1
    slot = fill % STAGES
    mbarrier.wait(kv_full.index(slot), fill // STAGES & 1)
    acc = warpgroup_mma(p, v_s.index(slot).reshape([BLOCK_N, v_s.shape[4]]), acc, is_async=True)
    return acc, m, gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, s_layout))


@gluon.jit
def _producer(load, AGAIN: gl.constexpr, CAUSAL: gl.constexpr):
    """One warp: keep the buffers of Q, K and V full, also for the next tile while the current one ends.

    The first tile is the CTA's number. A counter that all CTAs share gives the others. AGAIN: failed tiles, in fixed strides.
    """
    q_desc, k_desc, v_desc, counter_ptr, failed_ptr, ring, queries, turns, problem = load
    q_s, q_full, q_empty = queries
    tile_s, tile_full = turns
    batch_heads, heads, heads_per_kv, group, tiles_m, seq_q, seq_k, diagonal = problem
    Q_STAGES: gl.constexpr = tile_s.shape[0]
    CONSUMERS: gl.constexpr = q_s.shape[0] // Q_STAGES
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = ring[0].shape[3]
    fill = 0
    turn = 0
    tile = gl.program_id(0)
    tiles = batch_heads * tiles_m
    if AGAIN:
        tile = _next_failed(tile, tiles, failed_ptr)
    while tile < tiles:
        batch_head, start_m, n = _tile(tile, problem, BLOCK_M, BLOCK_N, CAUSAL)
        batch, head = batch_head // heads, batch_head % heads
        kv = (k_desc, v_desc, batch, head // heads_per_kv)
        start_n = (n - 1) * BLOCK_N
        for w in gl.static_range(CONSUMERS):
            slot = turn % Q_STAGES * CONSUMERS + w
            mbarrier.wait(q_empty.index(slot), (turn // Q_STAGES & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [batch, head, start_m + w * ROWS, 0], q_full.index(slot), q_s.index(slot))
            if w == 0:
                _load(kv, ring, fill, start_n, True, False)
        if AGAIN:
            tile = _next_failed(tile + gl.num_programs(0), tiles, failed_ptr)
        else:
            tile = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)
        for _ in range(1, n):
            fill += 1
            start_n -= BLOCK_N
            _load(kv, ring, fill, start_n, True, True)
        _load(kv, ring, fill + 1, start_n - BLOCK_N, False, True)
        fill += 2
        # A number past the last tile is passed on too: it tells the consumers to end.
        slot = turn % Q_STAGES
        tile_s.index(slot).store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
        mbarrier.arrive(tile_full.index(slot), count=1)
        turn += 1


@gluon.jit
def _consumer(work, w: gl.constexpr, AGAIN: gl.constexpr, CAUSAL: gl.constexpr):
    """A warpgroup that computes the w-th 64 query rows of each tile."""
    out_desc, out_ptr, lse_ptr, failed_ptr, scale, o_s, ring, queries, turns, problem = work
    k_s, v_s, kv_full, kv_empty = ring
    q_s, q_full, q_empty = queries
    tile_s, tile_full = turns
    batch_heads, heads, heads_per_kv, group, tiles_m, seq_q, seq_k, diagonal = problem
    Q_STAGES: gl.constexpr = tile_s.shape[0]
    CONSUMERS: gl.constexpr = q_s.shape[0] // Q_STAGES
    STAGES: gl.constexpr = k_s.shape[0]
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_N: gl.constexpr = k_s.shape[3]
    HEAD_DIM: gl.constexpr = k_s.shape[4]
    VALUE_DIM: gl.constexpr = v_s.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, VALUE_DIM, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    # With Q in registers, the matmul need not read Q from shared memory for every key tile. Two consumers have enough registers
    # for this, four do not.
    Q_IN_REGISTERS: gl.constexpr = CONSUMERS == 2 and HEAD_DIM <= 128
    # exp(x) = exp2(x * log2(e)), and exp2 is one instruction; never 0, because a masked score, -inf, times 0 is NaN
    scale_log2 = gl.maximum(scale * LOG2_E, 1e-37)
    fill = 0
    turn = 0
    tile = gl.program_id(0)
    tiles = batch_heads * tiles_m
    if AGAIN:
        tile = _next_failed(tile, tiles, failed_ptr)
    while tile < tiles:
        done = tile
        batch_head, start_m, n = _tile(tile, problem, BLOCK_M, BLOCK_N, CAUSAL)
        start_m += w * ROWS
        seen = gl.cdiv(gl.minimum(start_m + ROWS + diagonal, seq_k) if CAUSAL else seq_k, BLOCK_N)

        offs_m = start_m + gl.arange(0, ROWS, rows)
        acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, acc_layout)
        slot = turn % Q_STAGES * CONSUMERS + w
        mbarrier.wait(q_full.index(slot), turn // Q_STAGES & 1)
        q_buffer = q_s.index(slot).reshape([ROWS, HEAD_DIM])
        q = q_buffer.load(q_layout) if Q_IN_REGISTERS else q_buffer
        for _ in range(n - seen):  # skip key tiles that only the CTA's later consumers see
            mbarrier.wait(kv_full.index(fill % STAGES), fill // STAGES & 1)
            mbarrier.arrive(kv_empty.index(fill % STAGES), count=1)
            fill += 1
        s = _scores(q, ring, fill, ROWS)
        if Q_STAGES == 2:
            # TMA has stored the last tile's O from the other buffer, so the next Q may arrive there.
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index((turn + 1) % Q_STAGES * CONSUMERS + w), count=1, pred=turn > 0)
        acc, m, l = _accumulate(acc, s, q, ring, fill, seen, seq_k, start_m + diagonal, scale_log2, CONSUMERS, AGAIN, CAUSAL)
        fill += seen

        lse_ptrs = lse_ptr + batch_head.to(gl.int64) * seq_q + offs_m
        gl.store(lse_ptrs, (m + gl.log2(l)) / LOG2_E, mask=(offs_m >= 0) & (offs_m < seq_q))
        normalize = gl.convert_layout(1.0 / l, gl.SliceLayout(1, acc_layout))[:, None]
        mbarrier.wait(tile_full.index(turn % Q_STAGES), turn // Q_STAGES & 1)
        tile = gl.max(tile_s.index(turn % Q_STAGES).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(kv_empty.index(fill % STAGES), count=1)
        fill += 1
        if not AGAIN:
            # An infinite P, or an overflowing sum, makes l or part of a row of O infinite or NaN.
            fails = ~(gl.abs(gl.sum(acc, 1) + gl.convert_layout(l, gl.SliceLayout(1, acc_layout))) < float("inf"))
            same = gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, acc_layout))
            gl.store(failed_ptr + same, 1, mask=fails)
            gl.store(failed_ptr + 1 + done + same, 1, mask=fails)
        if out_ptr is not None and start_m < 0:
            out = (acc * normalize).to(q_s.dtype)
            store_rows(out_ptr, out_desc, batch_head // heads, batch_head % heads, start_m, out)
        else:
            o_s.index(slot).reshape([ROWS, VALUE_DIM]).store((acc * normalize).to(q_s.dtype))
            fence_async_shared()
            where = [batch_head // heads, batch_head % heads, start_m, 0]
            tma.async_copy_shared_to_global(out_desc, where, o_s.index(slot))
        if Q_STAGES == 1:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(slot), count=1)
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch_heads", "heads", "group", "seq_q", "seq_k", "diagonal"])
def _forward_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, counter_ptr, failed_ptr, scale,
    batch_heads, heads, heads_per_kv, group, seq_q, seq_k, diagonal,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, AGAIN: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    tiles_m = gl.cdiv(seq_q + diagonal % ROWS, BLOCK_M)
    if AGAIN:
        gdc_wait()  # for the first launch
        if gl.load(failed_ptr) == 0:
            return
    q_s = gl.allocate_shared_memory(q_desc.dtype, [Q_STAGES * CONSUMERS, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, VALUE_DIM], v_desc.layout)
    if VALUE_DIM == HEAD_DIM:
        o_s = q_s  # Q is no longer needed when O is done
    else:
        o_s = gl.allocate_shared_memory(q_desc.dtype, [Q_STAGES * CONSUMERS, 1, 1, ROWS, VALUE_DIM], out_desc.layout)
    tile_s = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = new_ring(Q_STAGES * CONSUMERS, 1, 1)  # each consumer has its own buffers
    kv_full, kv_empty = new_ring(STAGES, 1, CONSUMERS)
    ring = (k_s, v_s, kv_full, kv_empty)
    tile_full = new_barriers(Q_STAGES, 1)  # a tile's number has been read when its buffer of Q is released

    queries = (q_s, q_full, q_empty)
    turns = (tile_s, tile_full)
    problem = (batch_heads, heads, heads_per_kv, group, tiles_m, seq_q, seq_k, diagonal)
    work = (out_desc, out_ptr, lse_ptr, failed_ptr, scale, o_s, ring, queries, turns, problem)
    load = (q_desc, k_desc, v_desc, counter_ptr, failed_ptr, ring, queries, turns, problem)
    # An SM has 65,536 registers, 512 for each thread of a warpgroup. The producer keeps 24 per thread, and the consumers get
    # the rest.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (work, 0, AGAIN, CAUSAL)), (_consumer, (work, 1, AGAIN, CAUSAL)), (_producer, (load, AGAIN, CAUSAL))],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consumer, (work, 0, AGAIN, CAUSAL)), (_consumer, (work, 1, AGAIN, CAUSAL)),
             (_consumer, (work, 2, AGAIN, CAUSAL)), (_consumer, (work, 3, AGAIN, CAUSAL)), (_producer, (load, AGAIN, CAUSAL))],
            [4, 4, 4, 1], [112, 112, 112, 24],
        )  # fmt: skip


# Bytes of K and V of the heads whose tiles run at the same time. CTAs that read the same K and V at the same time share them
# through the L2 cache. If tiles differ in length, more heads keep the CTAs busy to the end.
L2_SHARE = {"full": 8 * 2**20, "causal": 32 * 2**20}
# By the larger head dimension: query rows per tile, 64 for each of two or four consumers; keys per tile; buffers of K and V;
# buffers of Q.
# NOTE: v12's tiles, which pay for a maximum and for rescaling O; here tiles cost less, and v14's are shorter.
TILES = {16: (256, 64, 6, 2), 32: (256, 64, 6, 2), 64: (256, 64, 6, 2), 128: (128, 128, 2, 2), 256: (128, 64, 2, 1)}


@replayed
def forward(q, k, v, *, causal, scale, diagonal=0):
    """Attention output and log-sum-exp; see `common.operator` for shapes, dtypes and errors. Falls back to v7 for float32.

    Raises:
        Unavailable: the GPU is not a Hopper GPU.
    """
    require_hopper(__package__)
    if q.dtype == torch.float32:
        return forward_of_v7(q, k, v, causal=causal, scale=scale, diagonal=diagonal)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    out = empty_rows(q, value_dim)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if scale < 0:
        q, scale = -q, -scale  # the scores stay the same; now their maximum can be taken before scaling
    q, k, v = addressable(q), addressable(k), addressable(v)
    out_ptr = out if diagonal % 64 else None  # if the first query tile starts before query 0
    block_m, block_n, stages, q_stages = TILES[max(head_dim, value_dim)]
    tiles = triton.cdiv(seq_q + diagonal % 64, block_m) * batch * heads
    programs = min(tiles, num_sms())
    kv_bytes = seq_k * (head_dim + value_dim) * k.element_size()
    group = heads // kv_heads * max(1, min(batch * kv_heads, L2_SHARE["causal" if causal else "full"] // kv_bytes))
    # The counter of tiles that were taken after each CTA's first; a flag if any tile failed; a flag for each tile.
    counter, failed = lse.new_zeros(2 + tiles, dtype=torch.int32).split([1, 1 + tiles])
    tensors = describe_tile(q, 64), describe_tile(k, block_n), describe_tile(v, block_n), describe_tile(out, 64), out_ptr, lse
    for again in (False, True):
        _forward_kernel[programs,](
            *tensors, counter, failed, scale, batch * heads, heads, heads // kv_heads, group, seq_q, seq_k, diagonal,
            HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=block_m, BLOCK_N=block_n, STAGES=stages, Q_STAGES=q_stages,
            AGAIN=again, CAUSAL=causal, num_warps=4, maxnreg={128: 168, 256: 96}[block_m], launch_pdl=again,
        )  # fmt: skip
    return out, lse
