"""What a call moves, computes and allocates, counted exactly on the CPU, where the kernels are interpreted.

A kernel counts what its programs ask of global memory: every element that a load, store, atomic or copy touches, each time,
for each program anew. Masked elements count nothing, nor does what lies outside a descriptor's tensor, which the hardware
clips. That is the traffic between the SMs and what lies behind them, and the "HBM accesses" of the FlashAttention
papers; a cache may serve part of it. An atomic operation reads and writes. Where TMA adds, it writes:
the L2 cache adds.

An operator of PyTorch counts its arguments and results once each, the least that it can move: how often a library reads its
tiles is its own affair. A dimension that is only expanded counts as one; views and empty tensors move nothing.

FLOPs are those of matmuls as executed: the masked part of a tile and what is computed again are in them.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.language import constexpr
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

from common.interpreter.asynchronous import Traffic

aten = torch.ops.aten
_FLOPS = flop_registry | {  # the CPU's attention has none of its own
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[aten._scaled_dot_product_flash_attention_backward],
}
# Operators that launch nothing on a GPU, besides those that PyTorch marks as views.
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
_OVERWRITING = {"copy_", "fill_", "zero_"}  # in place, without a look at what was there


@dataclass
class Launch:
    """One kernel, or one operator of PyTorch: bytes read and written, FLOPs of its matmuls."""

    name: str  # of the kernel's function; "aten.…" for an operator
    tile: dict[str, int] = field(default_factory=dict)  # a kernel's BLOCK_… arguments
    read: int = 0
    written: int = 0
    flops: int = 0


@dataclass
class Count:
    """What a call took: its launches in order, and the peak of the memory that it allocated, in bytes, outputs included."""

    launches: list[Launch]
    peak: int

    @property
    def read(self) -> int:
        """Bytes read by all launches."""
        return sum(launch.read for launch in self.launches)

    @property
    def written(self) -> int:
        """Bytes written by all launches."""
        return sum(launch.written for launch in self.launches)

    @property
    def flops(self) -> int:
        """FLOPs of the matmuls of all launches."""
        return sum(launch.flops for launch in self.launches)


def count(call: Callable) -> Count:
    """Call once and count; on the interpreter only, whose kernels can be watched.

    What PyTorch's dispatcher does not see is not counted: the inside of an operator, and of a custom operator. So a stage is
    counted through its plain functions.
    """
    with Counter() as counter:
        call()
    return Count(counter.launches, counter.peak)


def _tensors(values) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def distinct(tensors) -> list[Tensor]:
    """Some tensors, one passed twice once."""
    return list({(t.data_ptr(), t.dtype, t.shape, t.stride()): t for t in tensors}.values())


def bytes_of(tensor: Tensor) -> int:
    """Bytes of memory behind a tensor; a dimension that is only expanded counts as one."""
    return math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride) * tensor.itemsize


def moved(func, args, kwargs, result) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator of PyTorch reads, and those that it writes, from its schema."""
    name = func.overloadpacket.__name__
    read, written = [], _tensors(result)
    values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        tensors = _tensors(values.get(argument.name))
        changed = argument.alias_info is not None and argument.alias_info.is_write
        if changed:
            written += tensors
        if not (changed and (argument.is_out or name in _OVERWRITING)):
            read += tensors
    if name.startswith("new_") or name.endswith("_like"):  # these take no more than shape and dtype from their argument
        read = []
    return distinct(read), distinct(written)


def _operator_launch(func, args, kwargs, result) -> Launch:
    """What an operator of PyTorch moves and computes."""
    packet = func.overloadpacket
    read, written = (sum(map(bytes_of, tensors)) for tensors in moved(func, args, kwargs, result))
    formula = _FLOPS.get(packet)
    flops = formula(*_tensors(args), out_val=result) if formula else 0
    return Launch(f"aten.{packet.__name__}", read=read, written=written, flops=flops)


