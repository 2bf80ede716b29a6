"""FlashAttention-3 forward (arXiv 2407.08608, Algorithm 1), warp-specialized, in Gluon, for Hopper."""

import functools
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from common.kernels.hopper import (
    LOG2_E,
    ROWS,
    describe_tile,
    new_ring,
    per_row,
    require_hopper,
    signal,
    store_rows,
    wait_empty,
    wait_full,
    wgmma_layout,
)
from common.layout import cdiv, empty_rows
from common.runtime import num_sms
from stages.lengths6_eight_bit_cache.forward import forward as forward_of_lengths6

from .forward_load import _load
from .forward_merge import merge
from .forward_scheduler import SETUP, Problem, Share, _after, _own_share, _place, _row, _tile
from .forward_softmax import _accumulate, _scores
from .forward_widen import _descale, _wide_layout, _widener

CONSUMERS = gl.constexpr(2)


class Tensors(NamedTuple):
    """Tensors in global memory, as TMA descriptors or pointers.

    If PACKED > 1 query heads share a K/V head and a tile, tiles of Q are [1, 1, 64 // PACKED, PACKED, D], and otherwise
    [1, 1, 64, D]. With packed heads, few queries fill a tile, and a CTA reads K and V once for all heads of the tile.
    """

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    out: tma.tensor_descriptor  # O's shape and strides, for `store_rows`
    out_ptr: gl.tensor  # pointer to O
    lse: gl.tensor  # pointer to [B, H, Sq]
    # A head whose key tiles are in several shares has parts: share s of head h has part number h + s.
    part: gl.tensor  # pointer to the parts of O, [B * H / PACKED + shares, PACKED * Sq, VALUE_DIM]
    part_lse: gl.tensor  # pointer to the parts' LSE, [B * H / PACKED + shares, PACKED * Sq]
    shares: gl.tensor  # pointer to each head's first share and number of shares, [B * H / PACKED, 2]
    k_descale: gl.tensor | None  # pointer to the factors of K, [B, Hkv]; None for 1
    v_descale: gl.tensor | None


class Queries(NamedTuple):
    """A buffer of Q in shared memory."""

    q: gl.shared_memory_descriptor  # [1, *Q's tile]
    full: gl.shared_memory_descriptor  # a barrier, TMA → consumer: Q has arrived
    empty: gl.shared_memory_descriptor  # barriers, consumer → producer: Q has been read


class Ring(NamedTuple):
    """K and V in shared memory: a ring buffer with STAGES slots. One ring holds 8-bit tiles, and one the widened tiles.

    One arrival stands for all warps of a role, because the compiler lets them meet before it.
    """

    k: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_N, HEAD_DIM]
    v: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_N, VALUE_DIM]
    full: gl.shared_memory_descriptor  # barriers, TMA → widener, or widener → consumer: K and V have arrived
    empty: gl.shared_memory_descriptor  # barriers, the other way: K and V have been read


class Worker(NamedTuple):
    """What a consumer, and the producer and the widener that serve it, have for themselves."""

    queries: Queries
    ring: Ring
    wide: Ring
    share: Share


@gluon.jit
def _worker(
    w, tensors, problem, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WIDE_STAGES: gl.constexpr, SEQUENCES: gl.constexpr
):  # fmt: skip
    """Allocate buffers for consumer w, and return them with its share."""
    HEAD_DIM: gl.constexpr = tensors.q.block_shape[-1]
    VALUE_DIM: gl.constexpr = tensors.out.block_shape[-1]
    dtype: gl.constexpr = tensors.q.dtype
    q = gl.allocate_shared_memory(dtype, [1] + tensors.q.block_shape, tensors.q.layout)
    k = gl.allocate_shared_memory(tensors.k.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], tensors.k.layout)
    v = gl.allocate_shared_memory(tensors.v.dtype, [STAGES, 1, 1, BLOCK_N, VALUE_DIM], tensors.v.layout)
    wide_k = gl.allocate_shared_memory(dtype, [WIDE_STAGES, 1, 1, BLOCK_N, HEAD_DIM], _wide_layout(BLOCK_N, HEAD_DIM))
    wide_v = gl.allocate_shared_memory(dtype, [WIDE_STAGES, 1, 1, BLOCK_N, VALUE_DIM], _wide_layout(BLOCK_N, VALUE_DIM))
    q_full, q_empty = new_ring(1, 1, 1)
    full, empty = new_ring(STAGES, 1, 1)
    wide_full, wide_empty = new_ring(WIDE_STAGES, 1, 1)
    share = _own_share(problem, w, BLOCK_N, SEQUENCES, CONSUMERS)
    return Worker(Queries(q, q_full, q_empty), Ring(k, v, full, empty), Ring(wide_k, wide_v, wide_full, wide_empty), share)


