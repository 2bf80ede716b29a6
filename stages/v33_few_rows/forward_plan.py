"""How the host divides a forward's work into tiles, splits and launches."""

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
# If a CTA has at most this many key tiles, a guess's extra launches take longer than a running maximum (fitted on an H200).
SHORT = {16: 16, 32: 16, 64: 16, 128: 32, 256: 32}


def splits_of(tiles: int, key_tiles: int, programs: int) -> int:
    """Return the number of splits with which the tiles fill `programs` CTAs."""
    # NOTE: splits also cost time, for one more launch and for the bytes of their outputs; v34 predicts this time.
    return max(1, min(key_tiles, programs // tiles))


class Plan(NamedTuple):
    """How a forward's work is divided."""

    shape: Shape
    packed: int  # number of query heads side by side in a tile
    splits: int
    tiles: int  # query tiles of all heads; each is computed once per split
    short: bool  # true if a running maximum costs less than a guess's extra launches


def plan(batch, heads, kv_heads, seq_q, keys, diagonal, head_dim, value_dim, programs) -> Plan:
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
    splits = splits_of(tiles, key_tiles, programs)
    if few and key_tiles <= splits and shape.keys > ROWS.value:  # halve a CTA's only key tile to start matmuls sooner
        shape, key_tiles = shape._replace(keys=shape.keys // 2, kv_slots=shape.kv_slots * 2), key_tiles * 2
    packed = together if few or splits > 1 or tiles < triton.cdiv(seq_q, shape.queries) * batch * heads else 1
    before = diagonal % (64 // packed)  # positions before query 0
    tiles = triton.cdiv((seq_q + before) * packed, shape.queries) * batch * (heads // packed)
    turns = triton.cdiv(tiles * splits, programs)
    short = few or turns * triton.cdiv(key_tiles, splits) <= SHORT[width]
    return Plan(shape, packed, splits, tiles, short)
