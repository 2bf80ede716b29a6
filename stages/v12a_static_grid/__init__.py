"""A dead end: tiles assigned by CTA number, not by a counter."""

from common.kernels.hopper import unavailable
from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["SPILLED_BYTES", "UNORDERED", "attention", "backward", "forward", "unavailable"]

# Stored and loaded by a thread, at most: dK and dV, S and dP leave a consumer of the backward few registers for anything else.
# Most is spilled once. A step without a mask reads back a few words at most.
SPILLED_BYTES = 288
UNORDERED = ("dq",)  # added up in the order in which programs come, unless `torch.use_deterministic_algorithms` is on

attention = make_attention(__name__, forward, backward)