@gluon.jit
def _producer(tensors, worker, problem, CAUSAL: gl.constexpr):
    """Run on one warp: keep a consumer's buffers of Q, K and V full, also for the next tile while the current tile ends."""
    gdc_launch_dependents()  # PDL: the merge's CTAs may start when all CTAs of this launch are here
    queries, ring, share = worker.queries, worker.ring, worker.share
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    PACKED: gl.constexpr = tensors.q.block_shape[3] if len(tensors.q.block_shape) == 5 else 1
    fill = 0
    turn = 0
    place, batch, first = share.start, share.batch, share.first
    while place < share.end:
        tile = _tile(place, batch, first, share, problem, BLOCK_N, PACKED, CAUSAL)
        start_n = (tile.start + tile.key_tiles - 1) * BLOCK_N
        slot = wait_empty(queries.empty, turn)
        mbarrier.expect(queries.full.index(slot), tensors.q.block_type.nbytes)
        where = _row(tile.batch, tile.head, 0, PACKED)
        tma.async_copy_global_to_shared(tensors.q, where, queries.full.index(slot), queries.q.index(slot))
        _load(tensors, tile, ring, fill, start_n, problem, K=True, V=False)
        for _ in range(1, tile.key_tiles):
            fill += 1
            start_n -= BLOCK_N
            _load(tensors, tile, ring, fill, start_n, problem, K=True, V=True)
        _load(tensors, tile, ring, fill + 1, start_n - BLOCK_N, problem, K=False, V=True)
        fill += 2
        turn += 1
        place, batch, first = _after(place, batch, first, tile)


@gluon.jit
def _store_out(out, tensors, problem, tile, row, whole, PACKED: gl.constexpr):
    """Store a tile's rows: to O if the share has the whole head, or to the part that begins at `row`."""
    if whole:
        store_rows(tensors.out_ptr, tensors.out, tile.batch, tile.head, 0, out.to(tensors.q.dtype))
    else:
        offs_m = gl.arange(0, out.shape[0], gl.SliceLayout(1, out.type.layout))
        offs_d = gl.arange(0, out.shape[1], gl.SliceLayout(0, out.type.layout))
        part_ptrs = tensors.part + (row + _place(offs_m, problem, PACKED))[:, None] * out.shape[1] + offs_d[None, :]
        gl.store(part_ptrs, out, mask=(offs_m < problem.seq_q)[:, None])


