"""Widen K and V from 8 to 16 bits in shared memory."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from common.kernels.hopper import matrix, signal, wait_empty, wait_full

from .forward_scheduler import _after, _tile


@gluon.constexpr_function
def _wide_layout(rows, columns):
    """Return the layout in shared memory of a widened key tile, as TMA would fill it."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], gl.float16)


@gluon.jit
def _descale(descale_ptr, tile, problem):
    """Return the factor of a tile's K or V. `descale_ptr` points to all factors, [B, Hkv]."""
    if descale_ptr is None:
        return 1.0
    else:
        kv_heads = problem.heads // problem.heads_per_kv
        return gl.load(descale_ptr + tile.batch * kv_heads + tile.kv_head)


@gluon.jit
def _widen(source, target):
    """Store a matrix of 8-bit numbers as 16-bit numbers. Both types have each e4m3 number exactly."""
    COLUMNS: gl.constexpr = target.shape[3]
    # A thread reads 8 bytes and stores 16. Neighbours take neighbouring columns, so no two use one bank of shared memory.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    numbers = matrix(source).load(layout)
    if target.dtype == gl.bfloat16:
        numbers = numbers.to(gl.float32)  # else each number takes an F2F.BF16.F16, and an SM runs few of these in a cycle
    matrix(target).store(numbers.to(target.dtype))


class Turn(NamedTuple):
    """How far a consumer's share is widened: the next work tile, as for `_tile`, and the slots of the current one."""

    place: gl.tensor
    batch: gl.tensor
    first: gl.tensor
    slots: gl.tensor
    left: gl.tensor  # slots that are not widened yet


@gluon.jit
def _widen_slot(turn, fill, tensors, worker, problem, CAUSAL: gl.constexpr):
    """Widen a slot of `ring` into a slot of `wide`, and return the next turn."""
    BLOCK_N: gl.constexpr = worker.ring.k.shape[3]
    PACKED: gl.constexpr = tensors.q.block_shape[3] if len(tensors.q.block_shape) == 5 else 1
    if turn.left == 0:
        tile = _tile(turn.place, turn.batch, turn.first, worker.share, problem, BLOCK_N, PACKED, CAUSAL)
        place, batch, first = _after(turn.place, turn.batch, turn.first, tile)
        turn = Turn(place, batch, first, tile.key_tiles + 1, tile.key_tiles + 1)
    source = wait_full(worker.ring.full, fill)
    target = wait_empty(worker.wide.empty, fill)
    if turn.left > 1:  # the first slot of a work tile has no V, and the last no K
        _widen(worker.ring.k.index(source), worker.wide.k.index(target))
    if turn.left < turn.slots:
        _widen(worker.ring.v.index(source), worker.wide.v.index(target))
    signal(worker.ring.empty, fill)
    fence_async_shared()  # wgmma reads through the async proxy
    signal(worker.wide.full, fill)
    return Turn(turn.place, turn.batch, turn.first, turn.slots, turn.left - 1)


@gluon.jit
def _widener(tensors, one, two, problem, CAUSAL: gl.constexpr):
    """Run on a warpgroup: widen the slots of both consumers in turn.

    The matmuls need 16 bits: an 8-bit wgmma would need V transposed, and Q and P in 8 bits.
    """
    fill = 0
    turn_one = Turn(one.share.start, one.share.batch, one.share.first, 0, 0)
    turn_two = Turn(two.share.start, two.share.batch, two.share.first, 0, 0)
    while (turn_one.left > 0) | (turn_one.place < one.share.end) | (turn_two.left > 0) | (turn_two.place < two.share.end):
        if (turn_one.left > 0) | (turn_one.place < one.share.end):
            turn_one = _widen_slot(turn_one, fill, tensors, one, problem, CAUSAL)
        if (turn_two.left > 0) | (turn_two.place < two.share.end):
            turn_two = _widen_slot(turn_two, fill, tensors, two, problem, CAUSAL)
        fill += 1