class Counter(TorchDispatchMode):
    """Watches PyTorch's operators and storages, and from `__enter__` to `__exit__` what interpreted kernels do."""

    def __init__(self):
        super().__init__()
        self.launches = []
        self.peak = self._live = 0
        self._in_kernel = False

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # or the first operator loads the compiler, which takes a second

    def __enter__(self):
        watched = (
            (InterpretedFunction, "run", self._run),
            # All of the interpreter's other loads and stores, those of descriptors included, end in these two.
            (InterpreterBuilder, "create_masked_load", self._load),
            (InterpreterBuilder, "create_masked_store", self._store),
            (InterpreterBuilder, "create_atomic_rmw", self._atomic_rmw),
            (InterpreterBuilder, "create_atomic_cas", self._atomic_cas),
            (InterpreterBuilder, "create_descriptor_reduce", self._descriptor_reduce),
            (InterpreterBuilder, "create_dot", self._dot),
            (GluonJITFunction, "run", self._run),
            (Traffic, "read", self._of_gluon("read")),
            (Traffic, "write", self._of_gluon("written")),
            (Traffic, "multiply", self._of_gluon("flops")),
        )
        # On a GPU, where nothing is interpreted, the interpreter lacks what `common.interpreter` adds.
        there = [(owner, name, watch) for owner, name, watch in watched if hasattr(owner, name)]
        self._originals = [(owner, name, getattr(owner, name)) for owner, name, _ in there]
        for owner, name, watch in there:
            setattr(owner, name, watch(getattr(owner, name)))
        return super().__enter__()

    def __exit__(self, *exc_info):
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        return super().__exit__(*exc_info)

    def _run(self, run):
        def counted(function, *args, warmup, **kwargs):
            if not warmup:
                tile = {name: value for name, value in kwargs.items() if name.startswith("BLOCK_")}
                tile = {name: value.value if isinstance(value, constexpr) else value for name, value in tile.items()}
                self.launches.append(Launch(function.__name__, tile))
            self._in_kernel = True  # the interpreter's own tensors are no cost of the kernel
            try:
                return run(function, *args, warmup=warmup, **kwargs)
            finally:
                self._in_kernel = False

        return counted

    def _touch(self, pointers, mask, read, written):
        """Count the elements that a memory operation's mask lets through, as many times read and written."""
        element = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        touched = int(numpy.count_nonzero(numpy.asarray(mask.data))) * element  # a descriptor's mask is an array itself
        self.launches[-1].read += read * touched
        self.launches[-1].written += written * touched

    def _load(self, load):
        def counted(builder, pointers, mask, *args, **kwargs):
            self._touch(pointers, mask, read=1, written=0)
            return load(builder, pointers, mask, *args, **kwargs)

        return counted

    def _store(self, store):
        def counted(builder, pointers, value, mask, *args, **kwargs):
            self._touch(pointers, mask, read=0, written=1)
            return store(builder, pointers, value, mask, *args, **kwargs)

        return counted

    def _atomic_rmw(self, atomic_rmw):
        def counted(builder, operation, pointers, value, mask, *args):
            self._touch(pointers, mask, read=1, written=1)
            return atomic_rmw(builder, operation, pointers, value, mask, *args)

        return counted

    def _descriptor_reduce(self, descriptor_reduce):
        """What TMA adds is written: the L2 cache does the adding, and nothing comes back."""

        def counted(*args):
            read = self.launches[-1].read
            descriptor_reduce(*args)
            self.launches[-1].read = read

        return counted

    def _atomic_cas(self, atomic_cas):
        def counted(builder, pointers, expected, value, *args):
            everywhere = numpy.ones_like(pointers.data, dtype=bool)
            self._touch(pointers, everywhere, read=1, written=1)
            return atomic_cas(builder, pointers, expected, value, *args)

        return counted

    def _dot(self, dot):
        def counted(builder, a, b, *args):
            self.launches[-1].flops += 2 * a.data.size * b.data.shape[-1]
            return dot(builder, a, b, *args)

        return counted

    def _of_gluon(self, what):
        """Add what a Gluon kernel says to this number of its launch. Its threads come one at a time."""

        def watch(say):
            def counted(traffic, amount, *where):
                setattr(self.launches[-1], what, getattr(self.launches[-1], what) + amount)
                say(traffic, amount, *where)

            return counted

        return watch

    def _release(self, size):
        self._live -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._in_kernel:
            return result
        if not func.is_view and func.overloadpacket.__name__ not in _NO_KERNEL:
            self.launches.append(_operator_launch(func, args, kwargs, result))
        # A result that shares an argument's storage is a view of it or the argument itself; any other storage is new.
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        made = (t.untyped_storage() for t in _tensors(result))
        for storage in {s._cdata: s for s in made if s._cdata not in given}.values():
            self._live += storage.nbytes()
            weakref.finalize(storage, self._release, storage.nbytes())
        self.peak = max(self.peak, self._live)
        return result
