"""The scheduler: which CTA computes which tile, and where a tile's rows and keys lie."""

from typing import NamedTuple

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
    sample_failed: gl.tensor  # LATELY flags
    tile_failed: gl.tensor  # a flag for each tile


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
    splits: gl.tensor  # number of parts into which the keys are split
    is_split: gl.tensor | None  # None if keys are not split; the compiler then leaves out the code for splits
    per_round: gl.tensor | None  # number of tiles in a round; None if tiles come in `tile_and_head`'s order


class Tile(NamedTuple):
    """A work tile: BLOCK_M query rows of one head, and the key tiles that they see."""

    batch_head: gl.tensor  # batch * H + head
    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    start_m: gl.tensor  # the tile's first query row
    key_tiles: gl.tensor
    split: gl.tensor  # number of this tile's split
    step: gl.tensor  # number of keys from the start of a key tile to the start of the split's next key tile


class NextTiles(NamedTuple):
    """Tile numbers that the producer passes on to the consumers."""

    number: gl.shared_memory_descriptor  # [Q_STAGES + 1, 1]
    full: gl.shared_memory_descriptor  # a barrier for each slot: the number has been written


@gluon.jit
def _rows_before(diagonal, PACKED: gl.constexpr):
    """Return how many rows before query 0 the first tile starts. Then a consumer's diagonal stays in one key tile."""
    return diagonal % (ROWS // PACKED) * PACKED


@gluon.jit
def _share(tiles, split, problem):
    """Return how many of `tiles` key tiles a split has: tile number `split`, and every `splits`-th tile after that tile."""
    return gl.cdiv(gl.maximum(tiles - split, 0), problem.splits) if problem.is_split is not None else tiles


@gluon.jit
def _tile(
    number, problem, ROW_BYTES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PACKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Return the work tile whose number is `number`.

    In a round, each CTA takes one tile, and all CTAs together take all tiles of some heads. Heads start their longest tile
    first in one round, and last in the next round. So a CTA with a long tile gets a short tile next.
    """
    split = 0
    if problem.is_split is not None:
        split = number % problem.splits
        number = number // problem.splits
    if problem.per_round is not None:
        tile, batch_head = number % problem.tiles_m, number // problem.tiles_m
        tile = gl.where(number // problem.per_round % 2 == 0, tile, problem.tiles_m - 1 - tile)
    else:
        tile, batch_head = tile_and_head(
            problem.tiles_m, gl.cdiv(problem.seq_k, problem.heads_per_kv), ROW_BYTES, CAUSAL,
            program=number, programs=problem.batch_heads * problem.tiles_m,
        )  # fmt: skip
    start_m = (problem.tiles_m - 1 - tile) * BLOCK_M - _rows_before(problem.diagonal, PACKED)
    seq_k = gl.minimum((start_m + BLOCK_M) // PACKED + problem.diagonal, problem.seq_k) if CAUSAL else problem.seq_k
    keys = _share(gl.cdiv(seq_k, BLOCK_N), split, problem)
    if problem.is_split is not None:
        keys = gl.maximum(keys, 1)  # a split without key tiles loads one tile and does not use it
    step = BLOCK_N * problem.splits
    head = batch_head % problem.heads
    return Tile(batch_head, batch_head // problem.heads, head, head // problem.heads_per_kv, start_m, keys, split, step)


@gluon.jit
def _place(row, problem, PACKED: gl.constexpr):
    """Return a row's place in memory, where the PACKED heads follow each other. In a tile, their rows alternate."""
    return row % PACKED * (problem.seq_q // PACKED) + row // PACKED


@gluon.jit
def _seen(start_m, problem, BLOCK_N: gl.constexpr, PACKED: gl.constexpr, CAUSAL: gl.constexpr):
    """Return how many key tiles a consumer's rows see. The rows start at start_m."""
    end = (start_m + ROWS) // PACKED + problem.diagonal
    return gl.cdiv(gl.minimum(end, problem.seq_k) if CAUSAL else problem.seq_k, BLOCK_N)


@gluon.jit
def _to_compute(start_m, tile, problem, BLOCK_N: gl.constexpr, PACKED: gl.constexpr, MODE: gl.constexpr, CAUSAL: gl.constexpr):
    """Return a consumer's number of key tiles, the last key that row start_m sees, and whether the consumer is idle."""
    seen = _seen(start_m, problem, BLOCK_N, PACKED, CAUSAL)
    last = start_m // PACKED + problem.diagonal
    idle = False
    if problem.is_split is not None or MODE == "running":
        seen = gl.minimum(_share(seen, tile.split, problem), tile.key_tiles)
        idle = (seen <= 0) | (start_m >= problem.seq_q)  # no keys, or no rows
        seen = gl.where(idle, 1, seen)  # an idle consumer computes one tile, whose result is not used
        last = gl.where(idle, 2**30, last)
    return seen, last, idle


@gluon.jit
def _row(batch, head, row, PACKED: gl.constexpr):
    """Return the coordinates of a tile's row in Q and O."""
    return [batch, head, row // PACKED, 0, 0] if PACKED > 1 else [batch, head, row, 0]


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _begun(tiles, state):
    """Return a number above the numbers of all tiles that the first launch started. It may be too high, because this launch
    raises the same counter."""
    return gl.minimum(gl.num_programs(0) + gl.load(state.counter), tiles)


@gluon.jit
def _state(state_ptr):
    """Return the pointers of `State`."""
    return State(state_ptr, state_ptr + 1, state_ptr + 2, state_ptr + 2 + LATELY)


@gluon.jit
def _leave(number, state):
    """Leave a tile to the second launch, as if it had failed."""
    gl.store(state.any_failed, 1)
    gl.store(state.tile_failed + number, 1)


@gluon.jit
def _next_failed(number, others, begun, state):
    """Search from tile `number` on. Skip `others` failed tiles and return the number of the next failed tile, or a number of at
    least `begun` if no tile is left."""
    offs = gl.arange(0, LOOKED_AT, gl.BlockedLayout([LOOKED_AT // 32], [32], [1], [0]))
    while (others >= 0) & (number < begun):
        failed = gl.load(state.tile_failed + number + offs, mask=number + offs < begun, other=0)
        number += gl.sum((gl.associative_scan(failed, 0, _add) <= others).to(gl.int32), 0)
        others -= gl.sum(failed, 0)
    return number


@gluon.jit
def _next_again(failed, others, begun, state):
    """Return `_next_failed`'s result, and the tile to take: that failed tile or, if none is left, a tile that never started."""
    failed = _next_failed(failed, others, begun, state)
    number = failed
    if failed >= begun:
        number = gl.num_programs(0) + gl.atomic_add(state.counter, 1)
    return failed, number


@gluon.jit
def _in_vain(number, tiles, state):
    """Return whether more than a quarter of LATELY earlier tiles failed. The latest LATELY tiles do not count, because they may
    still run. For the first tiles, the samples count as earlier tiles."""
    before = gl.maximum(number + 1 - LATELY, 0) + gl.arange(0, LATELY, gl.BlockedLayout([LATELY // 32], [32], [1], [0]))
    failed = gl.load(state.sample_failed + before, mask=before - LATELY < tiles, other=0, volatile=True)
    return gl.sum(failed, 0) * 4 > LATELY


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
