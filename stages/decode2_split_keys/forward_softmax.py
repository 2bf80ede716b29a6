"""A consumer's online softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from common.kernels.hopper import ROWS, matrix, per_row, signal, slot_and_phase, wait_full, wgmma_layout


@gluon.jit
def _scores(q, ring, fill):
    """Start to compute the scores of a key tile, once its K has arrived."""
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    no_s = gl.zeros([ROWS, BLOCK_N], gl.float32, wgmma_layout(ROWS, BLOCK_N))
    k = matrix(ring.k.index(wait_full(ring.full, fill)))
    return warpgroup_mma(q, k.permute([1, 0]), no_s, use_acc=False, is_async=True)  # S = Q Kᵀ


@gluon.jit
def _sums(p):
    """Return four partial sums of each row of p, one per thread that holds part of the row.

    To add them up, the threads must exchange them. But all four threads rescale by the same factor, and only the tile's end
    needs whole row sums, for LSE and 1 / l. So one exchange at the end is enough, and no step of the loop has one.
    """
    # In wgmma's layout, each of a row's four threads holds 2 of every 8 columns.
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _visible(s, start_n, seq_k, last, PACKED: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the scores s of the key tile at start_n, with -inf for masked keys. `last` is the first row's last visible key."""
    offs_n = start_n + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    visible = (offs_n < seq_k)[None, :]
    if CAUSAL:
        last_n = last + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout)) // PACKED  # the last key that each row sees
        visible = visible & (last_n[:, None] >= offs_n[None, :])
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def _accumulate(
    acc, s, q, ring, fill, tiles, tile, problem, last, scale_log2,
    CONSUMERS: gl.constexpr, PACKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Run a consumer's online softmax over `tiles` key tiles, the last tile first. The last tile's scores are already being
    computed.

    Returns acc, m (maximum) and l (sum). The matmul P V of the first tile, visited last, is still in flight.
    """
    STAGES: gl.constexpr = ring.k.shape[0]
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    s_layout: gl.constexpr = wgmma_layout(ROWS, BLOCK_N)
    acc_layout: gl.constexpr = acc.type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    s = warpgroup_mma_wait(0, [s])  # [rows, BLOCK_N]
    signal(ring.empty, fill)  # the first slot has no V
    # The tile visited first has code of its own, because m and l start from it. Here that is the last key tile, the only one
    # with a mask. So all other tiles share one loop, without a mask, in which a step can leave work to the next step.
    # Other tiles need no mask, because `_rows_before` lets a consumer's last row see a multiple of ROWS // PACKED keys, or all.
    start_n = tile.split * BLOCK_N + (tiles - 1) * tile.step
    if CAUSAL or start_n + BLOCK_N > problem.seq_k:
        s = _visible(s, start_n, problem.seq_k, last, PACKED, CAUSAL)
    m = gl.max(s, 1) * scale_log2  # finite, because every row sees this tile's first key
    p = gl.exp2(s * scale_log2 - m[:, None])
    l = _sums(p)
    l_layout: gl.constexpr = l.type.layout
    p = gl.convert_layout(p.to(ring.k.dtype), p_layout)

    for _ in range(1, tiles):
        # Issue both matmuls at once, so that the tensor cores have work while other consumers compute their softmax. With two
        # consumers, P V also runs during the first part of this consumer's softmax.
        fill += 1
        slot, _ = slot_and_phase(fill, STAGES)
        s = _scores(q, ring, fill)
        acc = warpgroup_mma(p, matrix(ring.v.index(slot)), acc, is_async=True)  # O += P V
        if CONSUMERS == 2:
            s = warpgroup_mma_wait(1, [s])  # [rows, BLOCK_N]
        else:  # more consumers have too few registers to wait for O later
            s, acc = warpgroup_mma_wait(0, [s, acc])
            mbarrier.arrive(ring.empty.index(slot), count=1)
        m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
        p = gl.exp2(s * scale_log2 - m_new[:, None])
        rescale = gl.exp2(m - m_new)  # factor for the earlier l and acc
        l = l * per_row(rescale, l_layout) + _sums(p)
        if CONSUMERS == 2:
            acc = warpgroup_mma_wait(0, [acc])  # the compiler moves this wait before the exponentials
            mbarrier.arrive(ring.empty.index(slot), count=1)
        acc = acc * per_row(rescale, acc_layout)
        m = m_new
        p = gl.convert_layout(p.to(ring.k.dtype), p_layout)

    fill += 1
    slot = wait_full(ring.full, fill)
    # While this matmul runs, the partial sums are added up here, and `_consumer` computes LSE and 1 / l.
    acc = warpgroup_mma(p, matrix(ring.v.index(slot)), acc, is_async=True)  # O += P V
    return acc, m, gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, s_layout))
