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
    slot_and_phase,
    store_rows,
    wait_full,
    wgmma_layout,
)
from common.layout import cdiv, empty_rows
from common.runtime import num_sms
from stages.lengths5_even_shares.forward import forward as forward_of_lengths5

from .forward_load import _load
from .forward_merge import merge
from .forward_scheduler import SETUP, Problem, _after, _key_tiles, _own_share, _place, _row, _tile
from .forward_softmax import _accumulate, _scores
from .forward_widen import _descale, _wide_layout, _widener, widened_in_memory

BLOCK_M = gl.constexpr(128)  # query rows of a tile, for two consumers


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
    part: gl.tensor  # pointer to the parts of O, [B * H / PACKED + CTAs, PACKED * Sq, VALUE_DIM]
    part_lse: gl.tensor  # pointer to the parts' LSE, [B * H / PACKED + CTAs, PACKED * Sq]
    shares: gl.tensor  # pointer to each head's first share and number of shares, [B * H / PACKED, 2]
    k_descale: gl.tensor | None  # pointer to the factors of K, [B, Hkv]; None for 1
    v_descale: gl.tensor | None


class Queries(NamedTuple):
    """Buffers of Q in shared memory."""

    q: gl.shared_memory_descriptor  # [Q_STAGES * CONSUMERS, *Q's tile]
    full: gl.shared_memory_descriptor  # barriers, TMA → consumers: Q has arrived
    empty: gl.shared_memory_descriptor  # barriers, consumer → producer: Q has been read


class Ring(NamedTuple):
    """K and V in shared memory: a ring buffer with STAGES slots. One ring holds 8-bit tiles, and one the widened tiles.

    One arrival stands for all warps of a role, because the compiler lets them meet before it.
    """

    k: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_N, HEAD_DIM]
    v: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_N, VALUE_DIM]
    full: gl.shared_memory_descriptor  # barriers, TMA → widener, or widener → consumers: K and V have arrived
    empty: gl.shared_memory_descriptor  # barriers, the other way: K and V have been read


@gluon.jit
def _skip(ring, fill, tiles):
    """Release the next `tiles` key tiles without reading them, and return the number of the key tile after them."""
    for _ in range(tiles):
        wait_full(ring.full, fill)
        signal(ring.empty, fill)
        fill += 1
    return fill


