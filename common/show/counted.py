"""Show a run without a GPU: counted bytes and FLOPs, and beside them the gains that earlier runs measured on a GPU."""

from itertools import groupby

import stages
from common.measure.footprint import MIB_IN_MB
from common.measure.workloads import Workload
from common.show import results
from common.show.results import stage_order
from common.show.tables import PASS_NAMES, legend, markdown

SHAPE = "B", "H", "Hkv", "S", "Sk"  # the parts of a workload's label that differ between the rows of a table


def measured(impl: str, pass_: str, head_dim: int) -> tuple[str, str] | None:
    """Return a stage's measured speed over its parent's, such as "×1.51 (1.30–1.70)", and the run: the GPU and the commit.

    Return None if no run has both stages.
    """
    parent = stages.parent(impl) if stages.position(impl) else None
    found = parent and results.gain(results.runs(), impl, parent, pass_, head_dim)
    return found and (str(found[0]), results.place(found[1].machine))


def _total(records, impl, pass_, *fields) -> int:
    return sum(r[name] for r in records for name in fields if (r["impl"], r["pass"]) == (impl, pass_) and "failure" not in r)


def summary(records: list[dict], about: str | None = None) -> str:
    """Compare a stage with its parent, one line for each pass. Return "" if the run does not have both.

    Args:
        records: all records of a run without a GPU, including failures.
        about: the stage; None means the run's newest stage.
    """
    impls = sorted({record["impl"] for record in records}, key=stage_order)
    about = about or impls[-1]
    parent = stages.parent(about) if stages.position(about) else None
    if not {about, parent} <= {*impls}:
        return ""
    lines = [f"{about} compared with its parent, {parent}:"]
    head_dims = sorted({record["head_dim"] for record in records})
    for pass_, name in PASS_NAMES.items():
        moved, flops = (
            [_total(records, impl, pass_, *fields) for impl in (parent, about)]
            for fields in (("bytes_read", "bytes_written"), ("flops_executed",))
        )
        if all(moved):
            lines.append(f"  {name}: {results.bytes_in_words(*moved)}, {results.bytes_in_words(*flops, 'FLOPs')}")
            gains = [(head_dim, measured(about, pass_, head_dim)) for head_dim in head_dims]
            lines += [f"    measured at D={head_dim}: {found[0]} as fast ({found[1]})" for head_dim, found in gains if found]
    return "\n".join(lines)


def _cells(record) -> list:
    """Return the cells of all columns after the shape and the name."""
    if "failure" in record:
        return [record["failure"], *["-"] * 6]
    found = measured(record["impl"], record["pass"], record["head_dim"])
    megabytes = [f"{record[name] / 1e6:,.3f}" for name in ("bytes_read", "bytes_written")]
    amounts = [record["kernel_launches"], f"{record['peak_extra_mib'] * MIB_IN_MB:,.3f}", record["tiles"] or "-"]
    return [*megabytes, f"{record['flops_executed'] / 1e6:,.1f}", found[0] if found else "-", *amounts]


def tables(records: list[dict], machine: dict, wide: bool) -> str:
    """Format a markdown table for each pass, head dimension, mask, dtype and score distribution.

    Args:
        records: all records of a run without a GPU, including failures.
        machine: the run's versions, commit and date.
        wide: whether to show all columns and the full names of stages.
    """
    headers = ["shape", "implementation", "MB read", "MB written", "MFLOP", "measured", "launches", "peak extra MB", "tiles"]
    parts = [
        f"CPU, interpreted, torch {machine['torch']}, triton {machine['triton']}, commit {machine['commit'][:12]}, "
        f"{machine['date']}",
        "MB are the bytes that the kernels request. PyTorch's operators count arguments and results once.\n"
        "MFLOP are the FLOPs that run, those of masked scores included where a kernel computes them.\n"
        "measured: the speed over the parent's on a GPU, a mean over both masks and long and short S.",
    ]

    def kind(record):
        label = Workload.of(record).label.split(" ")
        return " ".join(part for part in label if part.partition("=")[0] not in SHAPE)

    def shape(record):
        return " ".join(part for part in Workload.of(record).label.split(" ") if part.partition("=")[0] in SHAPE)

    runs = {}
    for name, group in groupby(sorted(records, key=kind, reverse=True), key=kind):
        rows, above, notes = [], None, []
        for record in sorted(group, key=lambda r: (r["seq_len"], shape(r), stage_order(r["impl"]))):
            impl = record["impl"] if wide else results.spoken(record["impl"])
            rows.append(["" if shape(record) == above else shape(record), impl, *_cells(record)])
            above = shape(record)
            notes += [f"{impl} at {above}: {record['note']}"] if record.get("note") else []
            if found := measured(record["impl"], record["pass"], record["head_dim"]):
                runs[found[1]] = None
        kept = len(headers) if wide else headers.index("launches")
        parts += [name, markdown([row[:kept] for row in rows], headers[:kept], ("shape", "implementation")), *notes]
    parts += [f"measured on: {'; '.join(runs)}"] if runs else []
    parts += legend("\n".join(parts))
    return "\n\n".join(parts)
