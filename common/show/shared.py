"""Format tables for GQA, and for workloads in which Dv differs from D."""

import itertools
import statistics
from dataclasses import replace

from common.measure.footprint import MIB_IN_MB
from common.measure.workloads import Workload
from common.show.results import implementations, origin, spoken
from common.show.tables import PASS_NAMES, markdown

CUDNN = "sdpa-cudnn"


def _order(workload):
    """Return the sort key of a table's rows."""
    w = workload
    return list(PASS_NAMES).index(w.pass_), w.head_dim, w.value_dim, w.causal, w.dtype, w.seq_len


def _mask(workload):
    return "causal" if workload.causal else "full"


def remarks(records: list[dict]) -> list[str]:
    """Return the notes below a run's tables: why libraries do not support some workloads, and what a star means."""
    notes = [f"{spoken(record['impl'])}: {' '.join(record['note'].split())}" for record in records if record.get("note")]
    found = list(dict.fromkeys(notes))
    if any(record.get("launch_hidden") is False for record in records):
        found.append("* The GPU waited for the CPU's launch, so this time includes some of the CPU's time.")
    return found


class _Run:
    """A run's records by (implementation, workload with Hkv = H, query heads per K/V head)."""

    def __init__(self, records):
        self.records = {}
        for record in records:
            w = Workload.of(record)
            self.records[record["impl"], replace(w, kv_heads=w.heads), w.heads // w.kv_heads] = record
        points = sorted({point for _, point, _ in self.records}, key=_order)  # workloads without GQA
        self.points = [point for point in points if point.value_dim == point.head_dim]
        self.other_dims = [point for point in points if point.value_dim != point.head_dim]
        self.sharing = sorted({sharing for _, _, sharing in self.records})  # query heads per K/V head
        names = implementations(records)
        self.stage, self.peers = names[-1], names[:-1]

    def record(self, impl, point, sharing=1):
        """Return the record of workload `point` with `sharing` query heads per K/V head. Return {} if there is no such
        record."""
        return self.records.get((impl, point, sharing), {})

    def ratio(self, point, sharing, over):
        """Return the stage's time divided by the time of `over`. If `over` is the stage itself, use the stage's time without
        GQA. Return None if a time is missing."""
        theirs = self.record(self.stage, point) if over == self.stage else self.record(over, point, sharing)
        times = self.record(self.stage, point, sharing).get("ms"), theirs.get("ms")
        return times[0] / times[1] if all(times) else None

    def cell(self, impl, point, sharing=1):
        """Format TFLOP/s, with a star if the GPU waited for the launch. If nothing was measured, return the reason."""
        record = self.record(impl, point, sharing)
        if "tflops" not in record:
            return record.get("failure", "-")
        return f"{record['tflops']:.0f}" + ("*" if record["launch_hidden"] is False else "")


def _summary(run):
    """Format the geometric mean of `_Run.ratio` for each number of query heads per K/V head. The last column has the largest
    ratio with GQA."""
    rows = []
    for over, pass_ in itertools.product((run.stage, *run.peers), dict.fromkeys(point.pass_ for point in run.points)):
        points = [point for point in run.points if point.pass_ == pass_]
        found = {n: {point: ratio for point in points if (ratio := run.ratio(point, n, over))} for n in run.sharing}
        means = [f"{statistics.geometric_mean(ratios.values()):.3f}" if ratios else "-" for ratios in found.values()]
        shared = [
            (ratio, replace(point, kv_heads=point.heads // n).label)
            for n, ratios in found.items()
            for point, ratio in ratios.items()
            if n > 1
        ]
        worst = "{:.3f}: {}".format(*max(shared)) if shared else "-"
        name = f"{spoken(over)} without GQA" if over == run.stage else spoken(over)
        rows.append([name, PASS_NAMES[pass_], *means, worst])
    headers = ["time divided by that of", "pass", *(f"mean, {n}" for n in run.sharing), "worst"]
    return markdown(rows, headers, ("time divided by that of", "pass", "worst"))


def _each(run):
    """Format a table with a row for each workload. A cell has a value for each number of query heads per K/V head."""

    def ratios(point, over):
        found = [run.ratio(point, sharing, over) for sharing in run.sharing if sharing > 1 or over != run.stage]
        return " / ".join(f"{ratio:.2f}" if ratio else "-" for ratio in found)

    def memory(point):
        found = [run.record(run.stage, point, sharing).get("peak_extra_mib") for sharing in run.sharing]
        return " / ".join("-" if mib is None else f"{mib * MIB_IN_MB:,.0f}" for mib in found)

    rows = []
    for point in run.points:
        rates = [" / ".join(run.cell(impl, point, sharing) for sharing in run.sharing) for impl in (run.stage, CUDNN)]
        costs = [ratios(point, run.stage), ratios(point, CUDNN), memory(point)]
        rows.append([PASS_NAMES[point.pass_], point.head_dim, _mask(point), point.dtype, point.seq_len, *rates, *costs])
    name = spoken(run.stage)
    headers = ["pass", "D", "mask", "dtype", "S", f"TFLOP/s of {name}", "TFLOP/s of cuDNN", "time / time without GQA"]
    headers += ["time / cuDNN's", f"peak extra MB of {name}"]
    return markdown(rows, headers, ("pass", "mask", "dtype"))


def _other_dims(run):
    """Format TFLOP/s of all implementations for workloads in which v and k have different head dimensions."""
    names = (run.stage, *run.peers)
    rows = [
        [PASS_NAMES[w.pass_], w.head_dim, w.value_dim, _mask(w), *(run.cell(impl, w) for impl in names)] for w in run.other_dims
    ]
    return markdown(rows, ["pass", "D", "Dv", "mask", *map(spoken, names)], ("pass", "mask"))


def shared_tables(records: list[dict], machine: dict) -> str:
    """Format the tables of a `bench.py --reference shared` run: its newest stage next to the libraries.

    Args:
        records, machine: from `common.show.results.load_run`.
    """
    run = _Run(records)
    heads = sorted({(point.head_dim, point.heads) for point in run.points})
    parts = [
        f"Measured on {origin(machine)}, {machine['date']}.",
        f"The first table shows {spoken(run.stage)}'s time divided by another time. The first rows divide by "
        f"{spoken(run.stage)}'s own time without GQA, the other rows by a library's time with the same heads. Below 1 is "
        f"faster. *mean* is the geometric mean for {', '.join(map(str, run.sharing))} query heads per K/V head. *worst* is the "
        "largest value with GQA.",
        _summary(run),
        f"The second table shows 16k tokens and {', '.join(f'{number} heads of D = {dim}' for dim, number in heads)}. Slashes "
        f"separate the values for {', '.join(map(str, run.sharing))} query heads per K/V head. The time divided by the time "
        "without GQA has no value for 1 query head. Below 1 is faster.",
        _each(run),
    ]
    if run.other_dims:
        lengths = ", ".join(map(str, sorted({w.seq_len for w in run.other_dims})))
        dtypes = ", ".join(sorted({w.dtype for w in run.other_dims}))
        parts += [f"The third table shows TFLOP/s if V has another head dimension (Dv) than K: S = {lengths}, {dtypes}."]
        parts += [_other_dims(run)]
    return "\n\n".join([*parts, *remarks(records)])
