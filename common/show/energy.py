"""The table of measured energy."""

from tabulate import tabulate

from common.measure.workloads import Workload
from common.show.tables import PASS_NAMES, title


def energy_table(result: dict) -> str:
    """Format a saved file of `common.measure.energy` as a markdown table: a row for each workload and implementation."""
    rows = []
    for case in result["cases"]:
        workload = Workload.of(case)
        rows.append([
            PASS_NAMES[workload.pass_], workload.head_dim, "causal" if workload.causal else "full", workload.seq_len,
            title(case["impl"]), f"{case['joules']:.3f}", f"{case['joules'] / workload.flops * 1e12:.2f}",
            f"{case['watts']:.0f}", f"{100 * case['capped']:.0f}", f"{case['mhz'] / 1e3:.2f}", f"{case['seconds'] * 1e3:.3f}",
            f"{case['rested_seconds'] * 1e3:.3f}",
        ])  # fmt: skip
    info = result["machine_info"]
    headers = ["pass", "D", "mask", "S", "", "J", "pJ / FLOP", "W", "capped, %", "GHz", "ms", "ms, rested"]
    caption = (
        "*J* is the energy of a call in a long series of calls, as the GPU's driver reports it (NVML). *W* is the "
        "power. *capped* "
        "is the share of the time in which the power limit lowered the clock. *ms* is the time of a call in the series, and "
        "*ms, rested* the time of the first calls after a pause. FLOPs are counted as in the FlashAttention papers. Float16, "
        f"16k tokens, hidden size 2048. {info['gpu']}, limit {info['limit_watts']:.0f} W, "
        f"torch {info['torch']}, triton {info['triton']}, commit {info['commit'][:12]}, {info['date']}."
    )
    align = ["left", "right", "left", "right", "left"] + ["right"] * 7
    return f"{caption}\n\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True, colalign=align)}"
