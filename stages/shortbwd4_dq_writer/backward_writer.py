"""The dQ writer: a warp that moves dQ to its accumulator in memory (FlashAttention-3, arXiv 2407.08608, appendix B)."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from common.kernels.hopper import async_reduce_add, slot_and_phase

from .backward_scheduler import _next, _query_tile, _tile


class DqParts(NamedTuple):
    """A step's dQ in shared memory, in parts."""

    dq: gl.shared_memory_descriptor  # [PARTS, ...], in register order, which has no bank conflicts
    full: gl.shared_memory_descriptor  # a barrier for each part: the part has been written
    empty: gl.shared_memory_descriptor  # a barrier for each part: TMA has read the part


@gluon.jit
def _dq_writer(tensors, dq_parts, next_tiles, problem, PERSISTENT: gl.constexpr, CAUSAL: gl.constexpr):
    """Run on one warp: let TMA add each step's dQ to the accumulator, and release the parts that TMA has read.

    This prepares shortbwd5, where an addition may have to wait for another CTA. If dQ's warpgroup waited there itself, its
    matmuls would stop at once. While this warp waits, dQ's warpgroup computes until no part's buffer is free.
    """
    BLOCK_M: gl.constexpr = tensors.q.block_shape[2]
    HEAD_DIM: gl.constexpr = tensors.q.block_shape[3]
    VALUE_DIM: gl.constexpr = tensors.v.block_shape[3]
    PARTS: gl.constexpr = dq_parts.dq.shape[0]
    # With two parts, dQ's warpgroup can end a tile only after this warp has added the tile before. So this warp is at most one
    # tile behind, and three slots in `next_tiles` suffice.
    gl.static_assert(PARTS > 1 or not PERSISTENT)
    SUM_ROWS: gl.constexpr = tensors.sums.block_shape[0]
    fill = 0
    turn = 0
    number = gl.program_id(0)
    while number < problem.tiles:
        tile = _tile(number, problem, BLOCK_M, HEAD_DIM, VALUE_DIM, CAUSAL)
        for step in range(tile.steps):
            _, _, row = _query_tile(step, tile)
            _, phase = slot_and_phase(fill + step, 1)
            for part in gl.static_range(PARTS):
                mbarrier.wait(dq_parts.full.index(part), phase)
                where = [(row * PARTS + part) * SUM_ROWS, 0]
                async_reduce_add(tensors.sums, where, dq_parts.dq.index(part))
            for part in gl.static_range(PARTS):
                tma.store_wait(PARTS - 1 - part)
                mbarrier.arrive(dq_parts.empty.index(part), count=1)
        fill += tile.steps
        number = _next(next_tiles, turn, problem.tiles, PERSISTENT, WARPS=1)
        turn += 1
