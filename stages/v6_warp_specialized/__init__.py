"""v6: warps specialised, in Gluon: one loads, the others multiply, and nobody waits for what could have been begun before."""

from common.hopper import unavailable
from common.operator import make_attention
from stages.v6_warp_specialized.backward import backward
from stages.v6_warp_specialized.forward import forward

__all__ = ["SPILLED_BYTES", "UNORDERED", "attention", "backward", "forward", "unavailable"]

# At most, by a thread: consumers have all the registers there are. In the loop of the backward a few loads a step.
SPILLED_BYTES = 256
UNORDERED = ("dq",)  # added up in the order in which programs come, unless `torch.use_deterministic_algorithms` is on

attention = make_attention("v6_warp_specialized", forward, backward)
