"""The scheduler: the order of the work tiles, and where a tile's rows and keys lie.

The functions that load and the functions that compute get the same `Tile`. Gluon kernels can call these Triton functions.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from common.kernels.hopper import ROWS

FIELDS = tl.constexpr(8)  # int32 of an entry in the list of tiles; its 5 values lie in one sector of 32 bytes


SEQUENCES = gl.constexpr(128)  # sequences whose lengths are read at once
BY_LANE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


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
    """A CTA's key tiles, as positions in the list of all key tiles. The list has the first head of the first sequence first."""

    start: tl.tensor
    end: tl.tensor
    batch: tl.tensor  # the sequence at `start`
    first: tl.tensor  # position of this sequence's first key tile


class Tile(NamedTuple):
    """A work tile: BLOCK_M query rows of one head, and those of their key tiles that are in a CTA's share."""

    batch_head: tl.tensor  # batch * H + head
    batch: tl.tensor
    head: tl.tensor
    kv_head: tl.tensor
    start_m: tl.tensor  # the tile's first query row
    start: tl.tensor  # number of the first key tile
    key_tiles: tl.tensor
    keys: tl.tensor  # number of keys of the tile's sequence
    diagonal: tl.tensor  # diagonal of the tile's sequence
    end: tl.tensor  # position behind the last key tile of the sequence, for all its heads


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
def _key_tiles(end_m, keys, diagonal, BLOCK_N: tl.constexpr, PACKED: tl.constexpr, CAUSAL: tl.constexpr):
    """Return how many key tiles the rows before end_m see."""
    keys = tl.minimum(end_m // PACKED + diagonal, keys) if CAUSAL else keys
    return tl.cdiv(keys, BLOCK_N)


@triton.jit
def _key(start_n, tile, problem, COPIED: tl.constexpr):
    """Return the number of the first key that is loaded by the copy for the COPIED keys from start_n on.

    A sequence's last copy starts earlier, so that it ends with the sequence. Memory behind the sequence may hold
    NaN, and 0 * NaN would be NaN in P V. Before key 0, or before the first key of a page, TMA fills in zeros.
    """
    return tl.minimum(start_n, tile.keys - COPIED)


@triton.jit
def _tile(
    position, batch, first, share, problem,
    BLOCK_N: tl.constexpr, PACKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return the work tile at a position in the list of all key tiles, where sequence `batch` begins at position `first`."""
    keys = tl.minimum(tl.maximum(tl.load(problem.lengths + batch), 0), problem.seq_k)
    of_head = tl.maximum(tl.cdiv(keys, BLOCK_N), 1)  # a sequence without keys loads a tile without using it
    head = (position - first) // of_head
    start = (position - first) % of_head
    diagonal = keys - problem.seq_q // PACKED if CAUSAL else 0  # the last query sees all keys
    # Start early, so that start_m // PACKED + diagonal is a multiple of ROWS // PACKED. Then a consumer's diagonal lies in
    # one key tile, its last. No other tile needs a mask, so the masked tile can be computed outside the loop. (Without a causal
    # mask, `diagonal` is 0.)
    start_m = -_rows_before(diagonal, PACKED)
    key_tiles = tl.minimum(of_head - start, share.end - position)
    return Tile(
        batch * problem.heads + head, batch, head, head // problem.heads_per_kv, start_m, start, key_tiles, keys, diagonal,
        first + of_head * problem.heads,
    )  # fmt: skip


@triton.jit
def _next(position, batch, first, tile):
    """Return the sequence at the position behind a tile of sequence `batch`, and where the sequence begins."""
    ends = position == tile.end
    return tl.where(ends, batch + 1, batch), tl.where(ends, tile.end, first)


@triton.jit
def _add(a, b):
    """Return a + b; for `gl.associative_scan`."""
    return a + b


@gluon.jit
def _key_tiles_from(sequence, lengths, batch, heads, seq_k, BLOCK_N: gl.constexpr):
    """Return how many key tiles all heads of a sequence have, for `SEQUENCES` sequences from `sequence` on."""
    number = sequence + gl.arange(0, SEQUENCES, BY_LANE)
    keys = gl.load(lengths + number, mask=number < batch, other=0)
    tiles = gl.maximum(gl.cdiv(gl.minimum(keys, seq_k), BLOCK_N), 1) * heads
    return number, gl.where(number < batch, tiles, 0)


@gluon.jit
def _total(lengths, batch, heads, seq_k, BLOCK_N: gl.constexpr):
    """Return the number of key tiles of all sequences."""
    total = 0
    for sequence in range(0, batch, SEQUENCES):
        _, tiles = _key_tiles_from(sequence, lengths, batch, heads, seq_k, BLOCK_N)
        total += gl.sum(tiles, 0)
    return total


@gluon.jit
def _share(problem, BLOCK_N: gl.constexpr):
    """Return this CTA's share. All shares have equally many key tiles, except the last."""
    total = _total(problem.lengths, problem.batch, problem.heads, problem.seq_k, BLOCK_N)
    size = gl.cdiv(total, gl.num_programs(0))
    start = gl.program_id(0) * size
    batch, first, end = 0, 0, 0
    for sequence in range(0, problem.batch, SEQUENCES):
        _, tiles = _key_tiles_from(sequence, problem.lengths, problem.batch, problem.heads, problem.seq_k, BLOCK_N)
        ends = end + gl.associative_scan(tiles, 0, _add)
        batch += gl.sum((ends <= start).to(gl.int32), 0)
        first = gl.maximum(first, gl.max(gl.where(ends <= start, ends, 0), 0))
        end = gl.max(ends, 0)
    return Share(start, gl.minimum(start + size, total), batch, first)
