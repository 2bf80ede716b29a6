"""One TMA copy loads LSE and delta, which lie side by side."""

from common.kernels.hopper import unavailable
from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["SPILLED_BYTES", "UNORDERED", "attention", "backward", "forward", "unavailable"]
WAS = "v11_tma_statistics"

# Spilled bytes per thread. dK, dV, S and dP leave few registers in the backward at D = 128.
SPILLED_BYTES = 288
UNORDERED = ("dq",)  # programs add to dQ in any order, unless `torch.use_deterministic_algorithms` is on

attention = make_attention(__name__, forward, backward)
