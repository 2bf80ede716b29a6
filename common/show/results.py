"""What results/ holds, read: the runs, the counts, and the gains that follow from them."""

import functools
import itertools
import json
import statistics
from collections.abc import Iterable
from pathlib import Path

import stages
from common.measure.ncu import READ, WRITTEN
from common.measure.workloads import Workload
from common.show.tables import stage_order

ROOT = Path(__file__).parents[2]
HEAD_DIMS = (64, 128)


def run_file(name: str) -> Path:
    """Where results/ has a run; a part of the reference is called there what `bench.py --reference` calls it."""
    return ROOT / "results" / f"{name}-h200.json"


# The parts with all stages, on the papers' workloads.
FLOAT16, BFLOAT16 = (tuple(run_file(f"{dtype}-d{head_dim}") for head_dim in HEAD_DIMS) for dtype in ("float16", "bfloat16"))
NEWEST = tuple(run_file(f"newest-d{head_dim}") for head_dim in HEAD_DIMS)  # the last stages, measured since
TRAFFIC = ROOT / "results" / "traffic.json"
COUNTED_AT = 2048  # the sequence length of that file
UNITS = ROOT / "results" / "units-h200.json"
TIMELINE = ROOT / "results" / "timeline.json"
SCOPES = ROOT / "results" / "scopes-h200.json"
PLOTS = ROOT / "plots"
MEAN_OVER = (1024, 2048, 4096, 8192, 16384)  # sequence lengths
LONG = 2048  # from that sequence length on
COLUMNS = tuple(itertools.product(("fwd", "bwd"), HEAD_DIMS))  # passes and head dimensions


@functools.lru_cache
def _parsed(path: Path, changed_ns: int) -> dict:
    return json.loads(path.read_text())


def _read(path: Path) -> dict:
    """A file of results/, which is there for many readers: nobody changes it; SystemExit names it where it is missing or not
    whole."""
    try:
        return _parsed(path, path.stat().st_mtime_ns)
    except (OSError, ValueError):
        raise SystemExit(f"{path} is needed, and is missing or not whole; results/README.md says what makes it") from None


def records_of(run: dict) -> tuple[list[dict], dict]:
    """The records (as `speed_table` takes them) and the machine of a saved run."""
    return [benchmark["extra_info"] for benchmark in run["benchmarks"]] + run["failures"], run["machine_info"]


def load_run(path: Path) -> tuple[list[dict], dict]:
    """`records_of` a file of results/."""
    return records_of(_read(path))


def load_runs(paths: Iterable[Path]) -> tuple[list[dict], list[dict]]:
    """The records of several runs together, of which no two have the same case, and the machine of each."""
    runs = [load_run(path) for path in paths]
    return [record for records, _ in runs for record in records], [machine for _, machine in runs]


def implementations(records: list[dict]) -> list[str]:
    """The names in the records: baselines first, then the stages in their order."""
    return sorted(dict.fromkeys(record["impl"] for record in records), key=stage_order)


def measured(records, impl, pass_, head_dim, dtype="float16"):
    """The records by (causal, seq_len), of the lengths that means are over; without what could not be measured."""
    return {
        (record["causal"], record["seq_len"]): record
        for record in records
        if (record["impl"], record["pass"], record["head_dim"], record["dtype"]) == (impl, pass_, head_dim, dtype)
        and record["seq_len"] in MEAN_OVER
        and "failure" not in record
    }


def times_of(records, impl, passes, head_dim, dtype="float16"):
    """Milliseconds by (causal, seq_len), of several passes together where all were measured."""
    of_passes = [measured(records, impl, pass_, head_dim, dtype) for pass_ in passes]
    keys = set.intersection(*(set(of_pass) for of_pass in of_passes))
    return {key: sum(of_pass[key]["ms"] for of_pass in of_passes) for key in keys}


def mean_ratio(ours: dict, theirs: dict) -> float | None:
    """The geometric mean of theirs / ours over the keys of both; None where there are none."""
    common = ours.keys() & theirs.keys()
    return statistics.geometric_mean(theirs[key] / ours[key] for key in common) if common else None


