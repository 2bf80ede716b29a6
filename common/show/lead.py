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
    "a sink at the first key": (("sinks",), lambda work: work.sink > 0 and work.sink_key == 0),
    "a sink in the middle": (("sinks",), lambda work: work.sink_key > 0 and work.sink_head is None),
    "a sink in the middle, in one head": (("sinks",), lambda work: work.sink_head is not None),
    "64 heads on 8 K/V heads, causal": (("query-groups",), lambda work: True),
    "models, odd lengths, bfloat16": (("models",), lambda work: True),
    "random shapes": (("random",), lambda work: True),
}  # fmt: skip


def speeds(runs: list[Run], name: str, works: list[Workload]) -> list[float]:
    """Return a stage's speed over the fastest library's for each workload that has both times in one of the runs."""
    found = {}
    for run in runs:
        found |= shapes.speeds(run, name, works)
    return list(found.values())


def cell(runs: list[Run], name: str, works: list[Workload]) -> str:
    """Return the mean and the lowest of a stage's speeds over the fastest library's, and how many are slower, if any are.
    The mean is "=" if it is within the noise of each run that has these workloads."""
    found = speeds(runs, name, works)
    if not found:
        return "-"
    ratios = [ratio for run in runs if (ratio := results.ratio([run], name, results.FASTEST, works))]
    mean = "=" if all(ratio.same for ratio in ratios) else f"×{results.shown(statistics.geometric_mean(found))}"
    slower = sum(speed < 1 for speed in found)
    words = f"{mean} ({results.shown(min(found))}){results.CHANGED * any(ratio.changed for ratio in ratios)}"
    return words + f", {slower} of {len(found)}" * (slower > 0)


def _run(part: str, name: str) -> dict[str, Run]:
    """Return the run of a part that has the stage, by the name of its file.

    If the runs of several GPUs have it, return that with the most libraries, since a run without a fast library would flatter.
    If several have as many, return the newest of them.
    """
    paths = [results.ROOT / "results" / f"{part}-{gpu}.json" for gpu in results.GPUS]
    runs = {path.stem: run for path in paths if path.exists() and name in (run := results.load_run(path)).names}
    best = max(runs, key=lambda file: (len(runs[file].libraries), runs[file].ended), default=None)
    return {best: runs[best]} if best else {}


class Lead(NamedTuple):
    """A stage's speed over the fastest library's.

    Attributes:
        table: a row for each of `ROWS` that was measured, and a column for each pass and head dimension.
        ends: where the stage does not lead: by column, the rows whose mean is at most 1.00 or within the noise.
        without: by library, the rows that lack it, with the column if another column has it.
        runs: by the names of their files.
    """

    table: str
    ends: dict[str, list[str]]
    without: dict[str, list[str]]
    runs: dict[str, Run]


def lead(name: str) -> Lead:
    """Return how fast a stage is beside the fastest library of each workload."""
    of_parts = {part: _run(part, name) for part in dict.fromkeys(itertools.chain(*(parts for parts, _ in ROWS.values())))}
    runs = {file: run for found in of_parts.values() for file, run in found.items()}
    columns = list(itertools.product(CODE, sorted({work.head_dim for run in runs.values() for work in run.works})))
    spoken = {column: f"{PASS_NAMES[column[0]]}, D = {column[1]}" for column in columns}
    libraries = dict.fromkeys(library for run in runs.values() for library in run.libraries if library != "sdpa-flash")
    rows, ends, without = [], {}, {}
    for words, (parts, belongs) in ROWS.items():
        of_row = [run for part in parts for run in of_parts[part].values() if any(map(belongs, run.works))]
        works = list(dict.fromkeys(work for run in of_row for work in run.works if belongs(work)))
        groups = {column: [work for work in works if (work.pass_, work.head_dim) == column] for column in columns}
        cells = {column: cell(of_row, name, group) for column, group in groups.items()}
        if {*cells.values()} == {"-"}:
            continue
        rows.append([words, *cells.values()])
        for column, text in cells.items():
            if text.startswith(("×0", "×1.00", "=")):
                ends.setdefault(spoken[column], []).append(words)
        measured = [column for column, text in cells.items() if text != "-"]
        for library in libraries:
            if missing := [each for each in measured if not any(run.times(library, groups[each]) for run in of_row)]:
                places = [f"{words}, {spoken[column]}" for column in missing] if missing != measured else [words]
                without.setdefault(results.spoken(library), []).extend(places)
    first = f"{results.spoken(name)} / fastest library"
    return Lead(markdown(rows, [first, *spoken.values()], (first,)), ends, without, runs)
