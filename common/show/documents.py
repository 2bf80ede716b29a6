"""Write the documents' tables, between markers, from the committed results: `python -m common.show.documents`."""

import itertools
import json
import math
import re
from pathlib import Path

from tabulate import tabulate

import stages
from common.measure import files
from common.measure.footprint import MIB_IN_MB
from common.measure.ncu import pairs
from common.measure.scaling import tables
from common.measure.timeline import SCORES
from common.measure.traffic import GPUS
from common.measure.units import CLOCK, TIME
from common.show.choice import choice_table
from common.show.decoding import decoding_tables
from common.show.energy import energy_table
from common.show.profiles import traffic_table, units_table
from common.show.results import (
    CHOICE,
    COLUMNS,
    COUNTED_AT,
    HEAD_DIMS,
    LONG,
    MEAN_OVER,
    ROOT,
    TIMELINE,
    TRAFFIC,
    UNITS,
    Run,
    bytes_in_words,
    bytes_of,
    chain,
    counted,
    gain,
    implementations,
    load_counts,
    load_run,
    mean_ratio,
    modelled,
    moved,
    newest,
    number,
    origin,
    rate,
    run_file,
    runs,
    same_code,
    sources,
    speedup,
    spoken,
    times_of,
    tuned_case,
)
from common.show.scaling import load_ring, ring_files, scaling_passage
from common.show.shared import shared_tables
from common.show.sinks import sinks_table
from common.show.tables import PASS_NAMES, speed_table, title


def _names(found: list[Run]) -> list[str]:
    """Return the implementations in the runs: libraries in the oldest run's order, then the stages in stage order."""
    return implementations([record for run in reversed(found) for record in run.records])


def _last(names: list[str]) -> str:
    """Return the newest stage of the main line."""
    return [name for name in names if stages.position(name) and not stages.is_dead_end(name)][-1]


def summary_table(found: list[Run]) -> str:
    """Format the README's table: for each implementation the mean rate, the gain over its parent and the share of cuDNN's rate.

    Args:
        found: from `common.show.results.runs`.
    """
    names = _names(found)
    used, rows = [], []
    for name in names:
        parent, cells, of_rates, of_gains = stages.parent(name), [], [], []
        for pass_, head_dim in COLUMNS:
            measured = rate(found, name, pass_, head_dim)
            if not measured:
                cells.append("-")
                continue
            mean, run = measured
            of_rates.append(run)
            parts = [f"{mean:.0f}"]
            if parent and not same_code(name, parent, pass_):
                if gained := gain(found, name, parent, pass_, head_dim):
                    parts.append(f"**×{gained[0]:.2f}**")
                    of_gains.append(gained[1])
                else:
                    parts.append(f"not measured beside {spoken(parent)}")
            if cudnn := speedup(run.records, name, "sdpa-cudnn", pass_, head_dim):
                parts.append(f"{100 * cudnn:.0f} %")
            cells.append(", ".join(parts))
        if of_rates:
            used += of_rates + of_gains
            rates, gains = (sorted({number(found, run) for run in some}) for some in (of_rates, of_gains))
            shown = [", ".join(map(str, rates))] + [f"gain: {', '.join(map(str, gains))}"] * (gains not in ([], rates))
            rows.append([title(name), "; ".join(shown), *cells])
    headers = ["", "run", *(f"{PASS_NAMES[pass_]}, D={head_dim}" for pass_, head_dim in COLUMNS)]
    caption = (
        "TFLOP/s, **times as fast as the parent stage**, % of cuDNN's speed. `-`: not measured. A pass with its parent's code "
        "shows no gain. Float16, 16k tokens, hidden size 2048; geometric means over S = "
        f"{', '.join(map(str, MEAN_OVER))}, causal and not. Each row shows the newest run of its implementation. A gain is "
        "from the newest run that has both the stage and its parent; `gain:` names that run where it is another one. "
        f"Runs: {sources(found, used)}."
    )
    return f"{caption}\n\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True)}{_against_the_best(found, names)}"


