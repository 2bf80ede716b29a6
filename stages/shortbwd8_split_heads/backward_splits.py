"""Splits: several CTAs share the steps of a key tile, and add their dK and dV.

With few K/V heads, key tiles alone are fewer than SMs. With a causal mask, the longest takes longer than the mean SM.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from common.kernels.hopper import ROWS, reduce_add
from common.kernels.order import SHARE, mean_keys
from common.layout import cdiv

MAX_SPLITS = 8
# Costs in steps of one SM, by the larger of D and Dv, fitted to results/ways-h100.json: of a split's start, which
# loads K and V and adds dK and dV, and of a key tile's accumulators, which are zeroed, read again and rounded.
COSTS = {16: (2, 4), 32: (2, 4), 64: (2, 4), 128: (4, 9)}
CROWDED = 1.2  # how much longer steps take if they read from memory what the L2 cache could hold (results/shares-h100.json)
GAIN = 0.93  # CTAs share key tiles only if this is expected to take less than GAIN of the time


def splits_of(tiles, heads_per_kv, seq_q, seq_k, width, block_m, causal, diagonal, num_sms) -> tuple[int, int]:
    """Return how CTAs share a key tile: into how many equal shares they divide its query heads, and into how many splits the
    steps of a share. (1, 1): they share none. Steps are split only if each share has one head, because heads divide the work
    without the need to keep more of them in the L2 cache. A step has block_m queries.

    With a causal mask, each CTA starts at its own diagonal. So CTAs that run at the same time read all queries of a share. In
    many waves of CTAs, the order of query tiles brings them together (see `_tile`); in few waves, it does not.
    Without a mask, all CTAs take the same time, in waves. With one, the CTA with the most steps bounds the time, and so does
    the mean work of an SM.
    """
    longest = cdiv(seq_q - max(-diagonal, 0) if causal else seq_q, block_m) * heads_per_kv
    mean = max(mean_keys(seq_k, seq_q, seq_q - seq_k + diagonal, 128) / block_m, 1) * heads_per_kv  # keys and queries swapped

    few = causal and tiles < 4 * num_sms

    def time(ways):
        shares, splits = ways
        ctas, heads = shares * splits, heads_per_kv // shares
        start, sums = COSTS[width] if ctas > 1 else (0, 0)
        most = cdiv(longest, ctas) + start
        waves = max(tiles * (mean + start * ctas) / (num_sms * most), 1) if causal else cdiv(tiles * ctas, num_sms)
        crowded = few and heads > 1 and heads * seq_q * 8 * width > SHARE.value  # bytes of Q, dO and dQ's accumulator
        return (waves * most * (CROWDED if crowded else 1) + tiles * sums / num_sms) * (GAIN if ctas == 1 else 1)

    ways = [(shares, 1) for shares in range(1, heads_per_kv + 1) if heads_per_kv % shares == 0]
    return min(ways + [(heads_per_kv, splits) for splits in range(2, MAX_SPLITS + 1)], key=time)


@gluon.jit
def _store_or_add(sums, buffer, kv, tile, problem, w: gl.constexpr, offset: gl.constexpr):
    """Store a consumer's dK or dV in shared memory. If CTAs share key tiles, add it to its accumulator instead. The accumulator
    begins `offset` elements after dK's. In register order, an instruction adds four consecutive elements of each thread."""
    if kv.sums is None:
        buffer.store(sums.to(buffer.dtype))
        fence_async_shared()
    else:
        blocks_n = gl.cdiv(problem.seq_k, 2 * ROWS) * 2
        block = (tile.batch * problem.kv_heads + tile.kv_head) * blocks_n + tile.start_n // ROWS + w
        sums = sums.reshape([4, 2, 8, sums.shape[1] // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([ROWS * sums.shape[1]])
        offs = offset + gl.arange(0, sums.shape[0], sums.type.layout)
        reduce_add(kv.sums + block.to(gl.int64) * (ROWS * (kv.k.shape[4] + kv.v.shape[4])) + offs, sums)
