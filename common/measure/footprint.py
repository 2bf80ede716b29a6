"""The peak of a call's additional memory on a GPU. Without a GPU, `common.measure.counter` counts it."""

import gc
from collections.abc import Callable

import torch

MIB_IN_MB = 2**20 / 1e6  # records have MiB; tables show MB of 10⁶ bytes


def footprint(call: Callable) -> dict:
    """Call once; return {"peak_extra_mib": peak allocated memory during the call minus allocated memory before it}."""
    gc.collect()  # otherwise garbage that is freed during the call hides some of its allocations
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return {"peak_extra_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}
