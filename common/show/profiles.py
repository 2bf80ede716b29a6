"""The tables of what Nsight Compute measured: traffic next to the counts, and how busy the units of the GPU are."""

import re

from tabulate import tabulate

from common.measure.ncu import READ, WRITTEN, comparison, pairs
from common.measure.units import CLOCK, REASONS, REGISTERS, STALL, TIME, UNITS
from common.show.tables import PASS_NAMES, title

SHOWN_STALLS = 2  # the most frequent ones
LEAST_SHARE = 0.02  # of a case's time: kernels below are left out of the table


def _ratio(measured: float, counted: float) -> str:
    return f"{measured / counted:.3f}" if counted else "-"


def traffic_table(result: dict) -> str:
    """The markdown table of a file that was measured and counted: MB, and measured over counted."""
    info = result["machine_info"]
    rows = []
    for case in result["cases"]:
        mask = "causal" if case["causal"] else "full"
        shape = [case["impl"], PASS_NAMES[case["pass"]], case["seq_len"], case["head_dim"], mask]
        for label, counted, measured in pairs(case):
            both = comparison(counted, measured)
            shown = [f"{both[name] / 1e6:.3f}" for name in ("read", "read_measured", "written", "written_measured", "spilled")]
            shown.insert(2, _ratio(both["read_measured"], both["read"]))
            shown.append(_ratio(both["written_measured"] - both["spilled"], both["written"]))
            rows.append([*shape, label, *shown])
    headers = ["stage", "pass", "S", "D", "mask", "kernel", "MB read, counted", "measured", "ratio"]
    headers += ["MB written, counted", "measured", "of that spilled", "ratio of the rest"]
    align = ["left", "left", "right", "right", "left", "left"] + ["right"] * 7
    first = result["cases"][0]
    caption = (
        f"Bytes between the L2 cache and the multiprocessors: as Nsight Compute measures them ({READ}, {WRITTEN}), and as they "
        f"are counted on the CPU for the same tiles. B={first['batch']}, H={first['heads']}, {first['dtype']}. Of PyTorch's "
        "operators arguments and results are counted, once each; what they move beyond that is the library's. "
        f"{info['gpu']}, torch {info['torch']}, triton {info['triton']}, ncu {info['ncu']}, commit {info['commit'][:12]}, "
        f"{info['date']}."
    )
    return f"{caption}\n\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True, colalign=align)}"


def _short(name: str) -> str:
    """A kernel's name without its template and arguments, and no longer than a table can show."""
    name = re.sub(r"<.*|\(.*", "", name).split("::")[-1].removeprefix("void ")
    return name if len(name) <= 40 else name[:39] + "…"


def units_table(result: dict) -> str:
    """The markdown table of a saved file: a row for each kernel that takes a noticeable part of its case."""
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
        "Percent of what each unit can do in a kernel's time, the multiprocessors' clock, registers of a thread at launch, and "
        f"what waiting warps wait for most often. S = {', '.join(map(str, lengths))}, float16, 16k tokens, "
        f"hidden size 2048; under the profiler, a kernel at a time. {info['gpu']}, torch {info['torch']}, triton "
        f"{info['triton']}, ncu {info['ncu']}, commit {info['commit'][:12]}, {info['date']}."
    )
    align = ["left", "right", "left", "left", "left"] + ["right"] * (3 + len(UNITS)) + ["left"]
    return f"{caption}\n\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True, colalign=align)}"
