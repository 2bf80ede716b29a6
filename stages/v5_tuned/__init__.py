"""v4 with delta, the row sums of dO * O, computed once and read by both backward kernels."""

from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["attention", "backward", "forward"]

attention = make_attention(__name__, forward, backward)
