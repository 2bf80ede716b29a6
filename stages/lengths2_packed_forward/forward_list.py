"""Joined sequences: list their query tiles, and address a sequence's rows in tensors that hold all sequences."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from common.kernels.hopper import ROWS, describe_tile
from common.kernels.packed import by_first_token

from .forward_scheduler import FIELDS, _rows_before

CHUNK = tl.constexpr(512)  # sequences that a program reads at once, and tiles that it writes at once


@triton.jit
def _sequence(starts_ptr, sequence, sequences, tokens):
    """Return a sequence's first token and its number of tokens, both inside of the tensor. Past the last one there are none."""
    start = tl.load(starts_ptr + sequence, mask=sequence <= sequences, other=0)
    end = tl.load(starts_ptr + sequence + 1, mask=sequence < sequences, other=0)
    start = tl.minimum(tl.maximum(start, 0), tokens)
    return start, tl.maximum(tl.minimum(end, tokens), start) - start


@triton.jit
def _tiles(queries, keys, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the number of a sequence's query tiles, and its rows before query 0."""
    before = _rows_before(keys - queries, 1) if CAUSAL else 0
    return tl.where(queries > 0, tl.cdiv(queries + before, BLOCK_M), 0), before


@triton.jit(do_not_specialize=["sequences", "tokens_q", "tokens_k", "most"])
def _list_kernel(
    starts_q_ptr, starts_k_ptr, list_ptr, sequences, tokens_q, tokens_k, most,
    BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Write one sequence's query tiles to the list, behind the tiles of all sequences that have more keys."""
    own = tl.program_id(0)
    first_q, queries = _sequence(starts_q_ptr, own, sequences, tokens_q)
    first_k, keys = _sequence(starts_k_ptr, own, sequences, tokens_k)
    first, total = tl.zeros((), tl.int64), tl.zeros((), tl.int64)  # int64: starts that fall may make more than 2**31 tiles
    for start in range(0, sequences, CHUNK):
        other = start + tl.arange(0, CHUNK)
        _, other_queries = _sequence(starts_q_ptr, other, sequences, tokens_q)
        _, other_keys = _sequence(starts_k_ptr, other, sequences, tokens_k)
        tiles, _ = _tiles(other_queries, other_keys, BLOCK_M, CAUSAL)
        is_before = (other_keys > keys) | ((other_keys == keys) & (other < own))
        first += tl.sum(tl.where(is_before, tiles, 0).to(tl.int64))
        total += tl.sum(tiles.to(tl.int64))
    if own == 0:
        tl.store(list_ptr, 0)
        tl.store(list_ptr + 1, tl.minimum(total, most))
    tiles, before = _tiles(queries, keys, BLOCK_M, CAUSAL)
    for start in range(0, tiles, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        entry = list_ptr + (1 + first + tile) * FIELDS
        inside = (tile < tiles) & (first + tile < most)  # starts that do not rise may make more tiles
        tl.store(entry, (tiles - 1 - tile) * BLOCK_M - before, mask=inside)
        tl.store(entry + 1, first_q, mask=inside)
        tl.store(entry + 2, queries, mask=inside)
        tl.store(entry + 3, first_k, mask=inside)
        tl.store(entry + 4, keys, mask=inside)


def list_tiles(starts, q, k, block_m, causal):
    """Return the list of the query tiles of a head, [1 + tiles, FIELDS] in int32, for joined sequences in q and k.

    Entry 0 has the number of tiles that CTAs have taken, and the number of tiles in the list. There is room for the most tiles
    that so many sequences and queries can have.
    """
    sequences, tokens_q = len(starts.queries) - 1, q.shape[2]
    filled, before = min(sequences, tokens_q), ROWS.value - 1 if causal else 0
    most = filled + (tokens_q + filled * before) // block_m
    listed = starts.queries.new_empty(1 + most, FIELDS.value)
    _list_kernel[sequences,](
        starts.queries, starts.keys, listed, sequences, tokens_q, k.shape[2], most, BLOCK_M=block_m, CAUSAL=causal
    )
    return listed


describe_sequences = by_first_token(describe_tile)


@gluon.jit
def _store_inside(ptr, desc, tile, start_m, out):
    """Store those rows of `out` that lie inside the tile's sequence, without TMA, which would also overwrite its neighbours."""
    layout: gl.constexpr = out.type.layout
    row = start_m + gl.arange(0, out.shape[0], gl.SliceLayout(1, layout))
    offs = tile.head * desc.strides[1] + (tile.first_q + row) * desc.strides[2]
    ptrs = ptr + offs[:, None] + gl.arange(0, out.shape[1], gl.SliceLayout(0, layout))[None, :]
    gl.store(ptrs, out, mask=((row >= 0) & (row < tile.seq_q))[:, None])