def speedup(records: list[dict], impl: str, over: str | None, passes: tuple[str, ...], head_dim: int) -> float | None:
    """How many times as fast `impl` is as `over` in these passes together: the mean over `MEAN_OVER`, causal and not.

    Only where both were measured (out of memory, v0 has fewer points); None where that is nowhere.
    """
    return mean_ratio(*(times_of(records, name, passes, head_dim) for name in (impl, over)))


def origin(machine: dict) -> str:
    """Where a run's numbers are from: GPU, versions, commit."""
    return f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}, commit {machine['commit'][:12]}"


def origins(machines: list[dict], dated: bool = False) -> str:
    """`origin` of several runs, with their dates if asked; what is the same once."""
    return "; ".join(dict.fromkeys(origin(machine) + (f", {machine['date']}" if dated else "") for machine in machines))


def load_counts(path: Path) -> tuple[list[dict], dict]:
    """The records and the machine of a file that `common.measure.traffic` wrote."""
    counts = _read(path)
    return counts["records"], counts["machine_info"]


def counted(counts: list[dict], impl: str, pass_: str, head_dim: int, causal: bool) -> dict | None:
    """The count of a stage's pass; None where there is none."""
    wanted = (impl, pass_, head_dim, causal, COUNTED_AT)
    found = [c for c in counts if (c["impl"], c["pass"], c["head_dim"], c["causal"], c["seq_len"]) == wanted]
    return found[0] if found else None


def modelled(records: list[dict], impl: str | None, pass_: str, head_dim: int, causal: bool, seq_len: int) -> float | None:
    """Cycles for `timeline.SCORES` scores, of a file that `common.measure.timeline` wrote; None where there are none."""
    wanted = (impl, pass_, head_dim, causal, seq_len)
    found = [r for r in records if (r["impl"], r["pass"], r["head_dim"], r["causal"], r["seq_len"]) == wanted]
    return found[0]["cycles_a_tile"] if found else None


def moved(count: dict) -> int:
    """Bytes read and written."""
    return count["bytes_read"] + count["bytes_written"]


def mean_rate(records: list[dict], impl: str, pass_: str, head_dim: int) -> float | None:
    """TFLOP/s, the geometric mean over `MEAN_OVER`, causal and not; None where nothing was measured."""
    rates = [record["tflops"] for record in measured(records, impl, pass_, head_dim).values()]
    return statistics.geometric_mean(rates) if rates else None


SPOKEN = {
    "sdpa-flash": "FlashAttention-2", "sdpa-cudnn": "cuDNN", "flash-3": "FlashAttention-3", "flash-4": "FlashAttention-4"
}  # fmt: skip


def spoken(name: str) -> str:
    """An implementation as a sentence names it: a stage by its version, a peer by its usual name."""
    return name.split("_")[0] if stages.position(name) else SPOKEN.get(name, name)


def tuned_case(impl: str, pass_: str, head_dim: int, causal: bool) -> dict | None:
    """What Nsight Compute measured of a stage's pass, with the tiles that its tuner chose on the GPU; None where it did not."""
    wanted = (impl, pass_, head_dim, causal)
    for path in sorted((ROOT / "results").glob("traffic-*.json")):
        for case in json.loads(path.read_text())["cases"]:
            if (case["impl"], case["pass"], case["head_dim"], case["causal"]) == wanted and not shared(case):
                return case
    return None


def shared(record: dict) -> bool:
    """Whether query heads share K/V heads, or v has another head dimension than k, in a record of any file."""
    workload = Workload.of(record)
    return (workload.kv_heads, workload.value_dim) != (workload.heads, workload.head_dim)


def bytes_of(case: dict) -> int:
    """Bytes that the kernels of a `tuned_case` moved between L2 cache and multiprocessors, spilled registers included."""
    return int(sum(kernel[READ] + kernel[WRITTEN] for kernel in case["kernels"]))
