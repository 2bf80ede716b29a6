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

import stages
from common.measure import files, terminal
from common.measure.footprint import MIB_IN_MB
from common.measure.timeline import SCORES
from common.measure.traffic import GPUS
from common.measure.units import CLOCK, TIME
from common.show import tracks
from common.show.constants import constants_table
from common.show.counts import tables as count_tables
from common.show.energy import energy_table
from common.show.front import headline, ladder
from common.show.profiles import traffic_table, units_table
from common.show.results import (
    CHANGED,
    COLUMNS,
    COUNTED_AT,
    LENGTHS,
    ROOT,
    TIMELINE,
    TRAFFIC,
    UNITS,
    Gain,
    Run,
    counted,
    load_counts,
    load_run,
    modelled,
    moved,
    newest,
    origin,
    paper,
    place,
    ratio,
    read,
    run_file,
    runs,
    same_code,
    shown,
    spoken,
)
from common.show.scaling import scaling_passage, scaling_tables
from common.show.tables import PASS_NAMES, legend, markdown, mask, speed_table

# Published rates of float16 matmuls and of HBM: https://www.nvidia.com/en-us/data-center/h200/, which gives 1,979 TFLOP/s with
# sparsity. Without sparsity, the rate is half of this.
H200_TFLOPS, H200_TB_PER_S = 989, 4.8


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
    table = [[PASS_NAMES[pass_], head_dim, mask(causal), *row] for (pass_, head_dim, causal), row in rows.items()]
    return markdown(table, ["pass", "D", "mask", *headers], ("pass", "mask"))


def _changed_spans(name: str) -> list[tuple]:
    """Return the spans of the passes that a stage changes."""
    parent = stages.parent(name)
    return [span for span in _spans() if not (parent and same_code(name, parent, span[0]))]


def roofline_us(count: dict) -> float:
    """Return the time of each launch's bytes or of its FLOPs at an H200's published rates, whichever is longer, in all."""
    launches = count["launches"]
    return sum(max((one["read"] + one["written"]) / H200_TB_PER_S, one["flops"] / H200_TFLOPS) for one in launches) / 1e6


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
        "µs at peak": lambda count: f"{roofline_us(count):.1f}",
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


def _is_modelled(name: str) -> bool:
    """Return whether the model of an SM predicts a step's gain. Otherwise the roofline predicts the gain."""
    model, _ = load_counts(TIMELINE)
    return all(any(record["impl"] == stage for record in model) for stage in (name, stages.parent(name)))


def predicted(name: str, *span) -> float | None:
    """Return the predicted gain of a step over its parent; None if there is no prediction."""
    both = [counted(load_counts(TRAFFIC)[0], stage, *span) for stage in (stages.parent(name), name)]
    costs = [count and roofline_us(count) for count in both]
    if _is_modelled(name):
        costs = [modelled(load_counts(TIMELINE)[0], stage, *span) for stage in (stages.parent(name), name)]
    return costs[0] / costs[1] if all(costs) else None


def gains(name: str) -> dict[tuple, tuple[Run | None, dict[int, Gain]]]:
    """Return the measured gains of a step, for each span that it changes: the run, and the gains by sequence length."""
    found, measured = {}, runs()
    for span in _changed_spans(name):
        run = newest(measured, *span[:2], name, stages.parent(name))
        each = {s: run and ratio([run], name, stages.parent(name), [paper(*span, s)]) for s in LENGTHS}
        found[span] = run, {s: one for s, one in each.items() if one}
    return found


def _times(name: str) -> str:
    """Format the milliseconds of the first stage, which has no parent."""
    rows, used = {}, []
    for span in _spans():
        if run := newest(runs(), *span[:2], name):
            times = {work.seq_len: time for work, time in run.times(name, [paper(*span, s) for s in LENGTHS]).items()}
            rows[span], used = times, [*used, run]
    lengths = [s for s in LENGTHS if any(s in times for times in rows.values())]
    cells = {span: [f"{times[s]:.2f}" if s in times else "-" for s in lengths] for span, times in rows.items()}
    where = "; ".join(dict.fromkeys(place(run.machine) for run in used))
    return f"The table shows milliseconds ({where}).\n\n{_step_table(cells, [f'S = {s}' for s in lengths])}"


