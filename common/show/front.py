"""Write the generated parts of README.md: the newest stage's speed, and the ladder of all stages."""

import itertools
import re
from collections.abc import Iterable

import stages
from common.measure.workloads import HIDDEN, TOKENS, Workload
from common.show import lead, results, tracks
from common.show.story import change, idea
from common.show.tables import PASS_NAMES, markdown

PACKAGES = {"xformers": "FlashAttention-3 of xformers", "flash-attn-3": "FlashAttention-3", "flash-attn-4": "FlashAttention-4"}
HEAD_DIM = max(results.HEAD_DIMS)  # the head dimension in README.md's tables


def start(name: str) -> list[str]:
    """Return a stage's first cells in a table: link, idea, and number of changed lines."""
    text = idea(name).removeprefix("A dead end: ").rstrip(".")
    text = text[0].upper() + text[1:] if text.split()[0].islower() else text
    parent = stages.parent(name)
    lines = change(parent, name) if parent else None
    return [f"[{stages.version(name)}](stages/{name})", text, str(lines.added + lines.removed) if lines else "-"]


def numbers(found: list[results.Run], name: str) -> tuple[dict[str, tuple[str, str]], list[results.Run], list[results.Run]]:
    """Return a stage's gain over its parent and its share of the fastest library's speed, by pass. Also return the runs from
    which these cells are, and the runs of the shares."""
    parent, used, compared, cells = stages.parent(name), [], [], {}
    for pass_ in results.CODE:
        same = parent and results.same_code(name, parent, pass_)
        gained = None if same or not parent else results.gain(found, name, parent, pass_, HEAD_DIM)
        share = results.gain(found, name, results.FASTEST, pass_, HEAD_DIM)
        used += [each[1] for each in (gained, share) if each]
        compared += [share[1]] if share else []
        over_parent = "same code" if same else str(gained[0]) if gained else "-"
        cells[pass_] = over_parent, share[0].percent if share else "-"
    return cells, used, compared


def _table(first: str, rows: Iterable[list], more: list[str]) -> str:
    """Format a table of stages without `tabulate`'s padding: at most one space in a row, and at most three dashes."""
    shown = markdown(list(rows), [first, "idea", "lines changed", *more], (first, "idea"))
    return re.sub(" {2,}", " ", re.sub("-{4,}", "---", shown))


def track_table(key: str, track: tracks.Track) -> str:
    """Format a track: its workloads, and a row for each stage. The first row is the stage from which the track starts."""
    found, line, headers = tracks.runs_of(key), stages.line(key), ["× parent", "% of fastest"]
    rows = []
    for name in (stages.parent(line[0]), *line):
        gained = tracks.gain(key, name, stages.parent(name)) if name in line else None
        share = tracks.gain(key, name, results.FASTEST)
        rows.append([*start(name), str(gained or "-"), share.percent if share else "-"])
    rows[0][1:3] = ["The track starts from this stage", "-"]
    libraries = list(dict.fromkeys(results.spoken(name) for run in found for name in run.libraries))
    facts = [f"{PASS_NAMES[track.pass_].capitalize()}: {track.words}."]
    facts += [f"Libraries: {', '.join(libraries)}."] if libraries else []
    measured = any(cell != "-" for row in rows for cell in row[3:])
    facts.append(f"Measured on {results.places(found)}.{tracks.unmeasured(key)}" if measured else "Not measured yet.")
    return f"{' '.join(facts)}\n\n{_table(track.title, rows, headers)}"


def ladder(found: list[results.Run]) -> str:
    """Return the table of the trunk, then the tables of the tracks and of the dead ends."""
    used, compared = [], []

    def rows(names):
        for name in names:
            cells, of_cells, of_shares = numbers(found, name)
            used.extend(of_cells)
            compared.extend(of_shares)
            yield [*start(name), *(cell for both in cells.values() for cell in both)]

    more = [f"{PASS_NAMES[pass_]} {what}" for pass_ in results.CODE for what in ("× parent", "% of fastest")]
    main = _table("stage", rows(stages.line()), more)
    dead_ends = _table("dead end", rows(filter(stages.is_dead_end, stages.names())), more)
    libraries = dict.fromkeys(results.spoken(name) for run in compared for name in run.libraries)
    measured = (
        f"Six workloads, float16, D = {HEAD_DIM}: 1024, 4096 and 16384 tokens, causal and not. "
        f"Libraries: {', '.join(libraries)}. {results.measured(used)}"
    )
    words = (
        "A dead end looked good, but gained too little, or lost. Its parent has the same number: v4a starts "
        "from v4. The workloads are the ladder's."
    )
    return "\n\n".join([main, measured, *itertools.starmap(track_table, tracks.known().items()), words, dead_ends])


