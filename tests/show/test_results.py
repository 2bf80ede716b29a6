"""Measured gains come from the right run, with its noise, and missing numbers stay missing. The runs are invented."""

import functools
import itertools
import json
import math
from types import SimpleNamespace

import pytest

import stages
from common.measure import digest
from common.show import results

V0, V1, V2, V3 = map(stages.resolve, ("v0", "v1", "v2", "v3"))


def machine(commit, date="2026-01-02"):
    return {"gpu": "X", "torch": "1", "triton": "2", "commit": commit, "date": date}


def records(impl, ms, passes=("fwd", "bwd"), head_dims=results.HEAD_DIMS, lengths=results.MEAN_OVER, **others):
    """Return an implementation's records for every workload of the means. Each has `ms` and 100 / `ms` TFLOP/s."""
    return [
        {"impl": impl, **results.paper(pass_, head_dim, causal, seq_len).record()}
        | {"ms": ms, "iqr_ms": 0.01, "tflops": 100 / ms, "peak_extra_mib": 1.0} | others
        for pass_, head_dim, causal, seq_len in itertools.product(passes, head_dims, (False, True), lengths)
    ]  # fmt: skip


def run(commit, ended, *parts):
    """Return a run with the records of all `parts`."""
    return results.Run(sum(parts, []), machine(commit, ended), ended)


def failed(found, seq_len):
    """Return records in which the workloads of one sequence length have failed."""
    without_time = ({name: value for name, value in record.items() if name != "ms"} for record in found)
    return [gone | {"failure": "OOM"} if gone["seq_len"] == seq_len else r for r, gone in zip(found, without_time, strict=True)]


OLD = run("old", "2026-01-01", records(V0, 8.0), records(V1, 4.0), records("sdpa-cudnn", 2.0))
MIDDLE = run("middle", "2026-01-02", records(V1, 6.0), records(V2, 2.0), records(V0, 24.0, passes=["bwd"]))
NEW = run("new", "2026-01-03", records(V2, 1.0), records(V3, 0.5), records("flash-3", 0.75))
FEW = run("few", "2026-01-09", records(V0, 1.0, lengths=(4096,)), records(V1, 1.0, lengths=(4096,)))
FAILED = run("failed", "2026-01-09", failed(records(V0, 8.0), 16384), records(V1, 1.0))


@pytest.mark.parametrize(("runs", "case", "mean", "points", "source"), [
    ([NEW, MIDDLE, OLD], (V1, V0, "fwd", 64), 2, 6, OLD),  # the newest run that has both
    ([NEW, MIDDLE, OLD], (V1, V0, "bwd", 64), 4, 6, MIDDLE),
    ([NEW, MIDDLE, OLD], (V3, V2, "fwd", 128), 2, 6, NEW),
    ([FEW, OLD], (V1, V0, "fwd", 64), 2, 6, OLD),  # a run with few of the workloads does not count
    ([FAILED, OLD], (V1, V0, "fwd", 64), 8, 4, FAILED),  # a workload that failed was tried, and is left out
])  # fmt: skip
def test_a_gain_is_from_the_newest_run_that_has_both(runs, case, mean, points, source):
    gain, run = results.gain(runs, *case)
    assert (gain.mean, gain.points, run) == (pytest.approx(mean), points, source)
    assert results.gain(runs, V3, V1, "fwd", 64) is None


def test_a_gain_is_a_geometric_mean_with_its_worst_and_best_workload():
    ours = [record | {"ms": ms} for record, ms in zip(records(V1, 1.0, ["fwd"], [64]), [1, 2, 4, 1, 2, 4], strict=True)]
    found = run("x", "2026-01-01", records(V0, 4.0, ["fwd"], [64]), ours)
    ratio, _ = results.gain([found], V1, V0, "fwd", 64)
    assert (ratio.mean, ratio.worst, ratio.best, ratio.points) == pytest.approx((2, 1, 4, 6))
    assert str(ratio) == "×2.00 (1.00–4.00)"
    assert results.ratio([found], V1, V0, found.works[:1]).spread == ""


