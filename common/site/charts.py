"""Draw the chart of the start page with Vega-Lite: the speed of libraries and of the stages that a workload concerns."""

import functools
import itertools
from collections.abc import Container

import stages
from common.show import tracks
from common.show.results import (
    CODE,
    COLUMNS,
    HEAD_DIMS,
    LENGTHS,
    MEAN_OVER,
    implementations,
    mean_over,
    paper,
    runs,
    same_code,
    short_commit,
    spoken,
)

MEAN = "mean"  # value of `s` in rows with a mean over sequence lengths
FEW = 8  # a sentence names up to this many stages
COLORS = {"trunk": "#2f6fb0", "track": "#3f9b6c", "dead end": "#b8b8b8", "library": "#d2691e"}
LABEL = 40  # pixels to the right of the axis for the number of the longest bar
AXIS = {"tickCount": 6, "labelFlush": False, "labelOverlap": "greedy"}
LOOK = {
    "background": None, "font": "system-ui, sans-serif",
    "axis": {"labelColor": "currentColor", "titleColor": "currentColor", "gridColor": "#8884", "domainColor": "#8888",
             "tickColor": "#8888", "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"},
    "legend": {"rowPadding": 6, "labelColor": "currentColor", "titleColor": "currentColor", "labelFontSize": 12},
    "header": {"labelColor": "currentColor", "titleColor": "currentColor", "labelFontSize": 12},
    "title": {"color": "currentColor"}, "text": {"color": "currentColor"}, "view": {"stroke": None, "continuousWidth": 700},
}  # fmt: skip


def kind(name: str) -> str:
    """Return the kind of an implementation, as in COLORS."""
    if not stages.position(name):
        return "library"
    if stages.is_dead_end(name):
        return "dead end"
    return "track" if stages.track(name) else "trunk"


@functools.cache
def concerns(track: str | None, pass_: str, head_dim: int) -> bool:
    """Return whether the chart's workloads concern a track: whether the track's benchmark has such a workload.

    The chart's workloads have as many queries as keys, and as many query heads as K/V heads. Benchmarks of decoding, of caches
    and of query groups have no such workload.
    """
    works = (work for run in tracks.runs_of(track) for work in run.works) if tracks.read(track) else ()
    plain = {(work.pass_, work.head_dim) for work in works if (work.seq_len, work.heads) == (work.kv_len, work.kv_heads)}
    return track is None or (pass_, head_dim) in plain


@functools.cache
def same_ancestors(name: str, pass_: str) -> list[str]:
    """Return a stage's ancestors up to the last one that has the same code for a pass."""
    parent = stages.parent(name)
    return [parent, *same_ancestors(parent, pass_)] if parent and same_code(name, parent, pass_) else []


def belongs(name: str, work: list, measured: Container[tuple]) -> bool:
    """Return whether an implementation gets a bar for a workload: a library, or a stage that the workload concerns, unless
    an ancestor with the same code has a bar.

    Args:
        work: pass, D, mask and S.
        measured: all (name, *work) with a speed.
    """
    pass_, d, *_ = work
    if kind(name) == "library":
        return True
    shown = any((ancestor, *work) in measured for ancestor in same_ancestors(name, pass_))
    return not shown and concerns(stages.track(name), pass_, d)


def left_out(rows: list[dict], names: list[str]) -> dict[str, str]:
    """Return a sentence about the stages without a bar for each choice of pass, D, mask and S, as in the page's address."""
    found = {}
    for pass_, d, causal, s in itertools.product(CODE, HEAD_DIMS, (True, False), (MEAN, *LENGTHS)):
        shown = {row["impl"] for row in rows if (row["pass"], row["d"], row["causal"], row["s"]) == (pass_, d, causal, s)}
        missing = [name for name in names if name not in shown]
        same = [name for name in missing if same_ancestors(name, pass_)]
        others = [name for name in missing if name not in same and not concerns(stages.track(name), pass_, d)]
        unmeasured = [spoken(name) for name in missing if name not in same + others]
        kinds = ", ".join(dict.fromkeys(map(stages.track, others)))
        parts = [
            f"{len(same)} stages with their parent's {CODE[pass_]}" * bool(same),
            f"{len(others)} stages of tracks for other workloads ({kinds})" * bool(others),
            f"{len(unmeasured)} stages not measured" + f" ({', '.join(unmeasured)})" * (len(unmeasured) <= FEW),
        ]
        words = "; ".join(part for part in parts if part and not part.startswith("0 "))
        found[f"{pass_} {d} {'yes' if causal else 'no'} {s}"] = f"Left out: {words}." if missing else ""
    return found


