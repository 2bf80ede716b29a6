"""Write the generated parts of the documents, from the committed results. `make readme` runs this module."""

import argparse
import ast
import difflib
import functools
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from tabulate import tabulate

import stages
from common.measure import files, terminal
from common.measure.footprint import MIB_IN_MB
from common.measure.ncu import pairs
from common.measure.scaling import tables
from common.measure.timeline import SCORES
from common.measure.traffic import GPUS
from common.measure.units import CLOCK, TIME
from common.show import tracks
from common.show.choice import choice_table
from common.show.constants import constants_table
from common.show.decoding import decoding_tables
from common.show.energy import energy_table
from common.show.front import headline, ladder
from common.show.profiles import traffic_table, units_table
from common.show.results import (
    CHOICE,
    COLUMNS,
    COUNTED_AT,
    ROOT,
    TIMELINE,
    TRAFFIC,
    UNITS,
    Run,
    bytes_in_words,
    bytes_of,
    counted,
    implementations,
    load_counts,
    load_run,
    modelled,
    moved,
    newest,
    origin,
    place,
    run_file,
    runs,
    same_code,
    spoken,
    tuned_case,
)
from common.show.scaling import load_ring, scaling_passage
from common.show.shared import shared_tables
from common.show.sinks import sinks_table
from common.show.tables import PASS_NAMES, speed_table


def with_table(text: str, name: str, table: str) -> str:
    """Return `text` with `table` between the markers of `name`.

    Raises:
        ValueError: the text does not have each of the two markers exactly once.
    """
    begin, end = f"<!-- {name}: make readme -->\n", f"<!-- /{name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"the text does not have {begin.strip()!r} … {end!r} exactly once")
    return pattern.sub(lambda _: f"{begin}\n{table}\n\n{end}", text)


def _spans():
    """Return the pass, the head dimension and the mask of each row that a stage's tables may have."""
    return [(pass_, head_dim, causal) for pass_, head_dim in COLUMNS for causal in (False, True)]


def _step_table(rows: dict[tuple, list[str]], headers: list[str]) -> str:
    """Format a table with a row for each span. A span is a pass, a head dimension and a mask."""
    align = ["left", "right", "left"] + ["right"] * len(headers)
    table = [
        [PASS_NAMES[pass_], head_dim, "causal" if causal else "full", *row] for (pass_, head_dim, causal), row in rows.items()
    ]
    return tabulate(table, ["pass", "D", "mask", *headers], tablefmt="pipe", disable_numparse=True, colalign=align)


def _changed_spans(name: str) -> list[tuple]:
    """Return the spans of the passes that a stage changes."""
    parent = stages.parent(name)
    return [span for span in _spans() if not (parent and same_code(name, parent, span[0]))]


def traffic_of_step(name: str) -> str:
    """Format the counted traffic and FLOPs of a stage and its parent. Rows in which nothing changes are left out."""
    counts, _ = load_counts(TRAFFIC)
    parent = stages.parent(name)
    columns = {
        "MB read": lambda count: f"{count['bytes_read'] / 1e6:.2f}",
        "MB written": lambda count: f"{count['bytes_written'] / 1e6:.2f}",
        "total MB": lambda count: f"{moved(count) / 1e6:.2f}",
        "MFLOP": lambda count: f"{count['flops_executed'] / 1e6:.0f}",
        "FLOP / byte": lambda count: f"{count['flops_executed'] / moved(count):.1f}",
        "kernel launches": lambda count: str(count["kernel_launches"]),
        "peak extra MB": lambda count: f"{count['peak_extra_mib'] * MIB_IN_MB:.2f}",
        "µs at peak": lambda count: f"{count['roofline_us']:.1f}",
    }
    rows = {}
    for span in _changed_spans(name):
        both = [counted(counts, stage, *span) for stage in (parent, name) if stage]
        cells = [[show(count) if count else "-" for count in both] for show in columns.values()]
        if not parent or any(len(set(cell)) > 1 for cell in cells):
            rows[span] = [f"**{' → '.join(cell)}**" if len(set(cell)) > 1 else cell[0] for cell in cells]
    if not rows:
        return f"Same bytes and FLOPs as {spoken(parent)}."
    link = "[bytes and FLOPs](../../docs/measuring.md#counted-traffic)"
    return f"One head's {link}, S = {COUNTED_AT}.\n\n{_step_table(rows, list(columns))}"


