"""How the host divides a forward's work among CTAs."""

import functools
from typing import NamedTuple

import triton


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
    128: Shape(queries=128, keys=128, kv_slots=2, q_slots=2, maxnreg=168),
    256: Shape(queries=128, keys=64, kv_slots=2, q_slots=1, maxnreg=168),
}
FEW_ROWS = TILES | dict.fromkeys((16, 32, 64), Shape(queries=128, keys=128, kv_slots=3, q_slots=2, maxnreg=168))
FEW_SQUARES = 8  # a CTA with at most this many squares of 128 x 128 scores takes FEW_ROWS, not 256 rows (fitted on an H200)
# Constants of `splits_of`, fitted to times on an H200. results/constants-h200.json has the times of all numbers of splits.
# `splits_of` counts time in units of 1/30 ns. In one unit, a CTA reads one element of K or V, if few other CTAs read.
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


class Plan(NamedTuple):
    """How a forward's work is divided."""

    shape: Shape
    packed: int  # number of query heads side by side in a tile
    tiles: int  # query tiles of all heads; each is computed once per split
    splits: int
    counted: bool  # whether CTAs take their tiles from a counter, not in fixed strides
    few: bool  # whether rows are few


def plan(batch, heads, kv_heads, seq_q, keys, diagonal, head_dim, value_dim, programs) -> Plan:
    """Return the plan of a forward with `seq_q` queries. The last query sees `keys` keys, and `programs` CTAs run at once."""
    width = max(head_dim, value_dim)
    per_kv = heads // kv_heads
    packed = per_kv if 64 % per_kv == 0 else 1
    # Rows are few if one tile holds all packed rows of a K/V head, or if tiles of 256 rows would keep too few CTAs busy.
    squares = triton.cdiv(seq_q * packed, 128) * triton.cdiv(keys, 128) * batch * (heads // packed)
    few = seq_q * packed <= 128 or (TILES[width].queries > 128 and squares <= FEW_SQUARES * programs)
    shape = (FEW_ROWS if few else TILES)[width]
    if triton.cdiv(seq_q * packed, shape.queries) == triton.cdiv(seq_q, shape.queries) * packed:
        packed = 1  # packing is useless if it does not make fewer tiles
    before = diagonal % (64 // packed)  # positions before query 0
    tiles_m = triton.cdiv((seq_q + before) * packed, shape.queries)
    tiles = tiles_m * batch * (heads // packed)
    splits, key_tiles = 1, triton.cdiv(keys, shape.keys)
    if few or tiles < programs:
        rows = min(seq_q * packed, shape.queries)
        splits = splits_of(tiles, key_tiles, rows, shape.keys, head_dim + value_dim, programs)
    if few and key_tiles <= splits and shape.keys > 64:  # halve a CTA's only key tile to start matmuls sooner
        shape = shape._replace(keys=shape.keys // 2, kv_slots=shape.kv_slots * 2)
    # A counter gives no CTA less work if no CTA has a second tile, or if all tiles are equal: one tile per head, or splits. If
    # squares are few, a counter saves less time than its launch takes.
    counted = not few and splits == 1 and tiles_m > 1 and tiles > programs
    return Plan(shape, packed, tiles, splits, counted, few)
