"""FlashAttention-2 forward (arXiv 2307.08691, Algorithm 1) in Gluon, for Hopper.

In Gluon, a kernel itself decides where a tile lies, which warp does what, and when it waits. In Triton, the compiler decides.
A consumer is a warp that computes with what TMA loads. Here, all warps are consumers.

Functions share buffers as tuples, with the barriers that guard them. So the function that loads and the one that computes can
run on the same warps, as here, or on different warps, which is what Gluon is for.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from common.kernels.hopper import LOG2_E, describe_tile, matrix, new_barriers, per_row, require_hopper, wgmma_layout
from common.kernels.order import tile_and_head
from common.layout import cdiv, empty_rows
from stages.v6_tile_order.forward import forward as forward_of_v6

from .forward_softmax import _accumulate, _load


class Tensors(NamedTuple):
    """Tensors in global memory, as TMA descriptors or pointers."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    out: tma.tensor_descriptor
    lse: gl.tensor  # pointer to [B, H, Sq]


class Problem(NamedTuple):
    """Sizes that all work tiles share."""

    seq_q: tl.tensor
    seq_k: tl.tensor
    diagonal: tl.tensor  # with a causal mask, query i sees key j if j <= i + diagonal
    scale: tl.tensor


class Tile(NamedTuple):
    """A work tile: BLOCK_M query rows of one head, and the key tiles that they see."""

    batch_head: tl.tensor  # batch * H + head
    batch: tl.tensor
    head: tl.tensor
    kv_head: tl.tensor
    start_m: tl.tensor  # the tile's first query row
    key_tiles: tl.tensor


class Queries(NamedTuple):
    """Buffers in shared memory: Q, and O until TMA has stored it."""

    q: gl.shared_memory_descriptor  # [1, 1, 1, BLOCK_M, HEAD_DIM]: one slot, and the four dimensions of a TMA tile
    o: gl.shared_memory_descriptor  # [1, 1, 1, BLOCK_M, VALUE_DIM]
    full: gl.shared_memory_descriptor  # a barrier, TMA → consumers: Q has arrived


class Ring(NamedTuple):
    """K and V in shared memory: a ring buffer with STAGES slots."""

    k: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_N, HEAD_DIM]
    v: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_N, VALUE_DIM]
    full: gl.shared_memory_descriptor  # barriers, TMA → consumers: K and V have arrived


@gluon.jit
def _consumer(tensors, queries, ring, tile, problem, CAUSAL: gl.constexpr):
    """Run on all warps: compute the CTA's query tile from what TMA loads. `_accumulate` starts all loads but the first."""
    ROWS: gl.constexpr = queries.q.shape[3]
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    VALUE_DIM: gl.constexpr = ring.v.shape[4]
    s_layout: gl.constexpr = wgmma_layout(ROWS, BLOCK_N)
    acc_layout: gl.constexpr = wgmma_layout(ROWS, VALUE_DIM)
    of_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    # exp(x) = exp2(x * log2(e)), and exp2 is one instruction. Never scale by 0, because a masked score (-inf) times 0 is NaN.
    scale_log2 = gl.maximum(problem.scale * LOG2_E, 1e-37)
    # First come whole tiles that every row sees, without a mask. Then come tiles at the diagonal and the last key, with a mask.
    full = (gl.minimum(tile.start_m + problem.diagonal, problem.seq_k) if CAUSAL else problem.seq_k) // BLOCK_N

    offs_m = tile.start_m + gl.arange(0, ROWS, of_rows)
    acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, acc_layout)
    m = gl.full([ROWS], float("-inf"), gl.float32, of_rows)
    l = gl.zeros([ROWS], gl.float32, of_rows)
    mbarrier.wait(queries.full.index(0), 0)
    q = matrix(queries.q.index(0))  # stays on the chip
    last = tile.start_m + problem.diagonal  # the last key that the first row sees
    acc, m, l = _accumulate(acc, m, l, q, tensors, tile, ring, 0, full, problem, last, scale_log2, CAUSAL, MASKED=False)
    acc, m, l = _accumulate(
        acc, m, l, q, tensors, tile, ring, full, tile.key_tiles, problem, last, scale_log2, CAUSAL, MASKED=True
    )

    out = (acc * per_row(1.0 / l, acc_layout)).to(queries.q.dtype)  # [ROWS, VALUE_DIM], one division per row
    queries.o.index(0).reshape(out.shape).store(out)
    fence_async_shared()
    tma.async_copy_shared_to_global(tensors.out, [tile.batch, tile.head, tile.start_m, 0], queries.o.index(0))
    lse_ptrs = tensors.lse + tile.batch_head.to(gl.int64) * problem.seq_q + offs_m
    gl.store(lse_ptrs, (m + gl.log2(l)) / LOG2_E, mask=offs_m < problem.seq_q)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "seq_q", "seq_k", "diagonal"])  # compile once for all lengths
