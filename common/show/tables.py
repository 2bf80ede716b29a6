"""Format the tables of a benchmark run from its records and its machine."""

import textwrap
from itertools import groupby

from tabulate import tabulate

import stages
from common.measure.footprint import MIB_IN_MB
from common.measure.workloads import Workload

_SHARED = (
    "pass",
    "head_dim",
    "value_dim",
    "causal",
    "dtype",
    "score_std",
    "sink",
    "sink_key",
    "sink_head",
)  # equal in all rows of a table
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
_IN_A_ROW = "µs in a row"  # a column for runs of short calls
_KV_HEADS = "K/V heads"  # a column for runs with GQA
# Columns that a narrow table drops, in this order.
_LEFT_OUT = (
    "host µs", "% of matmul", "peak extra MB", "bound by", _IN_A_ROW, "FLOP / byte", "× v0", "tiles", "B × H", "± IQR",
    "launches", "% of cuDNN", "MFLOP", "MB written",
)  # fmt: skip


def _by(keys):
    """Return a function that sorts records by these fields. None comes first."""
    return lambda record: tuple((record[key] is not None, record[key]) for key in keys)


def stage_order(impl: str) -> tuple[int, str]:
    """Return a sort key: baselines first, then the stages in the order of the evolution."""
    return stages.position(impl) or (-1, "")


def title(impl: str) -> str:
    """Return an implementation's name in tables."""
    return f"{impl} (dead end)" if stages.is_dead_end(impl) else impl


def short_commit(commit: str) -> str:
    """Shorten a commit to twelve digits. Keep "+dirty", which means that files differ from the commit."""
    digits, dirty, _ = commit.partition("+dirty")
    return digits[:12] + dirty


def markdown(rows: list[list], headers: list[str], left: tuple = ()) -> str:
    """Format a table whose columns are aligned right, except those with headers in `left`."""
    align = ["left" if header in left else "right" for header in headers]
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=align)


def _number(value, digits):
    return "-" if value is None else f"{value:,.{digits}f}"


def _milliseconds(value):
    return _number(value, 4 if value < 1 else 3)


def _ratio(a, b, factor=1.0):
    return None if a is None or b is None else factor * a / b


def _time_before(impl, time_at):
    """Return the parent's time. `time_at` has times by a stage's number and letter, because its name may change after a run."""
    parent = stages.parent(impl)
    return parent and time_at.get(stages.position(parent))


def _time_cells(record, ms_at, ms_of, machine, headers):
    ms = record["ms"]
    ceiling = machine["matmul_tflops"].get(record["dtype"])
    cells = [
        _milliseconds(ms) + ("" if record["launch_hidden"] else "*"),
        _milliseconds(record["iqr_ms"]),
        _number(record["tflops"], 1),
        _number(_ratio(_time_before(record["impl"], ms_at), ms), 2),
        _number(_ratio(ms_at.get((0, "")), ms), 2),
        _number(_ratio(ms_of.get("sdpa-cudnn"), ms, 100), 0),
        _number(_ratio(record["tflops"], ceiling, 100), 0),
        _number(record["peak_extra_mib"] * MIB_IN_MB, 1),
        _number(record.get("host_us"), 0) + (f" ± {record['host_iqr_us']:,.0f}" if "host_iqr_us" in record else ""),
    ]
    return cells + [_number(record.get("in_a_row_us"), 1)] * (_IN_A_ROW in headers)


def _count_cells(record, time_at):
    return [
        record["tiles"] or "-",
        _number(record["bytes_read"] / 1e6, 3),
        _number(record["bytes_written"] / 1e6, 3),
        _number(record["flops_executed"] / 1e6, 1),
        _number(record["flops_executed"] / (record["bytes_read"] + record["bytes_written"]), 1),
        _number(record["roofline_us"], 3),
        record["bound"] or "-",
        _number(_ratio(_time_before(record["impl"], time_at), record["roofline_us"]), 2),
        record["kernel_launches"],
        _number(record["peak_extra_mib"] * MIB_IN_MB, 3),
    ]


def _where(record):
    """Return the words that say to which row of the table a note belongs."""
    keys = "" if record["kv_len"] == record["seq_len"] else f", {_KV_LEN}={record['kv_len']}"
    heads = "" if record["kv_heads"] == record["heads"] else f", {record['kv_heads']} {_KV_HEADS}"
    return f"S={record['seq_len']}{keys}{heads}"


