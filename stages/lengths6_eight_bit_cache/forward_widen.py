"""Widen K and V from 8 to 16 bits: key tiles in shared memory, or a cache in memory."""

import torch
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


@gluon.jit
def _widener(tensors, ring, wide, share, problem, CAUSAL: gl.constexpr):
    """Run on a warpgroup: widen each slot of `ring` into a slot of `wide`.

    The matmuls need 16 bits: an 8-bit wgmma would need V transposed, and Q and P in 8 bits.
    """
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    PACKED: gl.constexpr = tensors.q.block_shape[3] if len(tensors.q.block_shape) == 5 else 1
    fill = 0
    place, batch, first = share.start, share.batch, share.first
    while place < share.end:
        tile = _tile(place, batch, first, share, problem, BLOCK_N, PACKED, CAUSAL)
        for step in range(tile.key_tiles + 1):  # the first slot of a work tile has no V, and the last no K
            source = wait_full(ring.full, fill)
            target = wait_empty(wide.empty, fill)
            if step < tile.key_tiles:
                _widen(ring.k.index(source), wide.k.index(target))
            if step > 0:
                _widen(ring.v.index(source), wide.v.index(target))
            signal(ring.empty, fill)
            fence_async_shared()  # wgmma reads through the async proxy
            signal(wide.full, fill)
            fill += 1
        place, batch, first = _after(place, batch, first, tile)


def widened_in_memory(tensor, descale, dtype, table):
    """Return K or V of a cache in 8 bits, times its factors, as a cache of 16 bits, in one piece.

    The product is rounded to 16 bits once more, and may overflow float16.
    """
    if table is not None:
        pages = tensor.view(torch.uint8)  # because PyTorch does not index 8-bit floats everywhere
        known = (table >= 0) & (table < len(pages))
        found = pages[table.clamp(0, len(pages) - 1)] * known[..., None, None, None]  # [B, N, Hkv, page size, D]
        tensor = found.transpose(1, 2).flatten(2, 3).view(tensor.dtype)
    wide = tensor.to(dtype)
    return wide if descale is None else wide.mul_(descale[:, :, None, None])  # in place, because a cache may fill the memory
