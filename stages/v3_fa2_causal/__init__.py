"""FlashAttention-2: one program per output tile, fewer divisions and fewer masks."""

from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["attention", "backward", "forward"]

attention = make_attention(__name__, forward, backward)
