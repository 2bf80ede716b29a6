"""Read results/: the runs, the counts, and the gains."""

import ast
import functools
import itertools
import json
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import stages
from common.measure.ncu import READ, WRITTEN
from common.measure.workloads import HIDDEN, TOKENS, Workload
from common.show.tables import stage_order

ROOT = Path(__file__).parents[2]
GPUS = ("h200", "h100")  # as in the names of the files in results/
HEAD_DIMS = (64, 128)


def run_file(name: str) -> Path:
    """Return the path of a run in results/. `name` is a value of `bench.py --reference`. If several GPUs have such a file,
    return the newest."""
    paths = [ROOT / "results" / f"{name}-{gpu}.json" for gpu in GPUS]
    return max(paths, key=lambda path: path.exists() and _read(path)["datetime"] or "")


CODE = {"fwd": "forward", "bwd": "backward"}  # pass -> its name in `stages.files`; fwd+bwd has no code of its own
TRAFFIC = ROOT / "results" / "traffic.json"
COUNTED_AT = 2048  # the sequence length of TRAFFIC
UNITS = ROOT / "results" / "units-h200.json"
CHOICE = ROOT / "results" / "choice.json"
TIMELINE = ROOT / "results" / "timeline.json"
SCOPES = ROOT / "results" / "scopes-h200.json"
PLOTS = ROOT / "plots"
MEAN_OVER = (1024, 4096, 16384)  # sequence lengths at which the reference run measures every stage
COLUMNS = tuple(itertools.product(("fwd", "bwd"), HEAD_DIMS))  # passes and head dimensions


@functools.lru_cache
def _parsed(path: Path, changed_ns: int) -> dict:
    return json.loads(path.read_text())


def _read(path: Path) -> dict:
    """Return a file's cached content, which callers must not change; raise SystemExit if the file is missing or incomplete."""
    try:
        return _parsed(path, path.stat().st_mtime_ns)
    except (OSError, ValueError):
        raise SystemExit(f"{path} is missing or incomplete; results/README.md has the command that writes it") from None


def records_of(run: dict) -> tuple[list[dict], dict]:
    """Return the records (as for `speed_table`) and the machine of a saved run."""
    return [benchmark["extra_info"] for benchmark in run["benchmarks"]] + run["failures"], run["machine_info"]


def load_run(path: Path) -> tuple[list[dict], dict]:
    """Return `records_of` a file."""
    return records_of(_read(path))


@dataclass(frozen=True)
class Run:
    """A saved run, with its records of the FlashAttention papers' workloads.

    Attributes:
        records: the records with float16, 16k tokens, hidden size 2048 and normally distributed inputs, including failures.
        machine: the GPU, versions, commit and date.
        ended: the end time as a sortable string.
    """

    records: list[dict]
    machine: dict
    ended: str

    @functools.cached_property
    def _whole(self):
        """Each (implementation, pass, head dimension) that the run tried at every length of `MEAN_OVER`, with and without a
        causal mask."""
        tried = {}
        for record in self.records:
            case = record["impl"], record["pass"], record["head_dim"]
            tried.setdefault(case, set()).add((record["causal"], record["seq_len"]))
        return {case for case, points in tried.items() if points.issuperset(itertools.product((False, True), MEAN_OVER))}

    def holds(self, impl: str, pass_: str, head_dim: int) -> bool:
        """Return whether the run tried an implementation's pass at every length of `MEAN_OVER`, with and without a causal
        mask. A failed try counts."""
        return (impl, pass_, head_dim) in self._whole


