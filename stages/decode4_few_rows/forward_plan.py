"""How the host divides a forward's work among CTAs."""

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


def splits_of(tiles: int, key_tiles: int, programs: int) -> int:
    """Return the number of splits with which the tiles fill `programs` CTAs."""
    # NOTE: splits also cost time, for one more launch and for the bytes of their outputs; decode5 predicts this time.
    return max(1, min(key_tiles, programs // tiles))


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
    key_tiles = triton.cdiv(keys, shape.keys)
    splits = splits_of(tiles, key_tiles, programs)
    if few and key_tiles <= splits and shape.keys > 64:  # halve a CTA's only key tile to start matmuls sooner
        shape = shape._replace(keys=shape.keys // 2, kv_slots=shape.kv_slots * 2)
    # A counter gives no CTA less work if no CTA has a second tile, or if all tiles are equal: one tile per head, or splits. If
    # squares are few, a counter saves less time than its launch takes.
    counted = not few and splits == 1 and tiles_m > 1 and tiles > programs
    return Plan(shape, packed, tiles, splits, counted, few)
