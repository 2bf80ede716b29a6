"""Read the saved runs of the benchmark: who was measured, who was faster, how noisy the run was, and where it is from."""

import functools
import itertools
import json
import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import stages
from common.measure import digest
from common.measure.workloads import HIDDEN, TOKENS, Workload

ROOT = Path(__file__).parents[2]
GPUS = ("h200", "h100")  # as in the names of the files in results/
HEAD_DIMS = (64, 128)
MEAN_OVER = (1024, 4096, 16384)  # sequence lengths at which the reference run measures every stage
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)  # all sequence lengths of the papers
CODE = {"fwd": "forward", "bwd": "backward"}  # pass -> its name in `stages.files`; fwd+bwd has no code of its own
COLUMNS = tuple(itertools.product(CODE, HEAD_DIMS))  # passes and head dimensions
TRAFFIC = ROOT / "results" / "traffic.json"
COUNTED_AT = 2048  # the sequence length of TRAFFIC
PLOTS = ROOT / "plots"
FASTEST = "fastest library"  # stands for the fastest library of each workload
AGAIN = " (again)"  # ends the name of a stage that a run measures twice
LEAST_PAIRS = 6  # a run has a noise band if it has at least this many pairs of times of the same code
CHANGED = "†"  # marks a number whose code has changed since
LEGEND = {
    "=": "=: within the noise.",
    CHANGED: f"{CHANGED}: the code of the stage or its parent has changed since the run.",
}
SPOKEN = {
    "sdpa-flash": "FlashAttention-2", "sdpa-cudnn": "cuDNN", "flash-3": "FlashAttention-3", "flash-4": "FlashAttention-4",
    "cudnn-e4m3": "cuDNN in 8 bits", "flash-2": "FlashAttention-2",
}  # fmt: skip


@functools.lru_cache
def _loaded(path: Path, changed_ns: int) -> tuple[dict, "Run | None"]:
    saved = json.loads(path.read_text())
    return saved, Run.of(saved, repeats=True) if "benchmarks" in saved else None


def _load(path: Path) -> tuple[dict, "Run | None"]:
    """Return a file's content, and the run in it if it is one. Both are cached, so callers must not change them.

    Raises:
        SystemExit: the file is missing or incomplete.
    """
    try:
        return _loaded(path, path.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError):
        raise SystemExit(f"{path} is missing or incomplete; results/README.md has the command that writes it") from None


def read(path: Path) -> dict:
    """Return the content of a file of results/."""
    return _load(path)[0]


def load_run(path: Path) -> "Run":
    """Return the run in a file; raise SystemExit if the file has none."""
    if run := _load(path)[1]:
        return run
    raise SystemExit(f"{path} is no run of the benchmark")


def source(name: str, pass_: str) -> str | None:
    """Return the digest of a stage's pass as it is now, or None for a library and for a stage that no longer exists.

    For fwd+bwd, return both digests, joined by "+". `name` may end with `AGAIN`. A record's `source` is the digest of the
    code that was measured.
    """
    name = name.removesuffix(AGAIN)
    if not stages.position(name) or not (stages.directory(name) / "__init__.py").exists():
        return None
    return "+".join(digest.current(name, CODE[part]) for part in pass_.split("+"))


def same_code(new: str, old: str, pass_: str) -> bool:
    """Return whether two stages have the same code for a pass, apart from comments. Return False if a stage no longer
    exists."""
    return source(new, pass_) == source(old, pass_) is not None


def passes(name: str) -> list[str]:
    """Return the passes that a stage changes. The first stage changes all."""
    parent = stages.parent(name)
    return [pass_ for pass_ in CODE if not (parent and same_code(name, parent, pass_))]


def changed(record: dict) -> bool:
    """Return whether a stage's code has changed since this record was measured. Return False if this is unknown."""
    now = source(record["impl"], record["pass"])
    return None not in (now, record.get("source")) and now != record["source"]


def present(records: list[dict]) -> list[dict]:
    """Return the records with the present names of stages, without those of stages that no longer exist.

    A stage that took in several others has code that no run measured, so it gets no records of theirs. Neither does a stage get
    records of a pass that it does not change: under its old name, it had another parent.
    """
    here, moved = {*stages.names()}, stages.moved()
    names = {old: new for old, new in moved.items() if [*moved.values()].count(new) == 1}
    passes_of, found = functools.cache(passes), []  # many records have one stage
    for record in records:
        name, again, _ = record["impl"].partition(AGAIN)
        now = name if name in here or not stages.position(name) else names.get(name)
        own = now == name or record["pass"] not in CODE or (now and record["pass"] in passes_of(now))
        found += [record | {"impl": now + again}] if now and own else []
    return found


