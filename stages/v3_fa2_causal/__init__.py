"""FlashAttention-2; a program owns a query tile, divides once and leaves the masked half alone."""

from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["attention", "backward", "forward"]

attention = make_attention(__name__, forward, backward)
