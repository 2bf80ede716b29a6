"""What the documents show of the committed results: tables, rewritten between markers by `python -m common.show.documents`."""

import itertools
import json
import re
import statistics
from pathlib import Path

from tabulate import tabulate

import stages
from common.measure import files
from common.measure.ncu import pairs
from common.measure.scaling import tables
from common.measure.timeline import SCORES
from common.measure.traffic import GPUS
from common.measure.units import CLOCK, TIME
from common.show.decoding import decoding_tables
from common.show.energy import energy_table
from common.show.numbers import numbers_table
from common.show.profiles import traffic_table, units_table
from common.show.results import (
    BFLOAT16,
    COLUMNS,
    COUNTED_AT,
    FLOAT16,
    HEAD_DIMS,
    LONG,
    MEAN_OVER,
    NEWEST,
    ROOT,
    TIMELINE,
    TRAFFIC,
    UNITS,
    bytes_of,
    counted,
    implementations,
    load_counts,
    load_run,
    load_runs,
    mean_rate,
    mean_ratio,
    modelled,
    moved,
    origin,
    origins,
    run_file,
    speedup,
    spoken,
    times_of,
    tuned_case,
)
from common.show.scaling import load_ring, ring_files, scaling_passage
from common.show.shared import shared_tables
from common.show.tables import PASS_NAMES, speed_table, title


def summary_table(records: list[dict], machines: list[dict]) -> str:
    """The README's table: for each implementation the mean rate, the gain over the stage before and the share of cuDNN's.

    Args:
        records, machines: as `common.show.results.load_runs` gives them.
    """
    names = implementations(records)
    headers = ["", *(f"{PASS_NAMES[pass_]}, D={head_dim}" for pass_, head_dim in COLUMNS)]
    headers += [f"both, D={head_dim}" for head_dim in HEAD_DIMS]
    hosts = {}
    for record in records:
        if "host_us" in record:
            hosts.setdefault(record["pass"], []).append((record["impl"], record["host_us"]))
    headers += [f"host µs, {PASS_NAMES[pass_]}" for pass_ in hosts]
    rows = []
    for name in names:
        row = [title(name)]
        before = stages.parent(name)
        for pass_, head_dim in COLUMNS:
            rate = mean_rate(records, name, pass_, head_dim)
            cells = [f"{rate:.0f}"] if rate else []
            if gain := speedup(records, name, before, (pass_,), head_dim):
                cells.append(f"**×{gain:.2f}**")
            if cudnn := speedup(records, name, "sdpa-cudnn", (pass_,), head_dim):
                cells.append(f"{100 * cudnn:.0f} %")
            row.append(", ".join(cells) or "-")
        for head_dim in HEAD_DIMS:
            gain = speedup(records, name, before, ("fwd", "bwd"), head_dim)
            row.append(f"**×{gain:.2f}**" if gain else "-")
        for measured in hosts.values():
            host = [us for impl, us in measured if impl == name]
            row.append(f"{statistics.median(host):.0f}" if host else "-")
        rows.append(row)
    lengths = ", ".join(map(str, MEAN_OVER))
    host_meaning = "; host: the CPU's time for a call" if hosts else ""
    caption = (
        f"TFLOP/s, **× the stage before**, % of cuDNN; both: forward and backward together{host_meaning}. float16, 16k tokens, "
        f"hidden size 2048; geometric means over S = {lengths}, causal and not. {origins(machines, dated=True)}."
    )
    table = tabulate(rows, headers, tablefmt="pipe", disable_numparse=True)
    return f"{caption}\n\n{table}" + _against_the_best(records, names) + _bfloat16(records, names, machines)


