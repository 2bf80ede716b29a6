"""One backward kernel with five matmuls, not two with seven."""

from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["SPILLED_BYTES", "UNORDERED", "attention", "backward", "forward"]

# Stored and loaded by a thread, at most, for D = 128 with a mask: five matmuls leave few registers beside dK and dV.
SPILLED_BYTES = 16  # by Triton 3.6; by 3.7 none
UNORDERED = ("dq",)  # added up in the order in which programs come, unless `torch.use_deterministic_algorithms` is on

attention = make_attention(__name__, forward, backward)
