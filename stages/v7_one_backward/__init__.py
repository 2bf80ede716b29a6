"""One backward kernel with five matmuls, not seven, adds dQ in memory."""

from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["SPILLED_BYTES", "UNORDERED", "attention", "backward", "forward"]

# Spilled bytes per thread at D = 128 with a mask. dK and dV stay in registers, so the five matmuls have few registers left.
SPILLED_BYTES = 16  # with Triton 3.6; with 3.7 nothing is spilled
UNORDERED = ("dq",)  # programs add to dQ in any order, unless `torch.use_deterministic_algorithms` is on

attention = make_attention(__name__, forward, backward)
