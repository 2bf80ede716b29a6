"""List the key tiles and the query tiles of packed sequences."""

import triton
import triton.language as tl

from common.kernels.packed import CHUNK, lengths_of, padded_tiles

FIELDS = tl.constexpr(8)  # int32 of an entry in a list


@triton.jit
def _list(list_ptr, most, starts_seen_ptr, starts_ptr, sequences, tokens_seen, tokens, BLOCK: tl.constexpr):
    """Write the tiles of this program's part to a list, behind those of all parts that see more tokens: key tiles see queries,
    and query tiles see keys. Tokens of no sequence see none."""
    own = tl.program_id(0)
    first_seen, seen, first, rows = lengths_of(own, starts_seen_ptr, starts_ptr, sequences, tokens_seen, tokens)
    before, total = tl.zeros((), tl.int64), tl.zeros((), tl.int64)  # int64: starts that fall may make more than 2**31 tiles
    for start in range(0, sequences + 2, CHUNK):
        part = start + tl.arange(0, CHUNK)
        _, its_seen, _, its_rows = lengths_of(part, starts_seen_ptr, starts_ptr, sequences, tokens_seen, tokens)
        is_before = (its_seen > seen) | ((its_seen == seen) & (part < own))
        its_tiles = tl.cdiv(its_rows, BLOCK).to(tl.int64)
        before += tl.sum(tl.where(is_before, its_tiles, 0))
        total += tl.sum(its_tiles)
    if own == 0:
        tl.store(list_ptr, tl.minimum(total, most))
    tiles = tl.cdiv(rows, BLOCK)
    for start in range(0, tiles, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        entry = list_ptr + (1 + before + tile) * FIELDS
        inside = (tile < tiles) & (before + tile < most)  # starts that fall may make more tiles
        tl.store(entry, tile, mask=inside)
        tl.store(entry + 1, own, mask=inside)
        tl.store(entry + 2, first, mask=inside)
        tl.store(entry + 3, rows, mask=inside)
        tl.store(entry + 4, first_seen, mask=inside)
        tl.store(entry + 5, seen, mask=inside)


@triton.jit(do_not_specialize=["sequences", "tokens_q", "tokens_k", "most_k", "most_q", "head_tiles"])
def _list_kernel(
    starts_q_ptr, starts_k_ptr, key_list_ptr, query_list_ptr, sequences, tokens_q, tokens_k, most_k, most_q, head_tiles,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write one part's key tiles of BLOCK_N keys to one list, and its query tiles of BLOCK_M queries to the other list."""
    _list(key_list_ptr, most_k, starts_q_ptr, starts_k_ptr, sequences, tokens_q, tokens_k, BLOCK_N)
    _list(query_list_ptr, most_q, starts_k_ptr, starts_q_ptr, sequences, tokens_k, tokens_q, BLOCK_M)
    if tl.program_id(0) == 0:
        tl.store(key_list_ptr + 1, head_tiles)
        tl.store(query_list_ptr + 1, head_tiles)


@triton.jit
def _listed(list_ptr, number):
    """Return an entry of a list: the tile's number in its part, the part's number, its first token and its number of tokens,
    and the first token and the number of tokens that it sees."""
    entry = list_ptr + (1 + number).to(tl.int64) * FIELDS
    tile, part, first, rows = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    return tile, part, first, rows, tl.load(entry + 4), tl.load(entry + 5)


def list_tiles(starts, tokens_q, tokens_k, block_m):
    """Return the lists of a head's key tiles, of 64 keys, and query tiles, of 128 queries. Also return the number of a head's
    tiles of `block_m` queries, for LSE and delta.

    A list is [1 + tiles, FIELDS] in int32. Entry 0 has the number of tiles in the list, and the number that is returned.
    """
    sequences, head_tiles = len(starts.queries) - 1, padded_tiles(starts.queries, tokens_q, block_m)
    sizes = (tokens_k, 64), (tokens_q, 128)
    most = [(tokens + (rows - 1) * min(sequences + 2, tokens)) // rows for tokens, rows in sizes]
    key_list, query_list = (starts.keys.new_empty(1 + number, FIELDS.value) for number in most)
    _list_kernel[sequences + 2,](
        starts.queries, starts.keys, key_list, query_list, sequences, tokens_q, tokens_k, *most, head_tiles,
        BLOCK_N=64, BLOCK_M=128,
    )  # fmt: skip
    return key_list, query_list, head_tiles
