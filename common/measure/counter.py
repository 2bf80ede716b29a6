"""Count a call's traffic, FLOPs and allocations exactly, on the CPU with interpreted kernels.

A kernel's traffic is the bytes that its loads, stores, atomic operations and asynchronous copies move from and to memory. An
element counts each time it is read or written. Masked elements do not count. Elements outside a descriptor's tensor do not
count either, because TMA does not copy them. An atomic operation counts as a read and a write. An addition by TMA counts only
as a write, because the L2 cache does the addition. The FlashAttention papers call this traffic "HBM accesses", although caches
may serve part of it.

For a PyTorch operator, each argument and each result counts once. This is the minimum: the operator's kernel may read parts of
an argument several times. Making views or empty tensors moves no bytes.

The FLOPs are those of all matmuls that run. They include masked parts of tiles, and scores that a backward computes again. For
PyTorch's own attention, they are those of the unmasked scores.
"""

import contextlib
import functools
import itertools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

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
class Operand:
    """The bytes that a launch reads from, and writes to, one allocation. Both numbers may be 0."""

    allocation: int  # the allocation's number, the same in all launches of a call
    nbytes: int  # the size of the allocation
    read: int = 0
    written: int = 0


@dataclass
class Launch:
    """The bytes that one kernel or PyTorch operator reads and writes, and the FLOPs of its matmuls."""

    name: str  # the name of the kernel's function, or "aten.…" for an operator
    tile: dict[str, int] = field(default_factory=dict)  # a kernel's BLOCK_… arguments by name
    read: int = 0
    written: int = 0
    flops: int = 0
    crossing: int = field(default=0, compare=False)  # the bytes that must cross HBM (`common.measure.traffic.compulsory`)
    operands: list[Operand] = field(default_factory=list, compare=False)  # `read` and `written`, for each allocation
    eight_bit_flops: int = 0  # the part of `flops` whose operands have 8 bits


@dataclass
class Count:
    """The launches of a call in order, and the sums of their `read`, `written` and `flops`."""

    launches: list[Launch]
    peak: int  # the largest number of bytes of all tensors that the call allocates

    def __post_init__(self):
        self.read = sum(launch.read for launch in self.launches)
        self.written = sum(launch.written for launch in self.launches)
        self.flops = sum(launch.flops for launch in self.launches)


def count(call: Callable) -> Count:
    """Run `call` once, and count its launches. This works only on the interpreter.

    `call` must use a stage's `forward` or `backward`. The stage's `attention` is a custom operator, and PyTorch does not show
    `Counter` what happens inside it.
    """
    with Counter() as counter:
        call()
    return Count(counter.launches, counter.peak)


def tensors_of(values) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _bytes_of(tensor: Tensor) -> int:
    """Return the bytes of memory behind a tensor. An expanded dimension counts as size 1."""
    return math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride) * tensor.itemsize


def _values(func, args, kwargs) -> dict:
    """Return the values of a PyTorch operator's arguments by their names."""
    return dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs


