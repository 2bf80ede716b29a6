"""Say what the host chooses for a problem, without running it."""

from typing import NamedTuple

import torch

from .backward import BACKWARDS, chosen_backward
from .forward import FORWARDS, chosen_forward


class Choice(NamedTuple):
    """The directory names of the stages whose passes run."""

    forward: str
    backward: str


def choice(
    batch, heads, kv_heads, seq_q, seq_k, head_dim, value_dim, causal=False, diagonal=0, dtype=torch.float16
) -> Choice:  # fmt: skip
    """Return the stages that compute a problem of these sizes on the current GPU.

    float32 always runs v6's kernels, to which all tracks fall back.
    """
    if dtype == torch.float32:
        return Choice("v6_tile_order", "v6_tile_order")
    forward = FORWARDS[chosen_forward(batch, heads, kv_heads, seq_q, seq_k, head_dim, value_dim, causal, diagonal)]
    backward = BACKWARDS[chosen_backward(head_dim, value_dim)]
    return Choice(*(function.__module__.split(".")[1] for function in (forward, backward)))
