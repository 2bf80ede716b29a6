"""Make tensor descriptors for TMA on the host."""

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from common.layout import used_strides
from common.runtime import give_context


def aligned_strides(tensor: Tensor) -> list[int]:
    """Return the strides of an `addressable` tensor for a descriptor."""
    assert tensor.stride(-1) == 1, "a row is not contiguous: call a stage through common.entry"
    strides = used_strides(tensor) if 1 in tensor.shape else list(tensor.stride())
    strides[-1] = 1
    return strides


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
