"""Write the generated parts of README.md: the newest stage's speed, and the ladder of all stages."""

import math
import re

from tabulate import tabulate

import stages
from common.show.results import (
    CODE,
    HEAD_DIMS,
    Run,
    chain,
    gain,
    gpu_of,
    implementations,
    mean_ratio,
    newest,
    rate,
    same_code,
    speedup,
    spoken,
    times_of,
)
from common.show.story import change, idea
from common.show.tables import PASS_NAMES
from common.show.tracks import TRACKS, table

HEAD_DIM = max(HEAD_DIMS)  # the head dimension in README.md's tables


def names_in(found: list[Run]) -> list[str]:
    """Return the implementations in the runs: first the libraries, in the oldest run's order, then the stages in order."""
    return implementations([record for run in reversed(found) for record in run.records])


def last_stage(found: list[Run]) -> str:
    """Return the newest stage whose passes are both measured, and that is not a dead end."""
    line = [name for name in names_in(found) if stages.position(name) and not stages.is_dead_end(name)]
    return next(name for name in reversed(line) if all(rate(found, name, pass_, HEAD_DIM) for pass_ in CODE))


def origins(used: list[Run]) -> str:
    """Return the GPUs, versions, commits and dates of these runs, the oldest first."""
    machines = [run.machine for run in sorted(used, key=lambda run: run.ended)]
    commits = {}
    for machine in machines:
        versions = f"{gpu_of(machine)}, torch {machine['torch']}, triton {machine['triton']}"
        commits.setdefault(versions, []).append(f"{machine['commit'][:12]} ({machine['date']})")
    return "; ".join(f"{versions}, commit {', '.join(dict.fromkeys(found))}" for versions, found in commits.items())


def share_of_the_fastest(found: list[Run], name: str, pass_: str) -> tuple[float, Run] | None:
    """Return a stage's speed divided by the fastest library's speed, and the newest run with the stage. Return None if no run
    has the stage, or if that newest run has no times of libraries.

    The ratio is the mean over the workloads. Each workload has its own fastest library.
    """
    run = newest(found, pass_, HEAD_DIM, name)
    if not run:
        return None
    ours, *libraries = (
        times_of(run.records, impl, pass_, HEAD_DIM)
        for impl in (name, *(impl for impl in implementations(run.records) if not stages.position(impl)))
    )
    fastest = {key: min(times[key] for times in libraries if key in times) for key in set().union(*libraries)}
    ratio = mean_ratio(ours, fastest)
    return (ratio, run) if ratio else None


def start(name: str) -> list[str]:
    """Return a stage's first cells in a table: link, idea, and number of changed lines."""
    text = idea(name).removeprefix("A dead end: ").rstrip(".")
    text = text[0].upper() + text[1:] if text.split()[0].islower() else text
    parent = stages.parent(name)
    lines = change(parent, name) if parent else None
    return [f"[{stages.version(name)}](stages/{name})", text, str(lines.added + lines.removed) if lines else "-"]


def row(found: list[Run], name: str) -> tuple[list[str], list[Run]]:
    """Return a stage's cells in the ladder, and the runs with the cells' numbers."""
    parent, used, cells = stages.parent(name), [], start(name)
    for pass_ in CODE:
        gained = parent and gain(found, name, parent, pass_, HEAD_DIM)
        if parent and same_code(name, parent, pass_):
            cells.append("same code")
        else:
            cells.append(f"×{gained[0]:.2f}" if gained else "-")
            used += [gained[1]] if gained else []
        share = share_of_the_fastest(found, name, pass_)
        cells.append(f"{100 * share[0]:.0f} %" if share else "-")
        used += [share[1]] if share else []
    return cells, used


def _short(shown: str) -> str:
    """Undo `tabulate`'s padding: keep one of several spaces, and at most three dashes."""
    return re.sub(" {2,}", " ", re.sub("-{4,}", "---", shown))


