"""Where the sequences of a packed batch lie: in q, k and v, and in whole tiles of queries.

`starts` are those of `common.entry.Starts`. They cut the tokens into parts. Part 0 has the tokens before the first sequence,
part n has the tokens of the n-th sequence, and the last part has the tokens behind the last sequence.
"""

from collections.abc import Callable

import triton
import triton.language as tl

CHUNK = tl.constexpr(1024)  # starts that a program reads at once


def by_first_token(describe: Callable) -> Callable:
    """Return a function that makes descriptors of [1, H, S, D] as `describe` does, but with other coordinates: [first token of
    the sequence, head, token in the sequence, 0]. Tokens before the sequence have negative coordinates, so TMA gives zeros.

    To TMA, the tensor is a batch of S sequences, and each starts at the next token. These sequences overlap in memory, and
    their ends lie behind it. So a tile must end inside of its sequence.
    """

    def described(*args):
        descriptor = describe(*args)
        descriptor.shape[0], descriptor.strides[0] = descriptor.shape[2], descriptor.strides[2]
        return descriptor

    return described


@triton.jit
def _start(starts_ptr, part, sequences, tokens):
    """Return where a part starts, inside of the tensor. Behind the last part, there are no tokens."""
    start = tl.load(starts_ptr + part - 1, mask=(part > 0) & (part <= sequences + 1), other=0)
    return tl.where(part > sequences + 1, tokens, tl.minimum(tl.maximum(start, 0), tokens))


@triton.jit
def tokens_of(part, starts_ptr, sequences, tokens):
    """Return a part's first token and its number of tokens."""
    start = _start(starts_ptr, part, sequences, tokens)
    return start, tl.maximum(_start(starts_ptr, part + 1, sequences, tokens) - start, 0)


@triton.jit
def lengths_of(part, starts_q_ptr, starts_k_ptr, sequences, tokens_q, tokens_k):
    """Return a part's first query, number of queries, first key and number of keys. Queries of no sequence do not count."""
    first_q, queries = tokens_of(part, starts_q_ptr, sequences, tokens_q)
    first_k, keys = tokens_of(part, starts_k_ptr, sequences, tokens_k)
    return first_q, tl.where((part > 0) & (part <= sequences), queries, 0), first_k, keys


@triton.jit
def first_tile(part, start, BLOCK_M: tl.constexpr):
    """Return the number of a part's first query tile, if each part has tiles of its own. The part starts at token `start`.

    Whatever the starts are, a part's tiles end before the next part's tiles begin, and no part has more tiles than its tokens
    need.
    """
    return start // BLOCK_M + part


def padded_tiles(starts, tokens: int, block_m: int) -> int:
    """Return the number of query tiles of a head, if each part has tiles of its own. One more tile belongs to no part."""
    return tokens // block_m + len(starts) + 2


@triton.jit
def place_of(tile, starts_ptr, sequences, tokens, BLOCK_M: tl.constexpr):
    """Return where query tile number `tile` lies: its part's first token, its first row in its part, and the part's rows.

    A part's last tile ends with the part. So its first tile may start before the part, at a negative row. A tile that no part
    needs starts at row -BLOCK_M.
    """
    part = -1
    for number in range(0, sequences + 2, CHUNK):
        parts = number + tl.arange(0, CHUNK)
        first = first_tile(parts, _start(starts_ptr, parts, sequences, tokens), BLOCK_M)
        part += tl.sum(((parts < sequences + 2) & (first <= tile)).to(tl.int32))
    start, rows = tokens_of(part, starts_ptr, sequences, tokens)
    row = rows + (tile - first_tile(part, start, BLOCK_M) - tl.cdiv(rows, BLOCK_M)) * BLOCK_M
    return start, tl.where(row < rows, row, -BLOCK_M), rows
