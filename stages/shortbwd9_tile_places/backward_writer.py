"""The dQ writer: a warp that moves dQ to its accumulator in memory (FlashAttention-3, arXiv 2407.08608, appendix B)."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from common.kernels.hopper import (
    async_reduce_add,
    fence_async_global,
    fetch_add,
    flag_wait,
    slot_and_phase,
    stored_wait,
)

from .backward_scheduler import _next, _query_tile, _tile

STORED = gl.constexpr(2**30)  # added to a query tile's number of tickets when its first contribution is in memory


class DqParts(NamedTuple):
    """A step's dQ in shared memory, in parts."""

    dq: gl.shared_memory_descriptor  # [PARTS, ...], in register order, which has no bank conflicts
    full: gl.shared_memory_descriptor  # a barrier for each part: the part has been written
    empty: gl.shared_memory_descriptor  # a barrier for each part: TMA has read the part


@gluon.jit
def _take_ticket(tickets_ptr, row):
    """Take a ticket for query tile `row`, and return whether it is the tile's first. If not, wait until the first contribution
    is in memory."""
    before = fetch_add(tickets_ptr + row, 1)
    if before > 0:
        if before < STORED:
            flag_wait(tickets_ptr + row, STORED)
        fence_async_global()
    return before == 0


@gluon.jit
def _dq_writer(tensors, dq_parts, next_tiles, problem, PERSISTENT: gl.constexpr, CAUSAL: gl.constexpr):
    """Run on one warp: let TMA store each step's dQ in the accumulator, or add it if another CTA was first at the query tile.
    So the accumulator needs no zeros, which would go to memory and come back with the first addition.

    No deadlock: CTAs wait only for the CTA that has a query tile's first ticket. That CTA is running, and takes its next ticket
    only after its store is in memory. So it waits for no other CTA meanwhile.
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
            is_first = _take_ticket(tensors.tickets, row)
            _, phase = slot_and_phase(fill + step, 1)
            for part in gl.static_range(PARTS):
                mbarrier.wait(dq_parts.full.index(part), phase)
                where = [(row * PARTS + part) * SUM_ROWS, 0]
                if is_first:
                    tma.async_copy_shared_to_global(tensors.sums, where, dq_parts.dq.index(part))
                else:
                    async_reduce_add(tensors.sums, where, dq_parts.dq.index(part))
            for part in gl.static_range(PARTS):
                tma.store_wait(PARTS - 1 - part)
                mbarrier.arrive(dq_parts.empty.index(part), count=1)
            if is_first:
                stored_wait()
                gl.atomic_add(tensors.tickets + row, STORED, sem="release")
        fill += tile.steps
        number = _next(next_tiles, turn, problem.tiles, PERSISTENT, WARPS=1)
        turn += 1