@gluon.jit
def _consumer(tensors, worker, problem, CAUSAL: gl.constexpr):
    """Run on a warpgroup: compute the work tiles of its share.

    Consumers run at their own pace. So while one computes its softmax, the tensor cores run another's matmuls.
    """
    queries, ring, share = worker.queries, worker.wide, worker.share
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    PACKED: gl.constexpr = tensors.q.block_shape[3] if len(tensors.q.block_shape) == 5 else 1
    COPIED: gl.constexpr = tensors.k.block_shape[2]  # keys of a TMA copy: a key tile's, or fewer if pages are smaller
    HEAD_DIM: gl.constexpr = ring.k.shape[4]
    VALUE_DIM: gl.constexpr = ring.v.shape[4]
    s_layout: gl.constexpr = wgmma_layout(ROWS, BLOCK_N)
    acc_layout: gl.constexpr = wgmma_layout(ROWS, VALUE_DIM)
    q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=2)
    of_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    offs_m = gl.arange(0, ROWS, of_rows)
    fill = 0
    turn = 0
    place, batch, first = share.start, share.batch, share.first
    while place < share.end:
        tile = _tile(place, batch, first, share, problem, BLOCK_N, PACKED, CAUSAL)
        # exp(x) = exp2(x * log2(e)), and exp2 is one instruction. Never scale by 0: a masked score (-inf) times 0 is NaN.
        scale_log2 = problem.scale * _descale(tensors.k_descale, tile, problem) * LOG2_E
        scale_log2 = gl.where(scale_log2 < 1e-37, 1e-37, scale_log2)  # unlike a maximum, this keeps a factor of NaN
        v_descale = _descale(tensors.v_descale, tile, problem)
        acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, acc_layout)
        # In registers, Q need not be read from shared memory for every key tile, and TMA can bring the next Q.
        q = queries.q.index(wait_full(queries.full, turn)).reshape([ROWS, HEAD_DIM]).load(q_layout)
        signal(queries.empty, turn)
        s = _scores(q, ring, fill)
        acc, m, l = _accumulate(acc, s, q, ring, fill, tile, problem, scale_log2, COPIED, PACKED, CAUSAL)
        fill += tile.key_tiles

        # The last P V is still in flight, and only O needs it. So all else that only a tile's end needs is computed meanwhile:
        # the whole row sums (in `_accumulate`), and from them LSE and 1 / l.
        whole = tile.key_tiles == tile.of_head
        part = tile.batch_head if whole else tile.batch_head + share.number
        row = part.to(gl.int64) * problem.seq_q
        lse_ptrs = (tensors.lse if whole else tensors.part_lse) + row + _place(offs_m, problem, PACKED)
        gl.store(lse_ptrs, (m + gl.log2(l)) / LOG2_E, mask=offs_m < problem.seq_q)
        if tile.start == 0:
            shares = (place + tile.of_head - 1) // share.size - share.number + 1
            gl.store(tensors.shares + tile.batch_head * 2, share.number)
            gl.store(tensors.shares + tile.batch_head * 2 + 1, shares)
        normalize = per_row(gl.where(l > 0, v_descale / l, 0.0), acc_layout)  # a row that sees no key has zeros
        acc = warpgroup_mma_wait(0, [acc])
        signal(ring.empty, fill)
        fill += 1
        _store_out(acc * normalize, tensors, problem, tile, row, whole, PACKED)
        turn += 1
        place, batch, first = _after(place, batch, first, tile)


@gluon.jit(do_not_specialize=["batch", "heads", "seq_q", "seq_k"])  # compile once for all lengths
def _forward_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, part_ptr, part_lse_ptr, shares_ptr, lengths_ptr, table_ptr, scale,
    k_descale_ptr, v_descale_ptr, batch, heads, heads_per_kv, seq_q, seq_k,
    SEQUENCES: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WIDE_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    tensors = Tensors(
        q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, part_ptr, part_lse_ptr, shares_ptr, k_descale_ptr, v_descale_ptr
    )
    problem = Problem(batch, heads, heads_per_kv, seq_q, seq_k, scale, lengths_ptr, table_ptr)
    one = _worker(0, tensors, problem, BLOCK_N, STAGES, WIDE_STAGES, SEQUENCES)
    two = _worker(1, tensors, problem, BLOCK_N, STAGES, WIDE_STAGES, SEQUENCES)
    # An SM has 65,536 registers, and a warpgroup has 128 threads. So the registers per thread, summed over all warpgroups, are
    # at most 512. The last list has the registers per thread of all roles except the first. The producers are in one warpgroup.
    # The first role runs on the launch's `num_warps` warps and gets the rest.
    gl.warp_specialize(
        [(_consumer, (tensors, one, problem, CAUSAL)),
         (_consumer, (tensors, two, problem, CAUSAL)),
         (_widener, (tensors, one, two, problem, CAUSAL)),
         (_producer, (tensors, one, problem, CAUSAL)),
         (_producer, (tensors, two, problem, CAUSAL))],
        [4, 4, 1, 1], [192, 96, 24, 24],  # registers: 4 × maxnreg = 512 = 200 (the first role gets the rest) + 192 + 96 + 24
    )  # fmt: skip


