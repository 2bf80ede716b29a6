"""How the host divides a forward's work into tiles, splits and launches."""

import functools
from typing import NamedTuple

import triton

from common.kernels.hopper import ROWS


class Shape(NamedTuple):
    """Sizes of a work tile, and numbers of buffers."""

    queries: int  # query rows: 64 for each of two or four consumers
    keys: int  # keys of a key tile
    kv_slots: int  # buffers of K and V
    q_slots: int  # buffers of Q
    maxnreg: int  # registers per thread at the launch, before the roles divide the registers anew


# TILES and FEW_ROWS are indexed by the larger of D and Dv. FEW_ROWS has shapes for few query rows: longer key tiles, which keep
# more loads of K and V in flight.
TILES = dict.fromkeys((16, 32, 64), Shape(queries=256, keys=64, kv_slots=6, q_slots=2, maxnreg=96)) | {
    128: Shape(queries=128, keys=64, kv_slots=4, q_slots=2, maxnreg=168),
    256: Shape(queries=128, keys=64, kv_slots=2, q_slots=1, maxnreg=168),
}
FEW_ROWS = TILES | dict.fromkeys((16, 32, 64), Shape(queries=128, keys=128, kv_slots=3, q_slots=2, maxnreg=168))
FEW_ROWS |= {128: Shape(queries=128, keys=128, kv_slots=2, q_slots=2, maxnreg=168)}
FEW_SQUARES = 8  # a CTA with at most this many squares of 128 x 128 scores takes FEW_ROWS, not 256 rows (fitted on an H200)
# Failed tiles run again with a running maximum, for which longer key tiles are faster.
TILES_AGAIN = TILES | {128: FEW_ROWS[128]}
FIRST_KEYS = 16  # number of first keys in a row's guess
# A running maximum costs extra time for each key tile. A guess costs extra time for its launches, as much as SHORT key tiles,
# and for each query tile's first keys, as much as FEW_KEY_TILES key tiles. So if a CTA has n query tiles with k key tiles each,
# a running maximum is faster if n * (k - FEW_KEY_TILES) <= SHORT (fitted to results/constants-h200.json, and as good for
# constants-h100.json).
SHORT = {16: 16, 32: 16, 64: 16, 128: 28, 256: 32}
FEW_KEY_TILES = {16: 0, 32: 0, 64: 3, 128: 7, 256: 22}
# Constants of `splits_of`, fitted to times on an H200 (common/measure/constants.py measures more). `splits_of` counts time in
# units of 1/30 ns. In one unit, a CTA reads one element of K or V, if few other CTAs read.
CROWDED = 0.75  # reading takes this fraction longer if all 132 CTAs read, because memory is only fast enough for 75 CTAs
ROWS_READ = 75  # if a tile has more rows than this, computing takes longer than reading keys
MERGE = 75_000  # time of the merge's launch


@functools.cache
def splits_of(tiles: int, key_tiles: int, rows: int, keys: int, width: int, programs: int) -> int:
    """Return the smallest number of splits whose predicted time is within 1 % of the best time.

    A CTA takes up to ceil(tiles * splits / programs) query tiles one after the other, with ceil(key_tiles / splits) key tiles
    each. Then one more launch merges the splits. All CTAs together write the splits' outputs in float32, and read them again
    for the merge.

    Args:
        tiles: number of query tiles of all heads. Each has `rows` rows.
        key_tiles: number of key tiles of each query tile. Each has `keys` keys.
        width: number of elements of a key in K and V together.
        programs: number of CTAs that run at the same time.
    """

    def cost(splits):
        turns = triton.cdiv(tiles * splits, programs)
        busy = tiles * splits / (turns * programs)
        key_tile = keys * width * max(1 + CROWDED * busy**2, rows / ROWS_READ)
        parts = 2 * tiles * splits * rows * width * (1 + CROWDED) / programs
        return turns * triton.cdiv(key_tiles, splits) * key_tile + (MERGE + parts) * (splits > 1)

    costs = {splits: cost(splits) for splits in range(1, min(key_tiles, programs) + 1)}
    return next(splits for splits, cost in costs.items() if cost <= 1.01 * min(costs.values()))


def mean_keys(seq_q: int, keys: int, diagonal: int, queries: int) -> float:
    """Return about how many keys a tile of `queries` queries sees with a causal mask, on average.

    Query i of seq_q sees the keys up to i + diagonal, and the last query sees `keys` keys. A tile sees what its last query
    sees.
    """
    seeing = seq_q + min(diagonal, 0)  # number of queries that see a key
    rising = keys - max(diagonal, 0)  # number of these that see fewer keys than the last query, plus 1
    return (keys * seeing - rising * max(rising - queries, 0) / 2) / seq_q


class Plan(NamedTuple):
    """How a forward's work is divided."""

    shape: Shape
    packed: int  # number of query heads side by side in a tile
    splits: int
    tiles: int  # query tiles of all heads; each is computed once per split
    programs: int  # number of CTAs that the host launches
    per_round: int | None  # number of tiles in a round; see `_tile`
    short: bool  # true if a running maximum costs less than a guess


def plan(batch, heads, kv_heads, seq_q, keys, diagonal, causal, head_dim, value_dim, programs) -> Plan:
    """Return the best plan for `seq_q` queries. The last query sees `keys` keys, and `programs` CTAs run at the same time."""
    width = max(head_dim, value_dim)
    per_kv = heads // kv_heads
    together = per_kv if 64 % per_kv == 0 else 1
    rows = seq_q * together
    groups = batch * heads // together
    # Rows are few if one tile holds all packed rows of a K/V head, or if tiles of 256 rows would keep too few CTAs busy.
    squares = triton.cdiv(rows, 128) * triton.cdiv(keys, 128) * groups
    few = rows <= 128 or (TILES[width].queries > 128 and squares <= FEW_SQUARES * programs)
    shape = (FEW_ROWS if few else TILES)[width]
    tiles = triton.cdiv(rows, shape.queries) * groups
    key_tiles = triton.cdiv(keys, shape.keys)
    splits = 1
    if few or tiles < programs:
        splits = splits_of(tiles, key_tiles, min(rows, shape.queries), shape.keys, head_dim + value_dim, programs)
    if few and key_tiles <= splits and shape.keys > ROWS.value:  # halve a CTA's only key tile to start matmuls sooner
        shape, key_tiles = shape._replace(keys=shape.keys // 2, kv_slots=shape.kv_slots * 2), key_tiles * 2
    packed = together if few or splits > 1 or tiles < triton.cdiv(seq_q, shape.queries) * batch * heads else 1
    before = diagonal % (64 // packed)  # positions before query 0
    tiles_m = triton.cdiv((seq_q + before) * packed, shape.queries)
    tiles = tiles_m * batch * (heads // packed)
    turns = triton.cdiv(tiles * splits, programs)
    if causal:
        key_tiles = mean_keys(seq_q, keys, diagonal, shape.queries // packed) / shape.keys
    short = few or turns * (key_tiles / splits - FEW_KEY_TILES[width]) <= SHORT[width]
    programs = min(tiles * splits, programs)
    per_round, fewer = None, programs - programs % tiles_m  # with so many CTAs, a round has all tiles of some heads
    if causal and short and splits == 1 and width > 64 and fewer and triton.cdiv(tiles, fewer) == turns:
        programs = per_round = fewer  # not up to D = 64, where v51's order was faster
    return Plan(shape, packed, splits, tiles, programs, per_round, short)
