"""Count a call's traffic, FLOPs and allocations exactly, on the CPU with interpreted kernels.

A kernel's traffic is the bytes that its loads, stores, atomic operations and asynchronous copies move from and to memory. An
element counts each time it is read or written. Masked elements do not count. Elements outside a descriptor's tensor do not
count either, because TMA does not copy them. An atomic operation counts as a read and a write. An addition by TMA counts only
as a write, because the L2 cache does the addition. The FlashAttention papers call this traffic "HBM accesses", although caches
may serve part of it.

For a PyTorch operator, each argument and each result counts once. This is the minimum: the operator's kernel may read parts of
an argument several times. Making views or empty tensors moves no bytes.

The FLOPs are those of all matmuls that run. They include masked parts of tiles, and scores that a backward computes again.
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
from common.kernels import interpreted, matmul
from common.runtime import INTERPRETED

if INTERPRETED:
    interpreted.install()  # now, because a counter changes the interpreters

aten = torch.ops.aten
_FLOPS = flop_registry | {  # PyTorch's own table lacks the operators of attention on the CPU, and ours
    matmul.bmm_float32: flop_registry[aten.bmm],
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[aten._scaled_dot_product_flash_attention_backward],
}
# These operators launch no kernel on a GPU. Views (`func.is_view`) launch none either.
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
_OVERWRITING = {"copy_", "fill_", "zero_"}  # operators that write in place without reading the old values


@dataclass
class Launch:
    """The bytes that one kernel or PyTorch operator reads and writes, and the FLOPs of its matmuls."""

    name: str  # the name of the kernel's function, or "aten.…" for an operator
    tile: dict[str, int] = field(default_factory=dict)  # a kernel's BLOCK_… arguments by name
    read: int = 0
    written: int = 0
    flops: int = 0


@dataclass
class Count:
    """The launches of a call in order, and the peak bytes of all tensors that the call allocates."""

    launches: list[Launch]
    peak: int

    @property
    def read(self) -> int:
        """The bytes that all launches read."""
        return sum(launch.read for launch in self.launches)

    @property
    def written(self) -> int:
        """The bytes that all launches write."""
        return sum(launch.written for launch in self.launches)

    @property
    def flops(self) -> int:
        """The FLOPs of all launches' matmuls."""
        return sum(launch.flops for launch in self.launches)


def count(call: Callable) -> Count:
    """Run `call` once, and count its launches. This works only on the interpreter.

    `call` must use a stage's `forward` or `backward`. The stage's `attention` is a custom operator, and PyTorch does not show
    `Counter` what happens inside it.
    """
    with Counter() as counter:
        call()
    return Count(counter.launches, counter.peak)


def _tensors(values) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def distinct(tensors) -> list[Tensor]:
    """Return the tensors without repetitions."""
    return list({(t.data_ptr(), t.dtype, t.shape, t.stride()): t for t in tensors}.values())


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of memory behind a tensor. An expanded dimension counts as size 1."""
    return math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride) * tensor.itemsize


def moved(func, args, kwargs, result) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that a PyTorch operator reads, and the tensors that the operator writes."""
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
    if name.startswith("new_") or name.endswith("_like"):  # these operators use only the shape and dtype of their argument
        read = []
    return distinct(read), distinct(written)


def _operator_launch(func, args, kwargs, result) -> Launch:
    """Return the `Launch` of a PyTorch operator."""
    packet = func.overloadpacket
    read, written = (sum(map(bytes_of, tensors)) for tensors in moved(func, args, kwargs, result))
    formula = _FLOPS.get(packet)
    flops = formula(*_tensors(args), out_val=result) if formula else 0
    return Launch(f"aten.{packet.__name__}", read=read, written=written, flops=flops)


class Counter(TorchDispatchMode):
    """A context that counts: it watches PyTorch's operators, the memory of their results, and the interpreted kernels."""

    def __init__(self):
        super().__init__()
        self.launches = []
        self.peak = self._live = 0
        self._in_kernel = False

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # True would load PyTorch's compiler, which takes a second

    def __enter__(self):
        watched = (
            (InterpretedFunction, "run", self._run),
            # Loads and stores with descriptors call the next two functions too.
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
        # On a GPU, some of these functions do not exist.
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
            self._in_kernel = True  # operators that the interpreter itself calls do not count
            try:
                return run(function, *args, warmup=warmup, **kwargs)
            finally:
                self._in_kernel = False

        return counted

    def _touch(self, pointers, mask, read, written):
        """Count an operation's unmasked bytes as read if `read` is 1, and as written if `written` is 1."""
        element = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        touched = int(numpy.count_nonzero(numpy.asarray(mask.data))) * element  # with a descriptor, `mask` is a NumPy array
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
        """Count only the write of TMA's addition, because the L2 cache does the addition and returns nothing."""

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
        """Add a Gluon kernel's bytes or FLOPs to the field `what` of the running kernel's launch."""

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
        # A result that shares an argument's storage allocates nothing. Any other result has a new storage.
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        made = (t.untyped_storage() for t in _tensors(result))
        for storage in {s._cdata: s for s in made if s._cdata not in given}.values():
            self._live += storage.nbytes()
            weakref.finalize(storage, self._release, storage.nbytes())
        self.peak = max(self.peak, self._live)
        return result
