"""Format tables of Nsight Compute's measurements: the traffic next to the counted traffic, and how busy the GPU's units are."""

import re

from tabulate import tabulate

from common.measure.ncu import MEMORY, READ, WRITTEN, comparison, pairs
from common.measure.units import CLOCK, REASONS, REGISTERS, STALL, TIME, UNITS
from common.measure.workloads import Workload
from common.show.tables import PASS_NAMES, title

SHOWN_STALLS = 2  # the most frequent stall reasons
LEAST_SHARE = 0.02  # share of a case's time; the table omits kernels with a smaller share


def _ratio(measured: float, counted: float) -> str:
    return f"{measured / counted:.3f}" if counted else "-"


def traffic_table(result: dict) -> str:
    """Format a file of measured and counted traffic as a markdown table: MB, and measured MB over counted MB.

    With GQA the table also has the numbers of heads and the bytes between the L2 cache and device memory.
    """
    info = result["machine_info"]
    workloads = [Workload.of(case) for case in result["cases"]]
    first = workloads[0]
    columns = {}  # optional columns
    if any(w.value_dim != w.head_dim for w in workloads):
        columns["Dv"] = lambda w: w.value_dim
    if shares := any((w.heads, w.kv_heads) != (first.heads, first.heads) for w in workloads):
        columns["heads / K/V heads"] = lambda w: f"{w.heads} / {w.kv_heads}"
    recorded = all(metric in kernel for case in result["cases"] for kernel in case["kernels"] for metric in MEMORY)
    memory = MEMORY if shares and recorded else ()
    rows = []
    for case, w in zip(result["cases"], workloads, strict=True):
        shape = [case["impl"], PASS_NAMES[w.pass_], w.seq_len, w.head_dim, *(cell(w) for cell in columns.values())]
        shape.append("causal" if w.causal else "full")
        for label, counted, measured in pairs(case):
            both = comparison(counted, measured)
            shown = [f"{both[name] / 1e6:.3f}" for name in ("read", "read_measured", "written", "written_measured", "spilled")]
            shown.insert(2, _ratio(both["read_measured"], both["read"]))
            shown.append(_ratio(both["written_measured"] - both["spilled"], both["written"]))
            shown += [f"{sum(kernel[metric] for kernel in measured) / 1e6:.3f}" for metric in memory]
            rows.append([*shape, label, *shown])
    headers = ["stage", "pass", "S", "D", *columns, "mask", "kernel", "MB read, counted", "measured", "ratio"]
    headers += ["MB written, counted", "measured", "of that spilled", "ratio of the rest"]
    headers += ["MB from memory", "MB to memory"] if memory else []
    align = ["left" if header in ("stage", "pass", "mask", "kernel") else "right" for header in headers]
    heads = "" if shares else f"H={first.heads}, "
    beyond = (
        f" *from memory* and *to memory*: between the L2 cache and the GPU's memory ({', '.join(memory)})." if memory else ""
    )
    caption = (
        f"Bytes between the L2 cache and the SMs. *measured*: by Nsight Compute ({READ}, {WRITTEN}). *counted*: on the CPU, "
        f"for the same tiles. B={first.batch}, {heads}{first.dtype}.{beyond} For PyTorch's operators, only arguments and "
        "results are counted, once each. "
        f"{info['gpu']}, torch {info['torch']}, triton {info['triton']}, ncu {info['ncu']}, commit {info['commit'][:12]}, "
        f"{info['date']}."
    )
    return f"{caption}\n\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True, colalign=align)}"


def _short(name: str) -> str:
    """Shorten a kernel's name: no template, no arguments, at most 40 characters."""
    name = re.sub(r"<.*|\(.*", "", name).split("::")[-1].removeprefix("void ")
    return name if len(name) <= 40 else name[:39] + "…"


def units_table(result: dict) -> str:
    """Format a saved file as a markdown table: a row for each kernel with at least LEAST_SHARE of its case's time."""
    rows = []
    for case in result["cases"]:
        whole = sum(kernel[TIME] for kernel in case["kernels"])
        for kernel in case["kernels"]:
            if kernel[TIME] < LEAST_SHARE * whole:
                continue
            stalls = {reason: kernel[STALL.format(reason)] for reason in REASONS if STALL.format(reason) in kernel}
            most = sorted(stalls, key=stalls.get, reverse=True)[:SHOWN_STALLS]
            share = {reason.replace("_", " "): 100 * stalls[reason] / sum(stalls.values()) for reason in most}
            waiting = ", ".join(f"{reason} {percent:.0f} %" for reason, percent in share.items())
            rows.append([
                PASS_NAMES[case["pass"]], case["head_dim"], "causal" if case["causal"] else "full", title(case["impl"]),
                _short(kernel["name"]), f"{kernel[TIME] / 1e6:.3f}", f"{kernel[CLOCK] / 1e9:.2f}", f"{kernel[REGISTERS]:.0f}",
                *(f"{kernel[metric]:.0f}" for metric in UNITS.values()), waiting,
            ])  # fmt: skip
    info = result["machine_info"]
    lengths = sorted({case["seq_len"] for case in result["cases"]})
    headers = ["pass", "D", "mask", "", "kernel", "ms", "GHz", "registers", *UNITS, "waiting"]
    caption = (
        "A unit's column shows how busy it is, in percent of its peak. *GHz* is the clock of the SMs, *registers* "
        "the number per "
        "thread at launch, *waiting* the two most frequent reasons why warps wait. The profiler runs one kernel at a time. "
        f"S = {', '.join(map(str, lengths))}, float16, 16k tokens, hidden size 2048. {info['gpu']}, torch "
        f"{info['torch']}, triton "
        f"{info['triton']}, ncu {info['ncu']}, commit {info['commit'][:12]}, {info['date']}."
    )
    align = ["left", "right", "left", "left", "left"] + ["right"] * (3 + len(UNITS)) + ["left"]
    return f"{caption}\n\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True, colalign=align)}"
