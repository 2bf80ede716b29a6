"""Tables of the constants by which the newest stage's forward divides its work."""

import statistics

from common.measure.constants import DECISIONS
from common.measure.workloads import Workload
from common.show.results import origin
from common.show.tables import markdown

SHOWN = 1.03  # the table shows workloads for which another choice is faster than the host's by more than this


def constants_table(data: dict) -> str:
    """Format a file of `common.measure.constants`: for each decision, what the host's own choices cost."""
    parts = [f"Measured on {origin(data['machine_info'])}."]
    for key, decision in DECISIONS.items():
        cases = [case for case in data["cases"] if case["decision"] == key]
        if not cases:
            continue
        rows, costs = [], []
        for case in cases:
            times = {int(choice): us for choice, us in case["us"].items()}
            fastest = min(times, key=times.get)
            costs.append(times[case["own"]] / times[fastest])
            if costs[-1] > SHOWN:
                both = [cell for choice in (case["own"], fastest) for cell in (choice, f"{times[choice]:.1f}")]
                rows.append([Workload.of(case).label, *both, f"{costs[-1]:.2f}"])
        words = (
            f"*{key}*: {decision.about}. On {len(cases)} workloads, the host's choice takes "
            f"{statistics.geometric_mean(costs):.3f} times as long as the fastest choice, and at most {max(costs):.2f} times."
        )
        headers = ["workload", "own choice", "µs", "fastest choice", "µs", "ratio"]
        parts.append(f"{words}\n\n{markdown(rows, headers, headers)}" if rows else words)
    return "\n\n".join(parts)
