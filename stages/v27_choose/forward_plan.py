"""The host's choice among forwards: few queries, short rows, or a guess."""

from typing import NamedTuple

from common.layout import cdiv
from common.runtime import num_sms
from stages.decode8_short_splits.forward import plan as plan_of_decode
from stages.guess8_early_start.forward import TILES
from stages.guess8_early_start.forward_plan import is_short


class Chosen(NamedTuple):
    """A track, and how its forward divides the work."""

    track: str  # "decode", "shortfwd" or "guess"
    queries: int  # query rows of a tile
    tiles: int  # query tiles of all heads
    splits: int  # CTAs that share a query tile's keys


def chosen_forward(batch, heads, kv_heads, seq_q, seq_k, head_dim, value_dim, causal, diagonal) -> Chosen:
    """Return the track whose forward is the fastest. All arguments are sizes; see `common.operator`.

    - "decode" if rows are few, or if tiles do not fill the GPU, so that CTAs split the keys.
    - "shortfwd" if a running maximum costs less than a guess; but "decode" if packed heads need fewer waves of CTAs.
    - "guess" for all other problems. It packs no heads.
    """
    width, programs = max(head_dim, value_dim), num_sms()
    keys = min(seq_k, seq_q + diagonal) if causal else seq_k
    plan = plan_of_decode(batch, heads, kv_heads, seq_q, keys, diagonal, head_dim, value_dim, programs)
    decode = Chosen("decode", plan.shape.queries, plan.tiles, plan.splits)
    if plan.few or plan.splits > 1:
        return decode
    shape = TILES[width]
    tiles = cdiv(seq_q + diagonal % 64, shape.queries) * batch * heads
    if not is_short(tiles, seq_q, seq_k, diagonal, causal, shape, width, programs):
        return Chosen("guess", shape.queries, tiles, 1)
    fewer_waves = cdiv(plan.tiles, programs) < cdiv(tiles, programs)
    return decode if fewer_waves else Chosen("shortfwd", shape.queries, tiles, 1)
