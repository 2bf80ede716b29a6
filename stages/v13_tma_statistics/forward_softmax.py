"""A consumer's online softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from common.kernels.hopper import matrix, per_row, slot_and_phase, wait_full, wgmma_layout


@gluon.jit
def _load(tensors, tile, ring, fill):
    """Start to load a key tile's K and V into a free slot of the ring: the compiler lets all warps meet before it."""
    slot, _ = slot_and_phase(fill, ring.k.shape[0])
    where = [tile.batch, tile.kv_head, fill * ring.k.shape[3], 0]
    mbarrier.expect(ring.full.index(slot), tensors.k.block_type.nbytes + tensors.v.block_type.nbytes)
    tma.async_copy_global_to_shared(tensors.k, where, ring.full.index(slot), ring.k.index(slot))
    tma.async_copy_global_to_shared(tensors.v, where, ring.full.index(slot), ring.v.index(slot))


@gluon.jit
def _scores(q, ring, fill):
    """Start to compute the scores of a key tile, once its K has arrived."""
    ROWS: gl.constexpr = q.shape[0]
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
def _accumulate(
    acc, m, l, q, tensors, tile, ring, lo, hi, problem, last, scale_log2, CAUSAL: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Fold the key tiles [lo, hi) into a consumer's online softmax: acc, m (running maximum), l (running sum)."""
    STAGES: gl.constexpr = ring.k.shape[0]
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    acc_layout: gl.constexpr = acc.type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    for fill in range(lo, hi):
        slot, _ = slot_and_phase(fill, STAGES)
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
        # NOTE: the warps that compute also load, and all wait for each load; v15 has a warp that loads.
        if fill + STAGES < tile.key_tiles:
            _load(tensors, tile, ring, fill + STAGES)
    return acc, m, l
