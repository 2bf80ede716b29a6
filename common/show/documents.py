"""What the documents show of the committed results: tables, rewritten between markers by `python -m common.show.documents`."""

import itertools
import json
import re
import statistics
from pathlib import Path

from tabulate import tabulate

import stages
from common.show.profiles import traffic_table, units_table
from common.show.results import (
    COLUMNS,
    COUNTED_AT,
    HEAD_DIMS,
    LONG,
    MEAN_OVER,
    ROOT,
    RUN,
    SPREAD,
    TRAFFIC,
    UNITS,
    counted,
    implementations,
    load_counts,
    load_run,
    mean_ratio,
    measured,
    moved,
    origin,
    speedup,
    times_of,
)
from common.show.tables import PASS_NAMES, speed_table, title


def summary_table(records: list[dict], machine: dict) -> str:
    """The README's table: for each implementation the mean rate, the gain over the stage before and the share of cuDNN's."""
    names = implementations(records)
    stage_at = {stages.position(name): name for name in names}
    headers = ["", *(f"{PASS_NAMES[pass_]}, D={head_dim}" for pass_, head_dim in COLUMNS)]
    headers += [f"both, D={head_dim}" for head_dim in HEAD_DIMS]
    hosts = [(r["impl"], r["host_us"]) for r in records if r["pass"] == "fwd" and "host_us" in r]
    headers += ["host µs"] if hosts else []
    rows = []
    for name in names:
        row = [title(name)]
        position = stages.position(name)
        before = position and stage_at.get(stages.before(position))
        for pass_, head_dim in COLUMNS:
            rates = [record["tflops"] for record in measured(records, name, pass_, head_dim).values()]
            cells = [f"{statistics.geometric_mean(rates):.0f}"] if rates else []
            if gain := speedup(records, name, before, (pass_,), head_dim):
                cells.append(f"**×{gain:.2f}**")
            if cudnn := speedup(records, name, "sdpa-cudnn", (pass_,), head_dim):
                cells.append(f"{100 * cudnn:.0f} %")
            row.append(", ".join(cells) or "-")
        for head_dim in HEAD_DIMS:
            gain = speedup(records, name, before, ("fwd", "bwd"), head_dim)
            row.append(f"**×{gain:.2f}**" if gain else "-")
        if hosts:
            host = [us for impl, us in hosts if impl == name]
            row.append(f"{statistics.median(host):.0f}" if host else "-")
        rows.append(row)
    lengths = ", ".join(map(str, MEAN_OVER))
    host_meaning = "; host: the CPU's time for a forward call" if hosts else ""
    caption = (
        f"TFLOP/s, **× the stage before**, % of cuDNN; both: forward and backward together{host_meaning}. float16, 16k tokens, "
        f"hidden size 2048; geometric means over S = {lengths}, causal and not. {origin(machine)}, {machine['date']}."
    )
    table = tabulate(rows, headers, tablefmt="pipe", disable_numparse=True)
    return f"{caption}\n\n{table}" + _against_the_best(records, names) + _bfloat16(records, names)


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


def _bfloat16(records, names):
    """A sentence on how the other half precision compares; nothing where it was not measured."""
    ratios = {}
    for name, (pass_, head_dim) in itertools.product(names, COLUMNS):
        times = (times_of(records, name, (pass_,), head_dim, dtype) for dtype in ("float16", "bfloat16"))
        if stages.position(name) and (ratio := mean_ratio(*times)):
            ratios[ratio] = f"{name.split('_')[0]}, {PASS_NAMES[pass_]}, D={head_dim}"
    if not ratios:
        return ""
    least, most = min(ratios), max(ratios)
    return f"\n\nIn bfloat16 a stage takes {least:.3f} ({ratios[least]}) to {most:.3f} ({ratios[most]}) times as long."


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


def gain_table(name: str) -> str:
    """What a step moves, what that predicts it to gain and what it gained; for the first stage, what it moves."""
    records, machine = load_run(RUN)
    counts, counter = load_counts(TRAFFIC)
    position = stages.position(name)
    before = {stages.position(other): other for other in stages.names()}.get(stages.before(position))
    times = {
        (r["impl"], r["pass"], r["head_dim"], r["causal"]): r["ms"]
        for r in records
        if r["seq_len"] == COUNTED_AT and r["dtype"] == "float16" and "ms" in r
    }
    headers = ["pass", "D", "mask", "MB moved", "before", "FLOP / byte", "µs at peak", "gain predicted", "gain measured"]
    rows = []
    for pass_, head_dim in COLUMNS:
        for causal in (False, True):
            now, old = (counted(counts, stage, pass_, head_dim, causal) for stage in (name, before))
            ms, old_ms = (times.get((stage, pass_, head_dim, causal)) for stage in (name, before))
            rows.append([
                PASS_NAMES[pass_], head_dim, "causal" if causal else "full",
                f"{moved(now) / 1e6:.2f}" if now else "-", f"{moved(old) / 1e6:.2f}" if old else "-",
                f"{now['flops_executed'] / moved(now):.0f}" if now else "-", f"{now['roofline_us']:.1f}" if now else "-",
                f"×{old['roofline_us'] / now['roofline_us']:.2f}" if now and old else "-",
                f"×{old_ms / ms:.2f}" if ms and old_ms else "-",
            ])  # fmt: skip
    caption = (
        f"float16, S = {COUNTED_AT}. MB, FLOPs and the time that follows from {counter['roofline']} are of one head, as "
        f'`make traffic ARGS="--seq-len {COUNTED_AT}"` counts them; gains are over {before or "nothing"}, the measured ones '
        f"with 16k tokens and hidden size 2048, on {origin(machine)}."
    )
    align = ["left", "right", "left"] + ["right"] * 6
    return f"{caption}\n\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True, colalign=align)}"


def documents() -> dict[Path, str]:
    """What each generated document must be, from the committed results."""
    readme = ROOT / "README.md"
    found = {readme: with_table(readme.read_text(), "summary", summary_table(*load_run(RUN)))}
    found[RUN.with_suffix(".md")] = f"# All measurements\n\n{speed_table(*load_run(RUN))}\n"
    for name in stages.names():
        path = ROOT / "stages" / name / "README.md"
        found[path] = with_table(path.read_text(), "gain", gain_table(name))
    for path in (ROOT / "results").glob("traffic-*.json"):
        table = traffic_table(json.loads(path.read_text()))
        found[path.with_suffix(".md")] = f"# Traffic, counted and measured\n\n{table}\n"
    if SPREAD.exists():
        found[SPREAD.with_suffix(".md")] = f"# Scores of other spreads\n\n{speed_table(*load_run(SPREAD))}\n"
    if UNITS.exists():
        found[UNITS.with_suffix(".md")] = (
            f"# Busy units, and what warps wait for\n\n{units_table(json.loads(UNITS.read_text()))}\n"
        )
    return found


def main():
    """The command line."""
    for path, text in documents().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
