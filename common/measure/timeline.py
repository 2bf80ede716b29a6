"""Simulate a stage's Gluon kernels on one SM, cycle by cycle, at the measured rates of its units.

The model of an SM is `common.interpreter.timing`. The model's rates are in results/rates-h200.json. They come from
microbenchmarks, so no rate is fitted to a stage's measured time. Only Gluon kernels are timed. The site draws them.
"""

import json
from pathlib import Path

from common.interpreter.timing import Rates

RATES = Path(__file__).parents[2] / "results" / "rates-h200.json"


def measured_rates() -> Rates:
    """Return the model's rates, from the results of microbenchmarks."""
    values = {}
    for rate in json.loads(RATES.read_text())["rates"]:
        values[rate["unit"], rate["name"], rate["num_sms"] == 1, rate["warpgroups"]] = rate["value"]

    def value(unit, name, alone=False, warpgroups=None):
        return values[unit, name, alone, warpgroups]

    def latency(unit, name, rate):
        """Return the cycles of a copy of 64x64 elements, minus the cycles in which its bytes move."""
        return value(unit, name, alone=True) - 64 * 64 * 2 / value(unit, rate, alone=True)

    results = {  # the number of results per cycle, with four warpgroups
        name: value("instructions", measured, warpgroups=4)
        for name, measured in {
            "add": "add", "sub": "add", "sum": "add", "mul": "multiply", "max": "max", "row maximum": "max", "select": "select",
            "exp2": "exp2", "log2": "exp2", "to fp16": "to float16", "to bf16": "to bfloat16", "from fp16": "from float16",
            "from bf16": "from bfloat16, low",
        }.items()
    }  # fmt: skip
    both = value("instructions", "compare and select", warpgroups=4)
    results["compare"] = results["and"] = results["or"] = 1 / (1 / both - 1 / results["select"])
    matmul = value("tensor-cores", "64x64x64, A shared", warpgroups=4)
    moved = {
        "load": value("copy-in", "128x64, 12 at a time, the same tiles"),  # concurrent programs load the same tiles of K and V
        "store": value("copy-out", "64x128, 2 at a time, own tiles"),
        "add": value("copy-out", "16x256 float32, added, 2 at a time, own tiles"),
        "matmul": 2 * 64**3 / matmul,
        "shared": value("shared-memory", "store a result, 64x128", warpgroups=4),
    }
    stored = latency("copy-out", "64x64, from issue to its last byte read", "64x64, 2 at a time, own tiles")
    return Rates(
        results,
        moved,
        latency={
            "load": latency("copy-in", "64x64, from issue to barrier", "128x128, 6 at a time, own tiles"),
            "store": stored,
            "add": stored,
            "matmul": value("tensor-cores", "64x64x64, A shared, from issue to its end", warpgroups=1) - matmul,
        },
        synchronization={
            (operation, warps): value("barriers", f"{operation}, {warps} at once, nothing to wait for")
            for operation in ("arrive", "wait", "fence")
            for warps in (1, 4)
        },
        hand_over=value("barriers", "from an arrival to the end of a wait, 4 and 1 warps in turn"),
    )
