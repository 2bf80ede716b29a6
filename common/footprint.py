"""What a call costs besides time: the peak of the memory it adds and, without a GPU, the kernels it would launch."""

import gc
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from common.runtime import DEVICE

# Operators that launch nothing on a GPU, besides those that PyTorch marks as views.
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}


class _Observer(TorchDispatchMode):
    """Follows the storages that PyTorch's operators make on the CPU, and counts operators and Triton launches that compute.

    It sees what reaches PyTorch's dispatcher: not what an operator allocates inside itself, and nothing inside a custom
    operator, so a stage is observed through its plain functions.
    """

    def __init__(self):
        super().__init__()
        self.peak = self.launches = self._live = 0
        self._in_kernel = False

    def __enter__(self):
        self._run = run = InterpretedFunction.run

        def counted_run(function, *args, warmup, **kwargs):
            self.launches += not warmup
            self._in_kernel = True  # the interpreter's own tensors are no cost of the kernel
            try:
                return run(function, *args, warmup=warmup, **kwargs)
            finally:
                self._in_kernel = False

        InterpretedFunction.run = counted_run
        return super().__enter__()

    def __exit__(self, *exc_info):
        InterpretedFunction.run = self._run
        return super().__exit__(*exc_info)

    def _release(self, size):
        self._live -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self._in_kernel:
            return result
        if not func.is_view and func.overloadpacket.__name__ not in _NO_KERNEL:
            self.launches += 1
        # A result that shares an argument's storage is a view of it or the argument itself; any other storage is new.
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = (t.untyped_storage() for t in tree_leaves(result) if isinstance(t, Tensor))
        for storage in {s._cdata: s for s in made if s._cdata not in given}.values():
            self._live += storage.nbytes()
            weakref.finalize(storage, self._release, storage.nbytes())
        self.peak = max(self.peak, self._live)
        return result


def footprint(call: Callable) -> dict:
    """Call once and return what that took.

    Returns:
        "peak_extra_mib": the peak of the memory allocated during the call less what was allocated before it, outputs
        included; without a GPU also "kernel_launches": the Triton kernels, and PyTorch's operators that compute.
    """
    if DEVICE == "cuda":
        gc.collect()  # else a cycle that is collected during the call hides some of what it allocates
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return {"peak_extra_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}
    with _Observer() as observer:
        call()
    return {"peak_extra_mib": observer.peak / 2**20, "kernel_launches": observer.launches}
