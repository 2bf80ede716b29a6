"""The host's choice among forwards: the least expected time decides."""

from typing import NamedTuple

from common.kernels.order import busiest
from common.layout import cdiv
from common.runtime import num_sms
from stages.decode9_even_waves.forward import TILES as TILES_OF_DECODE
from stages.decode9_even_waves.forward import cost_of as cost_of_decode
from stages.decode9_even_waves.forward import plan as plan_of_decode
from stages.guess8_early_start.forward import TILES
from stages.guess8_early_start.forward_plan import is_short
from stages.shortfwd7_half_in_registers.forward import sizes_of
from stages.shortfwd7_half_in_registers.forward_plan import TIMES_OF_256


class Times(NamedTuple):
    """How long the parts of a forward take: microseconds, most of them fitted to results/ways-h100.json."""

    launches: float  # of all launches, with the first loads
    tile: float  # of a query tile, without its key tiles
    key_tile: float


# Times with a running maximum (`shortfwd`, `decode`) and with a guess, by the larger of D and Dv, and the queries of a tile.
# Widths below 64 have the times of 64. On other GPUs, times differ, but less so their ratios, which decide. The times of 192
# queries were fitted to results/rows-h200.json.
RUNNING = {
    (64, 256): Times(9.7, 1.7, 1.03), (64, 192): Times(8.4, 1.2, 0.81), (64, 128): Times(9.5, 1.3, 1.07),
    (128, 128): Times(7.5, 1.5, 1.57), (256, 128): Times(8.2, 3.8, 1.43),
}  # fmt: skip
# Times of `shortfwd` at D = Dv = 256 without a mask, by the keys of a tile.
UNMASKED = {keys: Times(RUNNING[256, 128].launches, *times) for (_, keys), times in TIMES_OF_256.items()}
GUESS = {64: Times(15.1, 2.1, 0.84), 128: Times(12.9, 1.9, 0.73)}  # at D = 256, a guess gained at most 3 %
SPLIT = {64: 1.1, 128: 1, 256: 0.88}  # time of split keys over what `decode` predicts; fitted to results/even-waves-h200.json
PACKED = 0.98  # expected times omit short key tiles, which only `shortfwd` has; so packed heads must save 2 %


class Chosen(NamedTuple):
    """A track, and how its forward divides the work. Only `choice` reads the sizes, to tell users what runs."""

    track: str  # "decode", "shortfwd" or "guess"
    queries: int  # query rows of a tile
    tiles: int  # query tiles of all heads
    splits: int  # CTAs that share a query tile's keys


def chosen_forward(batch, heads, kv_heads, seq_q, seq_k, head_dim, value_dim, causal, diagonal) -> Chosen:
    """Return the track whose forward has the least expected time, out of those that suit the problem.

    All arguments are sizes; see `common.operator`.
    """
    width, programs = max(head_dim, value_dim), num_sms()
    keys = min(seq_k, seq_q + diagonal) if causal else seq_k
    plan = plan_of_decode(batch, heads, kv_heads, seq_q, keys, diagonal, head_dim, value_dim, programs, causal)
    decode = Chosen("decode", plan.shape.queries, plan.tiles, plan.splits)
    # With few rows or few tiles, only "decode" suits: the other tracks would leave consumers or SMs idle.
    packed = heads // kv_heads if 64 % (heads // kv_heads) == 0 else 1  # the heads that `decode` can pack
    few = seq_q * packed <= 128 or plan.shape.queries < TILES_OF_DECODE[width].queries
    if few or plan.splits > 1 and plan.tiles < programs:
        return decode

    def time(shape, times, packed=1):
        work = busiest(
            batch * heads // packed, seq_q, seq_k, diagonal, causal, shape.queries // packed, shape.keys, programs,
            times.tile, times.key_tile,
        )  # fmt: skip
        return times.launches + work

    def unpacked(track, shape):
        return Chosen(track, shape.queries, cdiv(seq_q + diagonal % 64, shape.queries) * batch * heads, 1)

    least = max(width, 64)
    shape = sizes_of(batch * heads, seq_q, seq_k, diagonal, causal, head_dim, value_dim, programs)
    shortfwd, guess = unpacked("shortfwd", shape), unpacked("guess", TILES[width])
    # If rows are short, "guess" guesses nothing and has a running maximum, as "shortfwd" has.
    guesses = least in GUESS and not is_short(guess.tiles, seq_q, seq_k, diagonal, causal, TILES[width], width, programs)
    if plan.splits == plan.packed == 1 and not guesses:
        return shortfwd
    unmasked = head_dim == value_dim == 256 and not causal
    times = UNMASKED[shape.keys] if unmasked else RUNNING[least, shape.queries]
    expected = {shortfwd: time(shape, times)}
    # Without splits and packed heads, "decode" has nothing that "shortfwd" has not.
    times = RUNNING[least, plan.shape.queries]
    if plan.splits > 1:
        rows, key_tiles = min(seq_q * plan.packed, plan.shape.queries), cdiv(keys, plan.shape.keys)
        cost = cost_of_decode(plan.splits, plan.tiles, key_tiles, rows, plan.shape.keys, head_dim + value_dim, programs)
        expected[decode] = times.launches + SPLIT[least] * (cost / 30_000)  # a cost of 30,000 is a microsecond
    elif plan.packed > 1:
        expected[decode] = time(plan.shape, times, plan.packed) / PACKED
    if guesses:
        expected[guess] = time(TILES[width], GUESS[least])
    return min(expected, key=expected.get)