def _against_the_best(found, names):
    """Return a sentence that compares the newest stage with the fastest library at each point with S >= LONG."""
    last, ratios, libraries, used = _last(names), [], [], []
    for pass_, head_dim in COLUMNS:
        if run := newest(found, pass_, head_dim, last):
            others = [name for name in implementations(run.records) if not stages.position(name)]
            ours, *theirs = (times_of(run.records, name, pass_, head_dim) for name in (last, *others))
            points = [key for key in ours if key[1] >= LONG and any(key in times for times in theirs)]
            if best := {key: min(times[key] for times in theirs if key in times) for key in points}:
                ratios.append(f"{PASS_NAMES[pass_]} D={head_dim} ×{mean_ratio(ours, best):.2f}")
                libraries += others
                used.append(number(found, run))
    if not ratios:
        return ""
    return (
        f"\n\n{last} against the fastest of {', '.join(dict.fromkeys(libraries))} at each point, S ≥ {LONG}, "
        f"run {', '.join(map(str, sorted(set(used))))}: {', '.join(ratios)}."
    )


def with_table(text: str, name: str, table: str) -> str:
    """Return `text` with `table` between the markers of `name`.

    Raises:
        ValueError: the text does not have the two markers exactly once.
    """
    begin, end = f"<!-- {name}: written by make readme -->\n", f"<!-- end of {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"the text does not have {begin.strip()!r} … {end!r} exactly once")
    return pattern.sub(lambda _: f"{begin}\n{table}\n\n{end}", text)


def _spans():
    """Return pass, head dimension and mask of each row of a stage's tables."""
    return [(pass_, head_dim, causal) for pass_, head_dim in COLUMNS for causal in (False, True)]


def _step_table(rows: list[list[str]], headers: list[str]) -> str:
    """Format a table with a row of cells for each of `_spans`."""
    labels = [[PASS_NAMES[pass_], head_dim, "causal" if causal else "full"] for pass_, head_dim, causal in _spans()]
    align = ["left", "right", "left"] + ["right"] * len(headers)
    table = [label + row for label, row in zip(labels, rows, strict=True)]
    return tabulate(table, ["pass", "D", "mask", *headers], tablefmt="pipe", disable_numparse=True, colalign=align)


def traffic_of_step(name: str) -> str:
    """Format the counted traffic and FLOPs of a stage and its parent."""
    counts, counter = load_counts(TRAFFIC)
    before = stages.parent(name)
    headers = {
        "MB read": lambda count: f"{count['bytes_read'] / 1e6:.2f}",
        "MB written": lambda count: f"{count['bytes_written'] / 1e6:.2f}",
        "MFLOP": lambda count: f"{count['flops_executed'] / 1e6:.0f}",
        "FLOP / byte": lambda count: f"{count['flops_executed'] / moved(count):.1f}",
        "kernel launches": lambda count: str(count["kernel_launches"]),
        "peak extra MB": lambda count: f"{count['peak_extra_mib'] * MIB_IN_MB:.2f}",
        "µs at peak": lambda count: f"{count['roofline_us']:.1f}",
    }
    rows = []
    for span in _spans():
        both = [counted(counts, stage, *span) for stage in (before, name) if stage]
        rows.append([" → ".join(show(count) if count else "-" for count in both) for show in headers.values()])
    versions = [stage.split("_")[0] for stage in (before, name) if stage]
    command = f'make traffic STAGE={",".join(versions)} ARGS="--seq-len {COUNTED_AT}"'
    caption = (
        f"{' → '.join(versions)}, one head, float16, S = {COUNTED_AT}, fixed tiles, as `{command}` counts. "
        f"µs at peak: what the bytes or the FLOPs of each launch take at the published peaks, {counter['roofline']}."
    )
    return f"{caption}\n\n{_step_table(rows, list(headers))}"