def _rows(records, machine, headers, name):
    """Yield the rows of one table, grouped by workload. Only the first row of a workload shows the shape. `name` formats an
    implementation."""
    for _, group in groupby(sorted(records, key=_by(_WORKLOAD)), key=_by(_WORKLOAD)):
        group = sorted(group, key=lambda record: stage_order(record["impl"]))
        time = "ms" if machine["gpu"] else "roofline_us"
        time_of = {record["impl"]: record[time] for record in group if "failure" not in record}
        time_at = {stages.position(impl): of_impl for impl, of_impl in time_of.items()}
        for index, record in enumerate(group):
            shape = [record["seq_len"]] + ([record["kv_len"]] if _KV_LEN in headers else [])
            shape += [f"{record['batch']} × {record['heads']}"]
            shape += [record["kv_heads"]] if _KV_HEADS in headers else []
            shape = shape if index == 0 else [""] * len(shape)
            if "failure" in record:  # the reason takes the place of the first measurement
                cells = [record["failure"]] + ["-"] * (len(headers) - len(shape) - 2)
            elif machine["gpu"]:
                cells = _time_cells(record, time_at, time_of, machine, headers)
            else:
                cells = _count_cells(record, time_at)
            yield [*shape, name(record["impl"]), *cells]


def _fitted(rows: list[list], headers: list[str], columns: int | None) -> str:
    """Format the table.

    If the table is too wide, drop columns in the order of `_LEFT_OUT`. If it is still too wide, versions replace the names of
    stages. If `columns` is None, drop nothing.
    """
    name = headers.index("implementation")
    short = [[*row[:name], row[name].split("_")[0], *row[name + 1 :]] for row in rows]
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


def speed_table(records: list[dict], machine: dict, columns: int | None = None) -> str:
    """Format a markdown table for each pass, head dimension, head dimension of v, mask, dtype and score distribution.

    Args:
        records: all records of one run: each benchmark's `extra_info`, and the "failures" of the run's JSON file. A record has
            `impl` and the fields of `Workload.record`; records of older runs may lack some fields. A failed case also has
            `failure` and `note`. A case on a GPU also has `flops`, `ms`, `iqr_ms`, `tflops`, `launch_hidden`, `peak_extra_mib`
            and `host_us`, and optionally `host_iqr_us` and `in_a_row_us`. A case without a GPU has the fields of
            `common.measure.traffic.costs`.
        machine: the file's "machine_info": `gpu`, `torch`, `triton`, `commit`, `date`, `matmul_tflops` by dtype, and optionally
            `copy_gbps`. If `gpu` is None, the tables show counts, and times at the peak rates of `roofline`.
        columns: the maximum line length. With None, the tables show all columns, in lines of any length.

    Baselines come first, then the stages in stage order. "× parent" is a stage's speed divided by its parent's speed, and "×
    v0" divides by v0's speed. "-" means not measured. "host µs" is a median ± an interquartile range. "µs in a row" is the time
    per call of back-to-back calls.
    """
    records = [record | Workload.of(record).record() for record in records]
    headers = list(_TIME_HEADERS if machine["gpu"] else _COUNT_HEADERS)
    if any(record["kv_heads"] != record["heads"] for record in records):
        headers.insert(2, _KV_HEADS)
    if any(record["kv_len"] != record["seq_len"] for record in records):
        headers.insert(1, _KV_LEN)
    if any("in_a_row_us" in record for record in records):
        headers.append(_IN_A_ROW)
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

    for _, group in groupby(sorted(records, key=position), key=position):
        group = list(group)
        first = group[0]
        mask = "causal" if first["causal"] else "full"
        rows = list(_rows(group, machine, headers, title if columns is None else str))
        dims = f"D={first['head_dim']}" + ("" if first["value_dim"] == first["head_dim"] else f", Dv={first['value_dim']}")
        spread = "" if first["score_std"] == 1 else f", scores of standard deviation {first['score_std']:g}"
        head = "" if first["sink_head"] is None else f" of K/V head {first['sink_head']}"
        spread += f", a sink of {first['sink']:g} nats at key {first['sink_key']}{head}" if first["sink"] else ""
        parts.append(f"{PASS_NAMES[first['pass']]}, {dims}, {mask}, {first['dtype']}{spread}")
        parts.append(_fitted(rows, headers, columns))
        parts += [f"{record['impl']} at {_where(record)}: {record['note']}" for record in group if record.get("note")]
    if any(record.get("launch_hidden") is False for record in records):
        parts.append("* The GPU waited for the CPU's launch, so this time includes some of the CPU's time.")
    if columns is not None:
        parts = [part if part.startswith("|") else textwrap.fill(part, columns) for part in parts]
    return "\n\n".join(parts)
