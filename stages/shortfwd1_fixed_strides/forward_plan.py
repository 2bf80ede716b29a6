"""How the host divides a forward's work among CTAs."""

from typing import NamedTuple

import triton

# Fixed strides cost time because CTAs end at different times. This time grows with the keys of a CTA's query tiles. A counter
# costs time for its launch, as much as LAUNCH_KEYS keys, and for each query tile, as much as TILE_KEYS keys. So if a CTA has n
# query tiles that see k keys each, fixed strides are faster if n * (k - TILE_KEYS) <= LAUNCH_KEYS. The constants were fitted on
# an H200 at D = 128, to forwards that saved one more launch than the counter's (results/constants-h200.json).
LAUNCH_KEYS = 1792
TILE_KEYS = 448


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

    programs: int  # number of CTAs
    short: bool  # whether CTAs take their tiles in fixed strides, not from a counter


def plan(batch, heads, seq_q, keys, diagonal, causal, queries, programs) -> Plan:
    """Return the plan of a forward whose last query sees `keys` keys.

    A query tile has `queries` queries, and `programs` CTAs run at the same time.
    """
    tiles = triton.cdiv(seq_q + diagonal % 64, queries) * batch * heads
    turns = triton.cdiv(tiles, programs)
    seen = mean_keys(seq_q, keys, diagonal, queries) if causal else keys
    short = turns == 1 or turns * (seen - TILE_KEYS) <= LAUNCH_KEYS
    return Plan(min(tiles, programs), short)