def gain_table(name: str) -> str:
    """Format a step's predicted gain and its measured gain by sequence length; for the first stage, its times."""
    before = stages.parent(name)
    measured = runs()
    counts, _ = load_counts(TRAFFIC)
    model, _ = load_counts(TIMELINE)
    timed = all(any(record["impl"] == stage for record in model) for stage in (name, before))
    lengths = sorted({record["seq_len"] for run in measured for record in run.records})
    side_by_side = {column: newest(measured, *column, *filter(None, (before, name))) for column in COLUMNS}
    rows = []
    for pass_, head_dim, causal in _spans():
        span = pass_, head_dim, causal
        run = side_by_side[pass_, head_dim]
        ms = {(r["impl"], r["pass"], r["causal"], r["seq_len"]): r["ms"] for r in run.records if "ms" in r} if run else {}
        now, old = (counted(counts, stage, *span) for stage in (name, before))
        times = [[ms.get((stage, pass_, causal, seq_len)) for seq_len in lengths] for stage in (name, before)]
        if before:
            costs = [count and count["roofline_us"] for count in (old, now)]
            if timed:
                costs = [modelled(model, stage, *span, COUNTED_AT) for stage in (before, name)]
            predicted = f"×{costs[0] / costs[1]:.2f}" if all(costs) else "-"
            rows.append([predicted, *(f"×{b / a:.2f}" if a and b else "-" for a, b in zip(*times, strict=True))])
        else:
            rows.append([f"{time:.2f}" if time else "-" for time in times[0]])
    used = [run for run in side_by_side.values() if run]
    headers = [f"S = {seq_len}" for seq_len in lengths]
    where = f"Float16, 16k tokens, hidden size 2048. {sources(measured, used)}." if used else ""
    if not before:
        return f"Milliseconds, by sequence length. {where}\n\n{_step_table(rows, headers)}"
    missing = [f"{PASS_NAMES[pass_]} D={head_dim}" for (pass_, head_dim), run in side_by_side.items() if not run]
    missing = [f"Not measured beside {before}: {', '.join(missing)}."] if missing else []
    of = "cycles of the [model](../../results/timeline.md)" if timed else "two times at peak"
    caption = [
        f"Times as fast as {before}. Predicted: the ratio of the {of}, S = {COUNTED_AT}.",
        *(["The other columns are measured, by sequence length.", where] if used else []),
        *missing,
    ]
    return f"{' '.join(caption)}\n\n{_step_table(rows, ['predicted', *headers])}"


def tuned_table(name: str) -> str:
    """Format the measured traffic of a stage and its parent, with the tiles that the tuner chose on the GPU."""
    parent = stages.parent(name)
    rows = []
    for span in _spans():
        cases = [tuned_case(stage, *span) for stage in (parent, name)]
        cells = []
        for case in cases:
            cells += [", ".join(label for label, *_ in pairs(case)), f"{bytes_of(case) / 1e6:.1f}"] if case else ["-", "-"]
        if same_code(name, parent, span[0]):
            cells.append("same code")
        else:
            cells.append(bytes_in_words(bytes_of(cases[0]), bytes_of(cases[1])) if all(cases) else "-")
        rows.append(cells)
    old, new = spoken(parent), spoken(name)
    caption = (
        "MB between the L2 cache and the SMs, spilled registers included. Nsight Compute measured them on an H200, with the "
        f"tiles that the tuner chose there: two heads, S = {COUNTED_AT}, float16."
    )
    return f"{caption}\n\n{_step_table(rows, [f'tiles of {old}', 'MB', f'tiles of {new}', 'MB', f'{new} moves'])}"


def units_of_step(name: str) -> str:
    """Format how busy the GPU's units are in a stage, its parent and two peers."""
    result = json.loads(UNITS.read_text())
    shown = {"fwd": ("sdpa-cudnn", "flash-3", stages.parent(name), name), "bwd": (stages.parent(name), name)}
    cases = [case for case in result["cases"] if not case["causal"] and case["impl"] in shown[case["pass"]]]
    return units_table({**result, "cases": cases})


def spread_table(name: str) -> str:
    """Format the time of a stage's forward over its parent's, for wider score distributions."""
    records, machine = load_run(run_file("spread"))
    ms = {(r["impl"], r["dtype"], r["causal"], r["score_std"]): r["ms"] for r in records}
    deviations = sorted({record["score_std"] for record in records})
    rows = []
    for dtype, causal in itertools.product(("float16", "bfloat16"), (False, True)):
        times = [[ms.get((stage, dtype, causal, std)) for std in deviations] for stage in (name, stages.parent(name))]
        ratios = [f"×{a / b:.2f}" if a and b else "-" for a, b in zip(*times, strict=True)]
        rows.append([dtype, "causal" if causal else "full", *ratios])
    first = records[0]
    caption = (
        f"Times as long as {stages.parent(name)} takes for the same forward, by the standard deviation of normally distributed "
        f"scores: D = {first['head_dim']}, S = {first['seq_len']}, {origin(machine)}."
    )
    headers = ["", "mask", *(f"{std:g}" for std in deviations)]
    align = ["left", "left"] + ["right"] * len(deviations)
    return f"{caption}\n\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True, colalign=align)}"