def _side_by_side(name: str) -> dict[tuple, Run | None]:
    """Return, for each pass and head dimension, the newest run that has both a stage and its parent."""
    measured = runs()
    return {column: newest(measured, *column, *filter(None, (stages.parent(name), name))) for column in COLUMNS}


def _is_modelled(name: str) -> bool:
    """Return whether the model of an SM predicts a step's gain. Otherwise the roofline predicts the gain."""
    model, _ = load_counts(TIMELINE)
    return all(any(record["impl"] == stage for record in model) for stage in (name, stages.parent(name)))


def gains(name: str) -> tuple[list[int], dict[tuple, tuple[float | None, list[float | None]]]]:
    """Return the predicted gain of a step, and the measured gains by sequence length. The first stage has no parent, so its
    values are times in milliseconds instead of gains.

    Returns:
        The measured sequence lengths, and a dictionary by (pass, head dimension, mask). An entry has the prediction, and a list
        with the measured value for each length. None stands for an unknown value.
    """
    parent = stages.parent(name)
    counts, _ = load_counts(TRAFFIC)
    model, _ = load_counts(TIMELINE)
    lengths = sorted({record["seq_len"] for run in runs() for record in run.records})
    side_by_side, modelled_too = _side_by_side(name), _is_modelled(name)
    found = {}
    for span in _changed_spans(name):
        pass_, head_dim, causal = span
        run = side_by_side[pass_, head_dim]
        ms = {(r["impl"], r["pass"], r["causal"], r["seq_len"]): r["ms"] for r in run.records if "ms" in r} if run else {}
        now, old = ([ms.get((stage, pass_, causal, seq_len)) for seq_len in lengths] for stage in (name, parent))
        if not parent:
            found[span] = None, now
            continue
        if modelled_too:
            costs = [modelled(model, stage, *span, COUNTED_AT) for stage in (parent, name)]
        else:
            costs = [count and count["roofline_us"] for count in (counted(counts, stage, *span) for stage in (parent, name))]
        predicted = costs[0] / costs[1] if all(costs) else None
        found[span] = predicted, [b / a if a and b else None for a, b in zip(now, old, strict=True)]
    shown = [place for place, _ in enumerate(lengths) if any(values[place] for _, values in found.values())]
    return [lengths[place] for place in shown], {
        span: (predicted, [values[place] for place in shown]) for span, (predicted, values) in found.items()
    }


def gain_table(name: str) -> str:
    """Format a step's predicted gain and its measured gain by sequence length. For the first stage, format its times. For a
    stage of the track for D = 256, return `wide_table`."""
    if stages.track(name) == "wide":
        return wide_table(name)
    parent = stages.parent(name)
    lengths, found = gains(name)
    side_by_side = _side_by_side(name)
    columns = {span[:2] for span in found}
    used = [run for column, run in side_by_side.items() if run and column in columns]
    where = "; ".join(dict.fromkeys(place(run.machine) for run in used))
    headers = [f"S = {seq_len}" for seq_len in lengths]
    if not parent:
        rows = {span: [f"{time:.2f}" if time else "-" for time in times] for span, (_, times) in found.items()}
        return f"The table shows milliseconds ({where}).\n\n{_step_table(rows, headers)}"
    if not found:
        return f"{spoken(name)} has the same code as {spoken(parent)}."
    rows = {
        span: [f"×{ratio:.2f}" if ratio else "-" for ratio in (predicted, *ratios)]
        for span, (predicted, ratios) in found.items()
    }
    missing = [
        f"{PASS_NAMES[column[0]]}, D = {column[1]}" for column in COLUMNS if column in columns and not side_by_side[column]
    ]
    key = stages.track(name)
    of_track = key and tracks.gain(key, name, parent)
    elsewhere = f" ({tracks.place(key)})" if of_track and tracks.place(key) != where else ""
    old = spoken(parent)
    model = "[predicted](../../docs/measuring.md#the-model-of-an-sm)"
    predicted = model if _is_modelled(name) else "predicted by the roofline of an H200"
    measured = f", measured ({where})" if where else ""
    caption = [
        f"Speed over {old}: {predicted}{measured}.",
        f"Not measured against {old} yet: {'; '.join(missing)}." if missing else "",
        f"On the track's workloads{elsewhere}: ×{of_track:.2f}." if of_track else "",
    ]
    return f"{' '.join(filter(None, caption))}\n\n{_step_table(rows, ['predicted', *headers])}"


