"""The forward of v26, and that of the track `lengths` for packed sequences."""

from common.kernels.hopper import require_hopper
from stages.lengths2_packed_forward.forward import forward as forward_of_lengths
from stages.v26_second_q.forward import forward as forward_of_v26


def forward(q, k, v, *, causal, scale, diagonal=0, starts=None):
    """Return attention output and log-sum-exp. `common.operator` lists shapes, dtypes and errors."""
    require_hopper(__package__)
    if starts is None:
        return forward_of_v26(q, k, v, causal=causal, scale=scale, diagonal=diagonal)
    return forward_of_lengths(q, k, v, causal=causal, scale=scale, starts=starts)
