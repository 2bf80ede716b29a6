"""Examples worked by hand for the READMEs of v0 to v3: bytes step by step, one row of scores, and the order of tiles."""

import math

from common.show import results
from common.show.tables import PASS_NAMES, markdown

SCORES, NUMBER = "[Sq, Sk]", "[Sq]"  # shapes
STEPS = {  # pass -> (operator, what it computes, its result) of each launch of v0 that reads or writes scores
    "fwd": (
        ("bmm_float32", "**matmul 1:** Q Kᵀ", SCORES),
        ("mul", "scale · Q Kᵀ", f"S {SCORES}"),
        ("amax", "row maximum of S", f"m {NUMBER}"),
        ("sub", "S − m", SCORES),
        ("exp", "exp(S − m)", SCORES),
        ("sum", "row sum", f"l {NUMBER}"),
        ("div", "exp(S − m) / l", f"P {SCORES}"),
        ("_to_copy", "P in float16", f"P {SCORES}"),
        ("bmm_float32", "**matmul 2:** P V", "O [Sq, Dv]"),
    ),
    "bwd": (
        ("bmm_float32", "**matmul 1:** Q Kᵀ, again", SCORES),
        ("mul", "scale · Q Kᵀ", f"S {SCORES}"),
        ("sub", "S − LSE", SCORES),
        ("exp", "exp(S − LSE)", f"P {SCORES}"),
        ("_to_copy", "P in float16", f"P {SCORES}"),
        ("bmm_float32", "**matmul 2:** Pᵀ dO", "dV [Sk, Dv]"),
        ("bmm_float32", "**matmul 3:** dO Vᵀ", f"dP {SCORES}"),
        ("sub", "dP − delta", SCORES),
        ("mul", "P ∘ (dP − delta)", f"dS {SCORES}"),
        ("_to_copy", "dS in float16", f"dS {SCORES}"),
        ("bmm_float32", "**matmul 4:** dS K", "dQ [Sq, D]"),
        ("bmm_float32", "**matmul 5:** dSᵀ Q", "dK [Sk, D]"),
    ),
}
TILES = (1, 3), (2, 5)  # one row of scores in two tiles
TOKENS, BLOCK_M, BLOCK_N = 384, 128, 64  # of the grids; the tiles are those of v2 and v3


