"""A dead end: v4 with K transposed in memory beforehand, instead of in the dot."""

from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["attention", "backward", "forward"]

attention = make_attention(__name__, forward, backward)
