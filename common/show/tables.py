"""Format the tables of a benchmark run from its records and its machine."""

import math
import re
import textwrap
from itertools import groupby

from tabulate import tabulate

import stages
from common.measure.footprint import MIB_IN_MB
from common.measure.workloads import DTYPES, Workload
from common.show.results import AGAIN, CHANGED, LEGEND, Run, changed, short_commit, stage_order, within

_SHARED = ("pass", "head_dim", "value_dim", "causal", "dtype", "score_std", "sink", "sink_key", "sink_head")  # one table each
_WORKLOAD = ("seq_len", "kv_len", "batch", "heads", "kv_heads")  # can differ between rows of a table
PASS_NAMES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}
_PARENT = "× parent"
_TIME_HEADERS = (
    "S", "B × H", "implementation", "ms", "± IQR", "TFLOP/s", _PARENT, "× v0", "% of cuDNN", "% of matmul", "peak extra MB",
    "host µs",
)  # fmt: skip
_COUNT_HEADERS = (
    "S", "B × H", "implementation", "tiles", "MB read", "MB written", "MFLOP", "FLOP / byte", "µs at peak", "bound by",
    _PARENT, "launches", "peak extra MB",
)  # fmt: skip
_KV_LEN = "Sk"  # a column for runs in which Sk differs from S
_KV_RATE = "GB/s of K, V"  # and the rate at which K and V are read there
_IN_A_ROW = "µs in a row"  # a column for runs of short calls
_KV_HEADS = "K/V heads"  # a column for runs with GQA
# Columns that a narrow table drops, in this order.
_LEFT_OUT = (
    "host µs", "% of matmul", "peak extra MB", "bound by", _IN_A_ROW, "FLOP / byte", "× v0", "tiles", "B × H", "± IQR",
    "launches", "% of cuDNN", _KV_RATE, "MFLOP", "MB written",
)  # fmt: skip


def _by(keys):
    """Return a function that sorts records by these fields. None comes first."""
    return lambda record: tuple((record[key] is not None, record[key]) for key in keys)


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


def _number(value, digits):
    return "-" if value is None else f"{value:,.{digits}f}"


def _milliseconds(value):
    return _number(value, 4 if value < 1 else 3)


def _ratio(a, b, factor=1.0):
    return None if a is None or b is None else factor * a / b


def _gain(record, time, times, noise) -> str:
    """Return how many times as fast a stage is as its parent. `times` has times by a stage's number and letter, because its
    name may change after a run."""
    parent = stages.parent(record["impl"])
    ratio = _ratio(parent and times.get(stages.position(parent)), time)
    return "=" if ratio and within(noise.get(record["pass"]), math.log(ratio), 1) else _number(ratio, 2)


def _time_cells(record, times, cudnn, run, headers):
    ms = record["ms"]
    ceiling = run.machine["matmul_tflops"].get(record["dtype"])
    cells = [
        _milliseconds(ms) + ("" if record["launch_hidden"] else "*"),
        _milliseconds(record["iqr_ms"]),
        _number(record["tflops"], 1),
        _gain(record, ms, times, run.noise),
        _number(_ratio(times.get((0, "")), ms), 2),
        _number(_ratio(cudnn, ms, 100), 0),
        _number(_ratio(record["tflops"], ceiling, 100), 0),
        _number(record["peak_extra_mib"] * MIB_IN_MB, 1),
        _number(record.get("host_us"), 0) + (f" ± {record['host_iqr_us']:,.0f}" if "host_iqr_us" in record else ""),
    ]
    cells += [_number(record.get("in_a_row_us"), 1)] * (_IN_A_ROW in headers)
    return cells + [_number(kv_gbps(record), 0)] * (_KV_RATE in headers)