def gain_table(name: str) -> str:
    """Format a step's predicted gain and its measured gain by sequence length. For the first stage, format its times. For a
    stage of the track for D = 256, return `wide_table`."""
    if stages.track(name) == "wide":
        return wide_table(name)
    parent = stages.parent(name)
    if not parent:
        return _times(name)
    found = gains(name)
    if not found:
        return f"{spoken(name)} has the same code as {spoken(parent)}."
    lengths = [s for s in LENGTHS if any(s in each for _, each in found.values())]
    rows = {}
    for span, (_, each) in found.items():
        times = predicted(name, *span)
        rows[span] = [f"×{times:.2f}" if times else "-", *(each[s].short if s in each else "-" for s in lengths)]
    where = "; ".join(dict.fromkeys(place(run.machine) for run, _ in found.values() if run))
    missing = dict.fromkeys(f"{PASS_NAMES[span[0]]}, D = {span[1]}" for span, (run, _) in found.items() if not run)
    key = stages.track(name)
    of_track = key and tracks.gain(key, name, parent)
    elsewhere = f" ({tracks.place(key)})" if of_track and tracks.place(key) != where else ""
    model = "[predicted](../../docs/measuring.md#the-model-of-an-sm)"
    by = model if _is_modelled(name) else "predicted by an H200's roofline"
    if any(one.changed for _, each in found.values() for one in each.values()):
        where += CHANGED
    caption = [
        f"Speed over {spoken(parent)}: {by}" + (f", measured ({where})." if where else "."),
        f"Not measured against {spoken(parent)} yet: {'; '.join(missing)}." if missing else "",
        f"On its track{elsewhere}: {of_track}." if of_track else "",
    ]
    table = _step_table(rows, ["predicted", *(f"S = {s}" for s in lengths)])
    return f"{' '.join([*filter(None, caption), *legend(table)])}\n\n{table}"


def scores_table(name: str) -> str:
    """Format a stage's forward speed divided by that of the oldest stage in the runs of wide scores and sinks, which keeps a
    running maximum. For a stage of the track, brackets show the value of the stage from which the track starts."""
    found = [load_run(run_file(grid)) for grid in ("spread", "wide-scores", "sinks") if run_file(grid).exists()]
    found = [run for run in found if name in run.names]
    first = min((each for run in found for each in run.names if each not in run.libraries), key=stages.position)
    track = tracks.stages_of("sinks")
    start = stages.parent(track[0]) if name in track else None
    works = dict.fromkeys(work for run in found for work in run.works)
    points = sorted({(w.sink, w.score_std) for w in works})

    def over_first(impl, works):
        gain = ratio(found, impl, first, works)
        return shown(gain.mean) if gain else "wrong"

    rows = []
    for case in sorted({(w.head_dim, w.dtype == "bfloat16", w.causal) for w in works}):
        of_case = [w for w in works if (w.head_dim, w.dtype == "bfloat16", w.causal) == case]
        cells = []
        for point in points:
            here = [w for w in of_case if (w.sink, w.score_std) == point]
            cells.append(over_first(name, here) + (f" ({over_first(start, here)})" if start else ""))
        rows.append([case[0], of_case[0].dtype, mask(case[2]), *cells])
    names = [f"sink of {sink:g}" if sink else f"deviation {std:g}" for sink, std in points]
    places = "; ".join(dict.fromkeys(place(run.machine) for run in found))
    caption = (
        f"The speed of {spoken(name)}'s forward over {spoken(first)}'s."
        + (f" Brackets show {spoken(start)}'s value." if start else "")
        + " *deviation*: the standard deviation of the scores."
        + (" *sink*: the score of key 0 in nats." if points[-1][0] else "")
        + (" *wrong*: the error was too large, so the stage was not timed." if "wrong" in str(rows) else "")
        + f" S = {next(iter(works)).seq_len}, measured on {places}."
    )
    return f"{caption}\n\n{markdown(rows, ['D', '', 'mask', *names], ('', 'mask'))}"


