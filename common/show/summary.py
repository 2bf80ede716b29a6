"""Write the first lines of a benchmark's output: a stage's gain over its parent, and a table of some implementations."""

from collections import Counter

import stages
from common.show.results import LEGEND, Run, moved, ratio
from common.show.tables import PASS_NAMES, markdown

LINES, COLUMNS = 15, 100  # the summary has at most this many lines and columns
MOST_GROUPS = 4  # the table has columns for at most this many pairs of pass and head dimension
NO_GPU = "There is no GPU. µs at peak is the time of the counted bytes and FLOPs at an H200's peak rates."


def _change(before: float, after: float) -> str:
    """Return in words how `after` compares with `before`: "1.94 times fewer", or "as many"."""
    if round(before / after, 2) == 1:
        return "as many"
    return f"{before / after:.2f} times fewer" if after < before else f"{after / before:.2f} times more"


def _headline(run: Run, subject: str, over: str) -> list[str]:
    """Return lines that compare the speed of the stages `subject` and `over`, one line for each pass."""
    if over == subject:
        return [f"{subject}:"]
    role = "its parent" if over == stages.parent(subject) else "the first stage of this run"
    lines = [f"{subject} compared with {role}, {over}:"]
    for pass_, name in PASS_NAMES.items():
        works = [work for work in run.works if work.pass_ == pass_]
        if not (found := ratio([run], subject, over, works)):
            continue
        spread = f" ({found.spread})" if found.spread else ""
        text = f"  {name}: {found.mean:.2f} times as fast{spread}{', which is within the noise' * found.same}"
        if run.machine["gpu"]:
            cudnn = ratio([run], subject, "sdpa-cudnn", works)
            text += f", {100 * cudnn.mean:.0f} % of cuDNN's speed" if cudnn else ""
        else:
            both = [[run.record(impl, work) for work in run.times(impl, works)] for impl in (over, subject)]
            bytes_, flops = (
                _change(*(sum(map(count, records)) for records in both)) for count in (moved, lambda r: r["flops_executed"])
            )
            text += f" at peak, {bytes_} bytes, {flops} FLOPs"
        lines.append(text)
    return lines


def _failures(records) -> list[str]:
    """Return a line that names the cases without a measurement."""
    counted = Counter((record["impl"], record["failure"]) for record in records if "failure" in record)
    parts = [f"{impl} {failure}" + (f" ({number} cases)" if number > 1 else "") for (impl, failure), number in counted.items()]
    text = f"Not measured: {', '.join(parts)}."
    return [text if len(text) <= COLUMNS else text[: COLUMNS - 1] + "…"] if parts else []


def _cell(run: Run, name: str, works: list) -> str:
    """Return an implementation's TFLOP/s, or µs at peak without a GPU, and its gain over its parent."""
    times = run.times(name, works)
    if not times:
        return "-"
    total = sum(times.values())
    if run.machine["gpu"]:
        amount = f"{sum(run.record(name, work)['flops'] for work in times) / total / 1e9:.0f}"
    else:
        amount = f"{total:.0f}" if total >= 100 else f"{total:.3g}"
    found = ratio([run], name, stages.parent(name), works)
    return f"{amount} {found.short}" if found else amount


def summary(records: list[dict], machine: dict, about: str | None = None) -> str:
    """Summarize a run in at most `LINES` lines of `COLUMNS` columns: gains over the parent, by pass and head dimension.

    Args:
        records, machine: as for `common.show.tables.speed_table`.
        about: the stage whose gain over its parent comes first. With None, the newest stage's gain over the run's first stage
            comes first.
    """
    run = Run(records, machine)
    ours = [name for name in run.names if stages.position(name)]
    if not ours:
        return ""
    subject = about if about in ours else [name for name in ours if not stages.is_dead_end(name) or name == ours[0]][-1]
    over = stages.parent(subject) if about and stages.parent(subject) in run.names else ours[0]
    lines = _headline(run, subject, over)
    groups = {}
    for work in run.works:
        groups.setdefault((list(PASS_NAMES).index(work.pass_), work.head_dim), []).append(work)
    groups = dict(sorted(list(groups.items())[:MOST_GROUPS]))
    notes = _failures(records) + ([] if machine["gpu"] else [NO_GPU])
    room = LINES - len(lines) - len(notes) - 5  # an empty line, two header lines, and notes on "=" and on left-out names
    gains = {name: found.mean for name in ours if (found := ratio([run], name, stages.parent(name), run.works))}
    ranked = [*run.libraries, subject, over, ours[0], *sorted(gains, key=gains.get, reverse=True), *run.names]
    kept = list(dict.fromkeys(ranked))[:room]
    chosen = [name for name in run.names if name in kept]
    rows = [[name, *(_cell(run, name, works) for works in groups.values())] for name in chosen]
    unit = "TFLOP/s" if machine["gpu"] else "µs at peak"
    headers = [f"{unit}, × parent", *(f"{list(PASS_NAMES)[pass_]}, D={dim}" for pass_, dim in groups)]
    lines += ["", *markdown(rows, headers, (headers[0],)).splitlines()]
    notes = [LEGEND["="]] * any(cell.endswith("=") for row in rows for cell in row) + notes
    if len(chosen) < len(run.names):
        notes.insert(0, f"The tables below have {len(run.names) - len(chosen)} more implementations.")
    return "\n".join(lines + notes)
