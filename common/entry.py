"""How the operator and ring attention call a stage's functions."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from common.layout import addressable
from common.recording import Recorded
from common.runtime import DEVICE, INTERPRETED


class Unavailable(RuntimeError):
    """A stage cannot run here. The message says why, and what to do or which stage to use instead."""


def plainly(function: Callable, first: Tensor, *tensors: Tensor, **options):
    """Call `function` with the tensors' device as the current device, and with autocast off: autocast would change dtypes."""
    elsewhere = first.is_cuda and first.get_device() != torch.cuda.current_device()
    if elsewhere or torch.is_autocast_enabled(DEVICE):  # check first, because entering both contexts is slow
        with torch.cuda.device_of(first), torch.autocast(DEVICE, enabled=False):
            return function(first, *tensors, **options)
    return function(first, *tensors, **options)


@functools.cache
def entry(function: Callable) -> Callable:
    """Return a function that calls a stage's `forward` or `backward` as it wants to be called.

    Tensors are `addressable`, and their device is the current device. Autocast is off. Launches are recorded and replayed
    (`common.recording`).

    Raises:
        Unavailable: the tensors are on the CPU, the stage has kernels, and no interpreter runs kernels.
    """
    recorded = function if INTERPRETED else Recorded(function)

    @functools.wraps(function)
    def call(*tensors: Tensor, **options):
        try:
            return plainly(recorded, *map(addressable, tensors), **options)
        except RuntimeError as error:  # Triton found no driver
            if INTERPRETED or torch.cuda.is_available():
                raise
            raise Unavailable(
                "kernels need a GPU, and none is here; TRITON_INTERPRET=1, set before Python starts, runs them on the CPU"
            ) from error

    call.recorded = recorded
    return call
