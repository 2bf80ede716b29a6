"""A consumer's online softmax, with keys as rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from common.kernels.hopper import ROWS, signal, wait_full, wgmma_layout

from .forward_scheduler import _key
from .forward_widen import _wide_keys, _wide_values

LEAST = gl.constexpr(-1e38)  # finite, so that no query subtracts infinity from infinity


@gluon.jit
def _sums(p):
    """Return partial sums of the columns of p, one for each thread.

    To add them up, the threads must exchange them. But all threads rescale by the same factor, and only the tile's end needs
    whole sums, for LSE and 1 / l. So one exchange at the end is enough, and no step of the loop has one.
    """
    return gl.sum(p.reshape([p.shape[0] // 16, 2, 8, p.shape[1]]), 1)  # a thread holds two of every 16 rows


@gluon.jit
def _visible(s, start_n, tile, problem, COPIED: gl.constexpr, PACKED: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the scores s of the key tile at start_n, with -inf for masked keys."""
    row = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
    first = start_n  # the first key that the row's copy is for
    if COPIED < s.shape[0]:
        first = start_n + row // COPIED * COPIED
    offs_n = start_n + row + (_key(first, tile, problem, COPIED) - first)
    visible = (offs_n >= first)[:, None]  # keys before `first` belong to the copy before
    if CAUSAL:
        query = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)) // PACKED
        visible = visible & (query[None, :] + tile.diagonal >= offs_n[:, None])
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def _accumulate(
    q, p_s, ring, fill, tile, problem, scale_log2,
    VALUE_DIM: gl.constexpr, COPIED: gl.constexpr, PACKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Run a consumer's online softmax over a tile's key tiles, the last tile first.

    q [N, D] and p_s [N, BLOCK_N] are in shared memory. Returns acc (Oᵀ), m (maximum) and l (sum, 0 for a query that sees no
    key).
    """
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    N: gl.constexpr = q.shape[0]
    dtype: gl.constexpr = q.dtype
    layout: gl.constexpr = wgmma_layout(ROWS, N)  # of Sᵀ and Oᵀ
    of_queries: gl.constexpr = gl.SliceLayout(0, layout)
    acc = gl.zeros([VALUE_DIM, N], gl.float32, layout)
    no_s = gl.zeros([BLOCK_N, N], gl.float32, layout)
    m = gl.full([N], LEAST, gl.float32, of_queries)
    l = _sums(no_s)
    of_sums: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, l.type.layout))
    start_n = (tile.start + tile.key_tiles) * BLOCK_N
    for _ in range(tile.key_tiles):
        start_n -= BLOCK_N
        slot = wait_full(ring.full, fill)
        k = _wide_keys(ring.k.index(slot), layout, dtype)
        s = warpgroup_mma(k, q.permute([1, 0]), no_s, use_acc=False, is_async=True)  # Sᵀ = K Qᵀ
        v = _wide_values(ring.v.index(slot), layout, dtype)
        signal(ring.empty, fill)
        fill += 1
        s = warpgroup_mma_wait(0, [s])
        if CAUSAL or start_n + BLOCK_N > tile.keys:
            s = _visible(s, start_n, tile, problem, COPIED, PACKED, CAUSAL)
        m_new = gl.maximum(m, gl.max(s, 0) * scale_log2)
        p = gl.exp2(s * scale_log2 - m_new[None, :])
        rescale = gl.exp2(m - m_new)  # factor for the earlier l and acc
        l = l * gl.convert_layout(rescale, of_sums)[None, None, :] + _sums(p)
        acc = acc * rescale[None, :]
        m = m_new
        p_s.permute([1, 0]).store(p.to(dtype))
        fence_async_shared()  # wgmma reads through the async proxy
        acc = warpgroup_mma(v, p_s.permute([1, 0]), acc, is_async=True)  # Oᵀ += Vᵀ Pᵀ
        acc = warpgroup_mma_wait(0, [acc])
    return acc, m, gl.convert_layout(gl.sum(gl.sum(l, 0), 0), of_queries)
