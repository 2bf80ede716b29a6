"""Scale, mask and softmax are one Triton kernel over a materialised S; the matmuls stay the library's."""

from common.operator import make_attention

from .backward import backward
from .forward import forward

__all__ = ["attention", "backward", "forward"]

attention = make_attention(__name__, forward, backward)
