"""Write the generated parts of README.md: the newest stage's speed, and the ladder of all stages."""

import re

import stages
from common.show.results import (
    CHANGED,
    CODE,
    FASTEST,
    HEAD_DIMS,
    LEGEND,
    Run,
    gain,
    gpu_of,
    implementations,
    mean_over,
    rate,
    ratio,
    same_code,
    short_commit,
    spoken,
)
from common.show.story import change, idea
from common.show.tables import PASS_NAMES, markdown
from common.show.tracks import TRACKS, table

HEAD_DIM = max(HEAD_DIMS)  # the head dimension in README.md's tables


def names_in(found: list[Run]) -> list[str]:
    """Return the implementations in the runs: first the libraries, in the oldest run's order, then the stages in order."""
    return implementations([record for run in reversed(found) for record in run.records])


def origins(used: list[Run]) -> str:
    """Return the GPUs, versions, commits and dates of these runs, the oldest first."""
    commits = {}
    for run in sorted(used, key=lambda run: run.ended):
        machine = run.machine
        versions = f"{gpu_of(machine)}, torch {machine['torch']}, triton {machine['triton']}"
        commits.setdefault(versions, []).append(f"{short_commit(machine['commit'])} ({machine['date']})")
    return "; ".join(f"{versions}, commit {', '.join(dict.fromkeys(found))}" for versions, found in commits.items())


def start(name: str) -> list[str]:
    """Return a stage's first cells in a table: link, idea, and number of changed lines."""
    text = idea(name).removeprefix("A dead end: ").rstrip(".")
    text = text[0].upper() + text[1:] if text.split()[0].islower() else text
    parent = stages.parent(name)
    lines = change(parent, name) if parent else None
    return [f"[{stages.version(name)}](stages/{name})", text, str(lines.added + lines.removed) if lines else "-"]


def numbers(found: list[Run], name: str) -> tuple[dict[str, tuple[str, str]], list[Run]]:
    """Return a stage's gain over its parent and its share of the fastest library's speed, by pass. Also return the runs from
    which these cells are."""
    parent, used, cells = stages.parent(name), [], {}
    for pass_ in CODE:
        same = parent and same_code(name, parent, pass_)
        gained = None if same or not parent else gain(found, name, parent, pass_, HEAD_DIM)
        share = gain(found, name, FASTEST, pass_, HEAD_DIM)
        used += [each[1] for each in (gained, share) if each]
        cells[pass_] = (
            "same code" if same else str(gained[0]) if gained else "-", share[0].percent if share else "-"
        )  # fmt: skip
    return cells, used


def _short(shown: str) -> str:
    """Undo `tabulate`'s padding: keep one of several spaces, and at most three dashes."""
    return re.sub(" {2,}", " ", re.sub("-{4,}", "---", shown))


def ladder(found: list[Run]) -> str:
    """Return the table of the main ladder, then the tables of the tracks and of the dead ends.

    Args:
        found: the runs, from `common.show.results.runs`.
    """
    of_passes = [f"{PASS_NAMES[pass_]} {what}" for pass_ in CODE for what in ("× parent", "% of fastest")]
    tables, used = [], []
    for dead in (False, True):
        rows = []
        for name in stages.names():
            if stages.is_dead_end(name) == dead and (dead or not stages.track(name)):
                cells, from_ = numbers(found, name)
                rows.append([*start(name), *(cell for both in cells.values() for cell in both)])
                used += from_
        headers = ["dead end" if dead else "stage", "idea", "lines changed", *of_passes]
        tables.append(_short(markdown(rows, headers, tuple(headers[:2]))))
    libraries = dict.fromkeys(spoken(name) for run in used for name in run.libraries)
    meanings = [
        ["lines changed", "lines that the stage adds to its parent's code, plus lines that it removes"],
        ["× parent", "how many times as fast the stage is as its parent; below ×1.00 it is slower"],
        ["% of fastest", "100 %: as fast as each workload's fastest library; above 100 % the stage is faster"],
        ["× parent, % of fastest", "geometric means over the table's workloads; brackets: the lowest and highest workload"],
        ["=", LEGEND["="].removeprefix("=: ")],
        [CHANGED, LEGEND[CHANGED].removeprefix(f"{CHANGED}: ")],
        ["same code", "the stage does not change this pass, so its time is the parent's"],
        ["`-`", "not measured, or no parent (v0)"],
        ["commit", "the version of this repository that was measured"],
        ["measured on", "the GPU of the table; compare numbers within one table only, because the GPUs differ"],
    ]
    words = _short(markdown(meanings, ["in the tables", "meaning"], ("in the tables", "meaning")))
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
    """Return a table that compares the newest measured stage with the first stage and the libraries.

    Args:
        found: the runs, from `common.show.results.runs`.
    """
    line = [name for name in names_in(found) if stages.position(name) and not stages.is_dead_end(name)]
    best = {name: [rate(found, name, pass_, HEAD_DIM) for pass_ in CODE] for name in line}
    if not (both := [name for name in line if all(best[name])]):
        return "Not measured yet."
    last, first = both[-1], line[0]
    libraries = [name for name in names_in(found) if any(name in run.libraries for _, run in best[last])]
    rows, used = [], []
    for pass_, (mean, run) in zip(CODE, best[last], strict=True):
        over_first = gain(found, last, first, pass_, HEAD_DIM)
        gains = [over_first and over_first[0], *(ratio([run], last, name, mean_over(pass_, HEAD_DIM)) for name in libraries)]
        rows.append([PASS_NAMES[pass_], f"{mean:.0f}", *(str(each or "-") for each in gains)])
        used += [run, *([over_first[1]] if over_first else [])]
    headers = [f"{spoken(last)}, D = {HEAD_DIM}", "TFLOP/s", *(f"× {spoken(name)}" for name in (first, *libraries))]
    words = (
        f"{spoken(last)} is the newest measured stage. D is the head dimension. "
        "TFLOP/s counts 10¹² floating-point operations per second. "
        "×1.10 means 1.10 times as fast; brackets have the lowest and highest workload. The workloads are listed below the "
        f"ladder. Measured on {origins(used)}."
    )
    return f"{markdown(rows, headers, (headers[0],))}\n\n{words}"
