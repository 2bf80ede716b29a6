"""The scheduler: the order of the work tiles, and where a tile's rows and keys lie.

The functions that load and the functions that compute get the same `Tile`. Gluon kernels can call these Triton functions.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SETUP = tl.constexpr(2)  # beginning and ending a head takes about as long as this number of key tiles (fitted on an H100)


class Problem(NamedTuple):
    """Sizes that all work tiles share."""

    batch: tl.tensor
    heads: tl.tensor  # H / PACKED
    heads_per_kv: tl.tensor  # H / Hkv / PACKED
    seq_q: tl.tensor  # rows of PACKED heads: queries * PACKED
    seq_k: tl.tensor
    scale: tl.tensor
    lengths: tl.tensor  # pointer to the sequences' numbers of keys, [B]
    table: tl.tensor | None  # pointer to the numbers of the sequences' pages, [B, pages of a sequence]; None without pages


class Share(NamedTuple):
    """A consumer's part of the list of all heads' places. Each head has SETUP empty places, then a place for each key tile."""

    number: tl.tensor
    size: tl.tensor  # number of places
    start: tl.tensor  # the first place that has a key tile; without one, `end` or a later place
    end: tl.tensor
    batch: tl.tensor  # the sequence at `start`
    first: tl.tensor  # where this sequence begins in the list


class Tile(NamedTuple):
    """A work tile: the query rows of one head, and its key tiles in a consumer's share."""

    batch_head: tl.tensor  # batch * H + head
    batch: tl.tensor
    head: tl.tensor
    kv_head: tl.tensor
    start: tl.tensor  # number of the first key tile
    key_tiles: tl.tensor
    of_head: tl.tensor  # number of key tiles of all shares
    keys: tl.tensor  # number of keys of the tile's sequence
    diagonal: tl.tensor  # diagonal of the tile's sequence
    end: tl.tensor  # where the sequence ends in the list


@triton.jit
def _place(row, problem, PACKED: tl.constexpr):
    """Return a row's place in memory, where the PACKED heads follow each other. In a tile, their rows alternate."""
    return row % PACKED * (problem.seq_q // PACKED) + row // PACKED


@triton.jit
def _row(batch, head, row, PACKED: tl.constexpr):
    """Return the coordinates of a tile's row in Q and O."""
    return [batch, head, row // PACKED, 0, 0] if PACKED > 1 else [batch, head, row, 0]


@triton.jit
def _key(start_n, tile, problem, COPIED: tl.constexpr):
    """Return the number of the first key that is loaded by the copy for the COPIED keys from start_n on.

    A sequence's last copy starts earlier, so that it ends with the sequence. Memory behind the sequence may hold
    NaN, and 0 * NaN would be NaN in P V. Before key 0, or before the first key of a page, TMA fills in zeros.
    """
    return tl.minimum(start_n, tile.keys - COPIED)


@triton.jit
def _tiles_of(keys, BLOCK_N: tl.constexpr):
    """Return how many key tiles a head with this number of keys has. A sequence without keys loads a tile without using it."""
    return tl.maximum(tl.cdiv(keys, BLOCK_N), 1)


@triton.jit
def _keys_of(batch, problem):
    """Return a sequence's number of keys. A length may be wrong, but not lead outside of the cache."""
    return tl.minimum(tl.maximum(tl.load(problem.lengths + batch), 0), problem.seq_k)


@triton.jit
def _tile(place, batch, first, share, problem, BLOCK_N: tl.constexpr, PACKED: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the work tile whose first key tile is at a place in the list. Its sequence `batch` begins at `first`."""
    keys = _keys_of(batch, problem)
    of_head = _tiles_of(keys, BLOCK_N)
    head = (place - first) // (SETUP + of_head)
    start = (place - first) % (SETUP + of_head) - SETUP
    diagonal = keys - problem.seq_q // PACKED if CAUSAL else 0  # the last query sees all keys
    key_tiles = tl.minimum(of_head - start, share.end - place)
    return Tile(
        batch * problem.heads + head, batch, head, head // problem.heads_per_kv, start, key_tiles, of_head, keys,
        diagonal, first + (SETUP + of_head) * problem.heads,
    )  # fmt: skip


@triton.jit
def _after(place, batch, first, tile):
    """Return the place of the next key tile in the list, its sequence, and where that begins. There may be none."""
    place += tile.key_tiles
    batch, first = tl.where(place == tile.end, batch + 1, batch), tl.where(place == tile.end, tile.end, first)
    return tl.where(tile.start + tile.key_tiles == tile.of_head, place + SETUP, place), batch, first


@triton.jit
def _add(a, b):
    """Return a + b; for `gl.associative_scan`."""
    return a + b


@gluon.jit
def _own_share(problem, w, BLOCK_N: gl.constexpr, SEQUENCES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Return the share of this CTA's consumer w. All shares have equally many places, except the last
    ones, which have fewer or none."""
    in_warp: gl.constexpr = gl.BlockedLayout([SEQUENCES // 32], [32], [4], [0])  # each warp has all, so warps need not meet
    sequence = gl.arange(0, SEQUENCES, in_warp)
    keys = gl.load(problem.lengths + sequence, mask=sequence < problem.batch, other=0)
    places = (SETUP + _tiles_of(gl.minimum(keys, problem.seq_k), BLOCK_N)) * problem.heads
    ends = gl.associative_scan(gl.where(sequence < problem.batch, places, 0), 0, _add)
    total = gl.max(ends, 0)
    size = gl.cdiv(total, gl.num_programs(0) * CONSUMERS)
    number = gl.program_id(0) * CONSUMERS + w
    start = number * size
    batch = gl.minimum(gl.sum((ends <= start).to(gl.int32), 0), problem.batch - 1)
    first = gl.max(gl.where(ends <= start, ends, 0), 0)
    of_head = SETUP + _tiles_of(_keys_of(batch, problem), BLOCK_N)
    empty = gl.maximum(SETUP - (start - first) % of_head, 0)
    return Share(number, size, start + empty, gl.minimum(start + size, total), batch, first)
