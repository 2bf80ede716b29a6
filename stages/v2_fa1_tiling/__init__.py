"""FlashAttention; tiles of S live on the chip only, and O, m and l are rewritten for every K/V tile."""

from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["attention", "backward", "forward"]

attention = make_attention(__name__, forward, backward)