def _moved(func, args, kwargs, result) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that a PyTorch operator reads, and the tensors that the operator writes."""
    name, values = func.overloadpacket.__name__, _values(func, args, kwargs)
    read, written = [], tensors_of(result)
    for argument in func._schema.arguments:
        tensors = tensors_of(values.get(argument.name))
        changed = argument.alias_info is not None and argument.alias_info.is_write
        if changed:
            written += tensors
        if not (changed and (argument.is_out or name in _OVERWRITING)):
            read += tensors
    if name.startswith("new_") or name.endswith("_like"):  # these operators use only the shape and dtype of their argument
        read = []
    read, written = ({(t.data_ptr(), t.dtype, t.shape, t.stride()): t for t in found} for found in (read, written))  # distinct
    return list(read.values()), list(written.values())


def _operator_flops(func, args, kwargs, result) -> int:
    """Return the FLOPs of a PyTorch operator. Attention with a causal mask computes only the scores under the mask."""
    if func.overloadpacket not in _FLOPS:
        return 0
    flops = _FLOPS[func.overloadpacket](*tensors_of(args), out_val=result)
    values = _values(func, args, kwargs)
    if values.get("is_causal"):
        seq_q, seq_k = (values[name].shape[-2] for name in ("query", "key"))
        flops = flops * sum(min(i + 1, seq_k) for i in range(seq_q)) // (seq_q * seq_k)
    return flops


class Counter(TorchDispatchMode):
    """A context that counts: it watches PyTorch's operators, the memory of their results, and the interpreted kernels."""

    def __init__(self):
        super().__init__()
        self.launches = []
        self.peak = self._live = 0
        self._in_kernel = self._in_reduction = False
        self._numbers = defaultdict(itertools.count().__next__)  # the address of an allocation -> its number
        self._operands = {}  # the address of an allocation -> the operand of the newest launch

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # True would load PyTorch's compiler, which takes a second

    def __enter__(self):
        touch, interpreter = self._touch, InterpreterBuilder
        before = (  # (class, method, what to do with the method's arguments before each call)
            # Loads and stores with descriptors call the next two functions too.
            (interpreter, "create_masked_load", lambda _, pointers, mask, *others: touch(pointers, mask, True, False)),
            (interpreter, "create_masked_store", lambda _, pointers, value, mask, *others: touch(pointers, mask, False, True)),
            (interpreter, "create_atomic_rmw", lambda _, op, pointers, value, mask, *others: touch(pointers, mask, True, True)),
            (interpreter, "create_dot", lambda _, a, b, *others: self._multiply(2 * a.data.size * b.data.shape[-1])),
            (Traffic, "read", lambda _, nbytes, *ends: nbytes and self._access(nbytes, 0, *ends)),
            (Traffic, "write", lambda _, nbytes, *ends: nbytes and self._access(0, nbytes, *ends)),
            (Traffic, "multiply", lambda _, *matmul: self._multiply(*matmul)),
        )
        around = (
            (InterpretedFunction, "run", self._run),
            (GluonJITFunction, "run", self._run),
            (interpreter, "create_descriptor_reduce", self._reduction),
        )

        def watching(watch, original):
            def watched(*args, **kwargs):
                watch(*args)
                return original(*args, **kwargs)

            return watched

        self._patches = contextlib.ExitStack()
        for owner, name, change in (*((*method, functools.partial(watching, watch)) for *method, watch in before), *around):
            if original := getattr(owner, name, None):  # on a GPU, some of these functions do not exist
                self._patches.enter_context(mock.patch.object(owner, name, change(original)))
        return super().__enter__()

    def __exit__(self, *exc_info):
        self._patches.close()
        return super().__exit__(*exc_info)

    def _begin(self, launch: Launch):
        self.launches.append(launch)
        self._operands = {}

    def _operand(self, storage) -> Operand:
        """Return the newest launch's operand in a tensor's storage. If there is none yet, add one."""
        address = storage.data_ptr()
        if address not in self._operands:
            self._operands[address] = Operand(self._numbers[address], storage.nbytes())
            self.launches[-1].operands.append(self._operands[address])
        return self._operands[address]

    def _access(self, read: int, written: int, first: int, last: int, adds: bool = False):
        """Count the bytes of an access of the newest launch.

        `first` and `last` are the addresses of the first and the last element. `adds` says whether the access adds in memory.
        """
        operands = self._operands.items()
        operand = next((operand for begin, operand in operands if begin <= first < begin + operand.nbytes), None)
        if operand is None:
            raise RuntimeError(f"{self.launches[-1].name} accesses memory that belongs to none of its arguments")
        self._add(operand, read, written)

    def _add(self, operand: Operand, read: int, written: int):
        for each in (self.launches[-1], operand):
            each.read += read
            each.written += written

    def _run(self, run):
        def counted(function, *args, warmup, **kwargs):
            if not warmup:
                tile = {name: value for name, value in kwargs.items() if name.startswith("BLOCK_")}
                tile = {name: value.value if isinstance(value, constexpr) else value for name, value in tile.items()}
                self._begin(Launch(function.__name__, tile))
                for tensor in tensors_of([getattr(leaf, "base", leaf) for leaf in tree_leaves((args, kwargs))]):
                    self._operand(tensor.untyped_storage())
            with mock.patch.object(self, "_in_kernel", True):  # operators that the interpreter itself calls do not count
                return run(function, *args, warmup=warmup, **kwargs)

        return counted

    def _touch(self, pointers, mask, reads: bool, writes: bool):
        """Count an operation's unmasked bytes. TMA's addition is a write, because the L2 cache adds and returns nothing."""
        addresses = numpy.asarray(pointers.data)
        mask = numpy.asarray(getattr(mask, "data", mask))  # with a descriptor, `mask` is a NumPy array
        addresses = addresses[numpy.broadcast_to(mask.astype(bool), addresses.shape)]
        reads = reads and not self._in_reduction
        if addresses.size and (reads or writes):
            nbytes = addresses.size * max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
            ends = int(addresses.min()), int(addresses.max())
            self._access(reads * nbytes, writes * nbytes, *ends, adds=self._in_reduction or (reads and writes))

    def _reduction(self, reduce):
        def counted(*args):
            with mock.patch.object(self, "_in_reduction", True):
                reduce(*args)

        return counted

    def _multiply(self, flops: int, eight_bits: bool = False):
        self.launches[-1].flops += flops
        self.launches[-1].eight_bit_flops += flops * eight_bits

    def _allocate(self, nbytes: int):
        self._live += nbytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._in_kernel:
            return result
        # A result that shares an argument's storage allocates nothing. Any other result has a new storage.
        given = {t.untyped_storage()._cdata for t in tensors_of((args, kwargs))}
        made = (t.untyped_storage() for t in tensors_of(result))
        for storage in {s._cdata: s for s in made if s._cdata not in given}.values():
            self._numbers.pop(storage.data_ptr(), None)  # a freed allocation may have had this address
            self._allocate(storage.nbytes())
            weakref.finalize(storage, self._allocate, -storage.nbytes())
        self.peak = max(self.peak, self._live)
        if not func.is_view and func.overloadpacket.__name__ not in _NO_KERNEL:
            flops = _operator_flops(func, args, kwargs, result)
            self._begin(Launch(f"aten.{func.overloadpacket.__name__}", flops=flops))
            read, written = _moved(func, args, kwargs, result)
            for tensor in read:
                self._move(tensor, _bytes_of(tensor), 0)
            for tensor in written:
                self._move(tensor, 0, _bytes_of(tensor))
        return result

    def _move(self, tensor: Tensor, read: int, written: int):
        """Count that an operator reads or writes a tensor."""
        self._add(self._operand(tensor.untyped_storage()), read, written)
