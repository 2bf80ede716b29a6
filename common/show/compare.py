"""Compare two saved runs of the benchmark: their times or, without a GPU, their counts.

python -m common.show.compare  # the last two runs
python -m common.show.compare 3 before --stage v3  # the run with the id 0003, and the run saved as `before`
python -m common.show.compare results/newest-d128-h200.json 7 --stage newest
"""

import json
import sys
from itertools import chain
from pathlib import Path

import stages
from common.measure.options import command
from common.show.results import Run, moved, origin, stage_order
from common.show.tables import markdown

SAVED = Path(".benchmarks")  # pytest-benchmark saves runs here, under the current directory: 0003_before.json
COUNTED = ("MB", "MFLOP")  # the MB read and written, the MFLOP executed


def load(path: Path, repeats: bool) -> Run:
    """Load a saved run, as `Run.of` does; raise ValueError if the file is missing or incomplete."""
    try:
        return Run.of(json.loads(path.read_text()), repeats)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no complete run of the benchmark: {error!r}") from None


def saved(repeats: bool) -> dict[Path, Run]:
    """Return the runs of `SAVED`, the newest last. Name incomplete files on stderr."""
    found = {}
    for path in SAVED.glob("*/*.json"):
        try:
            found[path] = load(path, repeats)
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)
    return dict(sorted(found.items(), key=lambda item: item[1].ended))  # copying a file changes its time, but not the run's


def find(text: str, runs: dict[Path, Run], repeats: bool) -> tuple[Path, Run]:
    """Return the run that `text` names: a file, or the id or the name of a saved run. Raise ValueError if there is none."""
    if Path(text).exists() or Path(text).suffix == ".json":
        return Path(text), load(Path(text), repeats)
    for path in reversed(runs):
        number, _, name = path.stem.partition("_")
        if text in (path.stem, name) or (text.isdigit() and number.isdigit() and int(text) == int(number)):
            return path, runs[path]
    raise ValueError(f"no saved run is called {text!r}; there are {', '.join(path.stem for path in runs) or 'none'}")


def _cells(record: dict | None, on_gpu: bool) -> list[str]:
    """Return a run's cells for one case: the case's numbers, or the reason why the case was not measured."""
    if record is None or "failure" in record:
        return [record["failure"] if record else "-"] + ["-"] * (0 if on_gpu else len(COUNTED) - 1)
    if on_gpu:
        return [f"{record['ms']:.4g} ± {record['iqr_ms']:.2g}"]
    return [f"{moved(record) / 1e6:.4g}", f"{record['flops_executed'] / 1e6:.4g}"]


def tables(runs: list[tuple[Path, Run]], stage: str | None = None) -> str:
    """Format a table for each workload that both runs have, or one table of a stage. Both runs must have used a GPU, or
    neither. Raise ValueError if the runs have nothing in common."""
    (_, a), (_, b) = runs
    on_gpu = b.machine["gpu"] is not None

    def row(impl, work):
        """Return the cells of both runs for one case and, on a GPU, how many times as fast B is."""
        cells = [*chain(*zip(*(_cells(run.record(impl, work), on_gpu) for run in (a, b)), strict=True))]
        times = [run.times(impl, [work]).get(work) for run in (a, b)]
        return [*cells, f"{times[0] / times[1]:.2f}" if all(times) else "-"] if on_gpu else cells

    headers = [f"{name}: {what}" for what in (("ms ± IQR",) if on_gpu else COUNTED) for name in "AB"]
    headers += ["B × as fast"] * on_gpu
    of_runs = [[work for work in run.works if not stage or run.record(stage, work)] for run in (a, b)]
    shared = [work for work in of_runs[1] if work in of_runs[0]]
    if not shared:
        raise ValueError("the runs have no workload in common" + (f" for {stage}" if stage else ""))
    left_out = len({work for works in of_runs for work in works}) - len(shared)
    parts = [f"{left_out} workloads are left out, because only one of the runs has them."] if left_out else []
    if stage:
        rows = [[work.label, *row(stage, work)] for work in shared]
        return "\n\n".join([*parts, markdown(rows, [stage, *headers], (stage,))])
    names = sorted(dict.fromkeys([*a.names, *b.names]), key=stage_order)
    for work in shared:
        rows = [[name, *row(name, work)] for name in names if a.record(name, work) or b.record(name, work)]
        parts.append(f"{work.label}\n\n{markdown(rows, ['implementation', *headers], ('implementation',))}")
    return "\n\n".join(parts)


def main(argv: list[str]):
    """Run the command line; exit with the reason if there is nothing to compare."""
    parser = command("common.show.compare", __doc__)
    help_ = "two runs, A and B: files, or ids or names of saved runs (default: the last two saved runs)"
    parser.add_argument("runs", nargs="*", metavar="RUN", help=help_)
    parser.add_argument("--stage", metavar="V", help="compare one stage only, in one table")
    options = parser.parse_args(argv)
    if len(options.runs) not in (0, 2):
        parser.error(f"a comparison needs two runs, not {len(options.runs)}")
    try:
        stage = options.stage and stages.resolve(options.stage)
        every = saved(bool(stage))
        runs = [find(text, every, bool(stage)) for text in options.runs] or list(every.items())[-2:]
        if len(runs) < 2:
            raise ValueError(f"a comparison needs two saved runs, but {SAVED} has {len(runs)}; each `make bench` saves one")
        print(*(f"{name}: {path}: {origin(run.machine)}" for name, (path, run) in zip("AB", runs, strict=True)), sep="\n")
        gpus = {run.machine["gpu"] for _, run in runs}
        if gpus == {None}:
            print("Without a GPU, the runs have counts and no times.")
        elif None in gpus:
            raise ValueError("the runs cannot be compared: one had a GPU and one had none")
        elif len(gpus) == 2:
            print("The runs are from different GPUs, so the code may not be the cause of a difference.")
        print(f"\n{tables(runs, stage)}")
    except ValueError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(sys.argv[1:])
