"""The tracks after the main ladder. Each track is for one kind of workload, which `bench.py --reference` measures."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tabulate import tabulate

import stages
from common.measure.workloads import Workload
from common.show import results
from common.show.tables import PASS_NAMES


@dataclass(frozen=True)
class Track:
    """A track's workloads. A stage names its track in its code: `TRACK = "decoding"`."""

    title: str
    pass_: str
    grids: tuple[str, ...]  # values of `bench.py --reference`
    words: str  # the track's workloads in words
    at: str  # short form of `words`
    counts: Callable[[Workload], bool]


TRACKS = {
    "decoding": Track(
        "Decoding", "fwd", ("decode-d64", "decode-d128"),
        "one query, 1024 to 524288 keys, D = 64 and 128, bfloat16", "one query", lambda work: work.seq_len == 1,
    ),
    "query-groups": Track(
        "Backwards with query groups", "bwd", ("query-groups",),
        "4096 to 32768 tokens, 64 query heads, 8 K/V heads, causal, float16, D = 128", "GQA, causal, D = 128",
        lambda work: work.kv_heads < work.heads,
    ),
    "short-rows": Track(
        "Backwards of short sequences", "bwd", ("short-rows",),
        "512 and 1024 tokens, float16, D = 64", "S ≤ 1024, D = 64", lambda work: work.seq_len <= 1024,
    ),
    "short-forwards": Track(
        "Forwards of short sequences", "fwd", ("short-forwards",),
        "256 and 512 tokens, D = 64, 128 and 256, float16", "S ≤ 512", lambda work: work.seq_len <= 512,
    ),
    "sinks": Track(
        "Attention sinks and wide scores", "fwd", ("sinks", "wide-scores"),
        "4096 tokens, D = 64 and 128, and scores with a sink or a standard deviation of 4 or more", "sinks and wide scores",
        lambda work: work.sink > 0 or work.score_std >= 4,
    ),
    "wide": Track("D = 256", "bwd", ("wide",), "1024 to 16384 tokens, float16", "D = 256", lambda work: True),
}  # fmt: skip


def stages_of(key: str) -> list[str]:
    """Return a track's stages in order, without dead ends."""
    return [name for name in stages.names() if stages.track(name) == key and not stages.is_dead_end(name)]


def _times(track: Track) -> tuple[dict[str, dict[Workload, float]], list[dict]]:
    """Return milliseconds by implementation and workload, and the machines of the runs."""
    paths = [path for path in map(results.run_file, track.grids) if path.exists()]
    return _times_of(track, tuple((path, path.stat().st_mtime_ns) for path in paths))


@functools.lru_cache
def _times_of(track, files):
    times, machines = {}, []
    for path, _ in files:
        records, machine = results.load_run(path)
        machines.append(machine)
        for record in results.with_repeats(records):
            work = Workload.of(record)
            if "ms" in record and work.pass_ == track.pass_ and track.counts(work):
                times.setdefault(record["impl"], {})[work] = record["ms"]
    return times, machines


def gain(key: str, new: str, old: str) -> float | None:
    """Return `new`'s speed divided by `old`'s speed, as the mean over a track's workloads. Return None if no workload was
    measured with both."""
    times, _ = _times(TRACKS[key])
    return results.mean_ratio(times.get(new, {}), times.get(old, {}))


def place(key: str) -> str:
    """Return the GPUs and commits of a track's runs, shortened."""
    _, machines = _times(TRACKS[key])
    return "; ".join(dict.fromkeys(map(results.place, machines)))


def share_of_the_fastest(key: str, name: str) -> float | None:
    """Return a stage's speed divided by the speed of the fastest library, as the mean over a track's workloads."""
    times, _ = _times(TRACKS[key])
    libraries = [of_impl for impl, of_impl in times.items() if not stages.position(impl)]
    fastest = {work: min(each[work] for each in libraries if work in each) for work in set().union(*libraries)}
    return results.mean_ratio(times.get(name, {}), fastest)


def table(key: str, start: Callable[[str], list[str]]) -> str:
    """Format a track: its workloads, and a row for each stage.

    Args:
        start: a function that returns a stage's first cells: stage, idea and changed lines.
    """
    track = TRACKS[key]
    rows = []
    for name in stages_of(key):
        gained, share = gain(key, name, stages.parent(name)), share_of_the_fastest(key, name)
        rows.append([
            *start(name), f"×{gained:.2f}" if gained else "-", f"{100 * share:.0f} %" if share else "-",
        ])  # fmt: skip
    headers = [track.title, "idea", "lines changed", "× parent", "% of fastest"]
    times, _ = _times(track)
    libraries = [results.spoken(impl) for impl in times if not stages.position(impl)]
    if times and not libraries:  # the track's runs compare stages only
        headers, rows = headers[:-1], [row[:-1] for row in rows]
    align = ["left", "left", *["right"] * (len(headers) - 2)]
    shown = tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=align)
    facts = [f" Libraries: {', '.join(libraries)}."] if libraries else []
    measured = any(cell != "-" for row in rows for cell in row[3:])
    facts = [*facts, f" Measured on {place(key)}."] if measured else [" Not measured yet."]
    return f"{PASS_NAMES[track.pass_].capitalize()}: {track.words}.{''.join(facts)}\n\n{shown}"


def headings(names: list[str]) -> Iterator[tuple[str | None, str]]:
    """Yield a heading and a stage, for each stage. The heading names the track that begins with the stage. If no track begins
    there, the heading is None."""
    before = None
    for name in names:
        key = stages.track(name)
        track = TRACKS[key] if key and key != before else None
        yield (f"Track: {track.title} ({PASS_NAMES[track.pass_]}, {track.words})" if track else None), name
        before = key
