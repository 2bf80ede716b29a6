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

LATELY = gl.constexpr(128)  # number of tiles to look at; if over a quarter of them failed, most other tiles probably fail, too
LOOKED_AT = gl.constexpr(512)  # number of flags that a warp loads at once


class State(NamedTuple):
    """Pointers into the int32 tensor that all CTAs share: to a counter, and to flags."""

    counter: gl.tensor  # tiles taken so far, except each CTA's first tile
    any_failed: gl.tensor  # 1 if the second launch has work
    given_up: gl.tensor  # 1 if the CTAs of the first launch take no further tiles
    sample_failed: gl.tensor  # LATELY flags of samples, directly before those of the tiles
    tile_failed: gl.tensor  # a flag for each tile


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
    """Tile numbers that the producer passes on to the consumers. So only one warp searches for failed tiles."""

    number: gl.shared_memory_descriptor  # [Q_STAGES + 1, 1]; the last slot has a CTA's first tile
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
def _state(state_ptr):
    """Return the pointers of `State`."""
    return State(state_ptr, state_ptr + 1, state_ptr + 2, state_ptr + 3, state_ptr + 3 + LATELY)


@gluon.jit
def _add(a, b):
    """Return a + b; for `gl.associative_scan`."""
    return a + b


@gluon.jit
def _next_failed(number, skip, tiles, state):
    """Search the tiles from `number` to `tiles` - 1. Skip `skip` failed tiles and return the number of the next failed tile, or
    a number of at least `tiles` if no tile is left.

    If N CTAs take each N-th failed tile, they get equally many, up to one, even if failed tiles lie close together. For this,
    each CTA has to count all flags, so its producer loads many flags at once.
    """
    offs = gl.arange(0, LOOKED_AT, gl.BlockedLayout([LOOKED_AT // 32], [32], [1], [0]))
    while (skip >= 0) & (number < tiles):
        failed = gl.load(state.tile_failed + number + offs, mask=number + offs < tiles, other=0)
        number += gl.sum((gl.associative_scan(failed, 0, _add) <= skip).to(gl.int32), 0)
        skip -= gl.sum(failed, 0)
    return number


@gluon.jit
def _started(tiles, state):
    """Return a bound: the first launch started no tile with this number or a higher one. It may be too high, because this
    launch raises the same counter."""
    return gl.minimum(gl.num_programs(0) + gl.load(state.counter), tiles)


@gluon.jit
def _next_again(failed, skip, started, state):
    """Return `_next_failed`'s result, and the tile to take: that failed tile or, if none is left, a tile that never started."""
    failed = _next_failed(failed, skip, started, state)
    number = failed
    if failed >= started:
        number = gl.num_programs(0) + gl.atomic_add(state.counter, 1)
    return failed, number


@gluon.jit
def _gives_up(number, state):
    """Return whether a CTA takes no further tile after tile `number`: more than a quarter of LATELY earlier tiles failed, or
    another CTA has given up. The latest LATELY tiles do not count, because they may still run. For the first tiles, the
    samples count as earlier tiles.

    Failed tiles often lie close together, as the tiles of a head do. So without the second rule, a few CTAs that look at other
    tiles would compute all further tiles alone.
    """
    # The samples' flags lie directly before the tiles' flags. So this window slides from the ones to the others.
    before = gl.maximum(number + 1 - LATELY, 0) + gl.arange(0, LATELY, gl.BlockedLayout([LATELY // 32], [32], [1], [0]))
    failed = gl.load(state.sample_failed + before, volatile=True)
    given_up = gl.load(state.given_up, volatile=True)
    gives_up = gl.sum(failed + given_up * LATELY, 0) * 4 > LATELY
    if gives_up:
        gl.store(state.given_up, 1)
    return gives_up


@gluon.jit
def _leave(number, state):
    """Leave a tile that has not begun to the second launch, as if it had failed."""
    gl.store(state.any_failed, 1)
    gl.store(state.tile_failed + number, 1)


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
