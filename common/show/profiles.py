"""Format tables of Nsight Compute's measurements: measured next to counted traffic, and how busy each unit of the GPU is."""

import re

from common.measure.ncu import MEMORY, READ, WRITTEN, comparison, pairs
from common.measure.units import CLOCK, REASONS, REGISTERS, STALL, TIME, UNITS
from common.measure.workloads import Workload
from common.show.results import origin
from common.show.tables import PASS_NAMES, markdown, mask, title

SHOWN_STALLS = 2  # show this many reasons why warps wait, most frequent first
LEAST_SHARE = 0.02  # a kernel has a row if it takes at least this share of its case's time


def _ratio(measured: float, counted: float) -> str:
    return f"{measured / counted:.3f}" if counted else "-"


def traffic_table(result: dict) -> str:
    """Format a file of measured and counted traffic as a markdown table: MB, and measured MB divided by counted MB.

    With GQA the table also has the numbers of heads and the bytes between the L2 cache and memory.
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
        shape.append(mask(w.causal))
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
    heads = "" if shares else f"H={first.heads}, "
    beyond = f" *memory*: the MB between the L2 cache and device memory ({', '.join(memory)})." if memory else ""
    caption = (
        f"The table shows the MB between the L2 cache and the SMs. *measured*: Nsight Compute measured them ({READ}, "
        f"{WRITTEN}). *counted*: `make traffic` counted them for the same tiles. For PyTorch's operators, the count has only "
        f"arguments and results, once each.{beyond} B={first.batch}, {heads}{first.dtype}. Measured with ncu {info['ncu']} on "
        f"{origin(info)}."
    )
    return f"{caption}\n\n{markdown(rows, headers, ('stage', 'pass', 'mask', 'kernel'))}"


def _short(name: str) -> str:
    """Shorten a kernel's name: no template, no arguments, at most 40 characters."""
    name = re.sub(r"<.*|\(.*", "", name).split("::")[-1].removeprefix("void ")
    return name if len(name) <= 40 else name[:39] + "…"


def units_table(result: dict) -> str:
    """Format a saved file of `common.measure.units` as a markdown table. Each kernel has a row, unless its share of the
    case's time is below LEAST_SHARE."""
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
                PASS_NAMES[case["pass"]], case["head_dim"], mask(case["causal"]), title(case["impl"]),
                _short(kernel["name"]), f"{kernel[TIME] / 1e6:.3f}", f"{kernel[CLOCK] / 1e9:.2f}", f"{kernel[REGISTERS]:.0f}",
                *(f"{kernel[metric]:.0f}" for metric in UNITS.values()), waiting,
            ])  # fmt: skip
    info = result["machine_info"]
    lengths = sorted({case["seq_len"] for case in result["cases"]})
    headers = ["pass", "D", "mask", "", "kernel", "ms", "GHz", "registers", *UNITS, "waiting"]
    caption = (
        "The table shows how busy each unit was during a kernel, in percent of its peak. *registers*: the registers of a "
        "thread at launch. *waiting*: the most frequent reasons why warps wait. The workload has "
        f"S = {', '.join(map(str, lengths))}, float16, 16k tokens and hidden size 2048. The profiler ran one kernel at a time "
        f"with ncu {info['ncu']} on {origin(info)}."
    )
    return f"{caption}\n\n{markdown(rows, headers, ('pass', 'mask', '', 'kernel', 'waiting'))}"