def _forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, scale,
    heads, heads_per_kv, seq_q, seq_k, diagonal,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    tiles_m = gl.cdiv(seq_q, BLOCK_M)
    ROW_BYTES: gl.constexpr = 2 * (HEAD_DIM + VALUE_DIM)  # bytes of one key's 16-bit K and V
    number, batch_head = tile_and_head(tiles_m, gl.cdiv(seq_k, heads_per_kv), ROW_BYTES, CAUSAL)
    start_m = (tiles_m - 1 - number) * BLOCK_M  # the last rows see the most keys, so their tile is tile 0 and starts first
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // heads_per_kv
    end = gl.minimum(start_m + BLOCK_M + diagonal, seq_k) if CAUSAL else seq_k
    tile = Tile(batch_head, batch, head, kv_head, start_m, gl.cdiv(end, BLOCK_N))

    q_s = gl.allocate_shared_memory(q_desc.dtype, [1, 1, 1, BLOCK_M, HEAD_DIM], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, VALUE_DIM], v_desc.layout)
    if VALUE_DIM == HEAD_DIM:
        o_s = q_s  # Q is no longer needed when O is done
    else:
        o_s = gl.allocate_shared_memory(q_desc.dtype, [1, 1, 1, BLOCK_M, VALUE_DIM], out_desc.layout)
    tensors = Tensors(q_desc, k_desc, v_desc, out_desc, lse_ptr)
    problem = Problem(seq_q, seq_k, diagonal, scale)
    queries = Queries(q_s, o_s, new_barriers(1, 1))
    ring = Ring(k_s, v_s, new_barriers(STAGES, 1))
    mbarrier.expect(queries.full.index(0), q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [batch, head, start_m, 0], queries.full.index(0), q_s.index(0))
    for fill in range(gl.minimum(tile.key_tiles, STAGES)):
        _load(tensors, tile, ring, fill)
    _consumer(tensors, queries, ring, tile, problem, CAUSAL)


class Shape(NamedTuple):
    """Sizes of a work tile, and numbers of buffers."""

    queries: int  # query rows
    keys: int  # keys of a key tile
    kv_slots: int  # buffers of K and V


# TILES is indexed by the larger of D and Dv. No tuner chooses the tiles, because Gluon's layouts and buffers depend on them.
TILES = dict.fromkeys((16, 32, 64), Shape(queries=256, keys=64, kv_slots=6)) | {
    128: Shape(queries=128, keys=128, kv_slots=2),
    256: Shape(queries=128, keys=64, kv_slots=2),
}


def forward(q, k, v, *, causal, scale, diagonal=0):
    """Return attention output and log-sum-exp. `common.operator` lists shapes, dtypes and errors. Float32 falls back to v6.

    Raises:
        Unavailable: the GPU is not a Hopper GPU.
    """
    require_hopper(__package__)
    if q.dtype == torch.float32:  # exact float32 has no wgmma, and its tiles take twice the space
        return forward_of_v6(q, k, v, causal=causal, scale=scale, diagonal=diagonal)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = v.shape[1:]
    out = empty_rows(q, value_dim)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if scale < 0:
        q, scale = -q, -scale  # the scores stay the same, and max(scale * s) = scale * max(s)
    shape = TILES[max(head_dim, value_dim)]
    _forward_kernel[cdiv(seq_q, shape.queries) * batch * heads,](
        describe_tile(q, shape.queries), describe_tile(k, shape.keys), describe_tile(v, shape.keys),
        describe_tile(out, shape.queries),
        lse, scale, heads, heads // kv_heads, seq_q, seq_k, diagonal,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=shape.queries, BLOCK_N=shape.keys,
        STAGES=shape.kv_slots, CAUSAL=causal, num_warps=shape.queries // 16,
    )  # fmt: skip
    return out, lse
