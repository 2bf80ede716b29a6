"""How the operator and ring attention call a stage's functions."""

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from common.layout import addressable, empty_rows
from common.recording import Recorded
from common.runtime import DEVICE, INTERPRETED, NO_GPU


class Lengths(NamedTuple):
    """Lengths of the sequences of a batch, as tensors on the device. The host never reads them."""

    keys: Tensor  # [B], int32, contiguous: the number of keys of each sequence, at the start of the sequence's part of k and v
    # None, or the numbers of each sequence's pages, [B, N], int32, contiguous. k is then [pages, Hkv, page size, D]; v alike;
    # Sk is N * page size. Pages wholly behind a sequence may have any number, and a stage never reads them.
    pages: Tensor | None = None


class Starts(NamedTuple):
    """Where the sequences of a packed batch start, as tensors on the device, [B + 1], int32, contiguous.

    q, k and v are [1, H, tokens, D]. Sequence b has the tokens from number starts[b] up to, but without, number starts[b + 1].
    The host never reads the starts. Whatever they are, a stage reads and writes only inside the tensors.
    """

    queries: Tensor
    keys: Tensor


class Descales(NamedTuple):
    """The factors of a cache in 8 bits, as tensors on the device: the keys of a head are k times its factor."""

    k: Tensor | None  # [B, Hkv], float32, contiguous; None for 1
    v: Tensor | None  # likewise


class Unavailable(RuntimeError):
    """A stage cannot run here. The message says why, and what to do or which stage to use instead."""


def autocast_device(tensor) -> str:
    """Return the kind of device whose autocast counts for a tensor."""
    return "cpu" if isinstance(tensor, Tensor) and tensor.is_cpu else DEVICE


def plainly(function: Callable, first: Tensor, *tensors: Tensor, **options):
    """Call `function` with the tensors' device as the current device, and with autocast off: autocast would change dtypes.

    Raises:
        Unavailable: the tensors are on the CPU, the function has kernels, and no interpreter runs kernels.
    """
    elsewhere = first.is_cuda and first.get_device() != torch.cuda.current_device()
    device = autocast_device(first)
    try:
        if elsewhere or torch.is_autocast_enabled(device):  # check first, because entering both contexts is slow
            with torch.cuda.device_of(first), torch.autocast(device, enabled=False):
                return function(first, *tensors, **options)
        return function(first, *tensors, **options)
    except RuntimeError as error:
        if INTERPRETED or NO_GPU not in str(error):
            raise
        raise Unavailable(
            "kernels need a GPU, and none is here; TRITON_INTERPRET=1, set before Python starts, runs them on the CPU"
        ) from error


@functools.lru_cache(maxsize=512)  # more than the functions of all stages; a reloaded module's old functions are dropped
def entry(function: Callable) -> Callable:
    """Return a function that calls a stage's `forward` or `backward` as it wants to be called.

    Tensors are `addressable`, and their device is the current device. Autocast is off. Launches are recorded and replayed
    (`common.recording`).

    Raises:
        Unavailable: the tensors are on the CPU, the stage has kernels, and no interpreter runs kernels.
    """

    @functools.wraps(function)
    def laid_out(*tensors: Tensor, **options):  # recorded, too: a replay need not look at the tensors again
        first, *others = map(addressable, tensors)
        if options.get("scale", 1) < 0 and first.stride().count(1) > 1:  # stages take -q, where the other may be innermost
            first = empty_rows(first).copy_(first)
        return function(first, *others, **options)

    recorded = laid_out if INTERPRETED else Recorded(laid_out)

    @functools.wraps(function)
    def call(*tensors: Tensor, **options):
        return plainly(recorded, *tensors, **options)

    call.recorded = recorded
    return call


@functools.lru_cache(maxsize=512)
def differentiable_entry(forward: Callable) -> Callable:
    """Return `entry(forward)` for a caller who runs a backward with the results.

    A forward that rounds more than its inputs' dtype has an argument `differentiable` for this.
    """
    takes = "differentiable" in inspect.signature(forward).parameters
    return functools.partial(entry(forward), differentiable=True) if takes else entry(forward)
