"""The peak of the memory that a call adds on a GPU. Without one, `common.measure.counter` counts it."""

import gc
from collections.abc import Callable

import torch

MIB_IN_MB = 2**20 / 1e6  # records have MiB; what is shown is in MB of 10⁶, as all bytes


def footprint(call: Callable) -> dict:
    """Call once; {"peak_extra_mib": the peak of the memory allocated during it less what was allocated before}."""
    gc.collect()  # else a cycle that is collected during the call hides some of what it allocates
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return {"peak_extra_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}