def tuned_table(name: str) -> str:
    """Format the measured traffic of a stage and its parent, with the tiles that the tuner chose on the GPU."""
    parent = stages.parent(name)
    rows = {}
    for span in _changed_spans(name):
        cases = [tuned_case(stage, *span) for stage in (parent, name)]
        cells = []
        for case in cases:
            cells += [", ".join(label for label, *_ in pairs(case)), f"{bytes_of(case) / 1e6:.1f}"] if case else ["-", "-"]
        rows[span] = [*cells, bytes_in_words(bytes_of(cases[0]), bytes_of(cases[1])) if all(cases) else "-"]
    old, new = spoken(parent), spoken(name)
    caption = (
        "MB between the L2 cache and the SMs, measured with Nsight Compute on an H200, for the tiles that each stage's tuner "
        f"chose. The workload has two heads, S = {COUNTED_AT} and float16."
    )
    return f"{caption}\n\n{_step_table(rows, [f'tiles of {old}', 'MB', f'tiles of {new}', 'MB', f'{new} moves'])}"


def units_of_step(name: str) -> str:
    """Format how busy each unit of the GPU is in the kernels of a stage, its parent and two libraries."""
    result = json.loads(UNITS.read_text())
    shown = {"fwd": ("sdpa-cudnn", "flash-3", stages.parent(name), name), "bwd": (stages.parent(name), name)}
    cases = [case for case in result["cases"] if not case["causal"] and case["impl"] in shown[case["pass"]]]
    return units_table({**result, "cases": cases})


def spread_table(name: str) -> str:
    """Format a stage's forward speed divided by an earlier stage's, for several standard deviations of the scores. The earlier
    stage is the nearest ancestor that the run measured."""
    records, machine = load_run(run_file("spread"))
    measured, before = {record["impl"] for record in records}, stages.parent(name)
    while before and before not in measured:
        before = stages.parent(before)
    ms = {(r["impl"], r["dtype"], r["causal"], r["score_std"]): r["ms"] for r in records}
    deviations = sorted({record["score_std"] for record in records})
    rows = []
    for dtype, causal in itertools.product(("float16", "bfloat16"), (False, True)):
        times = [[ms.get((stage, dtype, causal, std)) for std in deviations] for stage in (name, before)]
        ratios = [f"×{theirs / ours:.2f}" if ours and theirs else "-" for ours, theirs in zip(*times, strict=True)]
        rows.append([dtype, "causal" if causal else "full", *ratios])
    first = records[0]
    caption = (
        f"The speed of {spoken(name)}'s forward over {spoken(before or '-')}'s, by the standard deviation of the scores. "
        f"D = {first['head_dim']} and S = {first['seq_len']}, measured on {place(machine)}."
    )
    headers = ["", "mask", *(f"deviation {std:g}" for std in deviations)]
    align = ["left", "left"] + ["right"] * len(deviations)
    return f"{caption}\n\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True, colalign=align)}"


def wide_table(name: str) -> str:
    """Format a stage's TFLOP/s at D = 256, its gain over its parent, and its share of each library's rate."""
    path = run_file("wide")
    if not path.exists():
        return f"{spoken(name)} has not been measured at D = 256 yet."
    records, machine = load_run(path)
    rates = {(r["impl"], r["pass"], r["causal"], r["seq_len"]): r["tflops"] for r in records if "tflops" in r}
    if not any(impl == name for impl, *_ in rates):
        return f"{spoken(name)} has not been measured at D = 256 yet."
    peers = [impl for impl in implementations(records) if not stages.position(impl)]
    lengths = sorted({record["seq_len"] for record in records})
    rows = []
    for pass_, causal, seq_len in itertools.product(("fwd", "bwd"), (False, True), lengths):
        ours, old, *theirs = (rates.get((impl, pass_, causal, seq_len)) for impl in (name, stages.parent(name), *peers))
        if not ours:  # the run skips a pass that the stage does not change
            continue
        cells = [f"{ours:.0f}", f"×{ours / old:.2f}" if old else "-"]
        cells += [f"{100 * ours / rate:.0f} %" if rate else "-" for rate in theirs]
        rows.append([PASS_NAMES[pass_], "causal" if causal else "full", seq_len, *cells])
    headers = ["pass", "mask", "S", "TFLOP/s", f"over {spoken(stages.parent(name))}", *(f"of {spoken(peer)}" for peer in peers)]
    align = ["left", "left"] + ["right"] * (len(headers) - 2)
    caption = f"D = 256, measured ({place(machine)}). *of*: in percent of the library's speed."
    return f"{caption}\n\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True, colalign=align)}"