def wide_table(name: str) -> str:
    """Format a stage's TFLOP/s at D = 256, its gain over its parent, and its share of each library's rate."""
    path = run_file("wide")
    if not path.exists():
        return "Not measured yet."
    records, machine = load_run(path)
    rates = {(r["impl"], r["pass"], r["causal"], r["seq_len"]): r["tflops"] for r in records if "tflops" in r}
    peers = [impl for impl in implementations(records) if not stages.position(impl)]
    lengths = sorted({record["seq_len"] for record in records})
    rows = []
    for pass_, causal, seq_len in itertools.product(("fwd", "bwd"), (False, True), lengths):
        ours, old, *theirs = (rates.get((impl, pass_, causal, seq_len)) for impl in (name, stages.parent(name), *peers))
        cells = [f"{ours:.0f}", f"×{ours / old:.2f}" if old else "-"] if ours else ["-", "-"]
        cells += [f"{100 * ours / rate:.0f} %" if ours and rate else "-" for rate in theirs]
        rows.append([PASS_NAMES[pass_], "causal" if causal else "full", seq_len, *cells])
    headers = ["pass", "mask", "S", "TFLOP/s", f"over {stages.parent(name)}", *(f"of {spoken(peer)}" for peer in peers)]
    align = ["left", "left"] + ["right"] * (len(headers) - 2)
    caption = f"D = 256, float16, 16k tokens, hidden size 2048, {origin(machine)}."
    return f"{caption}\n\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True, colalign=align)}"


def timeline_table() -> str:
    """Format the model's cycles of the Gluon stages next to the measured cycles of their main kernels."""
    model, _ = load_counts(TIMELINE)
    units = json.loads(UNITS.read_text())
    seq_len = units["cases"][0]["seq_len"]

    def cycles(stage, *span):
        """Return the measured cycles of an SM in a pass's longest kernel, for SCORES scores."""
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
        if all(ours) and all(theirs):  # the model has only Gluon stages
            gains = [old / new for old, new in zip(theirs, ours, strict=True)]
            row += [*(f"×{gain:.2f}" for gain in gains), f"{gains[0] / gains[1]:.2f}"]
        rows.append(row + ["-"] * (10 - len(row)))
    headers = ["stage", "pass", "D", "mask", "model", "measured", "ratio", "gain, model", "gain, measured", "ratio"]
    caption = (
        f"Cycles of an SM for {SCORES} scores that are not masked, in a pass's longest kernel, and times as fast as "
        f"the stage before: as `make timeline`'s model has them, at the rates of `rates-h200.json`, and as Nsight Compute "
        f"measured them (`units-h200.json`). S = {seq_len}, float16. {origin(units['machine_info'])}."
    )
    align = ["left", "left", "right", "left"] + ["right"] * 6
    return f"{caption}\n\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True, colalign=align)}"


PASSAGES = {  # generated passages that a stage's README may have
    "traffic": traffic_of_step, "gain": gain_table, "tuned": tuned_table, "units": units_of_step, "spread": spread_table,
    "sinks": sinks_table, "wide": wide_table,
}  # fmt: skip


