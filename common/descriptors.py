"""Host-side tensor descriptors: what the copy engine (TMA, Hopper and newer) needs to know of a tensor."""

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
    steps = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    aligned = all(step * tensor.element_size() % ALIGNMENT == 0 for step in steps[:-1]) and tensor.data_ptr() % ALIGNMENT == 0
    return tensor if aligned and tensor.stride(-1) == 1 else tensor.clone(memory_format=torch.contiguous_format)


def aligned_strides(tensor: Tensor) -> list[int]:
    """The strides of an `addressable` tensor; that of a dimension of size 1, which is never used, may be anything else."""
    *steps, _ = (stride if size > 1 else ALIGNMENT for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return [*steps, 1]


def describe(tensor: Tensor, rows: int = 1, columns: int = 1) -> TensorDescriptor:
    """A descriptor of an `addressable` [B, H, S, D] tensor, to be moved so many rows and columns of a head at a time.

    An autotuned kernel's `pre_hook` sets these anew. The sequence is a dimension of its own, so that the hardware clips at its
    end: past it a load gives zeros, and a store does nothing.
    """
    if tensor.is_cuda and not hasattr(_thread, "has_context"):
        # A new thread, such as autograd's, has no CUDA context until a call of the runtime gives it one; the driver's call that
        # encodes a descriptor fails without.
        torch.cuda.Event().record()
        _thread.has_context = True
    return TensorDescriptor(tensor, list(tensor.shape), aligned_strides(tensor), [1, 1, rows, columns])
