"""Format tables of decoding runs, in which few queries read many keys. The tables show times, and rates of reading K and V."""

import itertools
import statistics

import stages
from common.measure.workloads import DTYPES, Workload
from common.show.results import implementations, origin, spoken
from common.show.shared import remarks
from common.show.tables import markdown

LARGE_BYTES = 256e6  # K and V with at least this many bytes fit in no cache
FEW_ROWS = 64  # with at most this many query rows per K/V head, reading K and V takes most of the time


def kv_bytes(workload: Workload) -> int:
    """Return how many bytes K and V have together."""
    w = workload
    return w.batch * w.kv_heads * w.kv_len * (w.head_dim + w.value_dim) * DTYPES[w.dtype].itemsize


def kv_gbps(record: dict) -> float:
    """Return the rate in GB/s at which a measured call reads K and V."""
    return kv_bytes(Workload.of(record)) / record["ms"] / 1e6


def _model(workload):
    """Return a workload's batch size and its numbers of heads and K/V heads. These numbers are equal in all rows of a table."""
    return workload.batch, workload.heads, workload.kv_heads


def _order(workload):
    return *_model(workload), workload.seq_len, workload.kv_len


class _Run:
    """A run: its records by implementation and workload, and the GB/s of a copy in the GPU's memory."""

    def __init__(self, records, machine):
        self.copy_gbps = machine["copy_gbps"]
        self.records = {(record["impl"], Workload.of(record)): record for record in records}
        self.points = sorted({point for _, point in self.records}, key=_order)
        self.names = implementations(records)
        self.stage = self.names[-1]

    def ms(self, impl, point):
        return self.records.get((impl, point), {}).get("ms")

    def gain(self, point):
        """Return the fastest baseline's time divided by the newest stage's time. Return None if one of these times is
        missing."""
        ours = self.ms(self.stage, point)
        theirs = [ms for impl in self.names if not stages.position(impl) and (ms := self.ms(impl, point))]
        return min(theirs) / ours if ours and theirs else None

    def share(self, impl, point):
        """Return the rate of reading K and V, divided by the copy's rate. Return None if the call was not measured."""
        return kv_gbps(self.records[impl, point]) / self.copy_gbps if self.ms(impl, point) else None

    def cell(self, impl, point):
        """Format the time, the rate of reading K and V, and this rate in percent of the copy's rate. If nothing was measured,
        return the reason."""
        record = self.records.get((impl, point), {})
        if "ms" not in record:
            return record.get("failure", "-")
        star = "*" if record["launch_hidden"] is False else ""
        return f"{record['ms']:.4f}{star} / {kv_gbps(record):,.0f} / {self.share(impl, point):.0%}"


def _gains(run):
    """Format a table of the newest stage's speed divided by the fastest baseline's speed. Each number of queries has a row, and
    the last row is for all workloads."""
    gains = {point: gain for point in run.points if (gain := run.gain(point))}
    rows = []
    for queries in (*sorted({point.seq_len for point in gains}), "all"):
        some = {point: gain for point, gain in gains.items() if queries in (point.seq_len, "all")}
        worst = min(some, key=some.get, default=None)
        mean, least = (f"{statistics.geometric_mean(some.values()):.2f}", f"{some[worst]:.2f}: {worst.label}") if some else "--"
        rows.append([queries, mean, least])
    return markdown(rows, ["S", "mean", "worst"], ("worst",))


def _shares(run):
    """Format the rate at which each implementation reads K and V, in percent of the copy's rate. Leave out workloads with fewer
    than `LARGE_BYTES` bytes of K and V, or more than `FEW_ROWS` query rows per K/V head."""
    large = [p for p in run.points if kv_bytes(p) >= LARGE_BYTES and p.seq_len * p.heads // p.kv_heads <= FEW_ROWS]
    rows = []
    for impl in run.names:
        shares = {point: share for point in large if (share := run.share(impl, point))}
        least = min(shares, key=shares.get, default=None)
        mean, worst = (f"{statistics.mean(shares.values()):.0%}", f"{shares[least]:.0%}: {least.label}") if shares else "--"
        rows.append([spoken(impl), mean, worst])
    return markdown(rows, ["", "mean", "least"], ("", "least"))


def _points(run, points):
    """Format a table with a row for each workload in `points`."""
    rows = [[w.seq_len, w.kv_len, f"{kv_bytes(w) / 1e6:,.0f}", *(run.cell(impl, w) for impl in run.names)] for w in points]
    return markdown(rows, ["S", "Sk", "MB", *map(spoken, run.names)])


def decoding_tables(records: list[dict], machine: dict) -> str:
    """Format the tables of a `bench.py --reference decode-…` run: the decoding stages next to the libraries.

    Args:
        records, machine: from `common.show.results.load_run`.
    """
    run = _Run(records, machine)
    dims = ", ".join(f"D = {dim}" for dim in sorted({point.head_dim for point in run.points}))
    dtypes = ", ".join(sorted({point.dtype for point in run.points}))
    parts = [
        f"Measured on {origin(machine)}, {machine['date']}.",
        f"The forward has S queries and Sk keys, no mask, {dims}, {dtypes}. A copy in the GPU's memory reads and writes "
        f"{run.copy_gbps:,.0f} GB/s in the same run. A kernel that only reads can be faster.",
        f"The first table shows {spoken(run.stage)}'s speed divided by the speed of the fastest library at each point.",
        _gains(run),
        "The second table shows the rate at which K and V are read, in percent of the copy's rate. It includes the points with "
        f"at least {LARGE_BYTES / 1e6:.0f} MB of K and V, and at most {FEW_ROWS} query rows (S × H / Hkv) per K/V head.",
        _shares(run),
        "The next tables show all points. A cell has ms / GB/s of K and V / percent of the copy's rate. MB is the size of K "
        "and V.",
    ]
    for (batch, heads, kv_heads), points in itertools.groupby(run.points, key=_model):
        parts += [f"B = {batch}, H / Hkv = {heads} / {kv_heads}", _points(run, points)]
    return "\n\n".join([*parts, *remarks(records)])
