"""dK and dV leave a CTA."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from common.kernels.hopper import ROWS, reduce_add, slot_and_phase, store_clipped

from .backward_scheduler import CONSUMERS


class Place(NamedTuple):
    """The place of a work tile's dK and dV in global memory. The producer keeps it until they are stored."""

    batch: gl.tensor
    kv_head: gl.tensor
    start_n: gl.tensor  # the first key


class KeysValues(NamedTuple):
    """Buffers in shared memory: K and V, then dK and dV until TMA has stored them. They have KV_STAGES slots."""

    k: gl.shared_memory_descriptor  # [KV_STAGES * CONSUMERS, 1, 1, ROWS, HEAD_DIM]
    v: gl.shared_memory_descriptor  # [KV_STAGES * CONSUMERS, 1, 1, ROWS, VALUE_DIM]
    full: gl.shared_memory_descriptor  # barriers, TMA → consumers: K and V have arrived
    dk_full: gl.shared_memory_descriptor  # a barrier for each slot and consumer: dK is where K was
    dv_full: gl.shared_memory_descriptor  # a barrier for each slot and consumer: dV is where V was
    dk: tma.tensor_descriptor  # in global memory
    dv: tma.tensor_descriptor
    dk_ptr: gl.tensor
    dv_ptr: gl.tensor
    sums: gl.tensor | None  # in global memory, to which consumers add dK and dV instead; None if each key tile has one CTA


@gluon.jit
def _store_or_add(sums, buffer, ptr, desc, kv, tile, problem, w: gl.constexpr, offset: gl.constexpr):
    """Store a consumer's dK or dV in shared memory. If several CTAs work on a tile, add it to its accumulator instead,
    which begins `offset` elements after dK's. In register order, an instruction adds four consecutive elements of a thread."""
    if problem.listed is not None and tile.key + w * ROWS < 0:  # TMA cannot store before a sequence
        store_clipped(ptr, desc, tile.kv_batch, tile.kv_head, tile.key + w * ROWS, sums.to(buffer.dtype))
    elif kv.sums is None:
        buffer.store(sums.to(buffer.dtype))
        fence_async_shared()
    else:
        blocks_n = gl.cdiv(problem.seq_k, 2 * ROWS) * 2
        block = (tile.batch * problem.kv_heads + tile.kv_head) * blocks_n + tile.start_n // ROWS + w
        sums = sums.reshape([4, 2, 8, sums.shape[1] // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([ROWS * sums.shape[1]])
        offs = offset + gl.arange(0, sums.shape[0], sums.type.layout)
        reduce_add(kv.sums + block.to(gl.int64) * (ROWS * (kv.k.shape[4] + kv.v.shape[4])) + offs, sums)


@gluon.jit
def _store_dkv(place, kv, turn):
    """Wait for dK and dV of this CTA's tile number `turn`, store them unless consumers added them, and free the buffers."""
    slot, phase = slot_and_phase(turn, kv.full.shape[0])
    slot = slot * CONSUMERS
    for w in gl.static_range(CONSUMERS):
        mbarrier.wait(kv.dv_full.index(slot + w), phase)
        where = [place.batch, place.kv_head, place.start_n + w * ROWS, 0]
        if kv.sums is None and place.start_n + w * ROWS >= 0:
            tma.async_copy_shared_to_global(kv.dv, where, kv.v.index(slot + w))
    for w in gl.static_range(CONSUMERS):
        mbarrier.wait(kv.dk_full.index(slot + w), phase)
        where = [place.batch, place.kv_head, place.start_n + w * ROWS, 0]
        if kv.sums is None and place.start_n + w * ROWS >= 0:
            tma.async_copy_shared_to_global(kv.dk, where, kv.k.index(slot + w))
    tma.store_wait(0)
