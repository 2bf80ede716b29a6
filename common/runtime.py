"""Where the kernels run: on the GPU, or, where there is none, on Triton's interpreter on the CPU.

Importing this module decides. Without a GPU it switches the interpreter on, so that nobody has to set a variable; an explicit
`TRITON_INTERPRET=1` (or `0`) in the environment wins.
"""

import contextlib
import functools
import math
import os
import sys

import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
_imported_before = "triton.language" in sys.modules

import triton  # noqa: E402  (reads TRITON_INTERPRET)

from common.interpreter import repairs  # noqa: E402

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRETED else "cuda"


@functools.cache  # the driver takes most of a millisecond to answer
def _properties_of(device: int) -> dict[str, int]:
    return triton.runtime.driver.active.utils.get_device_properties(device)


def _properties() -> dict[str, int]:
    return _properties_of(triton.runtime.driver.active.get_current_device())


_interpreter_limit = math.inf


def shared_memory_limit() -> float:
    """Bytes of shared memory that one program can have on the current device; the interpreter has no limit of its own."""
    return _interpreter_limit if INTERPRETED else _properties()["max_shared_mem"]


def multiprocessors() -> int:
    """The number of multiprocessors of the current GPU."""
    return _properties()["multiprocessor_count"]


def architecture() -> int | None:
    """The current device's, 90 for sm_90; None on the interpreter."""
    return None if INTERPRETED else triton.runtime.driver.active.get_current_target().arch


@contextlib.contextmanager
def limited_shared_memory(limit: float):
    """Inside, the interpreter's programs have that many bytes of shared memory, as on some GPU; they get its tiles."""
    global _interpreter_limit
    before, _interpreter_limit = _interpreter_limit, limit
    try:
        yield
    finally:
        _interpreter_limit = before


if INTERPRETED:
    if _imported_before:
        repairs.adopt_language()
    repairs.repair_bfloat16()
