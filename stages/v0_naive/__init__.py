"""v0: attention as the textbook writes it, in PyTorch; scores, mask and probabilities are materialised."""

from common.operator import make_attention
from stages.v0_naive.backward import backward
from stages.v0_naive.forward import forward

__all__ = ["attention", "backward", "forward"]

attention = make_attention("v0_naive", forward, backward)
