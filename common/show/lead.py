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
        ends: where the stage does not lead: the columns with their rows whose mean is at most 1.00.
        without: which rows lack a library that others have.
        used: the runs.
    """

    table: str
    ends: str
    without: str
    used: list[Run]


def lead(name: str) -> Lead:
    """Return how fast a stage is beside the fastest library of each workload."""
    known = {part: run for part in dict.fromkeys(itertools.chain(*(parts for parts, _ in ROWS.values())))
             if (run := _run(part, name))}  # fmt: skip
    columns = list(itertools.product(CODE, sorted({work.head_dim for run in known.values() for work in run.works})))
    spoken = {column: f"{PASS_NAMES[column[0]]}, D = {column[1]}" for column in columns}
    rows, ends, lacking = [], {}, {}
    libraries = dict.fromkeys(library for run in known.values() for library in run.libraries if library != "sdpa-flash")
    for words, (parts, belongs) in ROWS.items():
        runs = [known[part] for part in parts if part in known]
        works = list(dict.fromkeys(work for run in runs for work in run.works if belongs(work)))
        groups = {column: [work for work in works if (work.pass_, work.head_dim) == column] for column in columns}
        cells = {column: cell(runs, name, group) for column, group in groups.items()}
        if {*cells.values()} == {"-"}:
            continue
        rows.append([words, *cells.values()])
        for column, text in cells.items():
            if text.startswith(("×0", "×1.00")):
                ends.setdefault(spoken[column], []).append(words)
        for library in libraries:
            if not all(library in run.libraries for run in runs if any(work in run.works for work in works)):
                lacking.setdefault(results.spoken(library), []).append(words)
    shown = markdown(
        rows, [f"{results.spoken(name)} / fastest library", *spoken.values()], (f"{results.spoken(name)} / fastest library",)
    )
    joined = [{key: ", ".join(words) for key, words in found.items()} for found in (ends, lacking)]
    texts = ["; ".join(f"{key}: {words}" for key, words in found.items()) for found in joined]
    return Lead(shown, *texts, list(known.values()))