def timeline_table() -> str:
    """Format the cycles of the Gluon stages in the model of an SM, next to the measured cycles of their longest kernels."""
    model, _ = load_counts(TIMELINE)
    units = json.loads(UNITS.read_text())
    seq_len = units["cases"][0]["seq_len"]

    def cycles(stage, *span):
        """Return the measured cycles that an SM takes for SCORES scores in a pass's longest kernel."""
        wanted = (stage, *span)
        for case in units["cases"]:
            if (case["impl"], case["pass"], case["head_dim"], case["causal"]) == wanted:
                kernel = max(case["kernels"], key=lambda kernel: kernel[TIME])
                scores = case["batch"] * case["heads"] * seq_len**2 / (2 if case["causal"] else 1)
                return kernel[TIME] * 1e-9 * kernel[CLOCK] * GPUS["h200"].num_sms * SCORES / scores
        return None

    rows = []
    for name, span in itertools.product(dict.fromkeys(record["impl"] for record in model), _spans()):
        ours, theirs = ((modelled(model, stage, *span, seq_len), cycles(stage, *span)) for stage in (name, stages.parent(name)))
        row = [name, PASS_NAMES[span[0]], span[1], "causal" if span[2] else "full", *(f"{x:.0f}" if x else "-" for x in ours)]
        row.append(f"{ours[0] / ours[1]:.2f}" if all(ours) else "-")
        if all(ours) and all(theirs):  # the model times only Gluon kernels
            gains = [old / new for old, new in zip(theirs, ours, strict=True)]
            row += [*(f"×{gain:.2f}" for gain in gains), f"{gains[0] / gains[1]:.2f}"]
        rows.append(row + ["-"] * (10 - len(row)))
    headers = ["stage", "pass", "D", "mask", "model", "measured", "ratio", "gain, model", "gain, measured", "ratio"]
    caption = (
        f"The table shows the cycles that an SM takes for {SCORES} unmasked scores in a pass's longest kernel. *model*: "
        "`make timeline` computes the cycles from the rates in `rates-h200.json`. *measured*: Nsight Compute measured the "
        "cycles (`units-h200.json`). *ratio*: the value of the model divided by the measured value. *gain*: the parent's "
        f"cycles divided by the stage's cycles. S = {seq_len}, float16, measured on {origin(units['machine_info'])}."
    )
    align = ["left", "left", "right", "left"] + ["right"] * 6
    return f"{caption}\n\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True, colalign=align)}"


PASSAGES = {  # generated passages that a stage's README may have
    "traffic": traffic_of_step, "gain": gain_table, "tuned": tuned_table, "units": units_of_step, "spread": spread_table,
    "sinks": sinks_table,
}  # fmt: skip


RUNS = {  # name of a run -> its heading, and the function that formats its records
    "forward-d64": ("Forward, all stages in float16, D = 64", speed_table),
    "forward-d128": ("Forward, all stages in float16, D = 128", speed_table),
    "backward-d64": ("Backward, all stages in float16, D = 64", speed_table),
    "backward-d128": ("Backward, all stages in float16, D = 128", speed_table),
    "newest-d64": ("The newest stages, D = 64", speed_table),
    "newest-d128": ("The newest stages, D = 128", speed_table),
    "query-groups": ("Backwards with query groups", speed_table),
    "short-rows": ("Backwards of short sequences", speed_table),
    "short-forwards": ("Forwards of short sequences", speed_table),
    "bfloat16-d64": ("In bfloat16, D = 64", speed_table),
    "bfloat16-d128": ("In bfloat16, D = 128", speed_table),
    "wide": ("D = 256", speed_table),
    "short": ("Short calls in float16", speed_table),
    "passes-as-one": ("Both passes as one", speed_table),
    "shared": ("Shared K/V heads", shared_tables),
    "models": ("Shapes of real models", speed_table),
    "decode-d64": ("Decoding, D = 64", decoding_tables),
    "decode-d128": ("Decoding, D = 128", decoding_tables),
    "pinned": ("With the pinned Triton", speed_table),
    "spread": ("Scores of other standard deviations", speed_table),
    "sinks": ("Attention sinks and wide score distributions", speed_table),
    "wide-scores": ("Wide score distributions", speed_table),
    "hidden-sinks": ("Attention sinks in mid-sequence", speed_table),
}


