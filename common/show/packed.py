"""Format how fast packed sequences are, from the files of `common.measure.packed`."""

import json
import statistics

from common.show import results
from common.show.results import Gain, gpu_of, short_commit, spoken
from common.show.tables import markdown

COMPUTED = {  # a stage that computes packed sequences -> the pass, and the files of results/ that measured it
    "lengths2_packed_forward": ("fwd", ("packed-h200.json", "packed-wide-h200.json")),
    "shortbwd10_packed_backward": ("bwd", ("packed-h200.json",)),
    "wide11_packed_backward": ("bwd", ("packed-wide-h200.json",)),
}


def table(name: str) -> str:
    """Format the newest stage's speed over others with packed sequences, for the pass that the stage `name` computes.

    A row for each head dimension has the mean over all cases in which both were timed, and the lowest and highest speed.
    """
    pass_, files = COMPUTED[name]
    found = [json.loads((results.ROOT / "results" / file).read_text()) for file in files]
    records = [record for result in found for record in result["records"] if record["pass"] == pass_]
    ours, *others = dict.fromkeys(impl for record in records for impl in record["us"])
    ratios = {}
    for record in records:
        row, times = ratios.setdefault(record["head_dim"], {impl: [] for impl in others}), record["us"]
        for impl in others:
            if impl in times and ours in times:
                row[impl].append(times[impl] / times[ours])
    rows = [[head_dim, *map(_gain, row.values())] for head_dim, row in ratios.items()]
    machines = [result["machine_info"] for result in found]
    places = dict.fromkeys(f"{gpu_of(machine)}, {short_commit(machine['commit'])}" for machine in machines)
    where = f"results/{', '.join(files)}; {'; '.join(places)}"
    caption = f"Packed sequences, {spoken(ours)} over others ({where}), mean (lowest–highest):"
    return f"{caption}\n\n{markdown(rows, ['D', *map(spoken, others)])}"


def _gain(ratios: list[float]) -> str:
    if not ratios:
        return "-"
    return str(Gain(statistics.geometric_mean(ratios), min(ratios), max(ratios), len(ratios), same=False, changed=False))