def is_usual(record: dict) -> bool:
    """Return whether a record has one of the papers' workloads, in float16, with scores of standard deviation 1 and no sink."""
    seq_len, head_dim = record["seq_len"], record["head_dim"]
    shape = (TOKENS // seq_len, HIDDEN // head_dim, seq_len, head_dim)
    return head_dim in HEAD_DIMS and Workload.of(record) == Workload(record["pass"], *shape, record["causal"], "float16")


def with_repeats(records: list[dict]) -> list[dict]:
    """Add the records of passes that a reference run skipped. The run skips a pass whose code is equal to the parent's code, so
    the added records are copies of the parent's records."""
    of_pass = {}
    for record in records:
        of_pass.setdefault((record["impl"], record["pass"]), []).append(record)
    every = list(records)
    for name in stages.names() if of_pass else []:  # a parent comes before its children
        parent = stages.parent(name)
        for pass_ in CODE:
            theirs = of_pass.get((parent, pass_))
            if theirs and (name, pass_) not in of_pass and same_code(name, parent, pass_):
                of_pass[name, pass_] = [{**record, "impl": name} for record in theirs]
                every += of_pass[name, pass_]
    return every


@functools.lru_cache
def _run(path: Path, changed_ns: int) -> Run | None:
    """Return the run in a file of results/. Return None if `Run.holds` is true for fewer than two stages."""
    saved = _read(path)
    if "benchmarks" not in saved:
        return None
    records, machine = records_of(saved)
    run = Run(with_repeats([record for record in records if is_usual(record)]), machine, saved.get("datetime", machine["date"]))
    return run if len({impl for impl, *_ in run._whole if stages.position(impl)}) > 1 else None


def runs() -> list[Run]:
    """Return the runs in results/ for which `Run.holds` is true for at least two stages, newest first."""
    found = [_run(path, path.stat().st_mtime_ns) for path in sorted((ROOT / "results").glob("*.json"))]
    return sorted(filter(None, found), key=lambda run: run.ended, reverse=True)


def newest(runs: list[Run], pass_: str, head_dim: int, *impls: str) -> Run | None:
    """Return the newest run that measured this pass of all these implementations. Return None if no run did."""
    return next((run for run in runs if all(run.holds(impl, pass_, head_dim) for impl in impls)), None)


def gain(runs: list[Run], new: str, old: str, pass_: str, head_dim: int) -> tuple[float, Run] | None:
    """Return `new`'s speed divided by `old`'s speed, and the newest run with both stages. Return None if no run has both."""
    run = newest(runs, pass_, head_dim, new, old)
    ratio = run and speedup(run.records, new, old, pass_, head_dim)
    return (ratio, run) if ratio else None


def rate(runs: list[Run], impl: str, pass_: str, head_dim: int) -> tuple[float, Run] | None:
    """Return the mean TFLOP/s of an implementation's pass, and the newest run with this pass. Return None if no run has it."""
    run = newest(runs, pass_, head_dim, impl)
    mean = run and mean_rate(run.records, impl, pass_, head_dim)
    return (mean, run) if mean else None


def chain(runs: list[Run], new: str, old: str, pass_: str, head_dim: int) -> list[tuple[str, str, float, Run]] | None:
    """Return gains whose product is `new`'s speed divided by `old`'s speed.

    Often no run has both stages. Then use the gains of a chain of stages, with as few stages as possible.

    Returns:
        (later stage, earlier stage, gain, run) for each gain; None if no gains lead from `old` to `new`.
    """
    links = {old: []}
    reached = [old]
    names = [name for name in implementations([r for run in runs for r in run.records]) if stages.position(name)]
    for stage in reached:  # breadth first: the loop also visits the stages that it appends
        for name in names:
            if name not in links and (found := gain(runs, name, stage, pass_, head_dim)):
                links[name] = [*links[stage], (name, stage, *found)]
                reached.append(name)
    return links.get(new)


def number(runs: list[Run], run: Run) -> int:
    """Return a run's number in captions; the oldest run's number is 1. Files from the same GPU, commit and day share a
    number."""
    origins = list(dict.fromkeys(origin(other.machine, dated=True) for other in reversed(runs)))
    return origins.index(origin(run.machine, dated=True)) + 1


def sources(runs: list[Run], used: Iterable[Run]) -> str:
    """Return the origins of the used runs, once each: "[1] GPU, versions, commit, date; [2] …"."""
    named = {number(runs, run): origin(run.machine, dated=True) for run in used}
    return "; ".join(f"[{key}] {named[key]}" for key in sorted(named))


@functools.lru_cache
def _parsed_code(text: str) -> str:
    return ast.dump(ast.parse(text))


def same_code(new: str, old: str, pass_: str) -> bool:
    """Return whether two stages have the same code for a pass, apart from comments. Return False if a stage no longer
    exists."""
    if not all(stages.directory(name).exists() for name in (new, old)):
        return False
    both = ([stages.source(name, file) for name in (new, old)] for file in stages.files(CODE[pass_], new, old))
    return all(ours == theirs or _parsed_code(ours) == _parsed_code(theirs) for ours, theirs in both)


def implementations(records: list[dict]) -> list[str]:
    """Return the names in the records: baselines first, then the stages in stage order."""
    return sorted(dict.fromkeys(record["impl"] for record in records), key=stage_order)


def measured(records: list[dict], impl: str, pass_: str, head_dim: int) -> dict[tuple[bool, int], dict]:
    """Return an implementation's records by (causal, seq_len), for the lengths of `MEAN_OVER` and without failures."""
    return {
        (record["causal"], record["seq_len"]): record
        for record in records
        if (record["impl"], record["pass"], record["head_dim"]) == (impl, pass_, head_dim)
        and record["seq_len"] in MEAN_OVER
        and "failure" not in record
    }


def times_of(records: list[dict], impl: str, pass_: str, head_dim: int) -> dict[tuple[bool, int], float]:
    """Return an implementation's milliseconds by (causal, seq_len), for the lengths of `MEAN_OVER`."""
    return {key: record["ms"] for key, record in measured(records, impl, pass_, head_dim).items()}


def mean_ratio(ours: dict, theirs: dict) -> float | None:
    """Return the geometric mean of theirs / ours over the workloads in both dicts. Return None if there are no such
    workloads."""
    common = ours.keys() & theirs.keys()
    return statistics.geometric_mean(theirs[key] / ours[key] for key in common) if common else None


def speedup(records: list[dict], impl: str, over: str, pass_: str, head_dim: int) -> float | None:
    """Return the speed of `impl` divided by the speed of `over` in one run.

    The result is the geometric mean over the lengths of `MEAN_OVER`, with and without a causal mask. Workloads without both
    times are left out: v0 runs out of memory at some lengths. Return None if no workload has both times.
    """
    return mean_ratio(*(times_of(records, name, pass_, head_dim) for name in (impl, over)))


def origin(machine: dict, dated: bool = False) -> str:
    """Return a run's GPU, versions and commit. With `dated`, add its date."""
    versions = f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}, commit {machine['commit'][:12]}"
    return versions + (f", {machine['date']}" if dated else "")


