"""For the Gluon stages: check the GPU, make descriptors and barriers, and add to global memory."""

import importlib

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from common.entry import Unavailable
from common.kernels.descriptors import make
from common.runtime import architecture

HOPPER = range(90, 100)  # compute capabilities of Hopper GPUs, times 10
LOG2_E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(64)  # one wgmma computes this many rows of its result
ELEMENTS = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
}


def unavailable() -> str | None:
    """Return why wgmma and Hopper's other instructions cannot run here, or None if they can."""
    arch = architecture()
    if arch is None or arch in HOPPER:  # None: without a GPU, the interpreter runs the kernels
        return None
    name = f"sm_{arch}" if isinstance(arch, int) else arch
    return f"needs a Hopper GPU (sm_90), and this GPU is {name}"


def require_hopper(stage: str):
    """Raise Unavailable if the GPU is not a Hopper GPU. The message names the stage to use instead.

    Args:
        stage: the calling stage's `__package__`.
    """
    if reason := unavailable():
        evolution = importlib.import_module(stage.rpartition(".")[0])  # not at the top, because the stages import this module
        raise Unavailable(f"{stage} {reason}; use {evolution.__name__}.{evolution.recommended()}")


def describe_tile(tensor: Tensor, *rows: int, columns: int | None = None) -> TensorDescriptor:
    """Make a Gluon descriptor of a tensor, for tiles of whole rows, or of at most `columns` columns.

    Args:
        tensor: [B, H, S, D]; or [B, H / N, S, N, D], where N heads are interleaved, so that N rows have the same position.
        rows: the tile's size in each dimension between H and D.
    """
    return make(TensorDescriptor, tensor, (1, 1, *rows, min(columns or tensor.shape[-1], tensor.shape[-1])), _layout)


def _layout(block, dtype):
    return gl.NVMMASharedLayout.get_default_for(list(block), ELEMENTS[dtype])


def describe_rows(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Make a descriptor of a contiguous [N, C] tensor, for tiles of `rows` rows that are not swizzled."""
    return make(TensorDescriptor, tensor, (rows, tensor.shape[1]), _layout_of_rows)


def _layout_of_rows(block, dtype):
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * dtype.itemsize, rank=len(block))


@builtin
def async_reduce_add(tensor_desc, coord, src, _semantic=None):
    """Let TMA add the tile `src` in shared memory to the tile at `coord` in global memory.

    The addition is asynchronous: `tma.store_wait` waits until TMA has read `src`. Triton 3.6 and 3.7 can compile this
    operation, but Gluon has no function for it.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@builtin
def stored_wait(_semantic=None):
    """Wait until the stores and additions that this warp has issued have arrived in memory.

    `tma.store_wait` waits only until TMA has read the tiles in shared memory.
    """
    zero = gl.to_tensor(0, _semantic=_semantic)
    asm = "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [zero], gl.int32, is_pure=False, pack=1, _semantic=_semantic)


@builtin
def fence_async_global(_semantic=None):
    """Let TMA's later accesses to global memory see what this warp sees. (`fence_async_shared` is for shared memory.)"""
    zero = gl.to_tensor(0, _semantic=_semantic)
    asm = "bar.warp.sync 0xffffffff; fence.proxy.async.global; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [zero], gl.int32, is_pure=False, pack=1, _semantic=_semantic)


@gluon.jit
def fetch_add(ptr, added):
    """Add to the int32 in global memory at `ptr`, and return its old value, which must not be negative. Run on one warp.

    With a scalar, `gl.atomic_add` would pass the old value on through shared memory. With a tensor, threads shuffle it.
    """
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    before = gl.atomic_add(ptr + gl.zeros_like(lanes), gl.zeros_like(lanes) + added, mask=lanes == 0, sem="acquire")
    return gl.max(gl.where(lanes == 0, before, 0), 0)


@gluon.jit
def flag_wait(ptr, least):
    """Wait until the int32 in global memory at `ptr` is at least `least`. Then what other programs wrote before is visible; to
    TMA only after `fence_async_global`. Run on one warp."""
    flag = gl.to_tensor(0)
    while flag < least:
        flag = fetch_add(ptr, 0)


@gluon.jit
def reduce_add(ptrs, tile):
    """Add a tile in registers to global memory.

    If each thread has four consecutive elements, one instruction adds all four (red.global.add.v4.f32).
    """
    gl.atomic_add(ptrs, tile, sem="relaxed")


@gluon.jit
def widened(p):
    """Convert p to float32 with few registers.

    Two bfloat16 elements share a register, and the inline assembly unpacks both. With Gluon's own conversion,
    backwards spill registers.
    """
    if p.dtype == gl.bfloat16:
        halves: gl.constexpr = (
            "/* a.to(gl.float32) */{ .reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t; and.b32 t, $2, 0xffff0000; mov.b32 $1, t; }"
        )
        return gl.inline_asm_elementwise(halves, "=f,=f,r", [p], gl.float32, is_pure=True, pack=2)
    else:
        return p.to(gl.float32)


@gluon.jit
def store_clipped(ptr, desc, batch, head, start, tile):
    """Store the rows of a tile that lie inside the tensor, without TMA.

    The tile may begin before the tensor's first row. A TMA store at such a negative coordinate fails.

    Args:
        ptr, desc: the tensor, [B, H, S, D], and its descriptor.
        start: the position of the tile's first row in the sequence.
        tile: [rows, D].
    """
    layout: gl.constexpr = tile.type.layout
    row = start + gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    offs = batch * desc.strides[0] + head * desc.strides[1] + row * desc.strides[2]
    ptrs = ptr + offs[:, None] + gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))[None, :]
    gl.store(ptrs, tile, mask=((row >= 0) & (row < desc.shape[2]))[:, None])


