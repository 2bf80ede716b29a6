"""Show how fast the newest stage is beside the fastest library of each workload, and where its lead ends."""

import itertools
import statistics
from collections.abc import Callable

from common.measure.workloads import Workload
from common.show import results, shapes
from common.show.results import CODE, HEAD_DIMS, LENGTHS, Run
from common.show.tables import PASS_NAMES, markdown

PAPERS = (*(f"newest-d{head_dim}" for head_dim in HEAD_DIMS), "wide")  # the runs of the papers' workloads in float16
STDS = (2, 4, 8)

# a row's words -> (the runs, as in `bench.py --reference`, and whether a workload of theirs belongs to the row)
ROWS: dict[str, tuple[tuple[str, ...], Callable[[Workload], bool]]] = {
    **{f"{length} tokens, float16": (PAPERS, lambda work, length=length: work.seq_len == length) for length in LENGTHS},
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


def table(name: str) -> tuple[str, list[Run]]:
    """Return a table of a stage's speed over the fastest library's, and the runs it is from. It has a row for each of `ROWS`
    that was measured, and a column for each pass and head dimension."""
    paths = {part: results.run_file(part) for parts, _ in ROWS.values() for part in parts}
    known = {part: run for part, path in paths.items() if path.exists() and name in (run := results.load_run(path)).names}
    used = list(known.values())
    columns = list(itertools.product(CODE, sorted({work.head_dim for run in used for work in run.works})))
    rows = []
    for words, (parts, belongs) in ROWS.items():
        runs = [known[part] for part in parts if part in known]
        works = list(dict.fromkeys(work for run in runs for work in run.works if belongs(work)))
        of_columns = ([work for work in works if (work.pass_, work.head_dim) == column] for column in columns)
        cells = [cell(runs, name, group) for group in of_columns]
        rows += [[words, *cells]] if {*cells} != {"-"} else []
    first = f"{results.spoken(name)} over the fastest library"
    headers = [f"{PASS_NAMES[pass_]}, D = {head_dim}" for pass_, head_dim in columns]
    return markdown(rows, [first, *headers], (first,)), used
