"""The host chooses a track's end for each problem."""

from common.kernels.hopper import unavailable
from common.operator import make_attention

from .backward import backward
from .choice import choice
from .forward import forward

__all__ = ["PAGES", "SPILLED_BYTES", "UNORDERED", "WIDE_PACKED", "attention", "backward", "choice", "forward", "unavailable"]
WAS = "v53_short_forward"

SPILLED_BYTES = 332  # the most that a kernel of these tracks spills
# Programs add to dQ, and to the dK and dV of a key tile that they share, in any order, unless
# `torch.use_deterministic_algorithms` is on.
UNORDERED = ("dq", "dk", "dv")
PAGES = True  # the forward takes caches in pages
WIDE_PACKED = True  # packed sequences have gradients for D or Dv = 256, too

attention = make_attention(__name__, forward, backward)
