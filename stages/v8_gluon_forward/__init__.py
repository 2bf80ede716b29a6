"""The forward in Gluon, with explicit layouts, buffers and barriers."""

from common.kernels.hopper import unavailable
from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["attention", "backward", "forward", "unavailable"]
WAS = "v9_gluon_forward"

attention = make_attention(__name__, forward, backward)
