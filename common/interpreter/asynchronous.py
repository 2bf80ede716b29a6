"""Interpret the asynchronous operations that a partition issues: TMA copies and warpgroup matmuls.

An operation takes place at a random moment, after its issue and before the wait for it ends.
"""

import math
from types import SimpleNamespace

import torch

from .schedule import Waiting, now
from .shared import Barrier, Buffer
from .timing import COPIES, STORES, TENSOR_CORES
from .values import Register, Scalar, Values, in_triton, operand


class Traffic:
    """The interpreter calls these methods for global memory traffic and matmuls. `common.measure.counter` replaces them."""

    def read(self, nbytes: int, first: int, last: int):
        """Handle a read of `nbytes` from global memory. `first` and `last` are the addresses of its first and last element."""

    def write(self, nbytes: int, first: int, last: int, adds: bool = False):
        """Handle a write of `nbytes` to global memory. If `adds`, the elements are added to the elements in memory."""

    def multiply(self, flops: int, eight_bits: bool):
        """Handle a matmul of `flops` FLOPs. `eight_bits` says whether its operands have 8 bits."""


traffic = Traffic()


def _extent(part: torch.Tensor) -> tuple[int, int, int]:
    """Return the bytes of a part of a tensor, and the addresses of its first and its last element."""
    steps = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True)) if part.numel() else 0
    return part.numel() * part.itemsize, part.data_ptr(), part.data_ptr() + steps * part.itemsize


class Descriptor:
    """A tensor descriptor, with the tensor that TMA reads or writes."""

    def __init__(self, descriptor, name: str):
        self.name = name
        self.block_shape, self.layout = list(descriptor.block_shape), descriptor.layout
        self.dtype = in_triton(descriptor.base.dtype)
        self._padding = float("nan") if descriptor.padding == "nan" else 0
        self._base, self.shape = descriptor.base.detach(), tuple(descriptor.shape)
        numel = math.prod(self.block_shape)
        self.block_type = SimpleNamespace(numel=numel, nbytes=numel * descriptor.base.itemsize)
        self.strides = [Scalar(stride, 64) for stride in descriptor.strides]

    def clipped(self, coord):
        """Return the part of a tile inside the tensor, as a view of the tensor and as slices of the tile."""
        begins, sizes, of_tile = [], [], []
        for first, size, end in zip(map(int, coord), self.block_shape, self.shape, strict=True):
            begin = max(first, 0)
            stop = max(begin, min(first + size, end))
            begins.append(begin)
            sizes.append(stop - begin)
            of_tile.append(slice(begin - first, stop - first))
        # A descriptor may describe more than the memory holds, so make no view of the whole.
        strides = [int(stride) for stride in self.strides]
        start = 0 if 0 in sizes else sum(begin * stride for begin, stride in zip(begins, strides, strict=True))
        return self._base.as_strided(sizes, strides, self._base.storage_offset() + start), tuple(of_tile)

    def tile(self, coord):
        """Return a tile. Elements outside of the tensor get the padding value."""
        part, of_tile = self.clipped(coord)
        whole = torch.full(self.block_shape, self._padding, dtype=part.dtype)
        whole[of_tile] = part
        traffic.read(*_extent(part))
        return whole

    def check(self, coord, buffer: Buffer):
        """Fail unless each dimension has a coordinate, and the buffer has the tile's size and dtype."""
        if len(coord) != len(self.block_shape):
            now().fail(f"got {len(coord)} coordinates for `{self.name}`, which has {len(self.block_shape)} dimensions")
        if buffer.numel != self.block_type.numel or buffer.dtype != self.dtype:
            now().fail(
                f"a copy needs one dtype and size, but {buffer} is {buffer.dtype} {buffer.shape} "
                f"and a tile of `{self.name}` is {self.dtype} {self.block_shape}"
            )


class Load:
    """A TMA copy from global to shared memory. The copy signals a barrier."""

    def __init__(self, descriptor: Descriptor, coord, barrier: Barrier, buffer: Buffer):
        descriptor.check(coord, buffer)
        barrier.claim(buffer.nbytes)
        self._descriptor, self._coord, self._barrier, self._buffer = descriptor, coord, barrier, buffer
        event = buffer.memory.use(buffer, "a copy", writes=True, asynchronous=True)
        self._known = now().running.known | event
        self._cycle = now().timing.issue(COPIES, now().running, "load", buffer.nbytes)
        now().issue(self.take_place)
        now().switch()

    def take_place(self):
        """Fill the buffer and signal the barrier."""
        self._buffer.view.copy_(self._descriptor.tile(self._coord).view(self._buffer.shape))
        self._barrier.land(self._buffer.nbytes, self._known, self._cycle)


