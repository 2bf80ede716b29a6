"""Choose where kernels run: on the GPU, or without a GPU on the CPU, in interpreters for Triton and Gluon.

Importing this module makes the choice. The environment variable `TRITON_INTERPRET=1` (or `0`) overrides the choice.
"""

import contextlib
import functools
import math
import os
import sys
import threading
from dataclasses import dataclass

import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
_imported_before = "triton.language" in sys.modules

import triton  # noqa: E402  (reads TRITON_INTERPRET)
from triton.compiler import CompiledKernel  # noqa: E402
from triton.runtime.jit import JITCallable  # noqa: E402

from common.interpreter import repairs  # noqa: E402
from common.interpreter.schedule import AT_ONCE  # noqa: E402

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRETED else "cuda"


def _let_any_thread_launch_first():
    """Make the first launch of a kernel thread-safe.

    Triton 3.6 and 3.7 load a kernel's binary without a lock. So another thread may load the binary again, or find it half
    loaded. Triton also parses a kernel's source without a lock, but `ast.parse` of CPython 3.11 and 3.12 is not
    thread-safe.
    """
    parse, load, lock = JITCallable.parse, CompiledKernel._init_handles, threading.RLock()

    def parse_alone(self):
        with lock:
            return parse(self)

    def load_once(self):
        if self.function is None:  # loading sets `function` last
            with lock:
                load(self)

    JITCallable.parse, CompiledKernel._init_handles = parse_alone, load_once


@functools.cache  # the driver takes most of a millisecond to answer
def _properties_of(device: int) -> dict[str, int]:
    return triton.runtime.driver.active.utils.get_device_properties(device)


def current_device() -> int:
    """Return the index of the current GPU, or 0 if kernels are interpreted."""
    return 0 if INTERPRETED else triton.runtime.driver.active.get_current_device()


def _properties() -> dict[str, int]:
    return _properties_of(current_device())


@dataclass(frozen=True)
class Device:
    """The device properties that stages use. The defaults are for interpreted kernels."""

    architecture: int | None = None
    shared_memory: float = math.inf
    num_sms: int = AT_ONCE


_interpreter = Device()
_stands_in = INTERPRETED  # whether `architecture` reads `_interpreter` instead of the GPU


def shared_memory_limit() -> float:
    """Return the maximum bytes of shared memory per program on the current device."""
    return _interpreter.shared_memory if INTERPRETED else _properties()["max_shared_mem"]


def num_sms() -> int:
    """Return the number of SMs of the current device, or of concurrent programs if kernels are interpreted."""
    return _interpreter.num_sms if INTERPRETED else _properties()["multiprocessor_count"]


def l2_bytes() -> int:
    """Return the bytes of the L2 cache of GPU 0. If kernels are interpreted, or without a GPU, return an H100's."""
    on_gpu = torch.cuda.is_available() and not INTERPRETED
    return torch.cuda.get_device_properties(0).L2_cache_size if on_gpu else 50 * 2**20


def architecture() -> int | str | None:
    """Return the current device's architecture, such as 90 for sm_90 or "gfx942" for AMD; None if kernels are interpreted."""
    return _interpreter.architecture if _stands_in else triton.runtime.driver.active.get_current_target().arch


@contextlib.contextmanager
def interpreted_as(device: Device):
    """Enter a context in which interpreted stages choose tiles and numbers of programs for `device`."""
    global _interpreter
    before, _interpreter = _interpreter, device
    try:
        yield
    finally:
        _interpreter = before


@contextlib.contextmanager
def architecture_as(device: Device):
    """Enter a context in which `architecture` returns the architecture of `device`, even on a GPU."""
    global _stands_in
    before, _stands_in = _stands_in, True
    try:
        with interpreted_as(device):
            yield
    finally:
        _stands_in = before


if INTERPRETED:
    from common.interpreter import gluon  # slow to import, and not needed on a GPU

    if _imported_before:
        repairs.adopt_language()
    repairs.repair_bfloat16()
    repairs.repair_loop_bounds()
    repairs.add_descriptor_reductions()
    repairs.refuse_stores_before_a_tensor()
    repairs.patch_the_language_once()
    repairs.check_overflow_cheaply()
    repairs.look_types_up_once()
    repairs.run_one_kernel_at_a_time()
    gluon.install()
else:
    _let_any_thread_launch_first()
