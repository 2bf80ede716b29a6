"""The scheduler: which CTA computes which keys, and in which order it takes the query tiles that see them.

A loop only counts steps. `_query_tile` finds a step's head and query tile. Gluon kernels can call these Triton functions.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from common.kernels.hopper import ROWS, slot_and_phase
from common.kernels.order import heads_of_group, tile_and_head

CONSUMERS = tl.constexpr(2)
# Without a mask, CTAs of a head start at different steps, so that they seldom meet at a query tile, where they would wait for
# each other. They start fewer than APART steps apart, so that the tiles in use, 2 MB, stay in the L2 cache.
APART = tl.constexpr(32)


class Problem(NamedTuple):
    """Sizes that all CTAs share."""

    kv_heads: tl.tensor
    heads_per_kv: tl.tensor
    seq_q: tl.tensor
    seq_k: tl.tensor
    head_tiles: tl.tensor  # number of query tiles of a head, of all its sequences
    diagonal: tl.tensor  # with a causal mask, query i sees key j if j <= i + diagonal
    num_sms: tl.tensor  # number of SMs; each runs one CTA at a time
    tiles: tl.tensor  # work tiles: key tiles of all heads, times `shares` and `splits`; persistent CTAs are fewer
    shares: tl.tensor | None  # number of equal shares of a K/V head's query heads; None if each key tile has one CTA
    splits: tl.tensor | None  # number of CTAs that split the steps of a share; None if each key tile has one CTA
    scale: tl.tensor


class Tile(NamedTuple):
    """A work tile: BLOCK_N keys of one head, and the query tiles of a share that see them, or a split of these query tiles."""

    batch: tl.tensor  # coordinate of the tile's sequence in Q and dO
    kv_batch: tl.tensor  # coordinate of the tile's sequence in K and V
    kv_head: tl.tensor
    head: tl.tensor  # the first query head of the share
    row: tl.tensor  # number of that head's first query tile, of this sequence, among the query tiles of all heads
    head_tiles: tl.tensor  # as in `Problem`
    heads: tl.tensor  # number of query heads of the share
    start_n: tl.tensor  # the first key
    key: tl.tensor  # the first key's coordinate in K and V
    keys: tl.tensor  # number of keys from start_n on
    query: tl.tensor  # coordinate in Q and dO of query tile 0
    diagonal: tl.tensor  # with a causal mask, query i sees key j if j <= i + diagonal
    first: tl.tensor  # the first query tile that sees one of the keys
    entry: tl.tensor  # the step at which this CTA enters the order of query tiles; see `_query_tile`
    rising: tl.tensor  # number of query tiles in rising order; the others come after them, the last one first
    tiles_m: tl.tensor  # number of query tiles of a head, of this sequence
    all_steps: tl.tensor  # number of query tiles from `first` on, of all these query heads
    steps: tl.tensor  # number of the steps that this CTA takes
    unseen: tl.tensor  # number of steps at the start whose queries see no key of the second consumer
    masked: tl.tensor  # number of steps at the start that need a mask


class NextTiles(NamedTuple):
    """Tile numbers that the producer passes on to the other warps, as in the forward."""

    number: gl.shared_memory_descriptor  # [3, 1]
    full: gl.shared_memory_descriptor  # barriers, producer → consumers: the number has been written


@triton.jit
def _tile(number, problem, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the work tile whose number is `number`."""
    # A share of a K/V head's query heads is a head of its own for the order of tiles. So CTAs that run at the same time use few
    # query heads, whose Q, dO and dQ stay in the L2 cache.
    shares = 1 if problem.shares is None else problem.shares
    heads = problem.heads_per_kv // shares
    key_tiles = problem.tiles
    if problem.splits is not None:  # a key tile's CTAs have consecutive numbers
        split = number % problem.splits
        number = number // problem.splits
        key_tiles = problem.tiles // problem.splits
    BLOCK_N: tl.constexpr = CONSUMERS * ROWS  # keys of a CTA; their dK and dV stay in registers
    ROW_BYTES: tl.constexpr = 6 * HEAD_DIM + 2 * VALUE_DIM  # bytes of a query's Q, dQ accumulator and dO
    tiles_n = tl.cdiv(problem.seq_k, BLOCK_N)
    tile_n, batch_share = tile_and_head(tiles_n, problem.seq_q, ROW_BYTES, CAUSAL, program=number, programs=key_tiles)
    start_n = tile_n * BLOCK_N  # the most queries see the first keys, so their tile is tile 0 and starts first
    batch = batch_share // (problem.kv_heads * shares)
    kv_batch, key, keys, query, diagonal = batch, start_n, problem.seq_k - start_n, 0, problem.diagonal
    tiles_m, row = problem.head_tiles, batch_share * heads * problem.head_tiles
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
    masked = tl.where(keys < BLOCK_N, tiles, masked)
    # CTAs that read a query tile at the same time share it through the L2 cache. So each wave of `num_sms` CTAs has one order
    # of query tiles, backwards or forwards, and the orders alternate. (Masked tiles come first, as `_accumulate` expects.)
    # Backwards: a wave's CTAs start together at the last query tile, and so read the same tiles. CTAs with later keys have
    # fewer tiles, so the CTAs end one by one.
    # Forwards: the next wave's CTAs therefore start one by one. Each has later keys, and starts at about the query tile that
    # the wave's earlier CTAs have reached. So they read the same tiles, and end together.
    # A group of heads (see `tile_and_head`) starts a new wave, because groups share no query tiles. With one query head for
    # each K/V head, the few query tiles in use stay in the cache in any order.
    rising = tiles
    if CAUSAL:
        group = tiles_n * heads_of_group(problem.seq_q, key_tiles // tiles_n, ROW_BYTES)
        waves = tl.cdiv(group, problem.num_sms)  # number of waves of a group
        wave = number // group * waves + number % group // problem.num_sms  # number of earlier waves, of all groups
        rising = tl.where((heads > 1) & (wave % 2 == 0), masked, tiles)
    # CTAs that meet at a query tile wait for each other: the first one stores its dQ, and the others may add theirs only after
    # that (`_take_ticket`). A causal mask keeps those apart that start together, each at its diagonal. Without a mask, all CTAs
    # of a head would start at the same query tile, so each enters the order of query tiles at a step of its own, `entry`. Any
    # step may come first, because either all steps or none need a mask.
    entry = 0
    if not CAUSAL:
        entry = start_n // BLOCK_M % APART % (tiles * heads)
    share = batch_share % (problem.kv_heads * shares)
    all_steps = tiles * heads
    steps = all_steps
    unseen *= heads
    masked *= heads
    if problem.splits is not None:
        begin = split * all_steps // problem.splits
        steps = (split + 1) * all_steps // problem.splits - begin
        # dK waits for the last dQ, so a CTA takes at least one step. If the key tile has fewer steps than CTAs, a CTA without
        # a step takes one that another CTA also takes. It masks all keys, so its dQ, dK and dV are zeros.
        keys = tl.where(steps > 0, keys, 0)
        masked = tl.where(steps > 0, masked - begin, 1)
        steps = tl.maximum(steps, 1)
        masked = tl.minimum(tl.maximum(masked, 0), steps)
        unseen = tl.minimum(tl.maximum(unseen - begin, 0), steps)
        entry += begin
    return Tile(
        batch, kv_batch, share // shares, share * heads, row, problem.head_tiles, heads, start_n, key, keys, query, diagonal,
        first, entry, rising, tiles_m, all_steps, steps, unseen, masked,
    )  # fmt: skip


@triton.jit
def _query_tile(step, tile):
    """Return the head and the query tile of a step, and the tile's number among the query tiles of all heads.

    The steps take one query tile of each query head that shares the keys, then the next query tile of each head. The first
    `rising` query tiles come in rising order, then the others, the last one first. A CTA enters this order at `entry`, and
    takes the steps before `entry` last.
    """
    step += tile.entry
    step = tl.where(step < tile.all_steps, step, step - tile.all_steps)
    # CTAs that take the same query tile number at the same time, to share tiles in the L2 cache, start at different heads. So
    # they seldom meet, and no CTA is the first at all heads, where the others would wait each time. Steps that need a mask stay
    # the first ones, because heads rotate only within the steps of a query tile number.
    shared = (step + tile.start_n // (CONSUMERS * ROWS)) % tile.heads
    done = step // tile.heads
    number = tl.where(done < tile.rising, tile.first + done, tile.tiles_m - 1 + tile.rising - done)
    return tile.head + shared, number, tile.row + shared * tile.head_tiles + number


@gluon.jit
def _pass_on(number, next_tiles, turn):
    """Tell the other warps which tile comes after this CTA's tile `turn`. A number past the last tile tells them to end."""
    slot, _ = slot_and_phase(turn, next_tiles.number.shape[0])
    next_tiles.number.index(slot).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(next_tiles.full.index(slot), count=1)


@gluon.jit
def _next(next_tiles, turn, tiles, PERSISTENT: gl.constexpr, WARPS: gl.constexpr = 4):
    """Return the number of the tile after this CTA's tile `turn`, once the producer has passed the number on. If CTAs are not
    persistent, return a number past the last tile."""
    number = tiles
    if PERSISTENT:
        slot, phase = slot_and_phase(turn, next_tiles.number.shape[0])
        mbarrier.wait(next_tiles.full.index(slot), phase)
        number = gl.max(next_tiles.number.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    return number