KEPT = (  # the files of results/ whose tables are committed; `make table` prints the tables of any file
    "wide-h100", "energy-d64-h200", "energy-d128-h200", "ring-h200-x2", "ring-million-h200-x2", "timeline"
)  # fmt: skip


def tables_of(path: Path) -> str:
    """Return a document for a JSON file of results/: a heading and the file's tables.

    Raises:
        ValueError: the file has no tables.
    """
    if path.name.startswith("traffic-"):
        heading, table = "Counted and measured traffic", traffic_table(json.loads(path.read_text()))
    elif path.name.startswith("constants-"):
        heading, table = "Constants of the newest stage", constants_table(json.loads(path.read_text()))
    elif path.name.startswith("energy-"):
        heading, table = "Energy and the power limit", energy_table(json.loads(path.read_text()))
    elif path.name.startswith("ring-"):
        heading, table = "One sequence shared by several GPUs", tables(load_ring(path))
    elif path.name == TIMELINE.name:
        heading, table = "The model of an SM next to measurements", timeline_table()
    elif path.name == UNITS.name:
        heading, table = "How busy each unit is, and why warps wait", units_table(json.loads(path.read_text()))
    elif path.name == CHOICE.name:
        heading, table = "Which stage on which GPU", choice_table(json.loads(path.read_text()))
    elif (name := path.stem.rpartition("-")[0]) in RUNS:
        heading, of_records = RUNS[name]
        table = of_records(*load_run(path))
    else:
        raise ValueError(f"{path} has no tables; results/README.md says what the files hold")
    return f"# {heading}\n\n{table}\n"


def step_hunk() -> str:
    """Return v6's change to the order of tiles, as a diff."""
    old, new = (stages.resolve(version) for version in ("v5", "v6"))
    before, after = (stages.source(name, "forward.py").splitlines() for name in (old, new))
    before, after = (lines[ast.parse("\n".join(lines)).body[0].end_lineno :] for lines in (before, after))  # no docstring
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    hunks = "\n".join(line for line in lines if not line.startswith("@@") and not line[1:].startswith("from "))
    return f"```diff\n{hunks}\n```"


# The passages that README.md, CONTRIBUTING.md and docs/ may have between markers.
FRONT = {
    "headline": lambda: headline(runs()), "ladder": lambda: ladder(runs()), "hunk": step_hunk,
    "choice": lambda: choice_table(json.loads(CHOICE.read_text())), "scaling": scaling_passage,
}  # fmt: skip


def with_passages(path: Path, passages: dict[str, Callable[[], str]]) -> str:
    """Return a document's text with new passages between its markers."""
    text = path.read_text()
    for name in re.findall(r"<!-- (\w+): make readme -->", text):
        text = with_table(text, name, passages[name]())
    return text


def documents() -> dict[Path, str]:
    """Return the new text of each document that has generated parts."""
    found = {path: with_passages(path, FRONT) for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])}
    for name in stages.names():
        passages = {passage: functools.partial(write, name) for passage, write in PASSAGES.items()}
        path = ROOT / "stages" / name / "README.md"
        found[path] = with_passages(path, passages)
    for path in (ROOT / "results" / f"{name}.json" for name in KEPT):
        if path.exists():
            found[path.with_suffix(".md")] = tables_of(path)
    return found


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    parser = argparse.ArgumentParser(
        prog="python -m common.show.documents",
        description="Rewrite the generated parts of the documents from results/, or print the tables of one file.",
    )
    parser.add_argument("file", type=Path, nargs="?", help="a JSON file of results/, whose tables are printed")
    options = parser.parse_args(argv)
    if options.file:
        try:
            print(tables_of(options.file), end="")
        except (OSError, ValueError, KeyError) as error:
            parser.exit(2, f"{parser.prog}: {error}\n")
    else:
        for path, text in documents().items():
            files.replace(path, text)


if __name__ == "__main__":
    main(sys.argv[1:])
