"""One loop takes the query tiles of all query heads; prepares v12."""

from common.kernels.hopper import unavailable
from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["UNORDERED", "attention", "backward", "forward", "unavailable"]

UNORDERED = ("dq",)  # programs add to dQ in any order, unless `torch.use_deterministic_algorithms` is on

attention = make_attention(__name__, forward, backward)