def test_the_fastest_library_is_that_of_each_workload():
    found = records(V0, 1.0) + records("sdpa-x", 4.0, lengths=[1024, 4096]) + records("flash-4", 2.0)
    found += records("sdpa-x", 0.5, lengths=[16384])
    ratio, _ = results.gain([run("only", "2026-01-01", found)], V0, results.FASTEST, "fwd", 64)
    assert ratio.mean == pytest.approx((2.0**2 * 0.5) ** (1 / 3))


def twice(impl, error, source=None):
    """Return the records of a stage that a run measures twice. The second times are longer or shorter by `error`."""
    first = records(impl, 4.0, ["fwd"], [64], source=source or impl)
    factors = [math.exp(sign * error) for sign in (1, -1, 1, -1, 1, -1)]
    return first, [record | {"ms": record["ms"] * factor} for record, factor in zip(first, factors, strict=True)]


@pytest.mark.parametrize("other", [f"{V0} (again)", V3])
def test_noise_is_measured_on_equal_code(other):
    """The noise band of a mean over six workloads is 2 · 0.03 / √6. A single workload's is 2 · 0.03."""
    first, again = twice(V0, 0.03)
    again = [record | {"impl": other} for record in again]
    found = run("x", "2026-01-01", first, again, records(V1, 4 * math.exp(0.0244)), records(V2, 4 * math.exp(0.0246)))
    assert found.noise == {"fwd": pytest.approx(0.03)}
    gains = [results.gain([found], name, V0, "fwd", 64)[0] for name in (V1, V2)]
    assert [ratio.same for ratio in gains] == [True, False]
    assert str(gains[0]) == "= (0.98–0.98)†" and gains[1].short == "×0.98"
    assert results.ratio([found], V2, V0, found.works[:1]).same
    assert (f"{V0} (again)" not in found.names) and found.times(V0, found.works[:1]).popitem()[1] == 4.0
    assert run("x", "2026-01-01", first, again[:5]).noise == {}  # too few pairs
    assert run("x", "2026-01-01", first, [record | {"impl": V3, "source": "other"} for record in again]).noise == {}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository with a folder for results, and with stages whose forwards all differ: v1's and v2's backwards are equal, but
    for a comment."""
    (tmp_path / "results").mkdir()
    for name, backward in {V0: "0", V1: "1", V2: "1  # why", V3: "2"}.items():
        (tmp_path / "stages" / name).mkdir(parents=True)
        for file, text in (("__init__", ""), ("forward", f"x = {name[1]}\n"), ("backward", f"x = {backward}\n")):
            (tmp_path / "stages" / name / f"{file}.py").write_text(text)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(digest, "ROOT", tmp_path)
    monkeypatch.setattr(digest, "current", functools.cache(digest.digest))
    monkeypatch.setattr(stages, "__path__", [str(tmp_path / "stages")])
    return tmp_path


def write(path, ended, found):
    benchmarks = [{"extra_info": record} for record in found]
    facts = {"machine_info": machine(path.stem, ended), "datetime": ended}
    path.write_text(json.dumps({"benchmarks": benchmarks, "failures": [], **facts}))


def test_runs_are_found_by_what_they_hold(root):
    pair = records(V0, 2.0) + records(V3, 1.0)
    for name, ended, found in (
        ("z-older", "2026-01-01", pair),
        ("a-newer", "2026-01-02", pair + records(V2, 1.0, score_std=8.0)),
        ("other-dtype", "2026-01-03", [{**record, "dtype": "bfloat16"} for record in pair]),
        ("one-length", "2026-01-03", [record for record in pair if record["seq_len"] == 4096]),
        ("one-stage", "2026-01-03", records(V0, 2.0) + records("sdpa-cudnn", 1.0)),
    ):
        write(root / "results" / f"{name}.json", ended, found)
    (root / "results" / "traffic.json").write_text('{"records": []}')
    assert [run.machine["commit"] for run in results.runs()] == ["a-newer", "z-older"]


def test_anchors_are_compared_with_the_median_of_their_gpu(root):
    for name, gpu, ms in (("a", "X", 1.0), ("b", "X", 2.0), ("c", "X", 3.0), ("d", "Y", 8.0)):
        facts = {"gpu": gpu, "anchors": {"fwd": {"flash-3": ms}}}
        (root / "results" / f"{name}.json").write_text(json.dumps({"machine_info": facts, "cases": []}))
    (root / "results" / "e.json").write_text('{"machine_info": {"gpu": "X"}}')
    ratios = {name: ratio for (name, *_), ratio in results.anchor_ratios().items()}
    assert ratios == {"a": 0.5, "b": 1.0, "c": 1.5, "d": 1.0}


def test_the_reference_runs_were_made_on_gpus_that_are_alike():
    """If an anchor is further off, the run is made again."""
    assert {key: ratio for key, ratio in results.anchor_ratios().items() if abs(ratio - 1) > 0.05} == {}


def test_a_pass_that_was_measured_as_the_parent_s_counts_as_the_stage_s(root):
    """Only v1's backward was measured. Its records count for v2 too, because v2's backward has the same code. They do not
    count for v0 and v3, and not as a pair that has measured the noise."""
    found = records(V1, 2.0) + [r for name in (V0, V2, V3) for r in records(name, 1.0, passes=["fwd"])]
    write(root / "results" / "some.json", "2026-01-04", found)
    (only,) = results.runs()
    assert results.gain([only], V2, V1, "bwd", 64)[0].mean == 1
    held = [only.holds(name, results.mean_over("bwd", 64)) for name in (V0, V1, V2, V3)]
    assert held == [False, True, True, False] and only.noise == {}
    assert not results.same_code("v98_gone", "v99_gone", "fwd")


def test_records_of_a_moved_stage_are_the_stage_s_and_those_of_others_are_left_out(root):
    """v1 was called v7_old, and v2 took in two stages. The run measured v7_old twice."""
    for name, was in ((V1, "v7_old"), (V2, "v8_one v9_two")):
        (root / "stages" / name / "__init__.py").write_text(f'WAS = "{was}"\n')
    names = ["sdpa-cudnn", "v7_old", "v7_old (again)", "v8_one", "v9_two", "v99_gone", V3]
    found = [record | {"source": "0"} for name in names for record in records(name, 2.0)]
    write(root / "results" / "old.json", "2026-01-04", found)
    (only,) = results.runs()
    assert [*dict.fromkeys(record["impl"] for record in results.present(found))] == ["sdpa-cudnn", V1, f"{V1} (again)", V3]
    assert only.noise.keys() == {"fwd", "bwd"}
    assert results.gain([only], V1, V3, "fwd", 64)[0].changed  # the code is not what it was under the old name


@pytest.mark.parametrize("text", [None, "", '{"benchmarks": ['], ids=["missing", "empty", "half-written"])
def test_results_that_cannot_be_read_are_named_in_one_line(text, tmp_path):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    for load in (results.load_run, results.read):
        with pytest.raises(SystemExit, match="run.json is missing or incomplete"):
            load(path)


@pytest.mark.parametrize(("triton", "said"), [
    ("T", "Measured with torch 2 and triton T on H100, commit a, day 1; H200, commit b, day 2."),
    ("S", "Measured on NVIDIA H100 80GB, torch 2, triton T, commit a, day 1; NVIDIA H200, torch 2, triton S, commit b, day 2."),
])  # fmt: skip
def test_equal_versions_are_said_once(triton, said):
    older = {"gpu": "NVIDIA H100 80GB", "torch": "2", "triton": "T", "commit": "a", "date": "day 1"}
    newer = {"gpu": "NVIDIA H200", "torch": "2", "triton": triton, "commit": "b", "date": "day 2"}
    found = [SimpleNamespace(ended=ended, machine=machine) for ended, machine in ((2, newer), (1, older), (1, older))]
    assert results.measured(found) == said