def _against_the_best(records, names):
    """A sentence on the last stage next to the fastest baseline of each point, for lengths that fill the GPU."""
    baselines = [name for name in names if not stages.position(name)]
    last = max((name for name in names if not stages.is_dead_end(name)), key=lambda name: stages.position(name) or (-1, ""))
    ratios = []
    for pass_, head_dim in COLUMNS:
        ours, *others = (times_of(records, name, (pass_,), head_dim) for name in (last, *baselines))
        points = [key for key in ours if key[1] >= LONG and any(key in times for times in others)]
        best = {key: min(times[key] for times in others if key in times) for key in points}
        if best:
            ratios.append(f"{PASS_NAMES[pass_]} D={head_dim} ×{mean_ratio(ours, best):.2f}")
    if not ratios:
        return ""
    return f"\n\n{last} against the fastest of {', '.join(baselines)} at each point, S ≥ {LONG}: {', '.join(ratios)}."


def _bfloat16(records, names, machines):
    """A sentence on how the other half precision compares; nothing where it was not measured."""
    ratios = {}
    for name, (pass_, head_dim) in itertools.product(names, COLUMNS):
        times = (times_of(records, name, (pass_,), head_dim, dtype) for dtype in ("float16", "bfloat16"))
        if stages.position(name) and (ratio := mean_ratio(*times)):
            ratios[ratio] = f"{name.split('_')[0]}, {PASS_NAMES[pass_]}, D={head_dim}"
    if not ratios:
        return ""
    least, most = min(ratios), max(ratios)
    apart = ", measured at another commit," if len({machine["commit"] for machine in machines}) > 1 else ""
    return f"\n\nIn bfloat16{apart} a stage takes {least:.3f} ({ratios[least]}) to {most:.3f} ({ratios[most]}) times as long."


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


def _spans():
    """Pass, head dimension and mask of each row of a stage's tables."""
    return [(pass_, head_dim, causal) for pass_, head_dim in COLUMNS for causal in (False, True)]


def _step_table(rows: list[list[str]], headers: list[str]) -> str:
    """A table whose rows are those of `_spans`, with these cells."""
    labels = [[PASS_NAMES[pass_], head_dim, "causal" if causal else "full"] for pass_, head_dim, causal in _spans()]
    align = ["left", "right", "left"] + ["right"] * len(headers)
    table = [label + row for label, row in zip(labels, rows, strict=True)]
    return tabulate(table, ["pass", "D", "mask", *headers], tablefmt="pipe", disable_numparse=True, colalign=align)


