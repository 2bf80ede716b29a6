"""One backward kernel with five matmuls, not seven, adds dQ in memory."""

from common.kernels.hopper import unavailable
from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["UNORDERED", "attention", "backward", "forward", "unavailable"]
WAS = "v7_one_backward"

UNORDERED = ("dq",)  # programs add to dQ in any order, unless `torch.use_deterministic_algorithms` is on

attention = make_attention(__name__, forward, backward)
