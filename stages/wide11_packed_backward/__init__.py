"""Packed sequences, backward, at D = 256: a kernel lists all tiles."""

from common.kernels.hopper import unavailable
from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["SPILLED_BYTES", "UNORDERED", "WIDE_PACKED", "attention", "backward", "forward", "unavailable"]

# Spilled bytes per thread. dK, dV, S and dP leave few registers in a backward consumer. Most spills happen once per tile, at
# most a few in each step without a mask.
SPILLED_BYTES = 332
# Up to D = 128, CTAs add to dQ in any order; at D = 256, to the gradients of tiles that they share, unless
# `torch.use_deterministic_algorithms` is on.
UNORDERED = ("dq", "dk", "dv")
WIDE_PACKED = True  # packed sequences have gradients for D or Dv = 256, too

attention = make_attention(__name__, forward, backward)
