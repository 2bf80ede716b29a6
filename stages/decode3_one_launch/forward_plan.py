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


# TILES is indexed by the larger of D and Dv. No tuner chooses the tiles, because Gluon's layouts and buffers depend on them.
TILES = dict.fromkeys((16, 32, 64), Shape(queries=256, keys=64, kv_slots=6, q_slots=2, maxnreg=96)) | {
    128: Shape(queries=128, keys=128, kv_slots=2, q_slots=2, maxnreg=168),
    256: Shape(queries=128, keys=64, kv_slots=2, q_slots=1, maxnreg=168),
}


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


def plan(batch, heads, kv_heads, seq_q, keys, diagonal, head_dim, value_dim, programs) -> Plan:
    """Return the plan of a forward with `seq_q` queries. The last query sees `keys` keys, and `programs` CTAs run at once."""
    shape = TILES[max(head_dim, value_dim)]
    per_kv = heads // kv_heads
    packed = per_kv if 64 % per_kv == 0 else 1
    if triton.cdiv(seq_q * packed, shape.queries) == triton.cdiv(seq_q, shape.queries) * packed:
        packed = 1  # packing is useless if it does not make fewer tiles
    before = diagonal % (64 // packed)  # positions before query 0
    tiles_m = triton.cdiv((seq_q + before) * packed, shape.queries)
    tiles = tiles_m * batch * (heads // packed)
    splits = splits_of(tiles, triton.cdiv(keys, shape.keys), programs)
    # A counter gives no CTA less work if no CTA has a second tile, or if all tiles are equal: one tile per head, or splits.
    counted = splits == 1 and tiles_m > 1 and tiles > programs
    return Plan(shape, packed, tiles, splits, counted)
