"""The tracks after the main ladder. Each track is for one kind of workload, which `bench.py --reference` measures."""

from collections.abc import Callable
from dataclasses import dataclass

import stages
from common.measure.workloads import Workload
from common.show import results
from common.show.results import Run


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


def runs_of(key: str) -> list[Run]:
    """Return the runs in results/ that measured a track's workloads."""
    return [results.load_run(path) for path in map(results.run_file, TRACKS[key].grids) if path.exists()]


def gain(key: str, new: str, old: str) -> results.Gain | None:
    """Return `new`'s speed divided by `old`'s speed over a track's workloads. Return None if no workload was measured with
    both. `old` may be `results.FASTEST`."""
    track, found = TRACKS[key], runs_of(key)
    works = {work for run in found for work in run.works if work.pass_ == track.pass_ and track.counts(work)}
    return results.ratio(found, new, old, works)


def place(key: str) -> str:
    """Return the GPUs and commits of a track's runs, shortened."""
    return results.places(runs_of(key))
