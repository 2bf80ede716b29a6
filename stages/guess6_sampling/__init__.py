"""Sampled scores predict before the first tile whether scores are too wide."""

from common.kernels.hopper import unavailable
from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["SPILLED_BYTES", "UNORDERED", "attention", "backward", "forward", "unavailable"]
WAS = "v43_safe_speculation"

# Spilled bytes per thread. dK, dV, S and dP leave few registers in a backward consumer. Most spills happen once per tile, at
# most a few in each step without a mask.
SPILLED_BYTES = 332
UNORDERED = ("dq",)  # programs add to dQ in any order, unless `torch.use_deterministic_algorithms` is on

attention = make_attention(__name__, forward, backward)
