"""The forward of the track that has the least expected time for a problem. No kernel is the fastest for all problems.

The kernels are in the tracks, which branch off v26. Each track has v26's kernels, changed for one kind of problem:

- "decode" for few queries: it packs the query heads of a K/V head into one tile, and CTAs split the keys.
- "shortfwd" for short rows: CTAs take tiles in fixed strides, without a counter. It has a running maximum, as v26 has.
- "guess" for long rows: it guesses each row's softmax maximum, so no step rescales the accumulator.
- "lengths" for sequences of different lengths and caches in 8 bits, which no other track takes.
"""

from common.kernels.hopper import require_hopper
from stages.decode9_even_waves.forward import forward as forward_of_decode
from stages.guess8_early_start.forward import forward as forward_of_guess
from stages.lengths8_keys_as_rows.forward import forward as forward_of_lengths
from stages.shortfwd7_half_in_registers.forward import forward as forward_of_shortfwd

from .forward_plan import chosen_forward

FORWARDS = {"decode": forward_of_decode, "shortfwd": forward_of_shortfwd, "guess": forward_of_guess}


def forward(q, k, v, *, causal, scale, diagonal=0, lengths=None, starts=None, descales=None):
    """Return attention output and log-sum-exp. `common.operator` lists shapes, dtypes and errors.

    Raises:
        Unavailable: the GPU is not a Hopper GPU.
        TypeError: there are `lengths` or `starts`, and q is float32.
    """
    require_hopper(__package__)
    if lengths is not None or starts is not None:
        given = {"lengths": lengths, "starts": starts, "descales": descales}
        return forward_of_lengths(q, k, v, causal=causal, scale=scale, **given)
    chosen = chosen_forward(*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], causal, diagonal)
    return FORWARDS[chosen.track](q, k, v, causal=causal, scale=scale, diagonal=diagonal)
