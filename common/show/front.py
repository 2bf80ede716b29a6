"""The README's front page: a sentence on where the newest stage stands, and the ladder of all stages."""

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

HEAD_DIM = max(HEAD_DIMS)  # of the numbers on the front page


def names_in(found: list[Run]) -> list[str]:
    """The implementations in the runs: libraries as the oldest run has them, then the stages in their order."""
    return implementations([record for run in reversed(found) for record in run.records])


def last_stage(names: list[str]) -> str:
    """The newest stage of the main line."""
    return [name for name in names if stages.position(name) and not stages.is_dead_end(name)][-1]


def _origins(used: list[Run]) -> str:
    """The GPUs, versions, commits and dates of some runs, the oldest first."""
    machines = [run.machine for run in sorted(used, key=lambda run: run.ended)]
    commits = {}
    for machine in machines:
        versions = f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}"
        commits.setdefault(versions, []).append(f"{machine['commit'][:12]} ({machine['date']})")
    return "; ".join(f"{versions}, commit {', '.join(dict.fromkeys(found))}" for versions, found in commits.items())


def share_of_the_fastest(found: list[Run], name: str, pass_: str) -> tuple[float, Run] | None:
    """A stage's speed over that of the fastest library at each point, and the run with both; None where no run has both."""
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


def _row(found: list[Run], name: str) -> tuple[list[str], list[Run]]:
    """A stage's cells in the ladder, and the runs that they are from."""
    parent, used = stages.parent(name), []
    text = idea(name).removeprefix("A dead end: ").rstrip(".")
    text = text[0].upper() + text[1:] if text.split()[0].islower() else text
    lines = change(parent, name) if parent else None
    cells = [f"[{stages.version(name)}](stages/{name})", text, str(lines.added + lines.removed) if lines else "-"]
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


def ladder(found: list[Run]) -> str:
    """The table of stages, then the table of dead ends.

    Args:
        found: as `common.show.results.runs` gives them.
    """
    headers = ["stage", "idea", "lines changed", "forward × parent", "% of fastest", "backward × parent", "% of fastest"]
    align = ["left", "left"] + ["right"] * 5
    tables, used = [], []
    for dead in (False, True):
        rows = []
        for name in stages.names():
            if stages.is_dead_end(name) == dead:
                cells, runs = _row(found, name)
                rows.append(cells)
                used += runs
        table = tabulate(
            rows, ["dead end" if dead else "stage", *headers[1:]], tablefmt="pipe", disable_numparse=True, colalign=align
        )
        tables.append(re.sub(" {2,}", " ", re.sub("-{4,}", "---", table)))  # or a long cell makes every row as long
    words = (
        "*lines changed*: added and removed in the two files of a stage. *× parent*: times as fast as the stage that it was "
        "made from. *% of fastest*, for the pass on its left: share of the fastest library's speed, at each length and mask. "
        "*same code*: the file did not change; differences are noise or the tuner's. `-`: not measured."
    )
    dead_ends = (
        "A dead end is an idea that looked good and made attention slower. v4a branches off v4, and nothing is built on it."
    )
    over = f"Float16, D = {HEAD_DIM}, geometric mean over S = 1024 to 16384, causal and not. Each ratio is from one run."
    measured = f"{over} {_origins(used)}."
    return "\n\n".join([words, tables[0], dead_ends, tables[1], measured])


def headline(found: list[Run]) -> str:
    """How fast the newest stage is, next to the libraries and to the first stage.

    Args:
        found: as `common.show.results.runs` gives them.
    """
    names = names_in(found)
    first, last = next(name for name in names if stages.position(name)), last_stage(names)
    libraries = [name for name in names if not stages.position(name)]
    parts, used = [], []
    for pass_ in CODE:
        mean, run = rate(found, last, pass_, HEAD_DIM)
        links = chain(found, last, first, pass_, HEAD_DIM) or []
        over = (
            [f"×{math.prod(ratio for *_, ratio, _ in links):.0f} {spoken(first)}{' over several runs' * (len(links) > 1)}"]
            if links
            else []
        )
        over += [
            f"×{ratio:.2f} {spoken(name)}" for name in libraries if (ratio := speedup(run.records, last, name, pass_, HEAD_DIM))
        ]
        parts.append(f"{PASS_NAMES[pass_]} {mean:.0f} TFLOP/s" + (f" ({', '.join(over)})" if over else ""))
        used += [run, *(link[-1] for link in links)]
    return f"**{spoken(last)}, D = {HEAD_DIM}, float16**: {'; '.join(parts)}. {_origins(used)}."