@gluon.jit
def _producer(tensors, queries, ring, share, problem, CAUSAL: gl.constexpr):
    """Run on one warp: keep the buffers of Q, K and V full, also for the next tile while the current tile ends."""
    gdc_launch_dependents()  # PDL: the merge's CTAs may start when all CTAs of this launch are here
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    PACKED: gl.constexpr = tensors.q.block_shape[3] if len(tensors.q.block_shape) == 5 else 1
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    Q_STAGES: gl.constexpr = queries.q.shape[0] // CONSUMERS
    fill = 0
    turn = 0
    place, batch, first = share.start, share.batch, share.first
    while place < share.end:
        tile = _tile(place, batch, first, share, problem, BLOCK_N, PACKED, CAUSAL)
        start_n = (tile.start + tile.key_tiles - 1) * BLOCK_N
        for w in gl.static_range(CONSUMERS):
            slot, phase = slot_and_phase(turn, Q_STAGES)
            slot = slot * CONSUMERS + w
            mbarrier.wait(queries.empty.index(slot), phase ^ 1)
            mbarrier.expect(queries.full.index(slot), tensors.q.block_type.nbytes)
            where = _row(tile.batch, tile.head, tile.start_m + w * ROWS, PACKED)
            tma.async_copy_global_to_shared(tensors.q, where, queries.full.index(slot), queries.q.index(slot))
            if w == 0:  # consumers start at their own pace: the first need not wait for the others' Q
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
def _store_out(out, tensors, problem, tile, start_m, row, whole, PACKED: gl.constexpr):
    """Store a consumer's rows: to O if the CTA has seen the whole head, or to the part that begins at `row`."""
    if whole:
        store_rows(tensors.out_ptr, tensors.out, tile.batch, tile.head, start_m // PACKED, out.to(tensors.q.dtype))
    else:
        offs_m = start_m + gl.arange(0, out.shape[0], gl.SliceLayout(1, out.type.layout))
        offs_d = gl.arange(0, out.shape[1], gl.SliceLayout(0, out.type.layout))
        part_ptrs = tensors.part + (row + _place(offs_m, problem, PACKED))[:, None] * out.shape[1] + offs_d[None, :]
        gl.store(part_ptrs, out, mask=((offs_m >= 0) & (offs_m < problem.seq_q))[:, None])


@gluon.jit
def _consumer(tensors, queries, ring, share, problem, w: gl.constexpr, CAUSAL: gl.constexpr):
    """Run on a warpgroup: compute the w-th 64 query rows of each tile.

    Consumers run at their own pace. So while one computes its softmax, the tensor cores run another's matmuls.
    """
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    Q_STAGES: gl.constexpr = queries.q.shape[0] // CONSUMERS
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    PACKED: gl.constexpr = tensors.q.block_shape[3] if len(tensors.q.block_shape) == 5 else 1
    COPIED: gl.constexpr = tensors.k.block_shape[2]  # keys of a TMA copy: a key tile's, or fewer if pages are smaller
    HEAD_DIM: gl.constexpr = ring.k.shape[4]
    VALUE_DIM: gl.constexpr = ring.v.shape[4]
    s_layout: gl.constexpr = wgmma_layout(ROWS, BLOCK_N)
    acc_layout: gl.constexpr = wgmma_layout(ROWS, VALUE_DIM)
    q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=2)
    of_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    # With Q in registers, the matmul need not read Q from shared memory for every key tile. Up to D = 128, there is room for Q.
    Q_IN_REGISTERS: gl.constexpr = HEAD_DIM <= 128
    fill = 0
    turn = 0
    place, batch, first = share.start, share.batch, share.first
    while place < share.end:
        tile = _tile(place, batch, first, share, problem, BLOCK_N, PACKED, CAUSAL)
        # exp(x) = exp2(x * log2(e)), and exp2 is one instruction. Never scale by 0: a masked score (-inf) times 0 is NaN.
        scale_log2 = problem.scale * _descale(tensors.k_descale, tile, problem) * LOG2_E
        scale_log2 = gl.where(scale_log2 < 1e-37, 1e-37, scale_log2)  # unlike a maximum, this keeps a factor of NaN
        v_descale = _descale(tensors.v_descale, tile, problem)
        start_m = tile.start_m + w * ROWS
        seen = _key_tiles(start_m + ROWS, tile.keys, tile.diagonal, BLOCK_N, PACKED, CAUSAL)
        # With few queries, a tile has consumers without rows. They leave the tensor cores to the others, after one key tile.
        seen = gl.where(start_m < problem.seq_q, seen, 1)
        seen = gl.minimum(seen - tile.start, tile.key_tiles)
        idle = seen <= 0  # the rows see none of the share's keys; the result of a first key tile is not used
        seen = gl.where(idle, 1, seen)

        offs_m = start_m + gl.arange(0, ROWS, of_rows)
        acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, acc_layout)
        slot, phase = slot_and_phase(turn, Q_STAGES)
        own = slot * CONSUMERS + w  # this consumer's slot of `queries`
        mbarrier.wait(queries.full.index(own), phase)
        q_buffer = queries.q.index(own).reshape([ROWS, HEAD_DIM])
        q = q_buffer.load(q_layout) if Q_IN_REGISTERS else q_buffer
        fill = _skip(ring, fill, tile.key_tiles - seen)  # key tiles that only the CTA's later consumers see
        s = _scores(q, ring, fill)
        last = start_m // PACKED + tile.diagonal  # the last key that the first row sees
        last = gl.where(idle, 2**30, last)  # without a visible key, the tile's maximum would be -inf, and P NaN
        acc, m, l = _accumulate(acc, s, q, ring, fill, seen, tile, problem, last, scale_log2, COPIED, PACKED, CAUSAL)
        fill += seen

        # The last P V is still in flight, and only O needs it. So all else that only a tile's end needs is computed meanwhile:
        # the whole row sums (in `_accumulate`), and from them LSE and 1 / l.
        whole = tile.key_tiles == tile.of_head
        part = tile.batch_head if whole else tile.batch_head + gl.program_id(0)
        row = part.to(gl.int64) * problem.seq_q
        lse_ptrs = (tensors.lse if whole else tensors.part_lse) + row + _place(offs_m, problem, PACKED)
        lse = gl.where(idle, float("-inf"), (m + gl.log2(l)) / LOG2_E)
        gl.store(lse_ptrs, lse, mask=(offs_m >= 0) & (offs_m < problem.seq_q))
        if tile.start == 0:
            shares = (place + tile.of_head - 1) // share.size - gl.program_id(0) + 1
            gl.store(tensors.shares + tile.batch_head * 2, gl.program_id(0))
            gl.store(tensors.shares + tile.batch_head * 2 + 1, shares)
        normalize = per_row(v_descale / l, acc_layout)
        mbarrier.arrive(queries.empty.index(own), count=1)
        acc = warpgroup_mma_wait(0, [acc])
        signal(ring.empty, fill)
        fill += 1
        out = gl.where(idle, 0.0, acc * normalize)
        _store_out(out, tensors, problem, tile, start_m, row, whole, PACKED)
        turn += 1
        place, batch, first = _after(place, batch, first, tile)


