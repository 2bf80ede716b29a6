"""Compare the last two saved runs of the benchmark: their times or, without a GPU, their counts.

python -m common.show.compare
"""

import json
import re
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tabulate import tabulate

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


def load(path: Path) -> Run:
    """Load a saved run; raise ValueError, KeyError or TypeError if the file is incomplete."""
    records, machine = results.records_of(json.loads(path.read_text()))
    found = {}
    for record in records:
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


def table(old: Run, new: Run) -> str:
    """Format a table for each workload that both runs have. Both runs must have used a GPU, or neither."""
    on_gpu = new.machine["gpu"] is not None
    names = ("ms ± IQR",) if on_gpu else COUNTED
    headers = ["implementation", *(text for name in names for text in (name, "now")), "× as fast"]
    time = "ms" if on_gpu else "roofline_us"
    parts = []
    for label in new.records:
        if label not in old.records:
            continue
        rows = []
        for impl in sorted(old.records[label] | new.records[label], key=stage_order):
            before, now = (run.records[label].get(impl) for run in (old, new))
            times = [record and record.get(time) for record in (before, now)]
            cells = chain(*zip(_cells(before, on_gpu), _cells(now, on_gpu), strict=True))
            rows.append([impl, *cells, f"{times[0] / times[1]:.2f}" if all(times) else "-"])
        align = ["left"] + ["right"] * (len(headers) - 1)
        parts.append(f"{label}\n\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True, colalign=align)}")
    return "\n\n".join(parts)


def main():
    """Run the command line; raise SystemExit with the reason if there is nothing to compare."""
    terminal.prepare()
    runs = last_two(SAVED)
    if len(runs) < 2:
        raise SystemExit(f"a comparison needs two saved runs, but {SAVED} has {len(runs)}; each `make bench` saves one")
    old, new = runs
    print(f"before: {old.origin}\nnow:    {new.origin}")
    gpus = old.machine["gpu"], new.machine["gpu"]
    if None in gpus and gpus != (None, None):
        raise SystemExit("the last two runs cannot be compared: one had a GPU and one had none")
    if gpus == (None, None):
        print(NO_TIMES)
    elif gpus[0] != gpus[1]:
        print("The runs are from different GPUs, so the code may not be the cause of a difference.")
    if not (shared := old.records.keys() & new.records.keys()):
        raise SystemExit("the last two runs have no workload in common")
    if left_out := len(old.records | new.records) - len(shared):
        print(f"{left_out} workloads are left out, because only one of the runs has them.")
    print(f"\n{table(old, new)}")


if __name__ == "__main__":
    main()
