"""Format the speed of forwards with attention sinks and with wide score distributions."""

import itertools

from tabulate import tabulate

import stages
from common.show.results import load_run, place, run_file, spoken
from common.show.tracks import TRACKS, stages_of


def sinks_table(name: str) -> str:
    """Format a stage's speed divided by the speed of the runs' oldest stage, which keeps a running maximum. Brackets show the
    value of the stage from which the track starts."""
    paths = [run_file(grid) for grid in TRACKS["sinks"].grids]
    if not all(path.exists() for path in paths):
        return "Attention sinks and wide scores have not been measured yet."
    runs = [load_run(path) for path in paths]
    records = [record for of_grid, _ in runs for record in of_grid]
    places = dict.fromkeys(place(machine) for _, machine in runs)
    ms = {(r["impl"], r["head_dim"], r["dtype"], r["causal"], r["score_std"], r["sink"]): r.get("ms") for r in records}
    first = min({record["impl"] for record in records}, key=stages.position)
    start = stages.parent(stages_of("sinks")[0])
    points = sorted({(record["score_std"], record["sink"]) for record in records}, key=lambda pair: pair[::-1])
    head_dims, dtypes = (list(dict.fromkeys(record[field] for record in records)) for field in ("head_dim", "dtype"))
    rows = []
    for head_dim, dtype, causal in itertools.product(sorted(head_dims), dtypes, (False, True)):

        def ratio(impl, point, case=(head_dim, dtype, causal)):
            theirs, ours = (ms.get((each, *case, *point)) for each in (first, impl))
            return f"{theirs / ours:.2f}" if theirs and ours else "wrong"

        cells = [f"{ratio(name, point)} ({ratio(start, point)})" for point in points]
        rows.append([head_dim, dtype, "causal" if causal else "full", *cells])
    names = [f"sink of {sink:g}" if sink else f"deviation {std:g}" for std, sink in points]
    caption = (
        f"The speed of {spoken(name)}'s forward over {spoken(first)}'s. Brackets "
        f"show {spoken(start)}'s value. *deviation*: the standard deviation of the scores. *sink*: the score of key 0 in "
        "nats. *wrong*: the error was too large, so the stage was not timed. "
        f"S = {records[0]['seq_len']}, measured on {'; '.join(places)}."
    )
    align = ["right", "left", "left"] + ["right"] * len(points)
    return f"{caption}\n\n{tabulate(rows, ['D', '', 'mask', *names], tablefmt='pipe', disable_numparse=True, colalign=align)}"