def speeds() -> list[dict]:
    """Return a row for each implementation and workload, and for each mean over sequence lengths.

    A row comes from the newest run that has it. Stages that a workload does not concern have no row.
    """
    rows, names = {}, ("impl", "pass", "d", "causal", "s")
    for run in runs():
        where = f"{run.machine['gpu']}, commit {short_commit(run.machine['commit'])}, {run.machine['date']}"
        for name, (pass_, d), causal in itertools.product(run.names, COLUMNS, (False, True)):
            works, found = [paper(pass_, d, causal, s) for s in LENGTHS], {}
            for work in run.times(name, works):
                tflops, ms, iqr_ms = (run.record(name, work)[what] for what in ("tflops", "ms", "iqr_ms"))
                found[work.seq_len] = {"tflops": tflops, "spread": iqr_ms / ms * tflops / 2, "ms": ms}
            if run.holds(name, mean_over(pass_, d)):
                mean = run.rate(name, [work for work in works if work.seq_len in MEAN_OVER])
                found |= {MEAN: {"tflops": mean}} if mean else {}
            for s, numbers in found.items():
                key = name, pass_, d, causal, s
                short = {what: float(f"{number:.4g}") for what, number in numbers.items()}  # enough digits for a chart
                about = {"run": where, "name": spoken(name), "kind": kind(name)}
                rows.setdefault(key, dict(zip(names, key, strict=True)) | short | about)
    return [row for (name, *work), row in rows.items() if belongs(name, work, rows)]


def speed_spec(rows: list[dict]) -> dict:
    """Return the chart of all implementations' speeds. A page sets the chart's parameters `pass`, `d`, `causal` and `s`."""
    order = [spoken(name) for name in implementations([{"impl": row["impl"]} for row in rows])]
    shown = "datum.pass == pass && datum.d == d && datum.causal == causal && datum.s == s"
    y = {"field": "name", "type": "nominal", "sort": order, "title": None, "axis": {"grid": False}}
    x = {"field": "tflops", "type": "quantitative", "title": "TFLOP/s", "axis": AXIS}
    numbers = {"tflops": "TFLOP/s", "spread": "± half the interquartile range", "ms": "ms"}
    tooltip = [{"field": "name", "title": "name"}]
    tooltip += [{"field": field, "title": title, "format": ".3~s"} for field, title in numbers.items()]
    tooltip += [{"field": "run", "title": "run"}]
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "description": "bars with the TFLOP/s of every stage and library",
        "data": {"values": [{field: value for field, value in row.items() if field != "impl"} for row in rows]},
        "params": [{"name": "pass", "value": "fwd"}, {"name": "d", "value": max(HEAD_DIMS)}, {"name": "causal", "value": True},
                   {"name": "s", "value": MEAN}],
        "transform": [
            {"filter": shown},
            {"calculate": "datum.tflops - (datum.spread || 0)", "as": "low"},
            {"calculate": "datum.tflops + (datum.spread || 0)", "as": "high"}],
        "width": "container", "height": {"step": 17}, "padding": {"left": 5, "top": 5, "bottom": 5, "right": LABEL},
        "layer": [
            {"mark": {"type": "bar", "height": 12}, "encoding": {
                "x": x, "y": y, "tooltip": tooltip,
                "color": {"field": "kind", "type": "nominal", "title": None,
                          "scale": {"domain": list(COLORS), "range": list(COLORS.values())},
                          "legend": {"orient": "top", "columns": 2}}}},
            {"mark": {"type": "rule", "strokeWidth": 2, "color": "currentColor"}, "encoding": {
                "x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y}},
            {"mark": {"type": "text", "align": "left", "dx": 6, "fontSize": 11}, "encoding": {
                "x": {**x, "field": "high"}, "y": y, "text": {"field": "tflops", "type": "quantitative", "format": ".0f"}}},
        ],
        "config": LOOK,
    }  # fmt: skip
