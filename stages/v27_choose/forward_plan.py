"""The host's choice among forwards: few queries, short rows, or a guess."""

import triton

from common.runtime import num_sms
from stages.decode5_planned_splits.forward import plan as plan_of_decode
from stages.guess7_short_rows.forward import TILES
from stages.guess7_short_rows.forward_plan import is_short


def chosen_forward(batch, heads, kv_heads, seq_q, seq_k, head_dim, value_dim, causal, diagonal) -> str:
    """Return the track whose forward is the fastest: "decode", "shortfwd" or "guess". All arguments are sizes; see
    `common.operator`.

    - "decode" if rows are few, or if tiles do not fill the GPU, so that CTAs split the keys.
    - "shortfwd" if a running maximum costs less than a guess; but "decode" if packed heads need fewer waves of CTAs.
    - "guess" for all other problems. It packs no heads.
    """
    width, programs = max(head_dim, value_dim), num_sms()
    keys = min(seq_k, seq_q + diagonal) if causal else seq_k
    plan = plan_of_decode(batch, heads, kv_heads, seq_q, keys, diagonal, head_dim, value_dim, programs)
    if plan.few or plan.splits > 1:
        return "decode"
    tiles = triton.cdiv(seq_q + diagonal % 64, TILES[width].queries) * batch * heads
    if not is_short(tiles, seq_q, seq_k, diagonal, causal, TILES[width], width, programs):
        return "guess"
    return "decode" if triton.cdiv(plan.tiles, programs) < triton.cdiv(tiles, programs) else "shortfwd"