class Shape(NamedTuple):
    """A consumer's numbers of buffers."""

    kv_slots: int  # of K and V in 8 bits
    wide_slots: int  # of K and V in 16 bits


SHAPES = dict.fromkeys((16, 32, 64), Shape(4, 3)) | {128: Shape(2, 2)}  # by the larger of D and Dv
BLOCK_N = 64  # keys of a key tile: few, so that shares are even
MOST_SEQUENCES = 1024  # each warp holds all lengths in its registers


def takes(q, keys, width, packed) -> bool:
    """Return whether the kernel takes a batch: if a consumer's 64 rows hold all queries of a sequence.

    `width` is the larger of D and Dv. At 256, accumulators and the widener would need more registers than there are.
    """
    batch, heads, seq_q, _ = q.shape
    places = batch * heads // packed * (cdiv(keys, BLOCK_N) + SETUP.value)  # sums of them are int32 in the kernel
    return batch <= MOST_SEQUENCES and seq_q * packed <= ROWS.value and places < 2**30 and width in SHAPES


def forward(q, k, v, *, causal, scale, diagonal=0, lengths=None, starts=None, descales=None):
    """Return attention output and log-sum-exp. `common.operator` lists shapes, dtypes and errors.

    Falls back to lengths6 with 16-bit k and v, for D or Dv of 256, for more than 1024 sequences, and for more queries than a
    consumer's 64 rows hold.

    Raises:
        Unavailable: the GPU is not a Hopper GPU.
        TypeError: there are `lengths` or `starts`, and q is float32.
    """
    require_hopper(__package__)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, page, value_dim = v.shape[1:]
    per_kv = heads // kv_heads
    packed = per_kv if ROWS.value % per_kv == 0 else 1  # a consumer's 64 rows hold all packed heads of a query
    masked = causal and seq_q > 1  # a single query sees all keys
    table = lengths.pages if lengths else None
    seq_k = page if table is None else table.shape[1] * page
    if not (descales and takes(q, seq_k, max(head_dim, value_dim), packed)):
        given = {"lengths": lengths, "starts": starts, "descales": descales}
        return forward_of_lengths6(q, k, v, causal=causal, scale=scale, diagonal=diagonal, **given)
    out = empty_rows(q, value_dim)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if scale < 0:
        q, scale = -q, -scale  # the scores stay the same, and max(scale * s) = scale * max(s)
    shape = SHAPES[max(head_dim, value_dim)]
    tiles = batch * heads // packed
    programs = min(cdiv(tiles * cdiv(seq_k, BLOCK_N), CONSUMERS.value), num_sms())
    copied, describe_keys = BLOCK_N, describe_tile  # keys that a TMA copy loads
    if table is not None:
        copied, describe_keys = min(copied, page), functools.partial(describe_tile, columns=128)
    queries, outputs, rows = q, out, (64,)
    if packed > 1:
        queries, outputs = (t.unflatten(1, (-1, packed)).transpose(2, 3) for t in (q, out))  # [B, H / packed, Sq, packed, D]
        rows = 64 // packed, packed
    parts = lse.new_empty(tiles + CONSUMERS.value * programs, packed * seq_q, value_dim)
    part_lses = lse.new_empty(parts.shape[:2])
    shares = lengths.keys.new_empty(tiles, 2)
    _forward_kernel[programs,](
        describe_tile(queries, *rows), describe_keys(k, copied), describe_keys(v, copied), describe_tile(outputs, *rows),
        outputs, lse, parts, part_lses, shares, lengths.keys, table, scale,
        *descales, batch, heads // packed, per_kv // packed, packed * seq_q, seq_k,
        SEQUENCES=1 << max(batch - 1, 31).bit_length(), BLOCK_N=BLOCK_N, STAGES=shape.kv_slots, WIDE_STAGES=shape.wide_slots,
        CAUSAL=masked, num_warps=4, maxnreg=128,
    )  # fmt: skip
    merge(parts, part_lses, shares, out, lse)
    return out, lse
