"""How the host divides a forward's work among CTAs."""

import functools
from typing import NamedTuple

from common.kernels.order import busiest, mean_keys
from common.layout import cdiv

# Fixed strides cost time because CTAs end at different times. This time grows with the keys of a CTA's query tiles. A counter
# costs time for its launch, as much as LAUNCH_KEYS keys, and for each query tile, as much as TILE_KEYS keys. So if a CTA has n
# query tiles that see k keys each, fixed strides are faster if n * (k - TILE_KEYS) <= LAUNCH_KEYS. The constants were fitted on
# an H200 at D = 128 (results/constants-h200.json). With a causal mask, only TILE_KEYS counts: where only the launch spoke for
# fixed strides, they took up to 27 % longer on an H100 (results/ways-h100.json).
LAUNCH_KEYS = 1792
TILE_KEYS = 448
# Times up to D = 64, by the queries and keys of a tile: microseconds of a query tile, and of each of its key tiles. They were
# fitted to results/rows-h200.json for 192 queries, and to results/ways-h100.json for the other tiles.
TIMES = {(256, 64): (1.7, 1.03), (192, 64): (1.2, 0.81), (128, 128): (1.3, 1.07)}


@functools.lru_cache(maxsize=1024)
def queries_of(heads, seq_q, seq_k, diagonal, causal, programs) -> int:
    """Return how many queries the tiles have that are expected to be the fastest up to D = 64."""
    sizes = heads, seq_q, seq_k, diagonal, causal
    expected = {size[0]: busiest(*sizes, *size, programs, *times) for size, times in TIMES.items()}
    return min(expected, key=expected.get)


class Plan(NamedTuple):
    """How a forward's work is divided."""

    programs: int  # number of CTAs
    short: bool  # whether CTAs take their tiles in fixed strides, not from a counter
    per_round: int | None  # number of tiles in a round; see `_tile`


def plan(batch, heads, seq_q, keys, diagonal, causal, width, queries, programs) -> Plan:
    """Return the plan of a forward whose last query sees `keys` keys.

    `width` is the larger of D and Dv. A query tile has `queries` queries, and `programs` CTAs run at the same time.
    """
    tiles_m = cdiv(seq_q + diagonal % 64, queries)
    tiles = tiles_m * batch * heads
    turns = cdiv(tiles, programs)
    seen = mean_keys(seq_q, keys, diagonal, queries) if causal else keys
    # If every CTA has at most one tile, a counter has nothing to give out.
    short = turns == 1 or turns * (seen - TILE_KEYS) <= (0 if causal else LAUNCH_KEYS)
    programs, per_round = min(tiles, programs), None
    # In a round, each CTA takes one tile. If the number of CTAs is a multiple of tiles_m, a round has all tiles of some heads.
    # So use fewer CTAs, unless that adds a round. Not up to D = 64, where this order was slower on an H200.
    fewer = programs - programs % tiles_m
    if causal and short and width > 64 and fewer and cdiv(tiles, fewer) == turns:
        programs = per_round = fewer
    return Plan(programs, short, per_round)