def stage_order(impl: str) -> tuple:
    """Return a sort key: baselines first, then the stages in the order of `stages.names`."""
    return stages.position(impl) or (-1,)


def implementations(records: list[dict]) -> list[str]:
    """Return the names in the records: baselines first, then the stages in stage order."""
    return sorted(dict.fromkeys(record["impl"] for record in records), key=stage_order)


def spoken(name: str) -> str:
    """Return an implementation's short name: a stage's version, or a library's usual name. `name` may end with `AGAIN`."""
    name, again, _ = name.partition(AGAIN)
    return (stages.version(name) if stages.position(name) else SPOKEN.get(name, name)) + again


def paper(pass_: str, head_dim: int, causal: bool, seq_len: int) -> Workload:
    """Return a workload of the FlashAttention papers in float16: 16k tokens, hidden size 2048, narrow scores and no sink."""
    return Workload(pass_, TOKENS // seq_len, HIDDEN // head_dim, seq_len, head_dim, causal, "float16")


@functools.cache
def mean_over(pass_: str, head_dim: int) -> tuple[Workload, ...]:
    """Return the workloads of the ladder's means: the papers' at the lengths of `MEAN_OVER`, with and without a causal mask."""
    return tuple(paper(pass_, head_dim, causal, s) for causal, s in itertools.product((False, True), MEAN_OVER))


class Run:
    """A run of the benchmark.

    A reference run skips a pass whose code is equal to the parent's. With `repeats`, such a pass gets the parent's records.

    Attributes:
        records: the `present` records, including failures and the added ones, but without those that measure a stage `AGAIN`.
        machine: the GPU, versions, commit and date.
        ended: the end time as a sortable string.
        noise: by pass, the RMS of the logarithms of the ratios of two times of the same code and workload. The two times belong
            to stages whose passes have the same digest, or to one stage that the run measured twice. A pass with fewer than
            `LEAST_PAIRS` ratios is missing.
    """

    def __init__(self, records: list[dict], machine: dict, ended: str = "", repeats: bool = False):
        self.machine, self.ended = machine, ended
        self.noise = _noise(records) if machine["gpu"] else {}
        self.records = [record for record in present(records) if not record["impl"].endswith(AGAIN)]
        self._cases = {}
        for record in self.records:
            self._cases.setdefault((record["impl"], record["pass"]), {})[Workload.of(record)] = record
        known = stages.names() if repeats else []
        parents = {name: stages.parent(name, known) for name in known}
        for (name, parent), pass_ in itertools.product(parents.items(), CODE):  # parents before their children
            theirs = self._cases.get((parent, pass_))
            if theirs and (name, pass_) not in self._cases and same_code(name, parent, pass_):
                self._cases[name, pass_] = {work: record | {"impl": name} for work, record in theirs.items()}
                self.records += self._cases[name, pass_].values()
        self.names = implementations(self.records)
        self.libraries = [name for name in self.names if not stages.position(name)]
        self.works = list(dict.fromkeys(work for cases in self._cases.values() for work in cases))

    @classmethod
    def of(cls, saved: dict, repeats: bool = False) -> "Run":
        """Return the run in a file's content. Raise KeyError or TypeError if it is no run."""
        records = [benchmark["extra_info"] for benchmark in saved["benchmarks"]] + saved["failures"]
        machine = saved["machine_info"]
        return cls(records, machine, saved.get("datetime") or machine.get("date", ""), repeats)

    def record(self, impl: str, work: Workload) -> dict | None:
        """Return the record of an implementation and a workload; None if the run did not try it."""
        return self._cases.get((impl, work.pass_), {}).get(work)

    def holds(self, impl: str, works: Iterable[Workload]) -> bool:
        """Return whether the run tried all of these workloads. A failed try counts."""
        return all(self.record(impl, work) for work in works)

    def times(self, impl: str, works: Iterable[Workload]) -> dict[Workload, float]:
        """Return an implementation's milliseconds by workload, without those that have none. `impl` may be `FASTEST`."""
        if impl == FASTEST:
            of_each = [self.times(name, works) for name in self.libraries]
            return {work: min(times[work] for times in of_each if work in times) for work in set().union(*of_each)}
        found = {work: self.record(impl, work) for work in works}
        return {work: record["ms"] for work, record in found.items() if record and record.get("ms")}

    def rate(self, impl: str, works: Iterable[Workload]) -> float | None:
        """Return the geometric mean of an implementation's TFLOP/s, or None if nothing was measured."""
        rates = [self.record(impl, work)["tflops"] for work in self.times(impl, works)]
        return statistics.geometric_mean(rates) if rates else None

    @functools.cached_property
    def compares(self) -> bool:
        """Whether the run tried all workloads of a mean with at least two stages."""
        ours = [name for name in self.names if name not in self.libraries]
        return sum(any(self.holds(name, mean_over(*column)) for column in COLUMNS) for name in ours) > 1


def _noise(records: list[dict]) -> dict[str, float]:
    times = {}  # of equal code in equal workloads
    for record in records:
        if "ms" in record:
            code = record.get("source", record["impl"].removesuffix(AGAIN))
            times.setdefault((record["pass"], code, Workload.of(record)), []).append(record["ms"])
    errors = {}
    for (pass_, *_), of_code in times.items():
        errors.setdefault(pass_, []).extend(math.log(b / a) for a, b in itertools.pairwise(of_code))
    return {
        pass_: math.sqrt(statistics.fmean(error**2 for error in found))
        for pass_, found in errors.items()
        if len(found) >= LEAST_PAIRS
    }


@dataclass(frozen=True)
class Gain:
    """How many times as fast an implementation is as another one, over the workloads for which runs have both times.

    Attributes:
        mean: the geometric mean of the ratios.
        worst: the least ratio.
        best: the largest ratio.
        points: the number of workloads.
        same: whether the mean is within the runs' noise.
        changed: whether the code of one of the two has changed since.
    """

    mean: float
    worst: float
    best: float
    points: int
    same: bool
    changed: bool

    @property
    def short(self) -> str:
        """The mean alone: "×1.51", or "=" within the noise."""
        return "=" if self.same else f"×{shown(self.mean)}"

    @property
    def spread(self) -> str:
        """The least and the largest ratio: "1.30–1.70"; "" for a single workload."""
        return f"{shown(self.worst)}–{shown(self.best)}" if self.points > 1 else ""

    @property
    def percent(self) -> str:
        """The mean in percent: "98 %"."""
        return f"{100 * self.mean:.0f} %" + CHANGED * self.changed

    def __str__(self):
        return self.short + (f" ({self.spread})" if self.spread else "") + CHANGED * self.changed


def shown(value: float) -> str:
    """Return a ratio with two digits after the point, or none from 10 on."""
    return f"{value:.{2 if value < 10 else 0}f}"


def within(noise: float | None, log_mean: float, points: int) -> bool:
    """Return whether the mean of the logarithms of `points` ratios is within a run's noise: at most 2 · noise / √points.

    The root needs independent errors of different workloads. They are independent: where several stages of a run have the same
    kernels, the means of their pairs over six workloads scatter by noise / √6.
    """
    return noise is not None and abs(log_mean) <= 2 * noise / math.sqrt(points)


def ratio(found: list[Run], new: str, old: str, works: Iterable[Workload]) -> Gain | None:
    """Return `new`'s speed divided by `old`'s speed, or None if no workload has both times.

    Args:
        found: the runs that measured the workloads. Each ratio is from one run.
        old: an implementation, or `FASTEST`.
    """
    logs, variances, code_changed = [], [], False
    for run in found:
        ours, theirs = (run.times(impl, works) for impl in (new, old))
        both = ours.keys() & theirs.keys()
        logs += [math.log(theirs[work] / ours[work]) for work in both]
        variances += [run.noise.get(work.pass_, math.nan) ** 2 for work in both]
        records = (run.record(impl, work) for impl in (new, old) for work in both)
        code_changed |= any(changed(record) for record in records if record)
    if not logs:
        return None
    mean, noise = statistics.fmean(logs), math.sqrt(statistics.fmean(variances))
    same = within(None if math.isnan(noise) else noise, mean, len(logs))
    return Gain(*map(math.exp, (mean, min(logs), max(logs))), len(logs), same, code_changed)


def run_file(name: str) -> Path:
    """Return the path of a run in results/. `name` is a value of `bench.py --reference`. If several GPUs have such a file,
    return the newest."""
    paths = [ROOT / "results" / f"{name}-{gpu}.json" for gpu in GPUS]
    return max(paths, key=lambda path: path.exists() and read(path)["datetime"] or "")


def runs() -> list[Run]:
    """Return the runs in results/ that compare stages on the workloads of the means, newest first."""
    found = [run for path in sorted((ROOT / "results").glob("*.json")) if (run := _load(path)[1])]
    return sorted((run for run in found if run.compares), key=lambda run: run.ended, reverse=True)


def anchor_ratios() -> dict[tuple[str, str, str, str], float]:
    """Return how far the anchors of reference runs are from the usual: their milliseconds over the median of all files of the
    same GPU. The keys are (file, GPU, pass, implementation)."""
    found = {}
    for path in sorted((ROOT / "results").glob("*.json")):
        facts = read(path).get("machine_info", {}) if isinstance(read(path), dict) else {}
        for pass_, times in facts.get("anchors", {}).items():
            found |= {(path.stem, facts["gpu"], pass_, impl): ms for impl, ms in times.items()}
    usual = {key[1:]: statistics.median(ms for other, ms in found.items() if other[1:] == key[1:]) for key in found}
    return {key: ms / usual[key[1:]] for key, ms in found.items()}


def newest(found: list[Run], pass_: str, head_dim: int, *impls: str) -> Run | None:
    """Return the newest run that measured this pass of all these implementations. Return None if no run did."""
    works = mean_over(pass_, head_dim)
    return next((run for run in found if all(run.holds(impl, works) for impl in impls)), None)


def gain(found: list[Run], new: str, old: str, pass_: str, head_dim: int) -> tuple[Gain, Run] | None:
    """Return the gain of `new` over `old` on the papers' workloads, and the newest run with both, or None if no run has both.

    `old` may be `FASTEST`: then the run is the one with most stages, so that a table has shares from one run, beside the same
    libraries. Of several such runs, it is the newest.
    """
    works = mean_over(pass_, head_dim)
    if old == FASTEST:
        found = [run for run in found if run.libraries and run.holds(new, works)]
        found = sorted(found, key=lambda run: sum(run.holds(name, works) for name in run.names), reverse=True)
    run = newest(found, pass_, head_dim, new, *([] if old == FASTEST else [old]))
    found_ratio = run and ratio([run], new, old, works)
    return (found_ratio, run) if found_ratio else None


def short_commit(commit: str) -> str:
    """Shorten a commit to twelve digits. Keep "+dirty", which means that files differ from the commit."""
    digits, dirty, _ = commit.partition("+dirty")
    return digits[:12] + dirty


def origin(machine: dict) -> str:
    """Return a run's GPU, versions, commit and date."""
    gpu, commit = machine["gpu"] or "no GPU", short_commit(machine["commit"])
    return f"{gpu}, torch {machine['torch']}, triton {machine['triton']}, commit {commit}, {machine['date']}"


def origins(found: Iterable[Run]) -> list[str]:
    """Return the origins of these runs, the oldest first. Files from the same GPU, commit and day have one origin."""
    return list(dict.fromkeys(origin(run.machine) for run in sorted(found, key=lambda run: run.ended)))


def gpu_of(machine: dict) -> str:
    """Return the short name of a run's GPU, such as H100 for NVIDIA H100 80GB HBM3."""
    return re.sub(r"^NVIDIA | [0-9]+GB.*", "", machine["gpu"])


def places(found: Iterable[Run]) -> str:
    """Return the GPUs of these runs, each with the commits that were measured on it, shortened."""
    commits = {}
    for run in found:
        commits.setdefault(gpu_of(run.machine), {})[short_commit(run.machine["commit"])] = None
    return "; ".join(", ".join([gpu, *each]) for gpu, each in commits.items())


def measured(found: Iterable[Run]) -> str:
    """Return a sentence about where and when these runs were measured. It says versions once if all runs have the same."""
    machines = [run.machine for run in sorted(found, key=lambda run: run.ended)]
    versions = {f"torch {machine['torch']} and triton {machine['triton']}" for machine in machines}
    if len(versions) != 1:
        return f"Measured on {'; '.join(origins(found))}."
    where = (f"{gpu_of(machine)}, commit {short_commit(machine['commit'])}, {machine['date']}" for machine in machines)
    return f"Measured with {versions.pop()} on {'; '.join(dict.fromkeys(where))}."


def counted(impl: str | None, pass_: str, head_dim: int, causal: bool) -> dict | None:
    """Return the record of a stage's pass at S = `COUNTED_AT` in `TRAFFIC`, or None if there is none."""
    wanted = (impl, pass_, head_dim, causal, COUNTED_AT)
    records = read(TRAFFIC)["records"] if TRAFFIC.exists() else []
    return next((r for r in records if (r["impl"], r["pass"], r["head_dim"], r["causal"], r["seq_len"]) == wanted), None)


def moved(count: dict) -> int:
    """Return the sum of the bytes read and the bytes written."""
    return count["bytes_read"] + count["bytes_written"]


def bytes_in_words(before: int, after: int, what: str = "bytes") -> str:
    """Say how a stage's `after` bytes compare with its parent's `before` bytes: "1.94 times fewer bytes"."""
    times = before / after
    if f"{times:.2f}" == "1.00":
        return f"the same {what}"
    return f"{times:.2f} times fewer {what}" if times > 1 else f"{1 / times:.2f} times more {what}"
