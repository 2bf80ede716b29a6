"""The tracks' benchmarks. A track is a branch off the trunk for one kind of workload.

The directory of a track's first stage has `benchmark.toml`: the workloads, in words and as command lines of bench.py. A track
without this file has no benchmark and no table.
"""

import tomllib
from typing import NamedTuple

import stages
from common.show import results
from common.show.results import Run


class Track(NamedTuple):
    """A track and its benchmark."""

    title: str
    pass_: str  # the pass that the track makes faster: "fwd" or "bwd"
    words: str  # the workloads in words
    at: str  # short form of `words`
    runs: dict[str, list[str]]  # value of `bench.py --reference` -> command lines of its run
    without: tuple[str, ...] = ()  # libraries that the runs leave out
    scene: dict = {}  # the workload of the pages' pictures


def read(key: str | None) -> Track | None:
    """Return a track; None if it has no benchmark, and for the trunk, whose `stages.track` is None.

    Raises:
        SystemExit: the benchmark is incomplete.
    """
    path = next((stages.directory(name) / "benchmark.toml" for name in stages.line(key)), None)
    if not path or not path.exists():
        return None
    try:
        return Track(**{name.replace("pass", "pass_"): value for name, value in tomllib.loads(path.read_text()).items()})
    except (TypeError, ValueError) as error:
        raise SystemExit(f"{path}: {error}") from None


def known() -> dict[str, Track]:
    """Return all tracks that have a benchmark, by name."""
    return {key: track for key in stages.tracks() if (track := read(key))}


def runs_of(key: str) -> list[Run]:
    """Return the runs in results/ that measured a track's workloads."""
    track = read(key)
    return [results.load_run(path) for path in map(results.run_file, track.runs if track else ()) if path.exists()]


def unmeasured(key: str) -> str:
    """Return a sentence that names the parts of a track's benchmark without a file in results/; "" if all have one."""
    missing = [part for part in read(key).runs if not results.run_file(part).exists()]
    return f" Not measured yet: {', '.join(missing)}." * bool(missing)


def gain(key: str, new: str, old: str) -> results.Gain | None:
    """Return `new`'s speed divided by `old`'s speed over a track's workloads. Return None if no workload was measured with
    both. `old` may be `results.FASTEST`."""
    pass_, found = read(key).pass_, runs_of(key)
    works = {work for run in found for work in run.works if work.pass_ == pass_}
    return results.ratio(found, new, old, works)
