"""At D = 256, CTAs share key tiles to fill the GPU."""

from common.kernels.hopper import unavailable
from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["SPILLED_BYTES", "UNORDERED", "attention", "backward", "forward", "unavailable"]

# Spilled bytes per thread. dK, dV, S and dP leave few registers in a backward consumer. Most spills happen once per tile, at
# most a few in each step without a mask.
SPILLED_BYTES = 332
# Up to D = 128, CTAs add to dQ in any order; at D = 256, to the dK and dV of a key tile that they share, unless
# `torch.use_deterministic_algorithms` is on.
UNORDERED = ("dq", "dk", "dv")

attention = make_attention(__name__, forward, backward)
