"""v2: FlashAttention; tiles of S live on the chip only, and O, m and l are rewritten for every K/V tile."""

from common.operator import make_attention
from stages.v2_fa1_tiling.backward import backward
from stages.v2_fa1_tiling.forward import forward

__all__ = ["attention", "backward", "forward"]

attention = make_attention("v2_fa1_tiling", forward, backward)
