"""What the documents show of the committed results: tables, rewritten between markers, and plots.

`python -m common.report readme` writes the former, `python -m common.report plots` draws the latter.
"""

import argparse
import itertools
import json
import math
import re
from pathlib import Path

from tabulate import tabulate

from common.ncu import traffic_table
from common.table import PASS_NAMES, speed_table, version

ROOT = Path(__file__).parents[1]
RUN = ROOT / "results" / "h200.json"
TABLES = RUN.with_suffix(".md")
PLOTS = ROOT / "plots"
MEAN_OVER = (1024, 2048, 4096, 8192, 16384)  # sequence lengths
COLUMNS = tuple(itertools.product(("fwd", "bwd"), (64, 128)))  # passes and head dimensions


def load_run(path: Path) -> tuple[list[dict], dict]:
    """The records (as `speed_table` takes them) and the machine of a saved run."""
    run = json.loads(path.read_text())
    return [benchmark["extra_info"] for benchmark in run["benchmarks"]] + run["failures"], run["machine_info"]


def implementations(records: list[dict]) -> list[str]:
    """The names in the records: baselines first, then the stages in their order."""
    names = dict.fromkeys(record["impl"] for record in records)
    return sorted(names, key=lambda name: -1 if version(name) is None else version(name))


def _measured(records, impl, pass_, head_dim):
    """The float16 records by (causal, seq_len), of the lengths that means are over; without what could not be measured."""
    return {
        (record["causal"], record["seq_len"]): record
        for record in records
        if (record["impl"], record["pass"], record["head_dim"], record["dtype"]) == (impl, pass_, head_dim, "float16")
        and record["seq_len"] in MEAN_OVER
        and "failure" not in record
    }


def speedup(records: list[dict], impl: str, over: str | None, pass_: str, head_dim: int) -> float | None:
    """How many times as fast `impl` is as `over`: the geometric mean over `MEAN_OVER`, causal and not.

    Only where both were measured (out of memory, v0 has fewer points); None where that is nowhere.
    """
    ours, theirs = (_measured(records, name, pass_, head_dim) for name in (impl, over))
    common = ours.keys() & theirs.keys()
    if not common:
        return None
    return math.exp(sum(math.log(theirs[key]["ms"] / ours[key]["ms"]) for key in common) / len(common))


def origin(machine: dict) -> str:
    """Where a run's numbers are from: GPU, versions, commit."""
    return f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}, commit {machine['commit'][:12]}"


def summary_table(records: list[dict], machine: dict) -> str:
    """The README's table: for each implementation the mean rate, the gain over the stage before and the share of cuDNN's."""
    names = implementations(records)
    stage_of = {version(name): name for name in names}
    headers = ["", *(f"{PASS_NAMES[pass_]}, D={head_dim}" for pass_, head_dim in COLUMNS)]
    rows = []
    for name in names:
        row = [name]
        before = stage_of.get(version(name) - 1) if version(name) else None
        for column in COLUMNS:
            rates = [record["tflops"] for record in _measured(records, name, *column).values()]
            cells = [f"{math.exp(sum(map(math.log, rates)) / len(rates)):.0f}"] if rates else []
            if gain := speedup(records, name, before, *column):
                cells.append(f"**×{gain:.2f}**")
            if cudnn := speedup(records, name, "sdpa-cudnn", *column):
                cells.append(f"{100 * cudnn:.0f} %")
            row.append(", ".join(cells) or "-")
        rows.append(row)
    lengths = ", ".join(map(str, MEAN_OVER))
    caption = (
        "TFLOP/s, **× the stage before**, % of cuDNN. float16, 16k tokens, hidden size 2048; geometric means over "
        f"S = {lengths}, causal and not. {origin(machine)}, {machine['date']}."
    )
    return f"{caption}\n\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True)}"


def with_table(text: str, name: str, table: str) -> str:
    """`text` with what stands between the markers of `name` replaced by `table`.

    Raises:
        ValueError: the text does not have the two markers exactly once.
    """
    begin, end = f"<!-- {name}: written by make readme -->\n", f"<!-- end of {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"the text does not have {begin.strip()!r} … {end!r} exactly once")
    return pattern.sub(lambda _: f"{begin}\n{table}\n\n{end}", text)


def documents() -> dict[Path, str]:
    """What each generated document must be, from the committed results."""
    records, machine = load_run(RUN)
    readme = ROOT / "README.md"
    profiled = {path: json.loads(path.read_text()) for path in RUN.parent.glob("traffic-*.json")}
    return {
        readme: with_table(readme.read_text(), "summary", summary_table(records, machine)),
        TABLES: f"# All measurements\n\n{speed_table(records, machine)}\n",
        **{path.with_suffix(".md"): f"# Traffic\n\n{traffic_table(result)}\n" for path, result in profiled.items()},
    }


def main():
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m common.report", description=f"Show what {RUN.relative_to(ROOT)} holds.")
    parser.add_argument("what", choices=["readme", "plots"], help="rewrite the tables of the documents, or draw the plots")
    if parser.parse_args().what == "readme":
        for path, text in documents().items():
            path.write_text(text)
    else:
        from common import plots  # matplotlib is slow to import

        plots.draw(*load_run(RUN), PLOTS)


if __name__ == "__main__":
    main()
