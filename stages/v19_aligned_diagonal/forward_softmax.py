"""A consumer's online softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from common.kernels.hopper import ROWS, matrix, per_row, slot_and_phase, wait_full, wgmma_layout


@gluon.jit
def _scores(q, ring, fill):
    """Start to compute the scores of a key tile, once its K has arrived."""
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    no_s = gl.zeros([ROWS, BLOCK_N], gl.float32, wgmma_layout(ROWS, BLOCK_N))
    k = matrix(ring.k.index(wait_full(ring.full, fill)))
    return warpgroup_mma(q, k.permute([1, 0]), no_s, use_acc=False, is_async=True)  # S = Q Kᵀ


@gluon.jit
def _visible(s, start_n, seq_k, last, CAUSAL: gl.constexpr):
    """Return the scores s of the key tile at start_n, with -inf for masked keys. `last` is the first row's last visible key."""
    offs_n = start_n + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    visible = (offs_n < seq_k)[None, :]
    if CAUSAL:
        last_n = last + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))  # the last key that each row sees
        visible = visible & (last_n[:, None] >= offs_n[None, :])
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def _accumulate(acc, m, l, q, ring, lo, hi, problem, last, scale_log2, CAUSAL: gl.constexpr, MASKED: gl.constexpr):
    """Fold the key tiles [lo, hi) into a consumer's online softmax: acc, m (running maximum), l (running sum)."""
    STAGES: gl.constexpr = ring.k.shape[0]
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    acc_layout: gl.constexpr = acc.type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    for fill in range(lo, hi):
        slot, _ = slot_and_phase(fill, STAGES)
        # NOTE: this consumer waits for each matmul; in v23 it issues S and P V together.
        s = warpgroup_mma_wait(0, [_scores(q, ring, fill)])  # [rows, BLOCK_N]
        if MASKED:
            s = _visible(s, fill * BLOCK_N, problem.seq_k, last, CAUSAL)
        m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)  # finite, because the first tile has key 0, which every query sees
        p = gl.exp2(s * scale_log2 - m_new[:, None])
        rescale = gl.exp2(m - m_new)  # factor for the earlier l and acc
        l = l * rescale + gl.sum(p, 1)
        acc = acc * per_row(rescale, acc_layout)
        m = m_new
        p = gl.convert_layout(p.to(ring.k.dtype), p_layout)
        acc = warpgroup_mma(p, matrix(ring.v.index(slot)), acc, is_async=True)  # O += P V
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(ring.empty.index(slot), count=1)
    return acc, m, l
