"""Format the tables of a benchmark run from its records and its machine."""

import math
import re
import textwrap
from collections.abc import Callable
from itertools import groupby

from tabulate import tabulate

import stages
from common.measure.footprint import MIB_IN_MB
from common.measure.workloads import DTYPES, Workload
from common.show.results import AGAIN, CHANGED, LEGEND, Run, changed, present, short_commit, spoken, stage_order, within

PASS_NAMES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}
_SHAPE = ("B", "H", "Hkv", "S", "Sk")  # the words of a workload's label that differ between the rows of a table
_PARENT = "× parent"
_V0 = "× v0"
_KV_RATE = "GB/s of K, V"  # a column for runs in which the number of keys differs from that of queries
_IN_A_ROW = "µs in a row"  # a column for runs of short calls
_NEW = "host µs, new lengths"  # another one
_HEADERS = (
    "ms", "± IQR", "TFLOP/s", _PARENT, _V0, "% of cuDNN", "% of matmul", "peak extra MB",
    "host µs", _NEW, _IN_A_ROW, _KV_RATE,
)  # fmt: skip
_MEANINGS = {
    _PARENT: "the speed of a stage divided by the speed of its parent",
    "± IQR": "the times' interquartile range",
    "% of matmul": "of the rate of a large matmul of PyTorch",
    "peak extra MB": "memory that the call takes, results included",
    "host µs": "the CPU's time for a call, median ± interquartile range",
    _NEW: "the same if a call's lengths are new",
    _IN_A_ROW: "the time per call of calls in a row",
    AGAIN.strip(): "the same code, measured twice",
}
# Columns that a narrow table drops, in this order.
_LEFT_OUT = (
    _NEW, "host µs", "% of matmul", "tiles", "peak extra MB", "launches", _IN_A_ROW, _V0, "± IQR", "% of cuDNN", _KV_RATE
)  # fmt: skip


def mask(causal: bool) -> str:
    """Return the name of a mask in tables."""
    return "causal" if causal else "full"


def title(impl: str) -> str:
    """Return an implementation's name in tables."""
    return f"{impl} (dead end)" if stages.is_dead_end(impl) else impl


def markdown(rows: list[list], headers: list[str], left: tuple = ()) -> str:
    """Format a table whose columns are aligned right, except those with headers in `left`."""
    align = ["left" if header in left else "right" for header in headers]
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=align if rows else None)


def kv_gbps(record: dict) -> float:
    """Return the rate in GB/s at which a measured call reads K and V, once each."""
    w = Workload.of(record)
    return w.batch * w.kv_heads * w.kv_len * (w.head_dim + w.value_dim) * DTYPES[w.dtype].itemsize / record["ms"] / 1e6


def _words(record, of_shape: bool) -> str:
    """Return the words of a workload's label that differ between the rows of a table, or those that all rows share."""
    return " ".join(word for word in Workload.of(record).label.split(" ") if (word.partition("=")[0] in _SHAPE) == of_shape)


def _order(record):
    """Return a sort key: first what all rows of a table share, then the shape, then the stages in stage order."""
    w = Workload.of(record)
    shared = w.head_dim, w.value_dim, w.causal, w.dtype, w.score_std, w.sink, w.sink_key, str(w.sink_head)
    shape = w.seq_len, w.kv_len, w.batch, w.heads, w.kv_heads
    return list(PASS_NAMES).index(w.pass_), *shared, *shape, stage_order(record["impl"])


def _fitted(rows: list[list], headers: list[str], columns: int | None) -> str:
    """Format the table. Drop columns in the order of `_LEFT_OUT` until it is narrow enough. Drop nothing for None."""
    for dropped in range(len(_LEFT_OUT) + 1):
        kept = [place for place, header in enumerate(headers) if header not in _LEFT_OUT[:dropped]]
        shown = [[row[place] for place in kept] for row in rows]
        table = markdown(shown, [headers[place] for place in kept], ("shape", "implementation"))
        if columns is None or len(table.partition("\n")[0]) <= columns:
            break
    return table


def grouped(records: list[dict], headers: list[str], cells: Callable, columns: int | None) -> list[str]:
    """Format a heading and a table for each pass, head dimension, mask, dtype and score distribution, with the rows' notes.

    Args:
        records: as for `speed_table`. A failure takes the place of a row's first cell.
        headers: the headers of the columns after the shape and the implementation.
        cells: a function of a record and of all measured records of its workload. It returns a dict from headers to cells.
        columns: the maximum width. With None, a table has all columns and the full names of stages.
    """
    parts = []
    for heading, of_table in groupby(sorted(records, key=_order), key=lambda record: _words(record, of_shape=False)):
        rows, notes = [], []
        for shape, cases in groupby(of_table, key=lambda record: _words(record, of_shape=True)):
            cases = list(cases)
            measured = [record for record in cases if "failure" not in record]
            for place, record in enumerate(cases):
                name = spoken(record["impl"]) if columns else title(record["impl"])
                row = [record.get("failure"), *["-"] * (len(headers) - 1)]
                if "failure" not in record:
                    found = cells(record, measured)
                    row = [found[header] for header in headers]
                rows.append(["" if place else shape, name + (f" {CHANGED}" if changed(record) else ""), *row])
                notes += [f"{record['impl']} at {shape}: {record['note']}"] if record.get("note") else []
        pass_, _, shared = heading.partition(" ")
        parts += [f"{PASS_NAMES[pass_]} {shared}", _fitted(rows, ["shape", "implementation", *headers], columns), *notes]
    return parts