def _count_cells(record, times):
    return [
        record["tiles"] or "-",
        _number(record["bytes_read"] / 1e6, 3),
        _number(record["bytes_written"] / 1e6, 3),
        _number(record["flops_executed"] / 1e6, 1),
        _number(record["flops_executed"] / (record["bytes_read"] + record["bytes_written"]), 1),
        _number(record["roofline_us"], 3),
        record["bound"] or "-",
        _gain(record, record["roofline_us"], times, {}),
        record["kernel_launches"],
        _number(record["peak_extra_mib"] * MIB_IN_MB, 3),
    ]


def _where(record):
    """Return the words that say to which row of the table a note belongs."""
    keys = "" if record["kv_len"] == record["seq_len"] else f", {_KV_LEN}={record['kv_len']}"
    heads = "" if record["kv_heads"] == record["heads"] else f", {record['kv_heads']} {_KV_HEADS}"
    return f"S={record['seq_len']}{keys}{heads}"


def _rows(records, run, headers, name):
    """Yield the rows of one table, grouped by workload. Only the first row of a workload shows the shape. `name` formats an
    implementation."""
    on_gpu = run.machine["gpu"]
    for _, group in groupby(sorted(records, key=_by(_WORKLOAD)), key=_by(_WORKLOAD)):
        group = sorted(group, key=lambda record: stage_order(record["impl"]))
        time_of = {record["impl"]: record["ms" if on_gpu else "roofline_us"] for record in group if "failure" not in record}
        times = {stages.position(impl): time for impl, time in time_of.items() if not impl.endswith(AGAIN)}
        for index, record in enumerate(group):
            shape = [record["seq_len"]] + ([record["kv_len"]] if _KV_LEN in headers else [])
            shape += [f"{record['batch']} × {record['heads']}"]
            shape += [record["kv_heads"]] if _KV_HEADS in headers else []
            shape = shape if index == 0 else [""] * len(shape)
            if "failure" in record:  # the reason takes the place of the first measurement
                cells = [record["failure"]] + ["-"] * (len(headers) - len(shape) - 2)
            elif on_gpu:
                cells = _time_cells(record, times, time_of.get("sdpa-cudnn"), run, headers)
            else:
                cells = _count_cells(record, times)
            yield [*shape, name(record["impl"]) + (f" {CHANGED}" if changed(record) else ""), *cells]


def _fitted(rows: list[list], headers: list[str], columns: int | None) -> str:
    """Format the table.

    If the table is too wide, drop columns in the order of `_LEFT_OUT`. If it is still too wide, versions replace the names of
    stages. If `columns` is None, drop nothing.
    """
    name = headers.index("implementation")
    short = [[*row[:name], re.sub(r"_\w+", "", row[name]), *row[name + 1 :]] for row in rows]
    every = len(_LEFT_OUT)
    attempts = [(rows, dropped) for dropped in range(every)] + [(short, dropped) for dropped in range(every + 1)]
    for shown, dropped in attempts:
        kept = [place for place, header in enumerate(headers) if header not in _LEFT_OUT[:dropped]]
        table = markdown(
            [[row[place] for place in kept] for row in shown], [headers[place] for place in kept], ("implementation",)
        )
        if columns is None or len(table.partition("\n")[0]) <= columns:
            break
    return table


def _caption(first: dict) -> str:
    """Return the words above a table: what all of its rows have in common."""
    dims = f"D={first['head_dim']}" + ("" if first["value_dim"] == first["head_dim"] else f", Dv={first['value_dim']}")
    spread = "" if first["score_std"] == 1 else f", scores of standard deviation {first['score_std']:g}"
    head = "" if first["sink_head"] is None else f" of K/V head {first['sink_head']}"
    spread += f", a sink of {first['sink']:g} nats at key {first['sink_key']}{head}" if first["sink"] else ""
    return f"{PASS_NAMES[first['pass']]}, {dims}, {mask(first['causal'])}, {first['dtype']}{spread}"


