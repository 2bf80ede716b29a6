"""Make tensor descriptors for TMA on the host."""

import threading

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16  # for TMA, the base address and all strides except the last must be multiples of this many bytes
_thread = threading.local()


def addressable(tensor: Tensor) -> Tensor:
    """Return `tensor` if a descriptor can address it, else a contiguous copy.

    A descriptor's base address and strides must be multiples of 16 bytes, and its last dimension must be contiguous.
    """
    if tensor.data_ptr() % ALIGNMENT == 0:
        if tensor.is_contiguous():  # a fast path for the usual case
            return tensor
        *steps, last = _used_strides(tensor)
        if last == 1 and all(step * tensor.element_size() % ALIGNMENT == 0 for step in steps):
            return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _used_strides(tensor: Tensor) -> list[int]:
    """Return the tensor's strides, with a valid stride for each dimension of size 1.

    PyTorch may give a dimension of size 1 any stride, but TMA requires a multiple of 16 bytes.
    """
    return [stride if size > 1 else ALIGNMENT for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def aligned_strides(tensor: Tensor) -> list[int]:
    """Return the strides of an `addressable` tensor for a descriptor."""
    strides = _used_strides(tensor) if 1 in tensor.shape else list(tensor.stride())
    strides[-1] = 1
    return strides


def give_context(tensor: Tensor):
    """Give this thread a CUDA context if it has none.

    The driver needs a context to encode a descriptor. A new thread, such as autograd's, has no context before its first call of
    the CUDA runtime.
    """
    if tensor.is_cuda and not hasattr(_thread, "has_context"):
        torch.cuda.Event().record()
        _thread.has_context = True


def located(tensor: Tensor) -> dict:
    """Return a descriptor's base, shape and strides for an `addressable` tensor."""
    give_context(tensor)
    return {"base": tensor, "shape": list(tensor.shape), "strides": aligned_strides(tensor)}


def describe(tensor: Tensor, rows: int = 1, columns: int = 1) -> TensorDescriptor:
    """Make a descriptor of an `addressable` [B, H, S, D] tensor, for tiles of `rows` x `columns` of one head.

    An autotuned kernel's `pre_hook` later replaces `rows` and `columns`. The sequence is a dimension of its own, so TMA clips a
    tile at the end of the sequence. Past this end, a load gives zeros and a store does nothing.
    """
    return TensorDescriptor(**located(tensor), block_shape=[1, 1, rows, columns])
