"""Which CTA computes which tile, and where a tile's rows and keys lie."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from common.kernels.hopper import ROWS


class Problem(NamedTuple):
    """Sizes that all CTAs share."""

    batch_heads: gl.tensor  # B * H
    heads: gl.tensor
    heads_per_kv: gl.tensor
    group: gl.tensor  # heads whose tiles follow each other
    tiles_m: gl.tensor  # query tiles of a head
    seq_q: gl.tensor
    seq_k: gl.tensor
    diagonal: gl.tensor  # with a causal mask, query i sees key j where j <= i + diagonal
    scale: gl.tensor


class Tile(NamedTuple):
    """A work tile: BLOCK_M query rows of one head, and the key tiles that they see."""

    batch_head: gl.tensor  # batch * H + head
    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    start_m: gl.tensor  # its first query row
    key_tiles: gl.tensor


class NextTiles(NamedTuple):
    """The numbers of tiles, which the producer passes on to the consumers."""

    number: gl.shared_memory_descriptor  # [Q_STAGES, 1]
    full: gl.shared_memory_descriptor  # a barrier for each slot: the number has been written


@gluon.jit
def _tile(number, problem, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the work tile with a number.

    Tiles of `group` heads follow each other, so that the K and V of these heads stay in the L2 cache; with a mask the longest
    tiles, of the last rows, come first.
    """
    first = number // (problem.group * problem.tiles_m) * problem.group
    inside = number % (problem.group * problem.tiles_m)
    group = gl.minimum(problem.group, problem.batch_heads - first)
    start_m = inside // group * BLOCK_M
    seq_k = problem.seq_k
    if CAUSAL:
        start_m = (problem.tiles_m - 1) * BLOCK_M - start_m - problem.diagonal % ROWS
        seq_k = gl.minimum(seq_k, start_m + BLOCK_M + problem.diagonal)
    keys = gl.cdiv(seq_k, BLOCK_N)
    batch_head = first + inside % group
    head = batch_head % problem.heads
    return Tile(batch_head, batch_head // problem.heads, head, head // problem.heads_per_kv, start_m, keys)


@gluon.jit
def _pass_on(number, next_tiles, slot):
    """Tell the consumers a tile's number; one past the last tile tells them to end."""
    next_tiles.number.index(slot).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(next_tiles.full.index(slot), count=1)


@gluon.jit
def _next(next_tiles, slot, phase):
    """Return the number that the producer has passed on."""
    mbarrier.wait(next_tiles.full.index(slot), phase)
    return gl.max(next_tiles.number.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
