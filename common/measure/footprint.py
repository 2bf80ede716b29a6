"""Measure the peak of a call's additional memory on a GPU. Without a GPU, `common.measure.counter` counts this memory."""

import gc
from collections.abc import Callable

import torch

MIB_IN_MB = 2**20 / 1e6  # records have MiB; tables show MB of 10⁶ bytes


def footprint(call: Callable) -> dict:
    """Run `call` once, and return {"peak_extra_mib": peak memory during the call minus memory before the call}."""
    gc.collect()  # otherwise garbage that is freed during the call hides some of its allocations
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return {"peak_extra_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}
