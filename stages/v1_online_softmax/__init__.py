"""v1: scale, mask and softmax are one Triton kernel over a materialised S; the products stay the library's."""

from common.operator import make_attention
from stages.v1_online_softmax.backward import backward
from stages.v1_online_softmax.forward import forward

__all__ = ["attention", "backward", "forward"]

attention = make_attention("v1_online_softmax", forward, backward)