def speed_table(records: list[dict], machine: dict, columns: int | None = None) -> str:
    """Format a markdown table for each pass, head dimension, head dimension of v, mask, dtype and score distribution.

    Args:
        records: all records of one run: each benchmark's `extra_info`, and the "failures" of the run's JSON file. A record has
            `impl` and the fields of `Workload.record`; records of older runs may lack some fields. A stage's record may have
            `source` (`common.show.results.source`). A failed case also has `failure` and `note`. A case on a GPU also has
            `flops`, `ms`, `iqr_ms`, `tflops`, `launch_hidden`, `peak_extra_mib` and `host_us`, and optionally `host_iqr_us` and
            `in_a_row_us`. A case without a GPU has the fields of `common.measure.traffic.costs`.
        machine: the file's "machine_info": `gpu`, `torch`, `triton`, `commit`, `date`, `matmul_tflops` by dtype, and optionally
            `copy_gbps`. If `gpu` is None, the tables show counts, and times at the peak rates of `roofline`.
        columns: the maximum line length. With None, the tables show all columns, in lines of any length.

    Baselines come first, then the stages in stage order. "× parent" is a stage's speed divided by its parent's speed, or "=" if
    they differ by less than the run's noise. "× v0" divides by v0's speed. "-" means not measured. "host µs" is a median ± an
    interquartile range. "µs in a row" is the time per call of back-to-back calls.
    """
    run = Run(records, machine)
    records = [record | Workload.of(record).record() for record in records]
    headers = list(_TIME_HEADERS if machine["gpu"] else _COUNT_HEADERS)
    if any(record["kv_heads"] != record["heads"] for record in records):
        headers.insert(2, _KV_HEADS)
    decoding = any(record["kv_len"] != record["seq_len"] for record in records)
    if decoding:
        headers.insert(1, _KV_LEN)
    if any("in_a_row_us" in record for record in records):
        headers.append(_IN_A_ROW)
    if decoding and machine["gpu"]:
        headers.append(_KV_RATE)
    facts = [machine["gpu"] or "CPU, interpreted", f"torch {machine['torch']}", f"triton {machine['triton']}"]
    commit = machine["commit"] if columns is None else short_commit(machine["commit"])
    facts += [f"commit {commit}", machine["date"]]
    facts += [f"matmul {dtype} {tflops:.0f} TFLOP/s" for dtype, tflops in machine["matmul_tflops"].items()]
    facts += [f"copy {machine['copy_gbps']:.0f} GB/s"] if "copy_gbps" in machine else []
    parts = [", ".join(facts)]
    if not machine["gpu"]:
        parts.append(
            "MB are the bytes that the kernels request. PyTorch's operators count their arguments and results once. MFLOP are "
            f"the executed FLOPs. µs at peak is the roofline at {machine['roofline']}. Caches can make a kernel faster than "
            "its roofline."
        )
    parts.append(f"{_PARENT}: the speed of a stage divided by the speed of its parent.")

    def position(record):
        return list(PASS_NAMES).index(record["pass"]), *_by(_SHARED[1:])(record)

    tables = []
    for _, group in groupby(sorted(records, key=position), key=position):
        group = list(group)
        rows = list(_rows(group, run, headers, title if columns is None else str))
        tables += [_caption(group[0]), _fitted(rows, headers, columns)]
        tables += [f"{record['impl']} at {_where(record)}: {record['note']}" for record in group if record.get("note")]
    parts += legend("\n".join(tables)) + tables
    if any(record.get("launch_hidden") is False for record in records):
        parts.append("* The GPU waited for the CPU's launch, so this time includes some of the CPU's time.")
    if columns is not None:
        parts = [part if part.startswith("|") else textwrap.fill(part, columns) for part in parts]
    return "\n\n".join(parts)


def legend(text: str) -> list[str]:
    """Return what the signs in a text mean, for the signs that it has: an equals sign in place of a ratio, and `CHANGED`."""
    return [LEGEND["="]] * bool(re.search(r"[|:,] *=[ †]*[|(]", text)) + [LEGEND[CHANGED]] * (CHANGED in text)
