"""Compare two saved runs of the benchmark: their times or, without a GPU, their counts.

python -m common.show.compare  # the last two runs
python -m common.show.compare --stage v43 results/forward-d128-h100.json results/newest-d128-h200.json
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from tabulate import tabulate

import stages
from common.measure import terminal
from common.measure.workloads import Workload
from common.show import results
from common.show.tables import short_commit, stage_order

SAVED = Path(".benchmarks")  # pytest-benchmark saves runs here, under the current directory
COUNTED = ("MB", "MFLOP", "µs at peak")  # the MB read and written, the MFLOP executed, the roofline
NO_TIMES = "Without a GPU, the runs have counts and no times. Times at peak assume a GPU's published peak rates."


@dataclass(frozen=True)
class Run:
    """A saved run: its records by workload and implementation, and its machine."""

    records: dict[str, dict[str, dict]]
    machine: dict

    @property
    def origin(self) -> str:
        """The GPU, versions, commit and date of the run."""
        facts = [self.machine["gpu"] or "no GPU", f"torch {self.machine['torch']}", f"triton {self.machine['triton']}"]
        return ", ".join([*facts, f"commit {short_commit(self.machine['commit'])}", self.machine["date"]])


def load(path: Path, repeats: bool = False) -> Run:
    """Load a saved run; raise ValueError, KeyError or TypeError if the file is incomplete.

    Args:
        repeats: whether to add the passes that the run skipped, because a stage's code equals its parent's code.
    """
    records, machine = results.records_of(json.loads(path.read_text()))
    found = {}
    for record in results.with_repeats(records) if repeats else records:
        found.setdefault(Workload.of(record).label, {})[record["impl"]] = record
    return Run(found, machine)


def last_two(directory: Path) -> list[Run]:
    """Return the two newest runs, the older one first. With fewer runs, the list is shorter. Name incomplete files on
    stderr."""

    def saved_at(path):  # from the file's name, because copying can change the modification time
        return re.findall(r"\d{8}_\d{6}", path.name), path.name

    found = []
    for path in sorted(directory.glob("*/*.json"), key=saved_at, reverse=True):
        try:
            found.insert(0, load(path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{path} is left out, because the run in it is incomplete: {error!r}", file=sys.stderr)
        if len(found) == 2:
            break
    return found


def _cells(record, on_gpu):
    """Return a run's cells for one case: the case's numbers, or the reason why the case was not measured."""
    if record is None or "failure" in record:
        shown = record["failure"] if record else "-"
        return [shown] if on_gpu else [shown] + ["-"] * (len(COUNTED) - 1)
    if on_gpu:
        return [f"{record['ms']:.4g} ± {record['iqr_ms']:.2g}"]
    peak = "-" if record["roofline_us"] is None else f"{record['roofline_us']:.4g}"
    return [f"{results.moved(record) / 1e6:.4g}", f"{record['flops_executed'] / 1e6:.4g}", peak]


def _row(a: dict | None, b: dict | None, on_gpu: bool) -> list[str]:
    """Return the cells of two records of one case, and how many times as fast B is."""
    times = [record and record.get("ms" if on_gpu else "roofline_us") for record in (a, b)]
    cells = chain(*zip(_cells(a, on_gpu), _cells(b, on_gpu), strict=True))
    return [*cells, f"{times[0] / times[1]:.2f}" if all(times) else "-"]


def tables(a: Run, b: Run, stage: str | None = None) -> str:
    """Format a table for each workload that both runs have, or one table of a stage. Both runs must have used a GPU, or
    neither."""
    on_gpu = b.machine["gpu"] is not None
    names = ("ms ± IQR",) if on_gpu else COUNTED
    headers = [text for name in names for text in (f"A: {name}", f"B: {name}")] + ["B × as fast"]

    def table(first, rows):
        align = ["left"] + ["right"] * len(headers)
        return tabulate(rows, [first, *headers], tablefmt="pipe", disable_numparse=True, colalign=align)

    shared = [label for label in b.records if label in a.records]
    if stage:
        return table(stage, [[label, *_row(a.records[label][stage], b.records[label][stage], on_gpu)] for label in shared])
    parts = []
    for label in shared:
        impls = sorted(a.records[label] | b.records[label], key=stage_order)
        rows = [[impl, *_row(a.records[label].get(impl), b.records[label].get(impl), on_gpu)] for impl in impls]
        parts.append(f"{label}\n\n{table('implementation', rows)}")
    return "\n\n".join(parts)


def _given(path: str, repeats: bool) -> Run:
    """Load a run that the command line names, as `load` does; raise SystemExit if it is missing or incomplete."""
    try:
        return load(Path(path), repeats)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is no complete run of the benchmark: {error!r}") from None


def main(argv: list[str]):
    """Run the command line; raise SystemExit with the reason if there is nothing to compare."""
    terminal.prepare()
    description = "Compare two saved runs of the benchmark."
    parser = argparse.ArgumentParser(prog="python -m common.show.compare", description=description)
    parser.add_argument("files", nargs="*", metavar="FILE", help="two saved runs, A and B (default: the last two)")
    parser.add_argument("--stage", metavar="V", help="compare one stage only, in one table")
    options = parser.parse_args(argv)
    if len(options.files) not in (0, 2):
        parser.error(f"a comparison needs two files, not {len(options.files)}")
    try:
        stage = options.stage and stages.resolve(options.stage)
    except ValueError as error:
        parser.error(str(error))
    runs = [_given(path, repeats=bool(stage)) for path in options.files] or last_two(SAVED)
    if len(runs) < 2:
        raise SystemExit(f"a comparison needs two saved runs, but {SAVED} has {len(runs)}; each `make bench` saves one")
    a, b = runs
    print(f"A: {a.origin}\nB: {b.origin}")
    gpus = a.machine["gpu"], b.machine["gpu"]
    if None in gpus and gpus != (None, None):
        raise SystemExit("the runs cannot be compared: one had a GPU and one had none")
    if gpus == (None, None):
        print(NO_TIMES)
    elif gpus[0] != gpus[1]:
        print("The runs are from different GPUs, so the code may not be the cause of a difference.")
    if stage:
        a, b = (
            replace(run, records={label: {stage: impls[stage]} for label, impls in run.records.items() if stage in impls})
            for run in runs
        )
    if not (shared := a.records.keys() & b.records.keys()):
        raise SystemExit("the runs have no workload in common" + (f" for {stage}" if stage else ""))
    if left_out := len(a.records | b.records) - len(shared):
        print(f"{left_out} workloads are left out, because only one of the runs has them.")
    print(f"\n{tables(a, b, stage)}")


if __name__ == "__main__":
    main(sys.argv[1:])
