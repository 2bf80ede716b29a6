"""The scheduler: which CTA computes which keys, and in which order it takes the query tiles that see them.

A loop only counts steps. `_query_tile` finds a step's head and query tile. Gluon kernels can call these Triton functions.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from common.kernels.hopper import ROWS
from common.kernels.order import tile_and_head
from common.kernels.packed import first_tile

from .backward_list import _listed
from .backward_splits import _steps_of, _tile_and_split

CONSUMERS = tl.constexpr(2)


class Problem(NamedTuple):
    """Sizes that all CTAs share."""

    kv_heads: tl.tensor
    heads_per_kv: tl.tensor
    seq_q: tl.tensor
    seq_k: tl.tensor
    diagonal: tl.tensor  # with a causal mask, query i sees key j if j <= i + diagonal
    scale: tl.tensor
    splits: tl.tensor | None  # number of CTAs that share a tile's steps; None for one CTA
    listed: tl.tensor | None  # pointer to a list of packed sequences' tiles (`backward_list`); else None


class Tile(NamedTuple):
    """A work tile: BLOCK_N keys of one head, and the query tiles that see them."""

    batch: tl.tensor  # coordinate of the tile's sequence in Q and dO
    kv_batch: tl.tensor  # coordinate of the tile's sequence in K and V
    kv_head: tl.tensor
    head: tl.tensor  # the first of the query heads that share these keys
    row: tl.tensor  # number of that head's query tile 0, of this sequence, among the query tiles of all heads
    head_tiles: tl.tensor  # number of query tiles of a head, of all its sequences
    heads_per_kv: tl.tensor  # number of query heads that share these keys
    start_n: tl.tensor  # the first key; negative for keys before a packed sequence
    keys: tl.tensor  # number of keys from start_n on
    query: tl.tensor  # the first query of query tile 0; negative for queries before a packed sequence
    diagonal: tl.tensor  # with a causal mask, query number i from `query` on sees key j if j <= i + diagonal
    first: tl.tensor  # the first query tile that sees one of the keys
    tiles_m: tl.tensor  # number of query tiles of a head, of this sequence
    begin: tl.tensor  # number of steps of the CTAs with earlier splits
    steps: tl.tensor  # number of query tiles from `first` on, of all these query heads, or of those in this split
    unseen: tl.tensor  # number of steps at the start whose queries see no key of the second consumer
    masked: tl.tensor  # number of steps at the start that need a mask


@triton.jit
def _tile(problem, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the work tile of this CTA."""
    heads_per_kv = problem.heads_per_kv
    tiles_m = tl.cdiv(problem.seq_q, BLOCK_M)
    BLOCK_N: tl.constexpr = ROWS if HEAD_DIM == 256 or VALUE_DIM == 256 else CONSUMERS * ROWS  # dK and dV stay in registers
    ROW_BYTES: tl.constexpr = 6 * HEAD_DIM + 2 * VALUE_DIM  # bytes of a query's Q, dQ accumulator and dO
    number = None
    key_tiles = None
    if problem.splits is not None:
        number, split, key_tiles = _tile_and_split(problem.splits)
    tiles_n = tl.cdiv(problem.seq_k, BLOCK_N)
    PACKED: tl.constexpr = problem.listed is not None
    if PACKED:
        tiles_n = tl.load(problem.listed)
        number, key_tiles = tl.program_id(0), tiles_n * problem.kv_heads
    tile_n, batch_head = tile_and_head(tiles_n, problem.seq_q, ROW_BYTES, CAUSAL or PACKED, program=number, programs=key_tiles)
    start_n = tile_n * BLOCK_N  # the most queries see the first keys, so their tile is tile 0 and starts first
    batch = batch_head // problem.kv_heads
    kv_batch, keys, query, diagonal = batch, problem.seq_k - start_n, 0, problem.diagonal
    head_tiles, row = tiles_m, batch_head * heads_per_kv * tiles_m
    if PACKED:  # tiles end with their sequence, so the first ones may begin before it
        tile_n, part, kv_batch, seq_k, batch, seq_q = _listed(problem.listed, tile_n)
        start_n = seq_k - (tl.cdiv(seq_k, BLOCK_N) - tile_n) * BLOCK_N
        keys = tl.where(seq_q > 0, BLOCK_N, 0)  # 0 masks keys that no query sees
        tiles_m, head_tiles = tl.maximum(tl.cdiv(seq_q, BLOCK_M), 1), tl.load(problem.listed + 1)
        query = seq_q - tiles_m * BLOCK_M
        diagonal = seq_k - seq_q + query
        row = batch_head * heads_per_kv * head_tiles + first_tile(part, batch, BLOCK_M)
    first = 0  # the first query tile that sees one of these keys; if no tile does, the last tile, with all scores masked
    masked = 0  # number of query tiles, from `first` on, that need a mask
    unseen = 0  # number of query tiles, from `first` on, that see no key of the second consumer
    if CAUSAL:
        start = start_n - diagonal  # the first query that sees the tile's first key; may be negative
        first = tl.minimum(tl.maximum(start, 0) // BLOCK_M, tiles_m - 1)  # at least one step, because dK waits for the last dQ
        full = tl.cdiv(tl.maximum(start + BLOCK_N - 1, 0), BLOCK_M)  # the first query tile that sees every key
        masked = tl.minimum(full, tiles_m) - first
        if BLOCK_M <= ROWS:  # a longer query tile almost always sees keys of both consumers
            unseen = tl.minimum(tl.maximum(start + ROWS, 0) // BLOCK_M, tiles_m) - first
    tiles = tiles_m - first
    masked = tl.where(start_n + BLOCK_N > problem.seq_k, tiles, masked)
    kv_head = batch_head % problem.kv_heads
    begin = 0
    steps = tiles * heads_per_kv
    if problem.splits is not None:
        begin, end, steps = _steps_of(split, problem.splits, steps)
        keys = tl.where(begin < end, keys, 0)  # 0 masks all
    return Tile(
        batch, kv_batch, kv_head, kv_head * heads_per_kv, row, head_tiles, heads_per_kv, start_n, keys, query, diagonal,
        first, tiles_m, begin, steps, unseen * heads_per_kv, masked * heads_per_kv,
    )  # fmt: skip


@triton.jit
def _query_tile(step, tile, HEADS_FIRST: tl.constexpr = False):
    """Return the head and the query tile of a step, and the tile's number among the query tiles of all heads.

    The steps take one query tile of each query head that shares the keys, then the next query tile of each head. So each head's
    first query tiles, which may need a mask, come before all others.

    With HEADS_FIRST, they take all query tiles of one head, then those of the next head. So CTAs that share a key tile divide
    its heads first, and use fewer heads at a time, whose Q and dO stay in the L2 cache.
    """
    shared = step % tile.heads_per_kv
    # NOTE: CTAs that run at the same time begin at different query tiles; in groups1 they read the same tiles.
    number = tile.first + step // tile.heads_per_kv
    if HEADS_FIRST:
        tiles = tile.tiles_m - tile.first
        shared = (tile.begin + step) // tiles
        number = tile.first + (tile.begin + step) % tiles
    return tile.head + shared, number, tile.row + shared * tile.head_tiles + number
