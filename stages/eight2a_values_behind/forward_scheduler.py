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


class Problem(NamedTuple):
    """Sizes that all work tiles share."""

    batch_heads: tl.tensor  # B * H
    heads: tl.tensor
    heads_per_kv: tl.tensor
    tiles_m: tl.tensor  # number of query tiles of a head
    seq_q: tl.tensor
    seq_k: tl.tensor
    diagonal: tl.tensor  # with a causal mask, query i sees key j if j <= i + diagonal
    scale: tl.tensor


class Tile(NamedTuple):
    """A work tile: BLOCK_M query rows of one head, and the key tiles that they see."""

    batch_head: tl.tensor  # batch * H + head
    batch: tl.tensor
    head: tl.tensor
    kv_head: tl.tensor
    start_m: tl.tensor  # the tile's first query row
    key_tiles: tl.tensor


class NextTiles(NamedTuple):
    """Tile numbers that the producer passes on to the consumers."""

    number: gl.shared_memory_descriptor  # [Q_STAGES, 1]
    full: gl.shared_memory_descriptor  # barriers, producer → consumers: the number has been written


@triton.jit
def _key_tiles(end_m, problem, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Return how many key tiles the rows before end_m see."""
    keys = tl.minimum(end_m + problem.diagonal, problem.seq_k) if CAUSAL else problem.seq_k
    return tl.cdiv(keys, BLOCK_N)


@triton.jit
def _tile(number, problem, ROW_BYTES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the work tile whose number is `number`."""
    tile, batch_head = tile_and_head(
        problem.tiles_m, tl.cdiv(problem.seq_k, problem.heads_per_kv), ROW_BYTES, CAUSAL,
        program=number, programs=problem.batch_heads * problem.tiles_m,
    )  # fmt: skip
    # Start `diagonal % ROWS` rows early, so that start_m + diagonal is a multiple of ROWS. Then a consumer's diagonal lies in
    # one key tile, its last. No other tile needs a mask, so the masked tile can be computed outside the loop. (Without a causal
    # mask, `diagonal` is 0.)
    start_m = (problem.tiles_m - 1 - tile) * BLOCK_M - problem.diagonal % ROWS
    key_tiles = _key_tiles(start_m + BLOCK_M, problem, BLOCK_N, CAUSAL)
    head = batch_head % problem.heads
    return Tile(batch_head, batch_head // problem.heads, head, head // problem.heads_per_kv, start_m, key_tiles)


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
