"""Format the table of measured energy."""

from common.measure.workloads import Workload
from common.show.results import origin
from common.show.tables import PASS_NAMES, markdown, mask, title


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
