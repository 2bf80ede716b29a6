"""Measure the extra memory that a GPU needs during a call. Without a GPU, `common.measure.counter` counts this memory."""

import gc
from collections.abc import Callable

import torch

MIB_IN_MB = 2**20 / 1e6  # records have MiB; tables show MB of 10⁶ bytes


def footprint(call: Callable) -> dict:
    """Run `call` once. Return {"peak_extra_mib": maximum memory during the call minus memory before the call, in MiB}."""
    gc.collect()  # garbage that is freed during the call would hide some of the call's allocations
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return {"peak_extra_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}
