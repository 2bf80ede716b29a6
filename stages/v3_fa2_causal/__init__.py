"""v3: FlashAttention-2; a program owns a query tile, divides once and leaves the masked half alone."""

from common.operator import make_attention
from stages.v3_fa2_causal.backward import backward
from stages.v3_fa2_causal.forward import forward

__all__ = ["attention", "backward", "forward"]

attention = make_attention("v3_fa2_causal", forward, backward)