class Store:
    """A TMA copy or addition from shared to global memory. The issuing partition must call `tma.store_wait`.

    TMA reads shared memory first. The tile arrives in global memory at a later random moment.
    """

    def __init__(self, descriptor: Descriptor, coord, buffer: Buffer, adds: bool = False):
        descriptor.check(coord, buffer)
        if any(int(first) < 0 for first in coord):
            now().fail(f"a store to `{descriptor.name}` at {[*map(int, coord)]}: TMA cannot store before a tensor")
        self._descriptor, self._coord, self.buffer, self._adds = descriptor, coord, buffer, adds
        self.where = now().here()
        self.event = buffer.memory.use(buffer, "a copy", writes=False, asynchronous=True)
        self.over = self.arrived = False
        self.cycle = now().timing.issue(STORES, now().running, "add" if adds else "store", buffer.nbytes)
        now().running.stores.append(self)
        now().issue(self.take_place)
        now().switch()

    def take_place(self):
        """Read the tile, and let it arrive in global memory later."""
        self._tile = self.buffer.view.reshape(self._descriptor.block_shape).clone()
        self.over = True
        now().issue(self.arrive)

    def arrive(self):
        """Write the part of the tile that lies inside the tensor, or add this part to the tensor."""
        part, of_tile = self._descriptor.clipped(self._coord)
        if self._adds:
            part += self._tile[of_tile]  # the L2 cache does the addition, so the SM reads nothing
        else:
            part.copy_(self._tile[of_tile])
        traffic.write(*_extent(part), self._adds)
        self.arrived = True


def store_wait(pendings: int):
    """Wait until TMA has read the buffers of all stores of this partition, except the last `pendings` stores.

    This function replaces `tma.store_wait`.
    """
    partition = now().running
    waited_for = partition.stores[: max(0, len(partition.stores) - pendings)]
    now().switch(Waiting(lambda: all(store.over for store in waited_for), lambda: "its stores"))
    for store in waited_for:
        partition.known |= store.event
        now().timing.reach(partition, store.cycle)
    del partition.stores[: len(waited_for)]
    partition.sent += waited_for


def arrival_wait():
    """Wait until all stores of this partition have arrived in global memory. This function replaces `stored_wait`."""
    store_wait(0)
    sent = now().running.sent
    now().switch(Waiting(lambda: all(store.arrived for store in sent), lambda: "its stores to arrive"))
    sent.clear()


class Matmul(Values):
    """A matmul that `warpgroup_mma` issues. The kernel can use the result only after `warpgroup_mma_wait`."""

    def __init__(self, a, b, acc, use_acc):
        (m, k), n = a.shape, b.shape[1]
        if b.shape[0] != k or acc.shape != [m, n] or a.dtype != b.dtype:
            now().fail(f"cannot multiply {a.dtype} {a.shape} and {b.dtype} {b.shape}, and add the result to {acc.shape}")
        self.shape, self.flops, self.eight_bits = [m, n], 2 * m * k * n, a.dtype.primitive_bitwidth == 8
        self._acc, self._use_acc = acc, use_acc
        self._events = 0
        for buffer in (a, b):
            if isinstance(buffer, Buffer):
                self._events |= buffer.memory.use(buffer, "a matmul", writes=False, asynchronous=True)
        self._operands = a if isinstance(a, Buffer) else operand(a), b
        self._value = None
        self.layout = acc.layout
        self.where = now().here()
        self.over = False
        self.cycle = now().timing.issue(TENSOR_CORES, now().running, "matmul", self.flops // (1 + self.eight_bits))
        now().running.matmuls.append(self)
        now().issue(self.take_place)
        now().switch()

    @property
    def data(self):
        """Fail, because the kernel uses the value before it has waited for this matmul."""
        return now().fail("a matmul's value is used before warpgroup_mma_wait")

    def __getattr__(self, name):
        """Fail like `data`: the kernel uses this matmul as a tensor too early."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self.data

    def take_place(self):
        """Multiply the operands in float32."""
        a, b = (one.view if isinstance(one, Buffer) else one for one in self._operands)
        self._value = a.float() @ b.float()
        if self._use_acc:
            self._value = self._value + (self._acc.result() if isinstance(self._acc, Matmul) else operand(self._acc))
        traffic.multiply(self.flops, self.eight_bits)

    def result(self) -> torch.Tensor:
        """Let the matmul take place now, unless it already did. Return its value."""
        now().perform(self.take_place)
        return self._value

    def finish(self):
        """Complete the matmul. Then the running partition knows that the matmul no longer reads its operands."""
        self.result()
        self.over = True
        now().running.known |= self._events
        now().timing.reach(now().running, self.cycle)


def matmul_wait(num_outstanding: int = 0, deps: list = ()):
    """Wait until all matmuls of this partition except the last `num_outstanding` are over.

    This function replaces `warpgroup_mma_wait`.

    Returns:
        `deps` as a tuple, with the values of finished matmuls. If `deps` has one entry: this entry, without a tuple.
    """
    partition = now().running
    while len(partition.matmuls) > num_outstanding:
        partition.matmuls.pop(0).finish()
    now().switch()
    given = tuple(Register(one.result(), one.layout) if isinstance(one, Matmul) and one.over else one for one in deps)
    return given[0] if len(given) == 1 else given
