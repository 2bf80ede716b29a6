"""Choose the order in which the programs of a launch take their tiles."""

import functools

import triton
import triton.language as tl

from common.layout import cdiv
from common.runtime import l2_bytes


def l2_budget(cache: int) -> int:
    """Return how much of an L2 cache of `cache` bytes the rows of a group of heads may take.

    It is a third, because the next group's rows arrive while the last tiles of this group still run, and the other tensors pass
    through, too. It is rounded down to a power of two, which mostly divides the heads into equal groups.
    """
    return 1 << (max(cache // 3, 1).bit_length() - 1)


def mean_keys(seq_q: int, keys: int, diagonal: int, queries: int) -> float:
    """Return about how many keys a tile of `queries` queries sees with a causal mask, on average.

    Query i of seq_q sees the keys up to i + diagonal, and the last query sees `keys` keys. A tile sees what its last query
    sees.
    """
    seeing = seq_q + min(diagonal, 0)  # number of queries that see a key
    rising = keys - max(diagonal, 0)  # number of these that see fewer keys than the last query, plus 1
    return (keys * seeing - rising * max(rising - queries, 0) / 2) / seq_q


def busiest(
    heads: int, seq_q: int, seq_k: int, diagonal: int, causal: bool, queries: int, keys: int, programs: int,
    tile: float, key_tile: float,
) -> float:  # fmt: skip
    """Return about how long the CTA works that ends last, if CTAs take the longest query tiles first, from a counter.

    A query tile takes `tile`, plus `key_tile` for each of its key tiles. It has `queries` queries, and a key tile has `keys`
    keys. `programs` CTAs run at the same time. The result is the largest of some lower bounds, which is close to the truth.
    """
    tiles = cdiv(seq_q + diagonal % 64, queries) * heads
    if not causal:
        return cdiv(tiles, programs) * (tile + key_tile * cdiv(seq_k, keys))

    mean = tile + key_tile * (mean_keys(seq_q, min(seq_k, seq_q + diagonal), diagonal, queries) / keys + 0.5)
    longest = tiles * mean / programs
    # The CTA that takes tile number n * programs has had n other tiles on average, which are at least as long.
    for turn, number in enumerate(range(0, min(tiles, 4 * programs), programs), start=1):
        seen = min(seq_k, max(seq_q + diagonal - number // heads * queries, 1))
        longest = max(longest, turn * (tile + key_tile * cdiv(seen, keys)))
    return longest


class _OfThisGPU(tl.constexpr):
    """`l2_budget` of the GPU for which a kernel is first compiled; a constant of the kernel. An import asks no GPU."""

    def __init__(self):
        pass

    @functools.cached_property
    def value(self):
        return l2_budget(l2_bytes())

    @functools.cached_property
    def type(self):
        return tl.constexpr(self.value).type


L2_BUDGET = _OfThisGPU()


@triton.jit
def heads_of_group(seq, heads, ROW_BYTES: tl.constexpr, BUDGET: tl.constexpr = None):
    """Return how many of `heads` heads form a group with a causal mask; see `tile_and_head`."""
    budget: tl.constexpr = L2_BUDGET if BUDGET is None else BUDGET
    rows = tl.maximum(budget // ROW_BYTES, 1)  # rows that fit into the budget
    return tl.minimum(tl.maximum(rows // seq, 1), heads)  # at most `heads`, so that a group's tiles fit in int32


@triton.jit
def tile_and_head(
    tiles, seq, ROW_BYTES: tl.constexpr, CAUSAL: tl.constexpr, BUDGET: tl.constexpr = None, program=None, programs=None,
):  # fmt: skip
    """Return this program's (tile, head).

    `tile` is the number of a tile in its head, from 0 to `tiles` - 1. `head` is the number of the tile's head among the heads
    of all batch elements.

    Programs start in the order of their numbers. Without a causal mask, they take all tiles of one head, then all tiles of the
    next head. So programs that run at the same time share a head's rows in the L2 cache: `seq` rows of ROW_BYTES bytes.

    With a causal mask, tiles take different times. If a slow tile starts last, the other SMs are idle at the end. So slow tiles
    start first: programs take tile 0 of each head in a group of heads, then tile 1 of each head, and so on. Tile 0 must take
    the longest time. A group has only so many heads that their rows stay in the L2 cache: at most L2_BUDGET bytes (BUDGET in
    tests), unless it has one head. The last group also takes the heads that are left over, and so has fewer than twice as many:
    a small group's longest tiles would start when the other SMs have nearly ended.

    If g query heads share K and V, pass the number of keys divided by g as `seq`, because the L2 cache holds K and V once for g
    heads. A persistent CTA computes several tiles. For each tile, it passes the `program` and `programs` of a launch with one
    program per tile.
    """
    if program is None:
        program = tl.program_id(0)
        programs = tl.num_programs(0)
    if CAUSAL:
        heads = programs // tiles
        group = heads_of_group(seq, heads, ROW_BYTES, BUDGET)
        last = heads // group - 1
        turn = tl.minimum(program // (group * tiles), last)
        first = turn * group
        group = tl.where(turn == last, heads - first, group)
        inside = program - first * tiles
        return inside // group, first + inside % group
    else:
        return program % tiles, program // tiles
