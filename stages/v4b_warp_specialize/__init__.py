"""v4b, a dead end: v4 with its forward's loop warp-specialized by the compiler."""

from common.operator import make_attention
from stages.v4b_warp_specialize.backward import backward
from stages.v4b_warp_specialize.forward import forward

__all__ = ["attention", "backward", "forward"]

attention = make_attention("v4b_warp_specialize", forward, backward)
