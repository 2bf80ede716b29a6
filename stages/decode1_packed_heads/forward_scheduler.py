"""The scheduler: which CTA computes which tile, and where a tile's rows and keys lie."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from common.kernels.hopper import ROWS
from common.kernels.order import tile_and_head


class Problem(NamedTuple):
    """Sizes that all CTAs share."""

    batch_heads: gl.tensor  # B * H / PACKED
    heads: gl.tensor  # H / PACKED
    heads_per_kv: gl.tensor
    tiles_m: gl.tensor  # number of query tiles of a head
    seq_q: gl.tensor  # rows of PACKED heads: queries * PACKED
    seq_k: gl.tensor
    diagonal: gl.tensor  # with a causal mask, query i sees key j if j <= i + diagonal
    scale: gl.tensor


class Tile(NamedTuple):
    """A work tile: BLOCK_M query rows of one head, and the key tiles that they see."""

    batch_head: gl.tensor  # batch * H + head
    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    start_m: gl.tensor  # the tile's first query row
    key_tiles: gl.tensor


class NextTiles(NamedTuple):
    """Tile numbers that the producer passes on to the consumers."""

    number: gl.shared_memory_descriptor  # [Q_STAGES, 1]
    full: gl.shared_memory_descriptor  # barriers, producer → consumers: the number has been written


@gluon.jit
def _rows_before(diagonal, PACKED: gl.constexpr):
    """Return how many rows before query 0 the first tile starts. Then a consumer's diagonal stays in one key tile."""
    return diagonal % (ROWS // PACKED) * PACKED


@gluon.jit
def _place(row, problem, PACKED: gl.constexpr):
    """Return a row's place in memory, where the PACKED heads follow each other. In a tile, their rows alternate."""
    return row % PACKED * (problem.seq_q // PACKED) + row // PACKED


@gluon.jit
def _row(batch, head, row, PACKED: gl.constexpr):
    """Return the coordinates of a tile's row in Q and O."""
    return [batch, head, row // PACKED, 0, 0] if PACKED > 1 else [batch, head, row, 0]


@gluon.jit
def _tile(
    number, problem, ROW_BYTES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PACKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Return the work tile whose number is `number`."""
    tile, batch_head = tile_and_head(
        problem.tiles_m, gl.cdiv(problem.seq_k, problem.heads_per_kv), ROW_BYTES, CAUSAL,
        program=number, programs=problem.batch_heads * problem.tiles_m,
    )  # fmt: skip
    start_m = (problem.tiles_m - 1 - tile) * BLOCK_M - _rows_before(problem.diagonal, PACKED)
    seq_k = gl.minimum((start_m + BLOCK_M) // PACKED + problem.diagonal, problem.seq_k) if CAUSAL else problem.seq_k
    keys = gl.cdiv(seq_k, BLOCK_N)
    head = batch_head % problem.heads
    return Tile(batch_head, batch_head // problem.heads, head, head // problem.heads_per_kv, start_m, keys)


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
