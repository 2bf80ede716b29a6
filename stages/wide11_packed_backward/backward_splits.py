"""Splits: with few K/V heads, key tiles leave SMs idle. So several CTAs share a key tile's steps, and add their dK and dV.

With few queries, query tiles leave SMs idle, and a CTA alone would go through all keys. So CTAs share these, and add their dQ.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from common.kernels.hopper import ROWS, matrix, reduce_add, store_clipped
from common.kernels.order import mean_keys
from common.layout import cdiv

MAX_SPLITS = 16
# Costs in steps of one SM: of a split's start, which loads K and V and adds dK and dV, and of a key tile's accumulators, which
# are zeroed, read again and rounded. They are shortbwd8's at D = 128, where a tile has as many bytes, by the FLOPs of a step.
# Over 33 backwards, choices took x1.01 of the fastest of nine ways' time, and x1.11 at worst (results/wide-ways-h200.json).
COSTS = (5, 12)
QUERY_COSTS = (4, 8)  # the same for query tiles: Q, dO and dQ
GAIN = 0.93  # CTAs share tiles only if this is expected to take less than GAIN of the time


def _splits(tiles, longest, mean, costs, causal, num_sms) -> int:
    """Return the number of CTAs that share a tile's steps. A tile has at most `longest` steps, and `mean` on average. Without a
    mask, all CTAs take the same time, in waves. With one, the CTA with the most steps bounds the time, and so does the mean
    work of an SM."""

    def time(splits, start, sums):
        most = cdiv(longest, splits) + start
        waves = max(tiles * (mean + start * splits) / (num_sms * most), 1) if causal else cdiv(tiles * splits, num_sms)
        return waves * most + tiles * sums / num_sms

    start, sums = costs
    best, least = 1, GAIN * time(1, 0, 0)
    for splits in range(2, MAX_SPLITS + 1):
        if tiles * ((mean if causal else longest) + start * splits + sums) / num_sms > least:
            break  # an SM's mean work takes longer, and more splits add to it
        if (expected := time(splits, start, sums)) < least:
            best, least = splits, expected
    return best


def splits_of(tiles, heads_per_kv, seq_q, seq_k, causal, diagonal, num_sms) -> int:
    """Return the number of CTAs that share a tile of 64 keys; 1 if key tiles fill the GPU evenly. A step has 64 queries."""
    queries = max(mean_keys(seq_k, seq_q, seq_q - seq_k + diagonal, 64), 64)  # keys and queries swapped
    return _splits(tiles, cdiv(seq_q, 64) * heads_per_kv, queries / 64 * heads_per_kv, COSTS, causal, num_sms)


def query_splits_of(tiles, seq_q, seq_k, causal, diagonal, num_sms) -> int:
    """Return the number of CTAs that share a tile of 128 queries; 1 if query tiles fill the GPU evenly. A step has 64 keys."""
    longest = min(seq_k, seq_q + diagonal) if causal else seq_k
    keys = max(mean_keys(seq_q, longest, diagonal, 128), 64)
    return _splits(tiles, cdiv(longest, 64), keys / 64, QUERY_COSTS, causal, num_sms)


@triton.jit
def _tile_and_split(splits):
    """Return the number of this CTA's tile, the number of its split, and the number of tiles. All first splits come first."""
    tiles = tl.num_programs(0) // splits
    return tl.program_id(0) % tiles, tl.program_id(0) // tiles, tiles


@triton.jit
def _steps_of(split, splits, steps):
    """Return the first of a split's steps, the end of its steps, and how many steps its CTA takes. The CTA takes at least one,
    because its roles wait for tiles. If the split has none, its begin is its end, and the CTA takes a step that another CTA
    also takes. It masks all keys of this step, and so adds zeros."""
    begin = split * steps // splits
    end = (split + 1) * steps // splits
    return begin, end, tl.maximum(end - begin, 1)


@gluon.jit
def _store_or_add(gradient, sums, ptr, desc, buffer, batch, head, heads, start, seq):
    """Store 64 rows of a gradient from their buffer in shared memory. If CTAs share tiles, add them to the accumulator instead,
    which has a block for each 64 of a head's `seq` rows. In register order (see `_finish_kernel`), an instruction adds four
    consecutive elements of each thread."""
    if ptr is not None and start < 0:  # TMA cannot store before a packed sequence
        store_clipped(ptr, desc, batch, head, start, gradient.to(buffer.dtype))
    elif sums is None:
        matrix(buffer).store(gradient.to(buffer.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [batch, head, start, 0], buffer)
        tma.store_wait(0)
    else:
        COLUMNS: gl.constexpr = gradient.shape[1]
        ordered = gradient.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([ROWS * COLUMNS])
        block = (batch * heads + head) * gl.cdiv(seq, ROWS) + start // ROWS
        offs = gl.arange(0, ROWS * COLUMNS, ordered.type.layout)
        if start < seq:  # the last query tile may have only 64 rows
            reduce_add(sums + block.to(gl.int64) * (ROWS * COLUMNS) + offs, ordered)