def ladder(found: list[Run]) -> str:
    """Return the table of the main ladder, then the tables of the tracks and of the dead ends.

    Args:
        found: the runs, from `common.show.results.runs`.
    """
    of_passes = [f"{PASS_NAMES[pass_]} {gain}" for pass_ in CODE for gain in ("× parent", "% of fastest")]
    headers = ["stage", "idea", "lines changed", *of_passes]
    align = ["left", "left"] + ["right"] * 5
    tables, used = [], []
    for dead in (False, True):
        rows = []
        for name in stages.names():
            if stages.is_dead_end(name) == dead and (dead or not stages.track(name)):
                cells, runs = row(found, name)
                rows.append(cells)
                used += runs
        shown = tabulate(
            rows, ["dead end" if dead else "stage", *headers[1:]], tablefmt="pipe", disable_numparse=True, colalign=align
        )
        tables.append(_short(shown))
    libraries = dict.fromkeys(spoken(name) for run in used for name in names_in([run]) if not stages.position(name))
    meanings = [
        ["lines changed", "lines that the stage adds to its parent's code, plus lines that it removes"],
        ["× parent", "how many times as fast the stage is as its parent; below ×1.00 it is slower"],
        ["% of fastest", "100 %: as fast as each workload's fastest library; above 100 % the stage is faster"],
        ["× parent, % of fastest", "geometric means over the table's workloads"],
        ["same code", "the stage does not change this pass, so its time is the parent's"],
        ["`-`", "not measured, or no parent (v0)"],
        ["commit", "the version of this repository that was measured"],
        ["measured on", "the GPU of the table; compare numbers within one table only, because the GPUs differ"],
    ]
    words = _short(tabulate(meanings, ["in the tables", "meaning"], tablefmt="pipe", disable_numparse=True))
    over = (
        f"Six workloads, float16, D = {HEAD_DIM}: 1024, 4096 and 16384 tokens, each with and without a causal mask. "
        f"Libraries: {', '.join(libraries)}. Measured on"
    )
    dead_ends = (
        "A dead end is an idea that looked good but made nothing faster. Its parent has the same number: v4a starts from v4. "
        "The workloads are the ladder's."
    )
    each = [_short(table(key, start)) for key in TRACKS]
    measured = f"{over} {origins(used)}."
    return "\n\n".join([words, tables[0], measured, *each, dead_ends, tables[1]])


def headline(found: list[Run]) -> str:
    """Return a table that compares the newest stage's speed with the first stage and the libraries.

    Args:
        found: the runs, from `common.show.results.runs`.
    """
    if not found:
        return "Not measured yet."
    names = names_in(found)
    first, last = next(name for name in names if stages.position(name)), last_stage(found)
    libraries = [name for name in names if not stages.position(name)]
    best = {pass_: rate(found, last, pass_, HEAD_DIM) for pass_ in CODE}
    beside = {name for _, run in best.values() for name in implementations(run.records)}
    libraries = [name for name in libraries if name in beside]
    rows, used, chained = [], [], False
    for pass_, (mean, run) in best.items():
        links = chain(found, last, first, pass_, HEAD_DIM) or []
        ratios = [math.prod(ratio for *_, ratio, _ in links) if links else None]
        ratios += [speedup(run.records, last, name, pass_, HEAD_DIM) for name in libraries]
        cells = [f"×{ratio:.{2 if ratio < 10 else 0}f}" if ratio else "-" for ratio in ratios]
        rows.append([PASS_NAMES[pass_], f"{mean:.0f}", *cells])
        used += [run, *(link[-1] for link in links)]
        chained |= len(links) > 1
    headers = [f"{spoken(last)}, D = {HEAD_DIM}", "TFLOP/s", *(f"× {spoken(name)}" for name in (first, *libraries))]
    table = tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=["left"] + ["right"] * (len(headers) - 1))
    words = (
        f"{spoken(last)} is the newest measured stage. D is the head dimension. "
        "TFLOP/s counts 10¹² floating-point operations per second. "
        f"×1.10 means 1.10 times as fast. The workloads are listed below the ladder. Measured on {origins(used)}."
    )
    if chained:
        words += (
            f" No run has both {spoken(first)} and {spoken(last)}, so × {spoken(first)} multiplies the gains of several runs."
        )
    return f"{table}\n\n{words}"
