"""A dead end: the compiler gives warps different roles (`warp_specialize=True`)."""

from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["attention", "backward", "forward"]

attention = make_attention(__name__, forward, backward)
