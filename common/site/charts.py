"""Draw the chart of the start page with Vega-Lite: the speed of all stages and libraries."""

import itertools

import stages
from common.show.results import (
    COLUMNS,
    HEAD_DIMS,
    LENGTHS,
    MEAN_OVER,
    implementations,
    mean_over,
    paper,
    runs,
    short_commit,
    spoken,
)

MEAN = "mean"  # value of `s` in rows with a mean over sequence lengths
COLORS = {"trunk": "#2f6fb0", "track": "#3f9b6c", "dead end": "#b8b8b8", "library": "#d2691e"}
LOOK = {
    "background": None, "font": "system-ui, sans-serif",
    "axis": {"labelColor": "currentColor", "titleColor": "currentColor", "gridColor": "#8884", "domainColor": "#8888",
             "tickColor": "#8888", "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"},
    "legend": {"labelColor": "currentColor", "titleColor": "currentColor", "labelFontSize": 12},
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


def speeds() -> list[dict]:
    """Return a row for each implementation and workload, and for each mean over sequence lengths.

    A row comes from the newest run that has it.
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
    return list(rows.values())


def speed_spec(rows: list[dict]) -> dict:
    """Return the chart of all implementations' speeds. A page sets the chart's parameters `pass`, `d`, `causal` and `s`."""
    order = [spoken(name) for name in implementations([{"impl": row["impl"]} for row in rows])]
    shown = "datum.pass == pass && datum.d == d && datum.causal == causal && datum.s == s"
    y = {"field": "name", "type": "nominal", "sort": order, "title": None, "axis": {"grid": False}}
    x = {"field": "tflops", "type": "quantitative", "title": "TFLOP/s"}
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
        "transform": [{"filter": shown}],
        "width": "container", "height": {"step": 17},
        "layer": [
            {"mark": {"type": "bar", "height": 12}, "encoding": {
                "x": x, "y": y, "tooltip": tooltip,
                "color": {"field": "kind", "type": "nominal", "title": None,
                          "scale": {"domain": list(COLORS), "range": list(COLORS.values())}, "legend": {"orient": "top"}}}},
            {"mark": {"type": "rule", "strokeWidth": 2, "color": "currentColor"}, "transform": [
                {"calculate": "datum.tflops - (datum.spread || 0)", "as": "low"},
                {"calculate": "datum.tflops + (datum.spread || 0)", "as": "high"}],
             "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y}},
            {"mark": {"type": "text", "align": "left", "dx": 6, "fontSize": 11}, "encoding": {
                "x": x, "y": y, "text": {"field": "tflops", "type": "quantitative", "format": ".0f"}}},
        ],
        "config": LOOK,
    }  # fmt: skip
