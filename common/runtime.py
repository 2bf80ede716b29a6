"""Where kernels run: on the GPU, or on the CPU, in interpreters for Triton and Gluon.

As everywhere in Triton, `TRITON_INTERPRET=1` chooses the interpreters. It must be set before this module is imported.
"""

import contextlib
import functools
import math
import threading
from dataclasses import dataclass

import torch
import triton

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRETED else "cuda"
NO_GPU = "active drivers"  # with these words Triton says that it found no GPU


class _Thread(threading.local):
    has_context = False


_thread = _Thread()


def current_device() -> int:
    """Return the index of the current GPU, or 0 if kernels are interpreted."""
    return 0 if INTERPRETED else triton.runtime.driver.active.get_current_device()


@functools.cache  # the driver takes most of a millisecond to answer
def _properties(device: int) -> dict[str, int]:
    return triton.runtime.driver.active.utils.get_device_properties(device)


@functools.cache
def _architecture(driver, device: int) -> int | str:
    return driver.get_current_target().arch


@dataclass(frozen=True)
class Device:
    """The device properties that stages use. The defaults are for interpreted kernels."""

    architecture: int | None = None
    shared_memory: float = math.inf
    num_sms: int | None = None  # None: as many as the interpreter runs at once


_interpreter = Device()


def shared_memory_limit() -> float:
    """Return the maximum bytes of shared memory per program on the current device."""
    return _interpreter.shared_memory if INTERPRETED else _properties(current_device())["max_shared_mem"]


def num_sms() -> int:
    """Return the number of SMs of the current device, or of concurrent programs if kernels are interpreted."""
    if not INTERPRETED:
        return _properties(current_device())["multiprocessor_count"]
    from common.interpreter.schedule import AT_ONCE  # not at the top, because a GPU needs no interpreter

    return _interpreter.num_sms or AT_ONCE


def l2_bytes() -> int:
    """Return the bytes of the current device's L2 cache. If kernels are interpreted, or without a GPU, return an H100's."""
    on_gpu = not INTERPRETED and torch.cuda.is_available()
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size if on_gpu else 50 * 2**20


def architecture() -> int | str | None:
    """Return the current device's architecture, such as 90 for sm_90 or "gfx942" for AMD; None if kernels are interpreted."""
    if INTERPRETED:
        return _interpreter.architecture
    driver = triton.runtime.driver.active
    return _architecture(driver, driver.get_current_device())


@contextlib.contextmanager
def interpreted_as(device: Device):
    """Enter a context in which interpreted stages choose tiles and numbers of programs for `device`."""
    global _interpreter
    before, _interpreter = _interpreter, device
    try:
        yield
    finally:
        _interpreter = before


def give_context(tensor: torch.Tensor):
    """Give this thread a CUDA context if it has none.

    The driver needs a context to encode a descriptor. A new thread, such as autograd's, has no context before its first call of
    the CUDA runtime.
    """
    if not _thread.has_context and tensor.is_cuda:
        torch.cuda.Event().record()
        _thread.has_context = True
