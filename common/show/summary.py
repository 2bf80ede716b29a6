"""Write the first lines of a GPU benchmark's output: a stage's gain over its parent, and a table of some implementations."""

from collections import Counter

import stages
from common.show.results import LEGEND, Run, ratio
from common.show.tables import PASS_NAMES, markdown

MOST_GROUPS = 4  # the table has columns for at most this many pairs of pass and head dimension
MOST_STAGES = 4  # the table has the stage that the summary is about, its parent, the parent's parent, up to this many


def _headline(run: Run, subject: str, over: str) -> list[str]:
    """Return lines that compare the speed of the stages `subject` and `over`, one line for each pass."""
    if over == subject:
        return [f"{subject}:"]
    role = "its parent" if over == stages.parent(subject) else "the first stage of this run"
    lines = [f"{subject} compared with {role}, {over}:"]
    for pass_, name in PASS_NAMES.items():
        works = [work for work in run.works if work.pass_ == pass_]
        if found := ratio([run], subject, over, works):
            spread = f" ({found.spread})" if found.spread else ""
            noise = ", which is within the noise" if found.same else ""
            cudnn = ratio([run], subject, "sdpa-cudnn", works)
            share = f", {100 * cudnn.mean:.0f} % of cuDNN's speed" if cudnn else ""
            lines.append(f"  {name}: {found.mean:.2f} times as fast{spread}{noise}{share}")
    return lines


def _cell(run: Run, name: str, works: list) -> str:
    """Return an implementation's TFLOP/s and its gain over its parent."""
    times = run.times(name, works)
    if not times:
        return "-"
    rate = f"{sum(run.record(name, work)['flops'] for work in times) / sum(times.values()) / 1e9:.0f}"
    found = ratio([run], name, stages.parent(name), works)
    return f"{rate} {found.short}" if found else rate


def summary(records: list[dict], machine: dict, about: str | None = None) -> str:
    """Summarize a run in a few lines: gains over the parent, by pass and head dimension.

    Args:
        records, machine: as for `common.show.tables.speed_table`.
        about: the stage whose gain over its parent comes first. With None, the newest stage's gain over the run's first stage
            comes first, or that of the run's last stage.
    """
    run = Run(records, machine)
    ours = [name for name in run.names if stages.position(name)]
    if not ours:
        return ""
    subject = next((name for name in (about, stages.newest()) if name in ours), ours[-1])
    over = stages.parent(subject) if about and stages.parent(subject) in run.names else ours[0]
    lines, groups = _headline(run, subject, over), {}
    for work in run.works:
        groups.setdefault((list(PASS_NAMES).index(work.pass_), work.head_dim), []).append(work)
    groups = dict(sorted(list(groups.items())[:MOST_GROUPS]))
    before = [subject]
    while len(before) < MOST_STAGES and (parent := stages.parent(before[-1])):
        before.append(parent)
    kept = {*run.libraries, over, ours[0], *before}
    rows = [[name, *(_cell(run, name, works) for works in groups.values())] for name in run.names if name in kept]
    headers = ["TFLOP/s, × parent", *(f"{list(PASS_NAMES)[pass_]}, D={dim}" for pass_, dim in groups)]
    lines += ["", *markdown(rows, headers, (headers[0],)).splitlines()]
    if left_out := len(run.names) - len(rows):
        lines.append(f"The tables below have {left_out} more implementations.")
    failures = Counter(f"{record['impl']} {record['failure']}" for record in records if "failure" in record)
    lines += ["Not measured: " + ", ".join(f"{what} ({number})" for what, number in failures.items())] * bool(failures)
    lines += [LEGEND["="]] * any(cell.endswith("=") for row in rows for cell in row)
    return "\n".join(lines)
