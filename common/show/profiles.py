"""Format tables of causes: traffic, busy units and energy."""

import re

from common.measure.ncu import MEMORY, READ, SECTOR, SPILLED, WRITTEN, comparisons
from common.measure.units import CLOCK, REASONS, REGISTERS, STALL, TIME, UNITS
from common.measure.workloads import Workload
from common.show.results import origin
from common.show.tables import PASS_NAMES, markdown, mask, title

SHOWN_STALLS = 2  # show this many reasons why warps wait, most frequent first
LEAST_SHARE = 0.02  # a kernel has a row if it takes at least this share of its case's time


def traffic_table(result: dict) -> str:
    """Format a file of measured and counted traffic as a markdown table: MB, and measured MB divided by counted MB."""
    info, first, rows = result["machine_info"], Workload.of(result["cases"][0]), []
    recorded = all(metric in kernel for case in result["cases"] for kernel in case["kernels"] for metric in MEMORY)
    memory = MEMORY if recorded else ()

    for case in result["cases"]:
        w = Workload.of(case)
        shape = [case["impl"], PASS_NAMES[w.pass_], w.seq_len, w.head_dim, f"{w.heads} / {w.kv_heads}", mask(w.causal)]
        for label, both in comparisons(case):
            read, written, spilled = both["read"], both["written"], both[SPILLED] * SECTOR
            shown = [f"{nbytes / 1e6:.3f}" for nbytes in (read, both[READ], written, both[WRITTEN], spilled)]
            shown.insert(2, f"{both[READ] / read:.3f}" if read else "-")
            shown.append(f"{(both[WRITTEN] - spilled) / written:.3f}" if written else "-")
            rows.append([*shape, label, *shown, *(f"{both[metric] / 1e6:.3f}" for metric in memory)])
    headers = ["stage", "pass", "S", "D", "heads / K/V heads", "mask", "kernel", "MB read, counted", "measured", "ratio"]
    headers += ["MB written, counted", "measured", "of that spilled", "ratio of the rest"]
    headers += ["MB from memory", "MB to memory"] if memory else []
    beyond = f" *memory*: the MB between the L2 cache and device memory ({', '.join(memory)})." if memory else ""
    caption = (
        f"The table shows the MB between the L2 cache and the SMs. *measured*: Nsight Compute measured them ({READ}, "
        f"{WRITTEN}). *counted*: `make traffic` counted them for the same tiles. For PyTorch's operators, the count has only "
        f"arguments and results, once each.{beyond} B={first.batch}, {first.dtype}. Measured with ncu {info['ncu']} on "
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


def energy_table(result: dict) -> str:
    """Format a saved file of `common.measure.energy` as a markdown table: a row for each workload and implementation."""
    rows = []
    for case in result["cases"]:
        workload = Workload.of(case)
        rows.append([
            PASS_NAMES[workload.pass_], workload.head_dim, mask(workload.causal), workload.seq_len,
            title(case["impl"]), f"{case['joules']:.3f}", f"{case['joules'] / workload.flops * 1e12:.2f}",
            f"{case['watts']:.0f}", f"{100 * case['capped']:.0f}", f"{case['mhz'] / 1e3:.2f}", f"{case['seconds'] * 1e3:.3f}",
            f"{case['rested_seconds'] * 1e3:.3f}",
        ])  # fmt: skip
    info = result["machine_info"]
    headers = ["pass", "D", "mask", "S", "", "J", "pJ / FLOP", "W", "capped, %", "GHz", "ms", "ms, rested"]
    caption = (
        "The table shows the energy, the power, the clock and the time of a call. Calls ran back to back, and NVML measured "
        "the energy. *capped*: the share of the time in which the GPU lowered its clock to stay below the power limit. *ms, "
        "rested*: the time of the first calls after a pause. *pJ / FLOP* counts the FLOPs of the papers. The workload has "
        f"float16, 16k tokens and hidden size 2048. It ran with a limit of {info['limit_watts']:.0f} W on {origin(info)}."
    )
    return f"{caption}\n\n{markdown(rows, headers, ('pass', 'mask', ''))}"
