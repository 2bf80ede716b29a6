"""The forward's tiles, fixed by hand for Hopper, as Gluon needs them."""

from common.kernels.hopper import unavailable
from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["attention", "backward", "forward", "unavailable"]
WAS = "v8_fixed_tiles"

attention = make_attention(__name__, forward, backward)
