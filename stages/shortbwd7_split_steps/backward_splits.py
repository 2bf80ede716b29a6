"""Splits: several CTAs share the steps of a key tile, and add their dK and dV."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from common.kernels.hopper import ROWS, reduce_add
from common.kernels.order import mean_keys
from common.layout import cdiv

MAX_SPLITS = 8
# Costs in steps of one SM, fitted to times of random shapes on an H100, indexed by the larger of D and Dv.
STARTS = {16: 2, 32: 2, 64: 2, 128: 4}  # a split's start: it loads K and V, and adds its dK and dV
SUMS = {16: 4, 32: 4, 64: 4, 128: 9}  # a key tile's accumulators: they are zeroed, read again and rounded
GAIN = 0.93  # CTAs share key tiles only if this is expected to take less than GAIN of the time


def block_m_of(width: int) -> int:
    """Return the number of queries of a step: the most rows of S and dP that fit in registers beside dK and dV."""
    return 64 if width >= 128 else 128


def splits_of(tiles, heads_per_kv, seq_q, seq_k, width, causal, diagonal, num_sms) -> int:
    """Return the number of CTAs that share a key tile's steps; 1 if key tiles fill the GPU evenly.

    Without a mask, all CTAs take the same time, in waves. With one, the CTA with the most steps bounds the time, and so does
    the mean work of an SM. `width` is the larger of D and Dv.
    """
    block_m = block_m_of(width)
    longest = cdiv(seq_q - max(-diagonal, 0) if causal else seq_q, block_m) * heads_per_kv
    mean = max(mean_keys(seq_k, seq_q, seq_q - seq_k + diagonal, 128) / block_m, 1) * heads_per_kv  # keys and queries swapped

    def time(splits):
        start, sums = (STARTS[width], SUMS[width]) if splits > 1 else (0, 0)
        most = cdiv(longest, splits) + start
        if not causal:
            return cdiv(tiles * splits, num_sms) * most + tiles * sums / num_sms
        return max(most, tiles * (mean + start * splits + sums) / num_sms)

    return min(range(1, MAX_SPLITS + 1), key=lambda splits: time(splits) if splits > 1 else GAIN * time(1))


@gluon.jit
def _store_or_add(sums, buffer, kv, tile, problem, w: gl.constexpr, offset: gl.constexpr):
    """Store a consumer's dK or dV in shared memory. If CTAs share key tiles, add it to its accumulator instead. The accumulator
    begins `offset` elements after dK's. In register order, an instruction adds four consecutive elements of each thread."""
    ELEMENTS: gl.constexpr = ROWS * sums.shape[1]
    if kv.sums is None:
        buffer.store(sums.to(buffer.dtype))
        fence_async_shared()
    else:
        blocks_n = gl.cdiv(problem.seq_k, 2 * ROWS) * 2
        block = (tile.batch * problem.kv_heads + tile.kv_head) * blocks_n + tile.start_n // ROWS + w
        sums = sums.reshape([4, 2, 8, sums.shape[1] // 8, 4, 2]).permute([0, 3, 2, 4, 1, 5]).reshape([ELEMENTS])
        offs = offset + gl.arange(0, ELEMENTS, sums.type.layout)
        reduce_add(kv.sums + block.to(gl.int64) * (ROWS * (kv.k.shape[4] + kv.v.shape[4])) + offs, sums)
