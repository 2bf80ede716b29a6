"""v4a, a dead end: v4 with K transposed in memory beforehand, instead of in the dot."""

from common.operator import make_attention
from stages.v4a_k_transposed.backward import backward
from stages.v4a_k_transposed.forward import forward

__all__ = ["attention", "backward", "forward"]

attention = make_attention("v4a_k_transposed", forward, backward)