def bytes_per_score(counted: dict) -> list[tuple[str, int, int]]:
    """Return (operator, bytes read, bytes written) per score of each launch that reads or writes scores.

    Divided by the number of scores, the bytes of tensors such as Q are below 1, and left out.
    """
    scores = counted["seq_len"] * counted["kv_len"]
    of_launches = ((each["name"].removeprefix("aten."), each["read"], each["written"]) for each in counted["launches"])
    return [(name, *both) for name, *sizes in of_launches if any(both := [size // scores for size in sizes])]


def steps(name: str) -> str:
    """Format the steps of v0's passes without a mask: the shapes of their results, and the bytes that add up to a pass's."""
    rows, sums = [], {}
    for pass_, known in STEPS.items():
        counted = results.counted(name, pass_, results.HEAD_DIMS[0], False)
        launches = bytes_per_score(counted)
        if [operator for operator, *_ in known] != [operator for operator, *_ in launches]:
            raise ValueError(f"{name} has other launches than worked.STEPS: {launches}")
        for (_, what, result), (_, read, written) in zip(known, launches, strict=True):
            rows.append([PASS_NAMES[pass_], what, result, read or "", written or ""])
        sums[pass_] = sum(read + written for _, read, written in launches)
        rows.append([PASS_NAMES[pass_], "**sum, read and written**", "", "", f"**{sums[pass_]}**"])
    counted = results.counted(name, "fwd", results.HEAD_DIMS[0], False)
    tokens, moved = counted["seq_len"], results.moved(counted) / 1e6
    words = (
        f"{tokens} queries and keys have {tokens}² scores. So the forward moves {sums['fwd']} · {tokens}² bytes, "
        f"{sums['fwd'] * tokens**2 / 1e6:.1f} of the {moved:.1f} MB above. Q, K, V and O are the rest."
    )
    table = markdown(rows, ["pass", "step", "result", "bytes read", "bytes written"], ("pass", "step", "result"))
    return f"{table}\n\n{words}"


def online_softmax(tiles) -> list[tuple[float, float, float, float]]:
    """Return (m, factor, sum of the tile, l) after each tile of a row's scores."""
    m, l, found = -math.inf, 0.0, []
    for tile in tiles:
        new = max(m, *tile)
        factor, added = math.exp(m - new), sum(math.exp(score - new) for score in tile)
        m, l = new, l * factor + added
        found.append((m, factor, added, l))
    return found


def softmax_by_hand(name: str) -> str:
    """Format the online softmax of one row of scores, tile by tile."""
    headers = ["", "scores", "m", "factor for the old l", "new terms", "l"]
    rows, old_m, old_l = [["start", "", "−∞", "", "", "0"]], "−∞", "0"
    for number, (tile, (m, factor, added, l)) in enumerate(zip(TILES, online_softmax(TILES), strict=True), 1):
        scores, terms = ", ".join(map(str, tile)), " + ".join(f"e^({score} − {m})" for score in tile)
        factor = f"{factor:.3f}" if factor else "0"
        total = f"{old_l} · {factor} + {added:.3f} = {l:.3f}"
        rows.append([f"tile {number}", scores, m, f"e^({old_m} − {m}) = {factor}", f"{terms} = {added:.3f}", total])
        old_m, old_l = m, f"{l:.3f}"
    lse = m + math.log(l)
    p = ", ".join(f"{math.exp(score - lse):.3f}" for tile in TILES for score in tile)
    words = f"LSE = {m} + log {l:.3f} = {lse:.3f}. The second reading writes P = e^(s − LSE): {p}."
    return f"{markdown(rows, headers, tuple(headers))}\n\n{words}"


def visits_by_keys() -> list[tuple[int, int]]:
    """Return (first query, first key) of the tiles in the order of v2's program: for each key tile, query tiles that see it."""
    return [(start_m, start_n) for start_n in range(0, TOKENS, BLOCK_N)
            for start_m in range(start_n // BLOCK_M * BLOCK_M, TOKENS, BLOCK_M)]  # fmt: skip


def limits(start_m: int) -> tuple[int, int]:
    """Return v3's `full` and `end` for the query tile that begins at `start_m`."""
    return min(start_m, TOKENS) // BLOCK_N * BLOCK_N, min(start_m + BLOCK_M, TOKENS)


def visits_by_queries() -> list[tuple[int, int]]:
    """Return (first query, first key) of the tiles in the order of v3's programs, one program after the other."""
    return [(start_m, start_n) for start_m in range(0, TOKENS, BLOCK_M) for start_n in range(0, limits(start_m)[1], BLOCK_N)]


def _grid(cells: dict, before: dict, after: dict, headers: tuple[list, list]) -> str:
    """Format a grid of query tiles x key tiles. `before` and `after` have further cells of each query tile's row."""
    keys = [f"keys {start}–{start + BLOCK_N - 1}" for start in range(0, TOKENS, BLOCK_N)]
    rows = [[*before[start_m], *(cells.get((start_m, start_n), "") for start_n in range(0, TOKENS, BLOCK_N)), *after[start_m]]
            for start_m in range(0, TOKENS, BLOCK_M)]  # fmt: skip
    return markdown(rows, [*headers[0], *keys, *headers[1]], tuple(headers[0]))


def _queries(start_m: int) -> str:
    return f"{start_m}–{start_m + BLOCK_M - 1}"


def order_by_keys(name: str) -> str:
    """Format the order in which v2's program visits the tiles of a causal problem."""
    cells = {tile: place for place, tile in enumerate(visits_by_keys(), 1)}
    starts = range(0, TOKENS, BLOCK_M)
    return _grid(cells, {start: [_queries(start)] for start in starts}, dict.fromkeys(starts, []), (["queries"], []))


def order_by_queries(name: str) -> str:
    """Format the order in which v3's programs visit the tiles of a causal problem. Tiles with a mask are bold."""
    cells, before, after = {}, {}, {}
    for program, start_m in enumerate(range(0, TOKENS, BLOCK_M)):
        full, end = limits(start_m)
        for place, start_n in enumerate(range(0, end, BLOCK_N), 1):
            cells[start_m, start_n] = place if start_n < full else f"**{place}**"
        before[start_m], after[start_m] = [program, _queries(start_m)], [full, end]
    return _grid(cells, before, after, (["program", "queries"], ["`full`", "`end`"]))
