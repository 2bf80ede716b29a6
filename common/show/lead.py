"""Show how fast the newest stage is beside the fastest library of each workload, and where its lead ends."""

import itertools
import statistics
from collections.abc import Callable
from typing import NamedTuple

from common.measure.workloads import Workload
from common.show import results, shapes
from common.show.results import CODE, HEAD_DIMS, LENGTHS, Run
from common.show.tables import PASS_NAMES, markdown

PAPERS = (*(f"newest-d{head_dim}" for head_dim in HEAD_DIMS), "wide")  # the runs of the papers' workloads in float16
STDS = (2, 4, 8)

# a row's words -> (the runs, as in `bench.py --reference`, and whether a workload of theirs belongs to the row)
ROWS: dict[str, tuple[tuple[str, ...], Callable[[Workload], bool]]] = {
    **{f"{length} tokens": (PAPERS, lambda work, length=length: work.seq_len == length) for length in LENGTHS},
    "512 to 16384 tokens, bfloat16": (tuple(f"bfloat16-d{head_dim}" for head_dim in HEAD_DIMS), lambda work: True),
    **{f"scores of σ = {std}": (("wide-scores",), lambda work, std=std: work.score_std == std) for std in STDS},
    "a sink at the first key": (("sinks", "hidden-sinks"), lambda work: work.sink > 0 and work.sink_key == 0),
    "a sink in the middle": (("hidden-sinks",), lambda work: work.sink_key > 0 and work.sink_head is None),
    "a sink in the middle, in one head": (("hidden-sinks",), lambda work: work.sink_head is not None),
    "random shapes": (("random",), lambda work: True),
}  # fmt: skip


def cell(runs: list[Run], name: str, works: list[Workload]) -> str:
    """Return the mean and the lowest of a stage's speeds over the fastest library's, and how many are slower, if any are."""
    found = [speed for run in runs for speed in shapes.speeds(run, name, works).values()]
    if not found:
        return "-"
    records = (run.record(name, work) for run in runs for work in works)
    mark = results.CHANGED * any(results.changed(record) for record in records if record)
    slower = sum(speed < 1 for speed in found)
    words = f"×{results.shown(statistics.geometric_mean(found))} ({results.shown(min(found))}){mark}"
    return words + f", {slower} of {len(found)}" * (slower > 0)


def _run(part: str, name: str) -> Run | None:
    """Return the run of a part that has the stage and the most libraries; of several such runs, the newest. Return None if
    there is none: a run without a fast library would flatter."""
    paths = [results.ROOT / "results" / f"{part}-{gpu}.json" for gpu in results.GPUS]
    found = [run for path in paths if path.exists() and name in (run := results.load_run(path)).names]
    return max(found, key=lambda run: (len(run.libraries), run.ended), default=None)


class Lead(NamedTuple):
    """A stage's speed over the fastest library's.

    Attributes:
        table: a row for each of `ROWS` that was measured, and a column for each pass and head dimension.
        ends: where the stage does not lead: by column, the rows whose mean is at most 1.00.
        without: by library, the rows that lack it.
        runs: by part of results/.
    """

    table: str
    ends: dict[str, list[str]]
    without: dict[str, list[str]]
    runs: dict[str, Run]


def lead(name: str) -> Lead:
    """Return how fast a stage is beside the fastest library of each workload."""
    runs = {part: _run(part, name) for part in dict.fromkeys(itertools.chain(*(parts for parts, _ in ROWS.values())))}
    runs = {part: run for part, run in runs.items() if run}
    columns = list(itertools.product(CODE, sorted({work.head_dim for run in runs.values() for work in run.works})))
    spoken = {column: f"{PASS_NAMES[column[0]]}, D = {column[1]}" for column in columns}
    libraries = dict.fromkeys(library for run in runs.values() for library in run.libraries if library != "sdpa-flash")
    rows, ends, without = [], {}, {}
    for words, (parts, belongs) in ROWS.items():
        of_row = [runs[part] for part in parts if part in runs and any(map(belongs, runs[part].works))]
        works = list(dict.fromkeys(work for run in of_row for work in run.works if belongs(work)))
        groups = {column: [work for work in works if (work.pass_, work.head_dim) == column] for column in columns}
        cells = {column: cell(of_row, name, group) for column, group in groups.items()}
        if {*cells.values()} == {"-"}:
            continue
        rows.append([words, *cells.values()])
        for column, text in cells.items():
            if text.startswith(("×0", "×1.00")):
                ends.setdefault(spoken[column], []).append(words)
        for library in libraries:
            if not all(library in run.libraries for run in of_row):
                without.setdefault(results.spoken(library), []).append(words)
    first = f"{results.spoken(name)} / fastest library"
    return Lead(markdown(rows, [first, *spoken.values()], (first,)), ends, without, runs)