def versions(used: list[results.Run]) -> str:
    """Return the versions of PyTorch, Triton and the libraries in these runs."""
    found = {}
    for machine in (run.machine for run in used):
        of_run = {"Triton": machine["triton"], "torch (FlashAttention-2)": machine["torch"]}
        if machine["cudnn"]:
            of_run["cuDNN"] = ".".join(
                map(str, (machine["cudnn"] // 10000, machine["cudnn"] // 100 % 100, machine["cudnn"] % 100))
            )
        of_run |= {PACKAGES.get(name, name): version for name, version in machine["others"].items()}
        for name, version in of_run.items():
            found.setdefault(name, {})[version] = None
    return ", ".join(f"{name} {' and '.join(each)}" for name, each in found.items())


def _tokens(lengths: Iterable[int]) -> str:
    """Return lengths in words: "1024, 4096 and 16384 tokens"."""
    return f"{' and '.join(', '.join(map(str, sorted(set(lengths)))).rsplit(', ', 1))} tokens"


def _inputs(works: Iterable[Workload]) -> list[str]:
    """Return in words which lengths the workloads with wide scores have, and which those with sinks."""
    lengths = {
        "scores of σ > 1": {work.seq_len for work in works if work.score_std > 1},
        "[sinks](docs/reading.md#glossary) (24 nats, at the first key also 8)": {
            work.seq_len for work in works if work.sink and work.sink_head is None
        },
        "sinks in one head": {work.seq_len for work in works if work.sink_head is not None},
    }
    return [f"{words} have {_tokens(found)}" for words, found in lengths.items() if found]


def headline(found: list[results.Run]) -> str:
    """Return three tables about the newest measured stage: beside the first stage and each library; beside the fastest library,
    with all that was measured; and what was measured. Each ratio of the first table is from the newest run that has both."""
    columns = list(itertools.product(results.CODE, results.HEAD_DIMS))
    line = [name for name in stages.line() if any(name in run.names for run in found)]
    held = {name: [results.newest(found, *column, name) for column in columns] for name in line}
    if not (everywhere := [name for name in line if all(held[name])]):
        return "Not measured yet."
    last, first = everywhere[-1], line[0]
    libraries = list(dict.fromkeys(name for run in reversed(found) for name in run.libraries))
    libraries = [name for name in libraries if any(results.newest(found, *column, last, name) for column in columns)]
    rows, used, partly = [], [], []
    for (pass_, head_dim), run in zip(columns, held[last], strict=True):
        gains = [results.gain(found, last, name, pass_, head_dim) for name in (first, *libraries)]
        works = results.mean_over(pass_, head_dim)
        mark = results.CHANGED * any(results.changed(run.record(last, work)) for work in works)
        rate = f"{run.rate(last, works):.0f}{mark} ({results.gpu_of(run.machine)})"
        column = f"{PASS_NAMES[pass_]}, D = {head_dim}"
        rows.append([column, rate, *(str(each[0]) if each else "-" for each in gains)])
        for name, each in zip((first, *libraries), gains, strict=True):
            if each and each[0].points < len(works):
                partly.append(f"{column}, × {results.spoken(name)}: {each[0].points} of {len(works)} workloads")
        used += [run, *(each[1] for each in gains if each)]
    headers = [
        f"{results.spoken(last)}, the newest", "TFLOP/s", *(f"× {results.spoken(name)}" for name in (first, *libraries))
    ]  # fmt: skip
    lead_of, used = lead.lead(last), sorted(used, key=lambda run: run.ended)
    inputs = _inputs({work for run in lead_of.runs.values() for work in run.works})
    facts = {
        "ties or losses on average": "; ".join(f"{column}: {', '.join(rows)}" for column, rows in lead_of.ends.items()) or "-",
        "first table": f"float16, {_tokens(results.MEAN_OVER)}, causal and not; {TOKENS} tokens in a batch; heads · D = "
        f"{HIDDEN}; standard deviation of scores σ = 1. Geometric mean (lowest–highest). "
        f"GPUs and commits: {results.places(used)}",
        **({"not measured everywhere": "; ".join(partly)} if partly else {}),
        "second table": "geometric mean (lowest), and how many workloads are slower, if only within the noise. Rows of "
        "lengths have the first table's shapes at that length; "
        f"{'; '.join([*inputs, 'only rows of lengths have FlashAttention-2'])}, up to D = 128. "
        "Random shapes: 100, each in one dtype; no constant was fitted to them, but 11 were measured as stages were written. "
        f"Files of results/: {', '.join(lead_of.runs)}",
        **{f"without {library}": "; ".join(words) for library, words in lead_of.without.items()},
        "versions": versions([*used, *lead_of.runs.values()]),
    }
    first = "about both tables"
    about = markdown(list(facts.items()), [first, ""], (first, ""))
    return "\n\n".join([markdown(rows, headers, (headers[0],)), lead_of.table, about])