def traffic_of_step(name: str) -> str:
    """What a stage and the one before move and compute, as counted."""
    counts, counter = load_counts(TRAFFIC)
    before = stages.parent(name)
    headers = {
        "MB read": lambda count: f"{count['bytes_read'] / 1e6:.2f}",
        "MB written": lambda count: f"{count['bytes_written'] / 1e6:.2f}",
        "MFLOP": lambda count: f"{count['flops_executed'] / 1e6:.0f}",
        "FLOP / byte": lambda count: f"{count['flops_executed'] / moved(count):.1f}",
        "kernel launches": lambda count: str(count["kernel_launches"]),
        "peak extra MiB": lambda count: f"{count['peak_extra_mib']:.2f}",
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


def _runs_with(*names: str) -> tuple[list[dict], list[dict]]:
    """The reference in float16; or, where that lacks one of these stages and the run of the newest has all, that."""
    for paths in (FLOAT16, NEWEST):
        if all(path.exists() for path in paths):
            runs = load_runs(paths)
            if set(names) <= set(implementations(runs[0])):
                return runs
    return load_runs(FLOAT16)


def gain_table(name: str) -> str:
    """What a step's traffic predicts it to gain, and what it gained, by sequence length; the first stage's times."""
    before = stages.parent(name)
    records, machines = _runs_with(*filter(None, (before, name)))
    counts, _ = load_counts(TRAFFIC)
    model, _ = load_counts(TIMELINE)
    timed = all(any(record["impl"] == stage for record in model) for stage in (name, before))
    lengths = sorted({record["seq_len"] for record in records if record["pass"] == "fwd"})
    ms = {(r["impl"], r["pass"], r["head_dim"], r["causal"], r["seq_len"]): r["ms"] for r in records if "ms" in r}
    rows = []
    for span in _spans():
        now, old = (counted(counts, stage, *span) for stage in (name, before))
        times = [[ms.get((stage, *span, seq_len)) for seq_len in lengths] for stage in (name, before)]
        if before:
            costs = [count and count["roofline_us"] for count in (old, now)]
            if timed:
                costs = [modelled(model, stage, *span, COUNTED_AT) for stage in (before, name)]
            predicted = f"×{costs[0] / costs[1]:.2f}" if all(costs) else "-"
            rows.append([predicted, *(f"×{b / a:.2f}" if a and b else "-" for a, b in zip(*times, strict=True))])
        else:
            rows.append([f"{time:.2f}" if time else "-" for time in times[0]])
    where = f"float16, 16k tokens, hidden size 2048, {origins(machines)}"
    if before:
        of = "cycles of the [model](../../results/timeline.md)" if timed else "two times at peak"
        caption = (
            f"Times as fast as {before}. Predicted: the ratio of the {of}, S = {COUNTED_AT}. The rest is "
            f"measured, by sequence length: {where}."
        )
        return f"{caption}\n\n{_step_table(rows, ['predicted', *(f'S = {seq_len}' for seq_len in lengths)])}"
    return f"Milliseconds, by sequence length: {where}.\n\n{_step_table(rows, [f'S = {seq_len}' for seq_len in lengths])}"


def tuned_table(name: str) -> str:
    """What a stage and the one before moved on the GPU, with the tiles that each ran with there."""
    rows = []
    for span in _spans():
        cases = [tuned_case(stage, *span) for stage in (stages.parent(name), name)]
        cells = []
        for case in cases:
            cells += [", ".join(label for label, *_ in pairs(case)), f"{bytes_of(case) / 1e6:.1f}"] if case else ["-", "-"]
        rows.append([*cells, f"÷{bytes_of(cases[0]) / bytes_of(cases[1]):.2f}" if all(cases) else "-"])
    old, new = (stage.split("_")[0] for stage in (stages.parent(name), name))
    caption = (
        "MB between the L2 cache and the multiprocessors, spilled registers included, as Nsight Compute measures them on an "
        f"H200 with the tiles that the tuner chose there: two heads, S = {COUNTED_AT}, float16."
    )
    return f"{caption}\n\n{_step_table(rows, [f'tiles of {old}', 'MB', f'tiles of {new}', 'MB', 'bytes'])}"


def units_of_step(name: str) -> str:
    """How busy the units of the GPU are in a stage, the one before and two peers."""
    result = json.loads(UNITS.read_text())
    shown = {"fwd": ("sdpa-cudnn", "flash-3", stages.parent(name), name), "bwd": (stages.parent(name), name)}
    cases = [case for case in result["cases"] if not case["causal"] and case["impl"] in shown[case["pass"]]]
    return units_table({**result, "cases": cases})


def spread_table(name: str) -> str:
    """Times of a stage's forward over those of the one before, where scores spread further."""
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
    """A stage with D = 256: TFLOP/s, its gain over the stage before, and its share of what each library reaches."""
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
    """What the model of a multiprocessor says of the Gluon stages, next to what was measured of their main kernels."""
    model, _ = load_counts(TIMELINE)
    units = json.loads(UNITS.read_text())
    seq_len = units["cases"][0]["seq_len"]

    def cycles(stage, *span):
        """Of all multiprocessors, in a pass's longest kernel, for as many scores as the model's."""
        wanted = (stage, *span)
        for case in units["cases"]:
            if (case["impl"], case["pass"], case["head_dim"], case["causal"]) == wanted:
                kernel = max(case["kernels"], key=lambda kernel: kernel[TIME])
                scores = case["batch"] * case["heads"] * seq_len**2 / (2 if case["causal"] else 1)
                return kernel[TIME] * 1e-9 * kernel[CLOCK] * GPUS["h200"].multiprocessors * SCORES / scores
        return None

    rows = []
    for name, span in itertools.product(dict.fromkeys(record["impl"] for record in model), _spans()):
        ours, theirs = ((modelled(model, stage, *span, seq_len), cycles(stage, *span)) for stage in (name, stages.parent(name)))
        row = [name, PASS_NAMES[span[0]], span[1], "causal" if span[2] else "full", *(f"{x:.0f}" if x else "-" for x in ours)]
        row.append(f"{ours[0] / ours[1]:.2f}" if all(ours) else "-")
        if all(ours) and all(theirs):  # of a stage that is not Gluon's the model says nothing
            gains = [old / new for old, new in zip(theirs, ours, strict=True)]
            row += [*(f"×{gain:.2f}" for gain in gains), f"{gains[0] / gains[1]:.2f}"]
        rows.append(row + ["-"] * (10 - len(row)))
    headers = ["stage", "pass", "D", "mask", "model", "measured", "ratio", "gain, model", "gain, measured", "ratio"]
    caption = (
        f"Cycles of a multiprocessor for {SCORES} scores that are not masked, in a pass's longest kernel, and times as fast as "
        f"the stage before: as `make timeline`'s model has them, at the rates of `rates-h200.json`, and as Nsight Compute "
        f"measured them (`units-h200.json`). S = {seq_len}, float16. {origin(units['machine_info'])}."
    )
    align = ["left", "left", "right", "left"] + ["right"] * 6
    return f"{caption}\n\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True, colalign=align)}"


PASSAGES = {  # what the README of a stage may show between markers
    "traffic": traffic_of_step, "gain": gain_table, "tuned": tuned_table, "units": units_of_step, "spread": spread_table,
    "numbers": numbers_table, "wide": wide_table,
}  # fmt: skip


def evolution_sentence(records: list[dict], machines: list[dict]) -> str:
    """What the walk from the first to the last stage bought, next to the peers, for the largest head dimension.

    Args:
        records, machines: as `common.show.results.load_runs` gives them.
    """
    names = implementations(records)
    line = [name for name in names if stages.position(name) and not stages.is_dead_end(name)]
    first, last, head_dim = line[0], line[-1], max(HEAD_DIMS)
    parts = []
    for pass_ in ("fwd", "bwd"):
        old, new = (mean_rate(records, name, pass_, head_dim) for name in (first, last))
        over = {name: speedup(records, last, name, (pass_,), head_dim) for name in names if name not in line}
        peers = [f"{spoken(name)} ×{gain:.2f}" for name, gain in over.items() if not stages.position(name) and gain]
        parts.append(
            f"{PASS_NAMES[pass_].capitalize()}: from {spoken(first)}'s {old:.0f} to {spoken(last)}'s {new:.0f} TFLOP/s, "
            f"×{speedup(records, last, first, (pass_,), head_dim):.0f}; over {', '.join(peers)}."
        )
    return f"Means on an {machines[0]['gpu']}, D = {head_dim}, float16. {' '.join(parts)}"


RUNS = {  # by the name of the run: the heading of its document, and what that shows of the records and the machine
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
    "numbers": ("Numbers that are not normal", speed_table),
}


def documents() -> dict[Path, str]:
    """What each generated document must be, from the committed results."""
    readme = ROOT / "README.md"
    text = with_table(readme.read_text(), "summary", summary_table(*load_runs(FLOAT16 + BFLOAT16)))
    if all(path.exists() for path in NEWEST):
        text = with_table(text, "newest", summary_table(*load_runs(NEWEST)))
    found = {readme: with_table(text, "evolution", evolution_sentence(*load_runs(FLOAT16)))}
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
        found[TIMELINE.with_suffix(".md")] = f"# A model of a multiprocessor, and what was measured\n\n{timeline_table()}\n"
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
