"""Shares and splits: if key tiles do not fill the GPU evenly, or use too many query heads at a time, several CTAs divide the
query heads of a key tile into shares, or the steps of a share into splits, and add their dK and dV.

With few K/V heads or keys, key tiles are fewer than SMs. A few more than fit in one wave take the time of two waves. And with a
causal mask, the longest key tile may take longer than an SM's mean work.

With a causal mask, CTAs start at different diagonals, so Q, dO and dQ of all query heads of their K/V heads are in use at a
time. The order of query tiles (see `_tile`) should bring CTAs together only if groups of heads fill whole waves. If CTAs of a
key tile take different heads, fewer heads are in use, and they stay in the L2 cache. Splits would keep all heads in use, so
steps are split only if each share has one head. Without a mask, CTAs take the same query tiles at about the same time in any
case, and shares take as long as splits.
"""

import functools

from common.kernels.order import L2_BUDGET, mean_keys
from common.layout import cdiv

MAX_SPLITS = 8  # of a share; a K/V head has at most as many shares as query heads
# Costs in steps of one SM, by the queries of a step, fitted to results/ways-h100.json. A CTA's start loads K and V, and its end
# adds dK and dV. A key tile's accumulators are zeroed, read again and rounded.
COSTS = {128: (2, 4), 64: (4, 9)}
CROWDED = 1.2  # how much longer steps take if they read from memory what the L2 cache could hold (results/shares-h100.json)
FULL = 0.9  # a wave is full if it has this part of its CTAs; 0.8 does not suffice (results/shares-lengths-h100.json)
GAIN = 0.93  # several CTAs work on a key tile only if this is expected to take less than GAIN of the time


@functools.cache
def _ways(heads_per_kv) -> list[tuple[int, int]]:
    """Return all numbers of shares and splits except (1, 1), those with the fewest CTAs first."""
    ways = [(shares, 1) for shares in range(2, heads_per_kv + 1) if heads_per_kv % shares == 0]
    return ways + [(heads_per_kv, splits) for splits in range(2, MAX_SPLITS + 1)]


def _fills_waves(tiles, group, num_sms) -> bool:
    """Return whether each group of work tiles (see `tile_and_head`) fills its last wave. Then waves with different orders do
    not mix. There are `tiles` work tiles, `group` of them in a group."""
    return (min(group, tiles) - 1) % num_sms + 1 >= FULL * num_sms


def splits_of(tiles, heads_per_kv, seq_q, seq_k, head_dim, value_dim, block_m, causal, diagonal, num_sms) -> tuple[int, int]:
    """Return the number of shares of a key tile, and the number of splits of a share: (1, 1) if key tiles fill the GPU evenly,
    and few query heads are in use or CTAs that run together use the same query tiles. A step has block_m queries.
    Without a mask, all CTAs take the same time, in waves. With one, the CTA with the most steps bounds the time, and so does
    the mean work of an SM."""
    longest = cdiv(seq_q - max(-diagonal, 0) if causal else seq_q, block_m) * heads_per_kv
    mean = max(mean_keys(seq_k, seq_q, seq_q - seq_k + diagonal, 128) / block_m, 1) * heads_per_kv  # keys and queries swapped
    row_bytes = 6 * head_dim + 2 * value_dim  # ROW_BYTES of `_tile`
    fitting = max(L2_BUDGET.value // row_bytes // seq_q, 1)  # heads of a group: their Q, dO and dQ's accumulator fit

    def time(shares, splits, start, sums):
        ctas, heads = shares * splits, heads_per_kv // shares
        most = cdiv(longest, ctas) + start
        waves = max(tiles * (mean + start * ctas) / (num_sms * most), 1) if causal else cdiv(tiles * ctas, num_sms)
        if causal and heads > fitting and not _fills_waves(tiles * shares, fitting * cdiv(seq_k, 128), num_sms):
            waves *= CROWDED
        return waves * most + tiles * sums / num_sms

    start, sums = COSTS[block_m]
    best, least = (1, 1), GAIN * time(1, 1, 0, 0)
    for shares, splits in _ways(heads_per_kv):
        if tiles * ((mean if causal else longest) + start * shares * splits + sums) / num_sms > least:
            break  # an SM's mean work takes longer, and more CTAs add to it
        if (expected := time(shares, splits, start, sums)) < least:
            best, least = (shares, splits), expected
    return best