def wide_table(name: str) -> str:
    """Format a stage's TFLOP/s at D = 256, its gain over its parent, and its share of each library's rate."""
    run = load_run(run_file("wide")) if run_file("wide").exists() else None
    if not run or name not in run.names:
        return f"{spoken(name)} has not been measured at D = 256 yet."
    rows, parent = [], stages.parent(name)
    for work in sorted(run.works, key=lambda w: (w.pass_ != "fwd", w.causal, w.seq_len)):
        if work in run.times(name, [work]) and not same_code(name, parent, work.pass_):
            over = [ratio([run], name, other, [work]) for other in (parent, *run.libraries)]
            cells = [f"{run.record(name, work)['tflops']:.0f}", over[0].short if over[0] else "-"]
            cells += [each.percent if each else "-" for each in over[1:]]
            rows.append([PASS_NAMES[work.pass_], mask(work.causal), work.seq_len, *cells])
    if not rows:
        return f"{spoken(name)} has the same code as {spoken(parent)}."
    headers = ["pass", "mask", "S", "TFLOP/s", f"over {spoken(parent)}", *(f"of {spoken(peer)}" for peer in run.libraries)]
    table = markdown(rows, headers, ("pass", "mask"))
    caption = f"D = 256, measured ({place(run.machine)}). *of*: in percent of the library's speed."
    return f"{' '.join([caption, *legend(table)])}\n\n{table}"


def timeline_table() -> str:
    """Format the cycles of the Gluon stages in the model of an SM, next to the measured cycles of their longest kernels."""
    model, units = load_counts(TIMELINE)[0], read(UNITS)
    seq_len = units["cases"][0]["seq_len"]

    def cycles(stage, *span):
        """Return the measured cycles that an SM takes for SCORES scores in a pass's longest kernel."""
        for case in units["cases"]:
            if (case["impl"], case["pass"], case["head_dim"], case["causal"]) == (stage, *span):
                kernel = max(case["kernels"], key=lambda kernel: kernel[TIME])
                scores = case["batch"] * case["heads"] * seq_len**2 / (2 if case["causal"] else 1)
                return kernel[TIME] * 1e-9 * kernel[CLOCK] * GPUS["h200"].num_sms * SCORES / scores
        return None

    rows = []
    for name, span in itertools.product(dict.fromkeys(record["impl"] for record in model), _spans()):
        ours, theirs = ((modelled(model, stage, *span, seq_len), cycles(stage, *span)) for stage in (name, stages.parent(name)))
        row = [name, PASS_NAMES[span[0]], span[1], mask(span[2]), *(f"{x:.0f}" if x else "-" for x in ours)]
        row.append(f"{ours[0] / ours[1]:.2f}" if all(ours) else "-")
        if all(ours) and all(theirs):  # the model times only Gluon kernels
            gains = [old / new for old, new in zip(theirs, ours, strict=True)]
            row += [*(f"×{gain:.2f}" for gain in gains), f"{gains[0] / gains[1]:.2f}"]
        rows.append(row + ["-"] * (10 - len(row)))
    headers = ["stage", "pass", "D", "mask", "model", "measured", "ratio", "gain, model", "gain, measured", "ratio"]
    caption = (
        f"The table shows the cycles that an SM takes for {SCORES} unmasked scores in a pass's longest kernel. *model*: "
        "computed from the rates in `rates-h200.json`. *measured*: Nsight Compute measured the "
        "cycles (`units-h200.json`). *ratio*: the value of the model divided by the measured value. *gain*: the parent's "
        f"cycles divided by the stage's cycles. S = {seq_len}, float16, measured on {origin(units['machine_info'])}."
    )
    return f"{caption}\n\n{markdown(rows, headers, ('stage', 'pass', 'mask'))}"


