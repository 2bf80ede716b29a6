"""A dead end: v4 with its forward's loop warp-specialized by the compiler."""

from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["attention", "backward", "forward"]

attention = make_attention(__name__, forward, backward)
