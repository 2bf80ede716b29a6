"""The scheduler: which CTA computes which keys, and in which order it takes the query tiles that see them.

A loop only counts steps. `_query_tile` finds a step's head and query tile.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from common.kernels.order import tile_and_head


class Problem(NamedTuple):
    """Sizes that all CTAs share."""

    kv_heads: tl.tensor
    heads_per_kv: tl.tensor
    seq_q: tl.tensor
    seq_k: tl.tensor
    diagonal: tl.tensor  # with a causal mask, query i sees key j if j <= i + diagonal
    scale: tl.tensor


class Tile(NamedTuple):
    """A work tile: BLOCK_N keys of one head, and the query tiles that see them."""

    batch: tl.tensor
    kv_head: tl.tensor
    head: tl.tensor  # the first of the query heads that share these keys
    batch_head: tl.tensor  # batch * H + head
    heads_per_kv: tl.tensor  # number of query heads that share these keys
    start_n: tl.tensor  # the first key
    keys: tl.tensor  # number of keys from start_n on
    diagonal: tl.tensor  # with a causal mask, query i sees key j if j <= i + diagonal
    first: tl.tensor  # the first query tile that sees one of the keys
    seq_q: tl.tensor
    steps: tl.tensor  # number of query tiles from `first` on, of all these query heads
    masked: tl.tensor  # number of steps at the start that need a mask


@triton.jit
def _tile(
    problem, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CAUSAL: tl.constexpr
):
    """Return the work tile of this CTA."""
    heads_per_kv = problem.heads_per_kv
    tiles_m = tl.cdiv(problem.seq_q, BLOCK_M)
    ROW_BYTES: tl.constexpr = 6 * HEAD_DIM + 2 * VALUE_DIM  # bytes of a query's Q, dQ accumulator and dO
    tile_n, batch_head = tile_and_head(tl.cdiv(problem.seq_k, BLOCK_N), problem.seq_q, ROW_BYTES, CAUSAL)
    start_n = tile_n * BLOCK_N  # the most queries see the first keys, so their tile is tile 0 and starts first
    first = 0  # the first query tile that sees one of these keys
    masked = 0  # number of query tiles, from `first` on, that need a mask
    if CAUSAL:
        start = start_n - problem.diagonal  # the first query that sees the tile's first key; may be negative
        first = tl.minimum(tl.maximum(start, 0) // BLOCK_M, tiles_m)  # tiles_m, if no query sees the keys: no steps
        full = tl.cdiv(tl.maximum(start + BLOCK_N - 1, 0), BLOCK_M)  # the first query tile that sees every key
        masked = tl.minimum(full, tiles_m) - first
    tiles = tiles_m - first
    masked = tl.where(start_n + BLOCK_N > problem.seq_k, tiles, masked)
    kv_head = batch_head % problem.kv_heads
    return Tile(
        batch_head // problem.kv_heads, kv_head, kv_head * heads_per_kv, batch_head * heads_per_kv, heads_per_kv,
        start_n, problem.seq_k - start_n, problem.diagonal, first, problem.seq_q,
        tiles * heads_per_kv, masked * heads_per_kv,
    )  # fmt: skip


@triton.jit
def _query_tile(step, tile):
    """Return the head and the query tile of a step, and where that head begins in LSE and delta.

    The steps take one query tile of each query head that shares the keys, then the next query tile of each head. So each head's
    first query tiles, which may need a mask, come before all others.
    """
    shared = step % tile.heads_per_kv
    number = tile.first + step // tile.heads_per_kv
    return tile.head + shared, number, (tile.batch_head + shared).to(tl.int64) * tile.seq_q