def gpu_of(machine: dict) -> str:
    """Return the short name of a run's GPU, such as H100 for NVIDIA H100 80GB HBM3."""
    return re.sub(r"^NVIDIA | [0-9]+GB.*", "", machine["gpu"])


def place(machine: dict) -> str:
    """Return a run's GPU and commit, both shortened."""
    return f"{gpu_of(machine)}, {machine['commit'][:12]}"


def load_counts(path: Path) -> tuple[list[dict], dict]:
    """Return the records and the machine of `TRAFFIC` or `TIMELINE`."""
    counts = _read(path)
    return counts["records"], counts["machine_info"]


def counted(counts: list[dict], impl: str, pass_: str, head_dim: int, causal: bool) -> dict | None:
    """Return the record with the counts of a stage's pass, or None if the pass was not counted."""
    wanted = (impl, pass_, head_dim, causal, COUNTED_AT)
    found = [c for c in counts if (c["impl"], c["pass"], c["head_dim"], c["causal"], c["seq_len"]) == wanted]
    return found[0] if found else None


def modelled(records: list[dict], impl: str | None, pass_: str, head_dim: int, causal: bool, seq_len: int) -> float | None:
    """Return the cycles that a stage's pass takes in the model of an SM for `timeline.SCORES` scores. Return None if the cycles
    are unknown."""
    wanted = (impl, pass_, head_dim, causal, seq_len)
    found = [r for r in records if (r["impl"], r["pass"], r["head_dim"], r["causal"], r["seq_len"]) == wanted]
    return found[0]["cycles_a_tile"] if found else None


def moved(count: dict) -> int:
    """Return the sum of the bytes read and the bytes written."""
    return count["bytes_read"] + count["bytes_written"]


def mean_rate(records: list[dict], impl: str, pass_: str, head_dim: int) -> float | None:
    """Return the geometric mean of TFLOP/s over the lengths of `MEAN_OVER` and both masks. Return None if nothing was
    measured."""
    rates = [record["tflops"] for record in measured(records, impl, pass_, head_dim).values()]
    return statistics.geometric_mean(rates) if rates else None


SPOKEN = {
    "sdpa-flash": "FlashAttention-2", "sdpa-cudnn": "cuDNN", "flash-3": "FlashAttention-3", "flash-4": "FlashAttention-4"
}  # fmt: skip


def spoken(name: str) -> str:
    """Return an implementation's short name: a stage's version, or a library's usual name."""
    return name.split("_")[0] if stages.position(name) else SPOKEN.get(name, name)


def tuned_case(impl: str, pass_: str, head_dim: int, causal: bool) -> dict | None:
    """Return Nsight Compute's measurement of a stage's pass, with the tiles that the tuner chose. Return None if there is no
    such measurement."""
    wanted = (impl, pass_, head_dim, causal)
    for path in sorted((ROOT / "results").glob("traffic-*.json")):
        for case in json.loads(path.read_text())["cases"]:
            if (case["impl"], case["pass"], case["head_dim"], case["causal"]) == wanted and not shared(case):
                return case
    return None


def shared(record: dict) -> bool:
    """Return whether a record has GQA, or another head dimension for V than for K."""
    workload = Workload.of(record)
    return (workload.kv_heads, workload.value_dim) != (workload.heads, workload.head_dim)


def bytes_of(case: dict) -> int:
    """Return the bytes that the kernels of a case moved between L2 cache and SMs, including spilled registers."""
    return int(sum(kernel[READ] + kernel[WRITTEN] for kernel in case["kernels"]))


def bytes_in_words(before: int, after: int, what: str = "bytes") -> str:
    """Say how a stage's `after` bytes compare with its parent's `before` bytes: "1.94 times fewer bytes"."""
    ratio = before / after
    if f"{ratio:.2f}" == "1.00":
        return f"the same {what}"
    return f"{ratio:.2f} times fewer {what}" if ratio > 1 else f"{1 / ratio:.2f} times more {what}"


def speed_in_words(ratio: float) -> str:
    """Say how many times as fast a stage is as its parent: "×1.51 as fast", or "×0.92 as fast (slower)"."""
    return f"×{ratio:.2f} as fast" + (" (slower)" if round(ratio, 2) < 1 else "")


def same_tiles(*cases: dict) -> bool:
    """Return whether two cases used the same tiles in each kernel that both ran. Return False if they share no kernel."""
    before, after = ({launch["name"]: launch["tile"] for launch in case["counted"] if "tile" in launch} for case in cases)
    common = before.keys() & after.keys()
    return bool(common) and all(before[name] == after[name] for name in common)