@gluon.jit
def store_rows(ptr, desc, batch, head, start, tile):
    """Store the rows of a tile that lie inside the tensor, as `store_clipped` does. Several rows may have the same position.

    Args:
        ptr, desc: the tensor, [B, H, S, D] or [B, H, S, N, D], and its descriptor.
        start: the position of the tile's first row in the sequence.
        tile: [rows, D]. If the tensor has a dimension N, N consecutive rows have the same position in the sequence.
    """
    layout: gl.constexpr = tile.type.layout
    N: gl.constexpr = desc.block_shape[3] if len(desc.block_shape) == 5 else 1
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    place = start + row // N
    offs = batch * desc.strides[0] + head * desc.strides[1] + place * desc.strides[2]
    if N > 1:
        offs += row % N * desc.strides[3]
    ptrs = ptr + offs[:, None] + gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))[None, :]
    gl.store(ptrs, tile, mask=((place >= 0) & (place < desc.shape[2]))[:, None])


@gluon.jit
def new_barriers(number: gl.constexpr, count: gl.constexpr):
    """Allocate `number` barriers. `count` arrivals at a barrier complete its phase."""
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon.jit
def new_ring(STAGES: gl.constexpr, producers: gl.constexpr, consumers: gl.constexpr):
    """Allocate the barriers of a ring buffer, and return (full, empty).

    A slot is full after `producers` arrivals at its full barrier, and empty after `consumers` arrivals at its empty barrier.
    """
    return new_barriers(STAGES, producers), new_barriers(STAGES, consumers)


@gluon.jit
def slot_and_phase(n, slots: gl.constexpr):
    """Return the slot of the n-th use of a ring, counted from 0, and the parity (0 or 1) of this use's phase."""
    if slots & (slots - 1) == 0:  # n % slots would take more registers, which the main loops of backwards lack
        return n & (slots - 1), (n & slots) // slots
    return n % slots, n // slots & 1


@gluon.jit
def wait_full(full, n):
    """Wait until the n-th fill of a ring has arrived, and return its slot. `full` has a barrier for each slot."""
    slot, phase = slot_and_phase(n, full.shape[0])
    mbarrier.wait(full.index(slot), phase)
    return slot


@gluon.jit
def wait_empty(empty, n):
    """Wait until the slot of a ring's n-th fill is free, and return the slot. At the start, all slots are free."""
    slot, phase = slot_and_phase(n, empty.shape[0])
    mbarrier.wait(empty.index(slot), phase ^ 1)
    return slot


@gluon.jit
def signal(barriers, n):
    """Arrive at the barrier of a ring's n-th fill, once for all warps of a role: the compiler lets them meet before it."""
    mbarrier.arrive(barriers.index(n % barriers.shape[0]), count=1)


@gluon.jit
def matrix(buffer):
    """Return a buffer of shape [1, 1, rows, columns] in shared memory as a matrix."""
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])


@gluon.constexpr_function
def wgmma_layout(rows, columns):
    """Return the register layout of a wgmma's result. Each warp holds 16 of the rows, and all columns."""
    return gl.NVMMADistributedLayout([3, 0], [rows // 16, 1], [16, columns, 16])


@gluon.jit
def per_row(factors, layout: gl.constexpr):
    """Return one factor for each row as a column, for a tile with this layout."""
    return gl.convert_layout(factors, gl.SliceLayout(1, layout))[:, None]
