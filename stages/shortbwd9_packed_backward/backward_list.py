"""Packed sequences: list their key tiles, and find the sequence of a query tile.

Tiles end with their sequence, so none has rows of the next sequence, which may be NaN. A sequence's first tile may begin before
the sequence. There, TMA gives zeros (`by_first_token`).
"""

import triton
import triton.language as tl

from .backward_scheduler import CONSUMERS, FIELDS, ROWS

CHUNK = tl.constexpr(512)  # sequences that a program reads at once, and tiles that it writes at once


@triton.jit
def _start(starts_ptr, number, sequences, tokens):
    """Return where part `number` of the tokens starts, inside of the tensor. Part 0 has the tokens before the first sequence,
    part n the tokens of the n-th sequence, and part `sequences` + 1 the tokens behind the last one."""
    start = tl.load(starts_ptr + number - 1, mask=(number > 0) & (number <= sequences + 1), other=0)
    return tl.where(number > sequences + 1, tokens, tl.minimum(tl.maximum(start, 0), tokens))


@triton.jit
def _part(starts_ptr, number, sequences, tokens):
    """Return a part's first token and its number of tokens."""
    start = _start(starts_ptr, number, sequences, tokens)
    return start, tl.maximum(_start(starts_ptr, number + 1, sequences, tokens) - start, 0)


@triton.jit
def _parts(starts_q_ptr, starts_k_ptr, number, sequences, tokens_q, tokens_k):
    """Return a part's first query, queries, first key and keys. Only queries of sequences count."""
    first_q, queries = _part(starts_q_ptr, number, sequences, tokens_q)
    first_k, keys = _part(starts_k_ptr, number, sequences, tokens_k)
    return first_q, tl.where((number > 0) & (number <= sequences), queries, 0), first_k, keys


@triton.jit
def _head_tiles(sequences, tokens, BLOCK_M: tl.constexpr):
    """Return the number of query tiles of a head. Part n has the tiles from `start // BLOCK_M + n` on, which suffice for any
    starts. The last tile belongs to no part: keys without queries use it."""
    return tokens // BLOCK_M + sequences + 3


@triton.jit(do_not_specialize=["sequences", "tokens_q", "tokens_k", "most"])
def _list_kernel(starts_q_ptr, starts_k_ptr, list_ptr, sequences, tokens_q, tokens_k, most, BLOCK_M: tl.constexpr):
    """Write one part's key tiles to the list, behind those of all parts that have more queries."""
    BLOCK_N: tl.constexpr = CONSUMERS * ROWS
    own = tl.program_id(0)
    first_q, queries, first_k, keys = _parts(starts_q_ptr, starts_k_ptr, own, sequences, tokens_q, tokens_k)
    first, total = 0, 0
    for start in range(0, sequences + 2, CHUNK):
        other = start + tl.arange(0, CHUNK)
        _, other_queries, _, other_keys = _parts(starts_q_ptr, starts_k_ptr, other, sequences, tokens_q, tokens_k)
        tiles = tl.cdiv(other_keys, BLOCK_N)
        is_before = (other_queries > queries) | ((other_queries == queries) & (other < own))
        first += tl.sum(tl.where(is_before, tiles, 0))
        total += tl.sum(tiles)
    if own == 0:
        tl.store(list_ptr, tl.minimum(total, most))
    tiles_m, tiles_n = tl.cdiv(queries, BLOCK_M), tl.cdiv(keys, BLOCK_N)
    unused = _head_tiles(sequences, tokens_q, BLOCK_M) - 1
    for start in range(0, tiles_n, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        entry = list_ptr + (1 + first + tile).to(tl.int64) * FIELDS
        inside = (tile < tiles_n) & (first + tile < most)  # starts that do not rise may make more tiles
        # Both rows of tiles end with the sequence. If they started at row 0, this would be the diagonal, with whole tiles:
        tl.store(entry + 7, tiles_n * BLOCK_N - tiles_m * BLOCK_M, mask=inside)
        tl.store(entry, tile * BLOCK_N, mask=inside)
        tl.store(entry + 1, first_k, mask=inside)
        tl.store(entry + 2, (tile - tiles_n) * BLOCK_N + keys, mask=inside)
        tl.store(entry + 3, first_q, mask=inside)
        tl.store(entry + 4, queries - tl.maximum(tiles_m, 1) * BLOCK_M, mask=inside)
        tl.store(entry + 5, tiles_m, mask=inside)
        tl.store(entry + 6, tl.where(tiles_m > 0, first_q // BLOCK_M + own, unused), mask=inside)


def list_tiles(starts, q, k, block_m):
    """Return the number of query tiles of all heads, the most key tiles of all heads, and the list of a head's key tiles.

    The list is [1 + tiles, FIELDS] in int32. Entry 0 has the number of tiles in the list.
    """
    sequences, tokens_q, tokens_k = len(starts.queries) - 1, q.shape[2], k.shape[2]
    most = (tokens_k + 127 * min(sequences + 2, tokens_k)) // 128
    listed = starts.keys.new_empty(1 + most, FIELDS.value)
    _list_kernel[sequences + 2,](starts.queries, starts.keys, listed, sequences, tokens_q, tokens_k, most, BLOCK_M=block_m)
    return (tokens_q // block_m + sequences + 3) * q.shape[1], most * k.shape[1], listed


@triton.jit
def _query_tile_of(heads, seq_q, starts_ptr, sequences, BLOCK_M: tl.constexpr):
    """Return the place of this program's query tile: its batch element or its sequence's first token, its head, its first row,
    and the sequence's number of rows."""
    tiles_m = tl.cdiv(seq_q, BLOCK_M) if starts_ptr is None else _head_tiles(sequences, seq_q, BLOCK_M)
    number = tl.program_id(0) % tiles_m
    batch_head = tl.program_id(0) // tiles_m
    batch, start_m, queries = batch_head // heads, number * BLOCK_M, seq_q
    if starts_ptr is not None:
        part = -1
        for start in range(0, sequences + 2, CHUNK):
            other = start + tl.arange(0, CHUNK)
            first = _start(starts_ptr, other, sequences, seq_q) // BLOCK_M + other
            part += tl.sum(((other < sequences + 2) & (first <= number)).to(tl.int32))
        batch, queries = _part(starts_ptr, part, sequences, seq_q)
        start_m = (number - batch // BLOCK_M - part - tl.cdiv(queries, BLOCK_M)) * BLOCK_M + queries
        start_m = tl.where(start_m < queries, start_m, -BLOCK_M)  # the tile has no rows
    return batch, batch_head % heads, start_m, queries


def by_first_token(descriptors):
    """Change descriptors of packed sequences, [1, H, S, D]: a coordinate is then [first token of the sequence, head, token in
    the sequence, 0]. So TMA gives zeros for tokens before the sequence: they have negative coordinates.

    To TMA, the tensor is a batch of S sequences, and each starts at the next token. They overlap in memory.
    """
    for descriptor in descriptors:
        descriptor.shape[0], descriptor.strides[0] = descriptor.shape[2], descriptor.strides[2]
