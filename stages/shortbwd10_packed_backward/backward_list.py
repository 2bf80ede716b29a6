"""List the key tiles of packed sequences."""

import triton
import triton.language as tl

from common.kernels.hopper import ROWS
from common.kernels.packed import CHUNK, first_tile, lengths_of, padded_tiles

from .backward_scheduler import CONSUMERS, FIELDS


@triton.jit(do_not_specialize=["sequences", "tokens_q", "tokens_k", "most", "unused"])
def _list_kernel(starts_q_ptr, starts_k_ptr, list_ptr, sequences, tokens_q, tokens_k, most, unused, BLOCK_M: tl.constexpr):
    """Write one part's key tiles to the list, behind those of all parts that have more queries."""
    BLOCK_N: tl.constexpr = CONSUMERS * ROWS
    own = tl.program_id(0)
    first_q, queries, first_k, keys = lengths_of(own, starts_q_ptr, starts_k_ptr, sequences, tokens_q, tokens_k)
    before, total = tl.zeros((), tl.int64), tl.zeros((), tl.int64)  # int64: starts that fall may make more than 2**31 tiles
    for start in range(0, sequences + 2, CHUNK):
        part = start + tl.arange(0, CHUNK)
        _, its_queries, _, its_keys = lengths_of(part, starts_q_ptr, starts_k_ptr, sequences, tokens_q, tokens_k)
        is_before = (its_queries > queries) | ((its_queries == queries) & (part < own))
        tiles = tl.cdiv(its_keys, BLOCK_N).to(tl.int64)
        before += tl.sum(tl.where(is_before, tiles, 0))
        total += tl.sum(tiles)
    if own == 0:
        tl.store(list_ptr, tl.minimum(total, most))
    tiles_m, tiles_n = tl.cdiv(queries, BLOCK_M), tl.cdiv(keys, BLOCK_N)
    for start in range(0, tiles_n, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        entry = list_ptr + (1 + before + tile) * FIELDS
        inside = (tile < tiles_n) & (before + tile < most)  # starts that fall may make more tiles
        tl.store(entry, tile * BLOCK_N, mask=inside)
        tl.store(entry + 1, first_k, mask=inside)
        tl.store(entry + 2, keys - (tiles_n - tile) * BLOCK_N, mask=inside)
        tl.store(entry + 3, first_q, mask=inside)
        tl.store(entry + 4, queries - tl.maximum(tiles_m, 1) * BLOCK_M, mask=inside)
        tl.store(entry + 5, tiles_m, mask=inside)
        tl.store(entry + 6, tl.where(tiles_m > 0, first_tile(own, first_q, BLOCK_M), unused), mask=inside)
        tl.store(entry + 7, tiles_n * BLOCK_N - tiles_m * BLOCK_M, mask=inside)  # the diagonal between whole tiles


def list_tiles(starts, q, k, block_m):
    """Return the list of a head's key tiles, the most key tiles of all heads, and the number of a head's query tiles.

    The list is [1 + tiles, FIELDS] in int32. Entry 0 has the number of tiles in the list.
    """
    sequences, tokens_q, tokens_k = len(starts.queries) - 1, q.shape[2], k.shape[2]
    most = (tokens_k + 127 * min(sequences + 2, tokens_k)) // 128
    listed = starts.keys.new_empty(1 + most, FIELDS.value)
    tiles_m = padded_tiles(starts.queries, tokens_q, block_m)
    _list_kernel[sequences + 2,](
        starts.queries, starts.keys, listed, sequences, tokens_q, tokens_k, most, tiles_m - 1, BLOCK_M=block_m
    )
    return listed, most * k.shape[1], tiles_m
