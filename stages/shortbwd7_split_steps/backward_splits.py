"""Splits: if key tiles do not fill the GPU evenly, several CTAs split the steps of a key tile, and add their dK and dV.

With few K/V heads or keys, key tiles are fewer than SMs. A few more than fit in one wave take the time of two waves. And with a
causal mask, the longest key tile may take longer than an SM's mean work.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from common.kernels.hopper import ROWS, reduce_add
from common.kernels.order import mean_keys
from common.layout import cdiv

MAX_SPLITS = 8
# Costs in steps of one SM, by the larger of D and Dv, fitted to results/ways-h100.json. A CTA's start loads K and V, and its
# end adds dK and dV. A key tile's accumulators are zeroed, read again and rounded.
COSTS = {16: (2, 4), 32: (2, 4), 64: (2, 4), 128: (4, 9)}
GAIN = 0.93  # several CTAs work on a key tile only if this is expected to take less than GAIN of the time


def splits_of(tiles, heads_per_kv, seq_q, seq_k, width, block_m, causal, diagonal, num_sms) -> int:
    """Return the number of CTAs that split a key tile's steps; 1 if key tiles fill the GPU evenly. A step has block_m queries.
    Without a mask, all CTAs take the same time, in waves. With one, the CTA with the most steps bounds the time, and so does
    the mean work of an SM."""
    longest = cdiv(seq_q - max(-diagonal, 0) if causal else seq_q, block_m) * heads_per_kv
    mean = max(mean_keys(seq_k, seq_q, seq_q - seq_k + diagonal, 128) / block_m, 1) * heads_per_kv  # keys and queries swapped

    def time(splits):
        start, sums = COSTS[width] if splits > 1 else (0, 0)
        most = cdiv(longest, splits) + start
        waves = max(tiles * (mean + start * splits) / (num_sms * most), 1) if causal else cdiv(tiles * splits, num_sms)
        return waves * most + tiles * sums / num_sms

    return min(range(1, MAX_SPLITS + 1), key=lambda splits: time(splits) if splits > 1 else GAIN * time(1))


@gluon.jit
def _store_or_add(sums, buffer, kv, tile, problem, w: gl.constexpr, offset: gl.constexpr):
    """Store a consumer's dK or dV in shared memory. If several CTAs work on a tile, add it to its accumulator instead,
    which begins `offset` elements after dK's. In register order, an instruction adds four consecutive elements of a thread."""
    if kv.sums is None:
        buffer.store(sums.to(buffer.dtype))
        fence_async_shared()
    else:
        blocks_n = gl.cdiv(problem.seq_k, 2 * ROWS) * 2
        block = (tile.batch * problem.kv_heads + tile.kv_head) * blocks_n + tile.start_n // ROWS + w
        sums = sums.reshape([4, 2, 8, sums.shape[1] // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([ROWS * sums.shape[1]])
        offs = offset + gl.arange(0, sums.shape[0], sums.type.layout)
        reduce_add(kv.sums + block.to(gl.int64) * (ROWS * (kv.k.shape[4] + kv.v.shape[4])) + offs, sums)