# generated passages that a stage's README may have
PASSAGES = {"traffic": traffic_of_step, "gain": gain_table, "scores": scores_table}
KEPT = (  # the files of results/ whose tables are committed; `make table` prints the tables of any file
    "wide-h100", "energy-d64-h200", "energy-d128-h200", "ring-h200-x2", "ring-million-h200-x2", "timeline"
)  # fmt: skip


def _run_tables(saved: dict) -> str:
    records = [benchmark["extra_info"] for benchmark in saved["benchmarks"]] + saved["failures"]
    on_gpu = saved["machine_info"]["gpu"]
    return speed_table(records, saved["machine_info"]) if on_gpu else _count_tables(saved | {"records": records})


def _count_tables(counts: dict) -> str:
    return count_tables(counts["records"], counts["machine_info"], wide=True)


KINDS = {  # a field of a file, or of its first record or case -> the heading, and the function that formats the file
    "benchmarks": ("Benchmark", _run_tables),
    "links": ("One sequence shared by several GPUs", scaling_tables),
    "cycles_a_tile": ("The model of an SM next to measurements", lambda _: timeline_table()),
    "flops_executed": ("Counted traffic", _count_tables),
    "decision": ("Constants of the newest stage", constants_table),
    "joules": ("Energy and the power limit", energy_table),
    "counted": ("Counted and measured traffic", traffic_table),
    "kernels": ("How busy each unit is, and why warps wait", units_table),
}


def tables_of(path: Path) -> str:
    """Return a document for a JSON file of a measurement: a heading and the file's tables. The file's contents decide which.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no JSON file with tables. The message says which files have tables.
    """
    try:
        result = json.loads(path.read_text())
        fields = {*result, *(result.get("records") or result.get("cases") or [()])[0]}
        heading, table = next(kind for field, kind in KINDS.items() if field in fields and "machine_info" in fields)
        return f"# {heading}: {path.stem}\n\n{table(result)}\n"
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        known = "a run that `make bench` saved, or a file of results/"
        raise ValueError(f"{path} has no tables; FILE= takes {known}, and results/README.md lists those") from None


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
    "headline": lambda: headline(runs()), "ladder": lambda: ladder(runs()), "hunk": step_hunk, "scaling": scaling_passage,
}  # fmt: skip


def with_passages(path: Path, passages: dict[str, Callable[[], str]]) -> str:
    """Return a document's text with new passages between its markers."""
    text = path.read_text()
    for name in re.findall(r"<!-- (\w+): make readme -->", text):
        text = with_table(text, name, passages[name]())
    return text


def documents(new: str | None = None) -> dict[Path, str]:
    """Return the new text of each document that has generated parts. For a new stage, return README.md and the stage's own."""
    pages = [ROOT / "README.md"] if new else sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
    found = {path: with_passages(path, FRONT) for path in pages}
    for name in [new] if new else stages.names():
        passages = {passage: functools.partial(write, name) for passage, write in PASSAGES.items()}
        path = ROOT / "stages" / name / "README.md"
        found[path] = with_passages(path, passages)
    for path in (ROOT / "results" / f"{name}.json" for name in KEPT):
        if path.exists() and not new:
            found[path.with_suffix(".md")] = tables_of(path)
    return found


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    parser = argparse.ArgumentParser(
        prog="python -m common.show.documents",
        description="Rewrite the generated parts of the documents from results/, or print the tables of one file.",
    )
    parser.add_argument(
        "file", type=Path, nargs="?", help="a saved run or another JSON file of results/, whose tables are printed"
    )
    options = parser.parse_args(argv)
    if options.file:
        try:
            print(tables_of(options.file), end="")
        except (OSError, ValueError) as error:
            parser.exit(2, f"{parser.prog}: {error}\n")
    else:
        for path, text in documents().items():
            files.replace(path, text)


if __name__ == "__main__":
    main(sys.argv[1:])