def evolution_sentence(found: list[Run]) -> str:
    """Return sentences on the gain from the first to the newest stage, and on the newest next to the libraries, for the largest
    D.

    Args:
        found: from `common.show.results.runs`.
    """
    names = _names(found)
    first, last, head_dim = next(name for name in names if stages.position(name)), _last(names), max(HEAD_DIMS)
    parts, notes, used = [], [], []
    for pass_ in ("fwd", "bwd"):
        (slow, _), (fast, run) = ends = [rate(found, name, pass_, head_dim) for name in (first, last)]
        links = chain(found, last, first, pass_, head_dim) or []
        used += [run for _, run in ends] + [link[-1] for link in links]
        factor = f", ×{math.prod(ratio for *_, ratio, _ in links):.0f}" if links else ""
        over = {name: speedup(run.records, last, name, pass_, head_dim) for name in names if not stages.position(name)}
        libraries = ", ".join(f"{spoken(name)} ×{ratio:.2f}" for name, ratio in over.items() if ratio)
        rates = f"from {spoken(first)}'s {slow:.0f} to {spoken(last)}'s {fast:.0f} TFLOP/s"
        parts.append(f"{PASS_NAMES[pass_].capitalize()}: {rates}{factor}" + (f"; over {libraries}." if libraries else "."))
        if len(links) > 1:
            steps = " by ".join(f"{spoken(old)} to {spoken(new)} [{number(found, run)}]" for new, old, _, run in links)
            notes.append(f"No run has both {spoken(first)} and {spoken(last)}, so the factor multiplies {steps}.")
    notes = dict.fromkeys(notes)
    return " ".join([f"Geometric means, D = {head_dim}, float16.", *parts, *notes, f"{sources(found, used)}."])


RUNS = {  # name of a run -> (heading of its document, function that formats the records)
    "float16-d64": ("All stages in float16, D = 64", speed_table),
    "float16-d128": ("All stages in float16, D = 128", speed_table),
    "bfloat16-d64": ("All stages in bfloat16, D = 64", speed_table),
    "bfloat16-d128": ("All stages in bfloat16, D = 128", speed_table),
    "newest-d64": ("The newest stages in float16, D = 64", speed_table),
    "newest-d128": ("The newest stages in float16, D = 128", speed_table),
    "wide": ("D = 256", speed_table),
    "short": ("Short calls in float16", speed_table),
    "passes-as-one": ("Both passes as one", speed_table),
    "shared": ("Shared K/V heads", shared_tables),
    "decode-d64": ("Decoding, D = 64", decoding_tables),
    "decode-d128": ("Decoding, D = 128", decoding_tables),
    "pinned": ("With the pinned Triton", speed_table),
    "spread": ("Scores of other spreads", speed_table),
    "sinks": ("Attention sinks and wide score distributions", speed_table),
}


def documents() -> dict[Path, str]:
    """Return the text of each document with generated parts, from the committed results."""
    readme = ROOT / "README.md"
    text = with_table(readme.read_text(), "summary", summary_table(runs()))
    text = with_table(text, "evolution", evolution_sentence(runs()))
    found = {readme: with_table(text, "choice", choice_table(json.loads(CHOICE.read_text())))}
    for path, (heading, table) in ((run_file(name), shown) for name, shown in RUNS.items()):
        if path.exists():
            found[path.with_suffix(".md")] = f"# {heading}\n\n{table(*load_run(path))}\n"
    for name in stages.names():
        path = ROOT / "stages" / name / "README.md"
        found[path] = path.read_text()
        for passage in re.findall(r"<!-- (\w+): written by make readme -->", found[path]):
            found[path] = with_table(found[path], passage, PASSAGES[passage](name))
    ring = ROOT / "ring.md"
    found[ring] = with_table(ring.read_text(), "scaling", scaling_passage())
    for path in ring_files():
        found[path.with_suffix(".md")] = f"# A sequence that several GPUs share\n\n{tables(load_ring(path))}\n"
    for path in (ROOT / "results").glob("traffic-*.json"):
        table = traffic_table(json.loads(path.read_text()))
        found[path.with_suffix(".md")] = f"# Traffic, counted and measured\n\n{table}\n"
    for path in (ROOT / "results").glob("energy-*.json"):
        found[path.with_suffix(".md")] = f"# Energy, and the power limit\n\n{energy_table(json.loads(path.read_text()))}\n"
    if TIMELINE.exists() and UNITS.exists():
        found[TIMELINE.with_suffix(".md")] = f"# A model of an SM, and what was measured\n\n{timeline_table()}\n"
    if UNITS.exists():
        found[UNITS.with_suffix(".md")] = (
            f"# Busy units, and what warps wait for\n\n{units_table(json.loads(UNITS.read_text()))}\n"
        )
    return found


def main():
    """The command line."""
    for path, text in documents().items():
        files.replace(path, text)


if __name__ == "__main__":
    main()
