"""Compare a stage with the fastest library on random shapes: mean, 5th percentile, and the worst shapes."""

import math
import statistics
from collections.abc import Callable

from common.measure.workloads import Workload
from common.show.results import CODE, FASTEST, Run, shown, spoken
from common.show.tables import markdown

WORST = 5  # shapes to list for each pass and head dimension
TAIL = 0.05  # the share of shapes that are below the percentile


def percentile(values: list[float], share: float) -> float:
    """Return the least value that is not among the lowest `share` of the values."""
    return sorted(values)[math.floor(share * len(values))]


def speeds(run: Run, name: str, works: list[Workload]) -> dict[Workload, float]:
    """Return an implementation's speed over the fastest library's, for each workload that has both times."""
    ours, theirs = run.times(name, works), run.times(FASTEST, works)
    return {work: theirs[work] / ours[work] for work in works if work in ours and work in theirs}


def groups(run: Run) -> dict[tuple[str, int], list[Workload]]:
    """Return the workloads by pass and head dimension, in the order of tables."""
    found = {}
    for work in run.works:
        found.setdefault((work.pass_, work.head_dim), []).append(work)
    return dict(sorted(found.items(), key=lambda item: (list(CODE).index(item[0][0]), item[0][1])))


def overview(run: Run, name: str) -> str:
    """Return a table of a stage's speeds over the fastest library: a row for each pass and head dimension."""
    of_dims, rows = groups(run), []
    for pass_ in CODE:
        of_pass = {head_dim: works for (each, head_dim), works in of_dims.items() if each == pass_}
        everything = {"all": sum(of_pass.values(), [])} if len(of_pass) > 1 else {}
        for head_dim, works in (of_pass | everything).items():
            if found := [*speeds(run, name, works).values()]:
                values = statistics.geometric_mean(found), percentile(found, TAIL), min(found)
                rows.append([CODE[pass_], head_dim, len(found), *map(shown, values), sum(value < 0.97 for value in found)])
    return markdown(rows, ["pass", "D", "shapes", "mean", "5th percentile", "lowest", "below 0.97"], ("pass",))


def worst(run: Run, name: str, chosen: Callable[[Workload], str]) -> str:
    """Return a table of the shapes on which a stage is the slowest compared with the fastest library.

    `chosen` returns in words how the stage computes a workload.
    """
    rows = []
    for works in groups(run).values():
        found = speeds(run, name, works)
        for work in sorted(found, key=found.get)[:WORST]:
            ours, theirs = (run.times(impl, [work])[work] * 1e3 for impl in (name, FASTEST))
            fastest = min(run.libraries, key=lambda impl: run.times(impl, [work]).get(work, math.inf))
            rows.append([work.label, shown(found[work]), f"{ours:.1f}", f"{theirs:.1f}", fastest, chosen(work)])
    headers = ["workload", "speed", "µs", "fastest library's", "which", "how"]
    return markdown(rows, headers, ("workload", "which", "how"))


def host(run: Run, name: str) -> str:
    """Return the median µs of the CPU for a call, if its shape was called before and if its lengths are new."""
    found = []
    for pass_, spelled in CODE.items():
        records = [run.record(name, work) for work in run.works if work.pass_ == pass_]
        times = {key: [record[key] for record in records if record and key in record] for key in ("host_us", "host_new_us")}
        if all(times.values()):
            repeated, new = (statistics.median(values) for values in times.values())
            found.append(f"{spelled} {repeated:.0f} µs, with new lengths {new:.0f} µs")
    return "The host's time, median: " + "; ".join(found) if found else ""


def report(records: list[dict], machine: dict, name: str, chosen: Callable[[Workload], str]) -> str:
    """Return both tables for the stage `name` of a run.

    Args:
        records, machine: as for `common.show.tables.speed_table`.
        chosen: as for `worst`.
    """
    run = Run(records, machine)
    title = f"{spoken(name)} over the fastest of {', '.join(run.libraries)}, for each shape:"
    parts = [title, overview(run, name), host(run, name), f"The worst {WORST} of each:", worst(run, name, chosen)]
    return "\n\n".join(filter(None, parts))
