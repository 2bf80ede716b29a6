"""The scheduler: the order of the work tiles, and where a tile's rows and keys lie.

The functions that load and the functions that compute get the same `Tile`. Gluon kernels can call these Triton functions.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from common.kernels.hopper import ROWS
from common.kernels.order import tile_and_head

FIELDS = tl.constexpr(8)  # int32 of an entry in the list of tiles; its 5 values lie in one sector of 32 bytes


class Problem(NamedTuple):
    """Sizes that all work tiles share."""

    batch_heads: tl.tensor  # B * H / PACKED
    heads: tl.tensor  # H / PACKED
    heads_per_kv: tl.tensor  # H / Hkv / PACKED
    tiles_m: tl.tensor  # number of query tiles of a head
    seq_q: tl.tensor  # rows of PACKED heads: queries * PACKED
    seq_k: tl.tensor
    diagonal: tl.tensor  # with a causal mask, query i sees key j if j <= i + diagonal
    scale: tl.tensor
    splits: tl.tensor  # number of parts into which the keys are split, so that few query tiles keep all CTAs busy
    is_split: tl.tensor | None  # None if keys are not split; the compiler then leaves out the code for splits
    lengths: tl.tensor | None  # pointer to the sequences' numbers of keys, [B], or `listed`; None if each has seq_k keys
    listed: tl.tensor | None  # pointer to the list of tiles of joined sequences (`forward_list`); else None
    table: tl.tensor | None  # pointer to the numbers of the sequences' pages, [B, pages of a sequence]; None without pages


class Tile(NamedTuple):
    """A work tile: BLOCK_M query rows of one head, and the key tiles that they see."""

    batch_head: tl.tensor  # batch * H + head
    batch: tl.tensor
    head: tl.tensor
    kv_head: tl.tensor
    kv_batch: tl.tensor  # coordinate of the tile's sequence in K and V, or in the table: its batch element, or its first token
    first_q: tl.tensor  # the sequence's first query row in Q; not 0 only if sequences are joined
    seq_q: tl.tensor  # the sequence's rows of PACKED heads
    start_m: tl.tensor  # the tile's first query row in its sequence
    key_tiles: tl.tensor
    split: tl.tensor  # number of this tile's split
    step: tl.tensor  # number of keys from the start of a key tile to the start of the split's next key tile
    keys: tl.tensor  # number of keys of the tile's sequence
    diagonal: tl.tensor  # diagonal of the tile's sequence


class NextTiles(NamedTuple):
    """Tile numbers that the producer passes on to the consumers."""

    number: gl.shared_memory_descriptor  # [Q_STAGES, 1]
    full: gl.shared_memory_descriptor  # barriers, producer → consumers: the number has been written


@triton.jit
def _rows_before(diagonal, PACKED: tl.constexpr):
    """Return how many rows before query 0 the first tile starts; see `_tile`."""
    return (diagonal & (ROWS // PACKED - 1)) * PACKED  # & and not %, because a diagonal may be negative


@triton.jit
def _place(row, problem, PACKED: tl.constexpr):
    """Return a row's place in memory, where the PACKED heads follow each other. In a tile, their rows alternate."""
    return row % PACKED * (problem.seq_q // PACKED) + row // PACKED


@triton.jit
def _row(batch, head, row, PACKED: tl.constexpr):
    """Return the coordinates of a tile's row in Q and O."""
    return [batch, head, row // PACKED, 0, 0] if PACKED > 1 else [batch, head, row, 0]


@triton.jit
def _share(tiles, split, problem):
    """Return how many of `tiles` key tiles a split has: from tile `split`, every `splits`-th. CTAs read neighbours together."""
    return tl.cdiv(tl.maximum(tiles - split, 0), problem.splits)


@triton.jit
def _key_tiles(end_m, keys, diagonal, BLOCK_N: tl.constexpr, PACKED: tl.constexpr, CAUSAL: tl.constexpr):
    """Return how many key tiles the rows before end_m see."""
    keys = tl.minimum(end_m // PACKED + diagonal, keys) if CAUSAL else keys
    return tl.cdiv(keys, BLOCK_N)


@triton.jit
def _key(start_n, tile, problem, COPIED: tl.constexpr):
    """Return the number of the first key that is loaded by the copy for the COPIED keys from start_n on.

    With lengths, a sequence's last copy starts earlier, so that it ends with the sequence. Memory behind the sequence may hold
    NaN, and 0 * NaN would be NaN in P V. Before key 0, or before the first key of a page, TMA fills in zeros.
    """
    return start_n if problem.lengths is None else tl.minimum(start_n, tile.keys - COPIED)


@triton.jit
def _tile(
    number, problem, ROW_BYTES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return the work tile whose number is `number`."""
    split = number % problem.splits
    number = number // problem.splits
    tile, batch_head = tile_and_head(
        problem.tiles_m, tl.cdiv(problem.seq_k, problem.heads_per_kv), ROW_BYTES, CAUSAL or problem.listed is not None,
        program=number, programs=problem.batch_heads * problem.tiles_m,
    )  # fmt: skip
    batch = batch_head // problem.heads
    keys, diagonal = problem.seq_k, problem.diagonal
    if problem.lengths is not None and problem.listed is None:
        keys = tl.minimum(tl.maximum(tl.load(problem.lengths + batch), 0), problem.seq_k)
        diagonal = keys - problem.seq_q // PACKED if CAUSAL else 0  # the last query sees all keys
    # Start early, so that start_m // PACKED + diagonal is a multiple of ROWS // PACKED. Then a consumer's diagonal lies in
    # one key tile, its last. No other tile needs a mask, so the masked tile can be computed outside the loop. (Without a causal
    # mask, `diagonal` is 0.)
    start_m = (problem.tiles_m - 1 - tile) * BLOCK_M - _rows_before(diagonal, PACKED)
    kv_batch, first_q, seq_q = batch, 0, problem.seq_q
    if problem.listed is not None:
        entry = problem.listed + (1 + tile).to(tl.int64) * FIELDS
        start_m, first_q, seq_q = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        kv_batch, keys = tl.load(entry + 3), tl.load(entry + 4)
        diagonal = keys - seq_q if CAUSAL else 0
    key_tiles = _key_tiles(start_m + BLOCK_M, keys, diagonal, BLOCK_N, PACKED, CAUSAL)
    if problem.lengths is not None:
        key_tiles = tl.where(start_m < problem.seq_q, key_tiles, 0)  # `tiles_m` allows for the most rows before query 0
    if problem.is_split is not None or problem.lengths is not None:
        key_tiles = tl.maximum(_share(key_tiles, split, problem), 1)  # a split without key tiles loads a tile without using it
    step = BLOCK_N * problem.splits
    head = batch_head % problem.heads
    kv_head = head // problem.heads_per_kv
    return Tile(batch_head, batch, head, kv_head, kv_batch, first_q, seq_q, start_m, key_tiles, split, step, keys, diagonal)


@gluon.jit
def _pass_on(number, next_tiles, slot):
    """Tell the consumers the next tile's number. A number past the last tile tells them to end."""
    next_tiles.number.index(slot).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(next_tiles.full.index(slot), count=1)


@gluon.jit
def _next(next_tiles, slot, phase):
    """Return the number that the producer has passed on."""
    mbarrier.wait(next_tiles.full.index(slot), phase)
    return gl.max(next_tiles.number.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
