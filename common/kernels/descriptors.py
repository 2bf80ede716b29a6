"""Host-side tensor descriptors: what TMA (Hopper and newer) needs to know of a tensor."""

import threading

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16  # bytes: of the base address and of every stride but the last
_thread = threading.local()


def addressable(tensor: Tensor) -> Tensor:
    """`tensor` if a descriptor can address it, else a contiguous copy.

    A descriptor wants a base and strides of multiples of 16 bytes and a contiguous last dimension; a view that starts in the
    middle of a row, or whose rows are padded by a few elements, has neither.
    """
    if tensor.data_ptr() % ALIGNMENT == 0:
        if tensor.is_contiguous():  # the usual case, and every call asks
            return tensor
        *steps, last = _used_strides(tensor)
        if last == 1 and all(step * tensor.element_size() % ALIGNMENT == 0 for step in steps):
            return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _used_strides(tensor: Tensor) -> list[int]:
    """The strides; that of a dimension of size 1 is never used, may be anything, and is replaced."""
    return [stride if size > 1 else ALIGNMENT for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def aligned_strides(tensor: Tensor) -> list[int]:
    """The strides of an `addressable` tensor as a descriptor takes them."""
    strides = _used_strides(tensor) if 1 in tensor.shape else list(tensor.stride())
    strides[-1] = 1
    return strides


def give_context(tensor: Tensor):
    """Give this thread a CUDA context if it has none, as a new one, such as autograd's, until a call of the runtime.

    The driver's call that encodes a descriptor fails without.
    """
    if tensor.is_cuda and not hasattr(_thread, "has_context"):
        torch.cuda.Event().record()
        _thread.has_context = True


def located(tensor: Tensor) -> dict:
    """Where an `addressable` tensor lies, in the terms of a descriptor: base, shape and strides."""
    give_context(tensor)
    return {"base": tensor, "shape": list(tensor.shape), "strides": aligned_strides(tensor)}


def describe(tensor: Tensor, rows: int = 1, columns: int = 1) -> TensorDescriptor:
    """A descriptor of an `addressable` [B, H, S, D] tensor, to be moved so many rows and columns of a head at a time.

    An autotuned kernel's `pre_hook` sets these anew. The sequence is a dimension of its own, so that the hardware clips at its
    end: past it a load gives zeros, and a store does nothing.
    """
    return TensorDescriptor(**located(tensor), block_shape=[1, 1, rows, columns])
