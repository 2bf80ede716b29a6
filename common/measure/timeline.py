"""Simulate a stage's Gluon kernels on one SM, cycle by cycle, at the measured rates of its units.

The model of an SM is `common.interpreter.timing`. The model's rates are in results/rates-h200.json. They come from
microbenchmarks, so no rate is fitted to a stage's measured time. Only Gluon kernels are timed. The site draws them.
"""

import json
from collections import Counter
from pathlib import Path

from common.interpreter.timing import UNITS, Rates, Span
from common.runtime import Device

RATES = Path(__file__).parents[2] / "results" / "rates-h200.json"
HOPPER = Device(architecture=90, shared_memory=227 * 1024, num_sms=1)
SCORES = 128 * 128  # the table gives the cycles for this number of unmasked scores


def measured_rates(path: Path = RATES) -> Rates:
    """Return the model's rates, from a results file of microbenchmarks."""
    values = {}
    for rate in json.loads(path.read_text())["rates"]:
        values[rate["unit"], rate["name"], rate["num_sms"] == 1, rate["warpgroups"]] = rate["value"]

    def value(unit, name, alone=False, warpgroups=None):
        return values[unit, name, alone, warpgroups]

    def latency(unit, name, nbytes, rate):
        """Return the cycles of a copy, minus the cycles in which bytes move."""
        return value(unit, name, alone=True) - nbytes / rate

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
    matmul, tile = value("tensor-cores", "64x64x64, A shared", warpgroups=4), 64 * 64 * 2
    in_alone, out_alone = (
        value("copy-in", "128x128, 6 at a time, own tiles", alone=True),
        value("copy-out", "64x64, 2 at a time, own tiles", alone=True),
    )
    return Rates(
        results=results,
        flops=2 * 64**3 / matmul,
        copied=value("copy-in", "128x64, 12 at a time, the same tiles"),  # concurrent programs load the same tiles of K and V
        stored=value("copy-out", "64x128, 2 at a time, own tiles"),
        added=value("copy-out", "16x256 float32, added, 2 at a time, own tiles"),
        shared=value("shared-memory", "store a result, 64x128", warpgroups=4),
        matmul=value("tensor-cores", "64x64x64, A shared, from issue to its end", warpgroups=1) - matmul,
        copy=latency("copy-in", "64x64, from issue to barrier", tile, in_alone),
        store=latency("copy-out", "64x64, from issue to its last byte read", tile, out_alone),
        arrive={warps: value("barriers", f"arrive, {warps} at once, nothing to wait for") for warps in (1, 4)},
        wait={warps: value("barriers", f"wait, {warps} at once, nothing to wait for") for warps in (1, 4)},
        fence={warps: value("barriers", f"fence, {warps} at once, nothing to wait for") for warps in (1, 4)},
        hand_over=value("barriers", "from an arrival to the end of a wait, 4 and 1 warps in turn"),
    )


def busy(spans: list[Span], end: float) -> dict[str, float]:
    """Return for each unit the share of the time from 0 to `end` in which the unit is busy."""
    cycles = Counter()
    for span in spans:
        cycles[span.unit] += span.end - span.start
    return {unit: cycles[unit] / end for unit in UNITS}
