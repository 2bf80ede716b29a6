"""Load key tiles, from sequences that lie in one piece or in pages."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from common.kernels.hopper import wait_empty

from .forward_scheduler import _key

LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # the producer is one warp, and each lane has one element


@gluon.jit
def _batch(desc, start_n, tile, problem):
    """Return the batch coordinate of the key tile at start_n. With pages, lane i has the number of the tile's i-th page."""
    if problem.table is None:
        return tile.batch
    else:
        pages = problem.seq_k // desc.shape[2]  # of a sequence
        page = gl.minimum(start_n // desc.shape[2] + gl.arange(0, 32, LANES), pages - 1)
        return gl.load(problem.table + tile.batch.to(gl.int64) * pages + page)


@gluon.jit
def _copy(desc, buffers, slot, barrier, batch, start_n, tile, problem):
    """Start to load K or V of the key tile at start_n to a slot, from where `_batch` says.

    With pages, a copy loads at most one page. No table can lead outside of the memory: TMA fills in zeros for a page that there
    is not. A page wholly behind the sequence is not read: its keys get negative rows, for which TMA fills in zeros, too.
    """
    BLOCK_N: gl.constexpr = buffers.shape[3]
    COPIED: gl.constexpr = desc.block_shape[2]
    if problem.table is None:
        where = [batch, tile.kv_head, _key(start_n, tile, problem, COPIED), 0]
        tma.async_copy_global_to_shared(desc, where, barrier, buffers.index(slot))
    else:
        # In shared memory, a matrix lies in blocks that hold 128 bytes of each row. A copy fills some rows of a block. The
        # loop's bound is no constant, because the compiler would unroll the loop, and a producer has few registers.
        COLUMNS: gl.constexpr = desc.block_shape[3]
        BLOCKS: gl.constexpr = buffers.shape[4] // COLUMNS
        PARTS: gl.constexpr = BLOCK_N // COPIED
        shape: gl.constexpr = [buffers.shape[0] * BLOCKS * PARTS, 1, 1, COPIED, COLUMNS]
        pieces = buffers._reinterpret(buffers.dtype, shape, desc.layout)
        begin = start_n % desc.shape[2]  # the row in the page where a copy begins: not 0 only if one copy loads the key tile
        lane = gl.arange(0, 32, LANES)
        for i in range(gl.cdiv(BLOCK_N, desc.shape[2])):
            first = start_n + i * COPIED
            page = gl.sum(gl.where(lane == i, batch, 0), 0)
            row = begin + _key(first, tile, problem, COPIED) - first
            for block in gl.static_range(BLOCKS):
                where = [page, tile.kv_head, row, block * COLUMNS]
                tma.async_copy_global_to_shared(desc, where, barrier, pieces.index((slot * BLOCKS + block) * PARTS + i))


@gluon.jit
def _load(tensors, tile, ring, fill, start_n, problem):
    """Start to fill the next slot of the ring with K and V of the key tile at start_n, when the consumer has released it."""
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    # Look up pages before the wait, so that it hides how long memory takes to answer.
    batch_k = _batch(tensors.k, start_n, tile, problem)
    batch_v = _batch(tensors.v, start_n, tile, problem)
    slot = wait_empty(ring.empty, fill)
    full = ring.full.index(slot)
    mbarrier.expect(full, BLOCK_N * (ring.k.shape[4] + ring.v.shape[4]))
    _copy(tensors.k, ring.k, slot, full, batch_k, start_n, tile, problem)
    _copy(tensors.v, ring.v, slot, full, batch_v, start_n, tile, problem)