@gluon.jit(do_not_specialize=["batch", "heads", "seq_q", "seq_k"])  # compile once for all lengths
def _forward_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, part_ptr, part_lse_ptr, shares_ptr, lengths_ptr, table_ptr, scale,
    k_descale_ptr, v_descale_ptr, batch, heads, heads_per_kv, seq_q, seq_k,
    SEQUENCES: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    HEAD_DIM: gl.constexpr = q_desc.block_shape[-1]
    VALUE_DIM: gl.constexpr = out_desc.block_shape[-1]
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    q_s = gl.allocate_shared_memory(q_desc.dtype, [Q_STAGES * CONSUMERS] + q_desc.block_shape, q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, VALUE_DIM], v_desc.layout)
    k_wide = gl.allocate_shared_memory(q_desc.dtype, [STAGES // 2, 1, 1, BLOCK_N, HEAD_DIM], _wide_layout(BLOCK_N, HEAD_DIM))
    v_wide = gl.allocate_shared_memory(q_desc.dtype, [STAGES // 2, 1, 1, BLOCK_N, VALUE_DIM], _wide_layout(BLOCK_N, VALUE_DIM))
    q_full, q_empty = new_ring(Q_STAGES * CONSUMERS, 1, 1)  # each consumer has its own buffers
    kv_full, kv_empty = new_ring(STAGES, 1, 1)
    wide_full, wide_empty = new_ring(STAGES // 2, 1, CONSUMERS)
    tensors = Tensors(
        q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, part_ptr, part_lse_ptr, shares_ptr, k_descale_ptr, v_descale_ptr
    )
    problem = Problem(batch, heads, heads_per_kv, seq_q, seq_k, scale, lengths_ptr, table_ptr)
    share = _own_share(problem, BLOCK_N, SEQUENCES)
    queries = Queries(q_s, q_full, q_empty)
    ring = Ring(k_s, v_s, kv_full, kv_empty)
    wide = Ring(k_wide, v_wide, wide_full, wide_empty)
    # An SM has 65,536 registers, and a warpgroup has 128 threads. So the registers per thread, summed over all warpgroups, are
    # at most 512. The last list has the registers per thread of all roles except the first. The producer gets 24. The first
    # role runs on the launch's `num_warps` warps and gets the rest.
    gl.warp_specialize(
        [(_consumer, (tensors, queries, wide, share, problem, 0, CAUSAL)),
         (_consumer, (tensors, queries, wide, share, problem, 1, CAUSAL)),
         (_widener, (tensors, ring, wide, share, problem, CAUSAL)),
         (_producer, (tensors, queries, ring, share, problem, CAUSAL))],
        [4, 4, 1], [192, 96, 24],  # registers: 4 × maxnreg = 512 = 200 (the first role gets the rest) + 192 + 96 + 24
    )  # fmt: skip


class Shape(NamedTuple):
    """Numbers of buffers."""

    kv_slots: int  # buffers of K and V in 8 bits; half as many in 16 bits
    q_slots: int  # buffers of Q


SHAPES = dict.fromkeys((16, 32, 64), Shape(6, 2)) | {128: Shape(4, 2)}  # by the larger of D and Dv
BLOCK_N = 64  # keys of a key tile: few, so that shares are even
MOST_SEQUENCES = 1024  # each warp holds all lengths in its registers


def takes(q, keys, width, packed, masked) -> bool:
    """Return whether the kernel takes a batch: if a tile holds all queries of a sequence.

    `width` is the larger of D and Dv. At 256, accumulators and the widener would need more registers than there are.
    """
    batch, heads, seq_q, _ = q.shape
    before = ROWS.value // packed - 1 if masked else 0  # the most positions before query 0
    places = batch * heads // packed * (cdiv(keys, BLOCK_N) + SETUP.value)  # sums of them are int32 in the kernel
    one_tile = (seq_q + before) * packed <= BLOCK_M.value
    return batch <= MOST_SEQUENCES and one_tile and places < 2**30 and width in SHAPES


def forward(q, k, v, *, causal, scale, diagonal=0, lengths=None, starts=None, descales=None):
    """Return attention output and log-sum-exp. `common.operator` lists shapes, dtypes and errors.

    Falls back to lengths5 with 16-bit k and v. It also does so, and first widens 8-bit k and v in memory, for D or Dv of 256,
    for more than 1024 sequences, and for more queries than a tile holds.

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
    taken = descales and takes(q, seq_k, max(head_dim, value_dim), packed, masked)
    if descales and not taken:
        k, v = (widened_in_memory(each, descale, q.dtype, table) for each, descale in zip((k, v), descales, strict=True))
        lengths = lengths._replace(pages=None)
    if not taken:
        return forward_of_lengths5(q, k, v, causal=causal, scale=scale, diagonal=diagonal, lengths=lengths, starts=starts)
    out = empty_rows(q, value_dim)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if scale < 0:
        q, scale = -q, -scale  # the scores stay the same, and max(scale * s) = scale * max(s)
    shape = SHAPES[max(head_dim, value_dim)]
    tiles = batch * heads // packed
    programs = min(tiles * cdiv(seq_k, BLOCK_N), num_sms())
    copied, describe_keys = BLOCK_N, describe_tile  # keys that a TMA copy loads
    if table is not None:
        copied, describe_keys = min(copied, page), functools.partial(describe_tile, columns=128)
    queries, outputs, rows = q, out, (64,)
    if packed > 1:
        queries, outputs = (t.unflatten(1, (-1, packed)).transpose(2, 3) for t in (q, out))  # [B, H / packed, Sq, packed, D]
        rows = 64 // packed, packed
    parts = lse.new_empty(tiles + programs, packed * seq_q, value_dim)
    part_lses = lse.new_empty(parts.shape[:2])
    shares = lengths.keys.new_empty(tiles, 2)
    _forward_kernel[programs,](
        describe_tile(queries, *rows), describe_keys(k, copied), describe_keys(v, copied), describe_tile(outputs, *rows),
        outputs, lse, parts, part_lses, shares, lengths.keys, table, scale,
        *descales, batch, heads // packed, per_kv // packed, packed * seq_q, seq_k,
        SEQUENCES=1 << max(batch - 1, 31).bit_length(), BLOCK_N=BLOCK_N, STAGES=shape.kv_slots, Q_STAGES=shape.q_slots,
        CAUSAL=masked, num_warps=4, maxnreg=128,
    )  # fmt: skip
    merge(parts, part_lses, shares, out, lse)
    return out, lse