def _number(value, digits):
    return "-" if value is None else f"{value:,.{digits}f}"


def _milliseconds(value):
    return _number(value, 4 if value < 1 else 3)


def _cells(record, group, run) -> dict:
    """Return a measured record's cells by header. `group` has all measured records of the workload."""
    ms, host = record["ms"], record.get("host_iqr_us")
    times = {r["impl"]: r["ms"] for r in group if not r["impl"].endswith(AGAIN)}

    def times_as_fast(other, factor=1):
        return factor * times[other] / ms if other in times else None

    gain = times_as_fast(stages.parent(record["impl"]))
    same = gain and within(run.noise.get(record["pass"]), math.log(gain), 1)
    ceiling = run.machine["matmul_tflops"].get(record["dtype"])
    return {
        "ms": _milliseconds(ms) + ("" if record["launch_hidden"] else "*"),
        "± IQR": _milliseconds(record["iqr_ms"]),
        "TFLOP/s": _number(record["tflops"], 1),
        _PARENT: "=" if same else _number(gain, 2),
        _V0: _number(times_as_fast(stages.names()[0]), 2),
        "% of cuDNN": _number(times_as_fast("sdpa-cudnn", 100), 0),
        "% of matmul": _number(ceiling and 100 * record["tflops"] / ceiling, 0),
        "peak extra MB": _number(record["peak_extra_mib"] * MIB_IN_MB, 1),
        "host µs": _number(record.get("host_us"), 0) + (f" ± {host:,.0f}" if host is not None else ""),
        _NEW: _number(record.get("host_new_us"), 0),
        _IN_A_ROW: _number(record.get("in_a_row_us"), 1),
        _KV_RATE: _number(kv_gbps(record), 0),
    }


def speed_table(records: list[dict], machine: dict, columns: int | None = None) -> str:
    """Format the tables of a run on a GPU.

    Args:
        records: all records of one run: each benchmark's `extra_info`, and the "failures" of the run's JSON file. A record has
            `impl` and the fields of `Workload.record`; records of older runs may lack some fields. A stage's record may have
            `source` (`common.show.results.source`). A failed case also has `failure` and `note`. Any other case has `ms`,
            `iqr_ms`, `tflops`, `launch_hidden`, `peak_extra_mib` and `host_us`, and optionally `host_iqr_us`, `in_a_row_us`
            and `host_new_us`, the CPU time of a call whose lengths are new.
        machine: the file's "machine_info": `gpu`, `torch`, `triton`, `commit`, `date`, `matmul_tflops` by dtype, and optionally
            `copy_gbps`.
        columns: the maximum line length. With None, the tables show all columns, in lines of any length.

    Baselines come first, then the stages in stage order. "× parent" is a stage's speed divided by its parent's speed, or "=" if
    they differ by less than the run's noise. "× v0" divides by v0's speed. "-" means not measured. "host µs" is a median ± an
    interquartile range. "µs in a row" is the time per call of back-to-back calls.
    """
    run, records = Run(records, machine), present(records)
    decoding = any(record.get("kv_len", record["seq_len"]) != record["seq_len"] for record in records)
    short, new = (any(name in record for record in records) for name in ("in_a_row_us", "host_new_us"))
    of_v0 = any(record["impl"] == stages.names()[0] for record in records)
    headers = [header for header in _HEADERS if {_NEW: new, _IN_A_ROW: short, _KV_RATE: decoding, _V0: of_v0}.get(header, True)]
    tables = grouped(records, headers, lambda record, group: _cells(record, group, run), columns)
    commit = machine["commit"] if columns is None else short_commit(machine["commit"])
    facts = [machine["gpu"], f"torch {machine['torch']}", f"triton {machine['triton']}", f"commit {commit}", machine["date"]]
    facts += [f"matmul {dtype} {tflops:.0f} TFLOP/s" for dtype, tflops in machine["matmul_tflops"].items()]
    facts += [f"copy {machine['copy_gbps']:.0f} GB/s"] if "copy_gbps" in machine else []
    shown = "\n".join(tables)
    meanings = "; ".join(f"{sign}: {words}" for sign, words in _MEANINGS.items() if f" {sign} " in shown)
    parts = [", ".join(facts), *[f"{meanings}."] * bool(meanings), *legend(shown), *tables]
    if any(record.get("launch_hidden") is False for record in records):
        parts.append("* The GPU waited for the CPU's launch, so this time includes some of the CPU's time.")
    if columns is not None:
        parts = [part if part.startswith("|") else textwrap.fill(part, columns) for part in parts]
    return "\n\n".join(parts)


def legend(text: str) -> list[str]:
    """Return what the signs in a text mean, for the signs that it has: an equals sign in place of a ratio, and `CHANGED`."""
    return [LEGEND["="]] * bool(re.search(r"[|:,] *=[ †]*[|(]", text)) + [LEGEND[CHANGED]] * (CHANGED in text)
