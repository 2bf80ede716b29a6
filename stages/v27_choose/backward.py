"""The backward of the track that suits the head dimension.

- "wide" has kernels for D or Dv = 256, where dK and dV of 128 keys do not fit in registers, and v26 falls back to v6.
- "shortbwd" has v26's kernel for all smaller ones, changed for short sequences, few K/V heads, and packed sequences.
"""

from common.kernels.hopper import require_hopper
from stages.shortbwd10_packed_backward.backward import backward as backward_of_shortbwd
from stages.wide11_packed_backward.backward import backward as backward_of_wide


def chosen_backward(head_dim, value_dim) -> str:
    """Return the track whose backward is the fastest: "wide" for D or Dv = 256, "shortbwd" for all smaller ones."""
    return "wide" if max(head_dim, value_dim) == 256 else "shortbwd"


BACKWARDS = {"shortbwd": backward_of_shortbwd, "wide": backward_of_wide}


def backward(grad_out, q, k, v, out, lse, *, causal, scale, diagonal=0, starts=None):
    """Return the gradients of q, k and v. `common.operator` lists shapes, dtypes and errors.

    Both tracks fall back to v6 for float32. "shortbwd" also does so under `torch.use_deterministic_algorithms`, because its key
    tiles add to dQ in any order. "wide" then shares no tiles.

    Raises:
        Unavailable: the GPU is not a Hopper GPU.
        NotImplementedError: there are `starts`, and "shortbwd" would fall back.
    """
    require_hopper(__package__)
    run = BACKWARDS[chosen_backward(q.shape[3], v.shape[3])]
    return run(grad_out, q, k, v, out, lse, causal=causal, scale=scale, diagonal=diagonal, starts=starts)
