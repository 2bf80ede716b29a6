"""Measured gains come from the right run, with its noise, and missing numbers stay missing. The runs are invented."""

import functools
import itertools
import json
import math

import pytest

import stages
from common.measure import digest
from common.show import results


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


def write(path, commit, ended, found):
    benchmarks = [{"extra_info": record} for record in found]
    path.write_text(
        json.dumps({"benchmarks": benchmarks, "failures": [], "machine_info": machine(commit, ended), "datetime": ended})
    )


def gain(found, *case):
    """Return the mean of a step's gain, and its run."""
    ratio, run = results.gain(found, *case)
    return pytest.approx(ratio.mean), run


OLD = run("old", "2026-01-01", records("v0_a", 8.0), records("v1_b", 4.0), records("sdpa-cudnn", 2.0))
MIDDLE = run("middle", "2026-01-02", records("v1_b", 6.0), records("v2_c", 2.0), records("v0_a", 24.0, passes=["bwd"]))
NEW = run("new", "2026-01-03", records("v2_c", 1.0), records("v3_d", 0.5), records("flash-3", 0.75))
RUNS = [NEW, MIDDLE, OLD]


def test_a_gain_is_from_the_newest_run_that_has_both():
    assert gain(RUNS, "v1_b", "v0_a", "fwd", 64) == (2, OLD)
    assert gain(RUNS, "v1_b", "v0_a", "bwd", 64) == (4, MIDDLE)
    assert gain(RUNS, "v3_d", "v2_c", "fwd", 128) == (2, NEW)
    assert results.gain(RUNS, "v3_d", "v1_b", "fwd", 64) is None


def test_a_rate_is_from_the_newest_run():
    assert results.rate(RUNS, "v2_c", "fwd", 64) == (pytest.approx(100), NEW)
    assert results.rate(RUNS, "v1_b", "fwd", 64) == (pytest.approx(100 / 6), MIDDLE)
    assert results.rate(RUNS, "v13_z", "fwd", 64) is None


def test_a_run_with_few_of_the_points_does_not_count():
    few = run("few", "2026-01-09", records("v0_a", 1.0, lengths=(4096,)), records("v1_b", 1.0, lengths=(4096,)))
    assert gain([few, OLD], "v1_b", "v0_a", "fwd", 64) == (2, OLD)


def test_a_point_that_failed_was_tried_and_is_left_out():
    found = records("v0_a", 8.0)
    for record in found:
        if record["seq_len"] == 16384:
            del record["ms"]
            record["failure"] = "OOM"
    newer = run("newer", "2026-01-09", found, records("v1_b", 1.0))
    assert gain([newer, OLD], "v1_b", "v0_a", "fwd", 64) == (8, newer)
    assert results.gain([newer], "v1_b", "v0_a", "fwd", 64)[0].points == 4


def test_a_gain_is_a_geometric_mean_with_its_worst_and_best_workload():
    ours = [record | {"ms": ms} for record, ms in zip(records("v1_b", 1.0, ["fwd"], [64]), [1, 2, 4, 1, 2, 4], strict=True)]
    found = run("x", "2026-01-01", records("v0_a", 4.0, ["fwd"], [64]), ours)
    ratio, _ = results.gain([found], "v1_b", "v0_a", "fwd", 64)
    assert (ratio.mean, ratio.worst, ratio.best, ratio.points) == pytest.approx((2, 1, 4, 6))
    assert str(ratio) == "×2.00 (1.00–4.00)"
    assert results.ratio([found], "v1_b", "v0_a", found.works[:1]).spread == ""


def test_the_fastest_library_is_that_of_each_workload():
    found = records("v0_a", 1.0) + records("sdpa-x", 4.0, lengths=[1024, 4096]) + records("flash-4", 2.0)
    found += records("sdpa-x", 0.5, lengths=[16384])
    ratio, _ = results.gain([run("only", "2026-01-01", found)], "v0_a", results.FASTEST, "fwd", 64)
    assert ratio.mean == pytest.approx((2.0**2 * 0.5) ** (1 / 3))


def twice(impl, error, source=None):
    """Return the records of a stage that a run measures twice. The second times are longer or shorter by `error`."""
    first = records(impl, 4.0, ["fwd"], [64], source=source or impl)
    factors = [math.exp(sign * error) for sign in (1, -1, 1, -1, 1, -1)]
    return first, [record | {"ms": record["ms"] * factor} for record, factor in zip(first, factors, strict=True)]


@pytest.mark.parametrize("other", ["v0_a (again)", "v3_d"])
def test_noise_is_measured_on_equal_code(other):
    """The noise band of a mean over six workloads is 2 · 0.03 / √6. A single workload's is 2 · 0.03."""
    first, again = twice("v0_a", 0.03)
    again = [record | {"impl": other} for record in again]
    found = run("x", "2026-01-01", first, again, records("v1_b", 4 * math.exp(0.0244)), records("v2_c", 4 * math.exp(0.0246)))
    assert found.noise == {"fwd": pytest.approx(0.03)}
    gains = [results.gain([found], name, "v0_a", "fwd", 64)[0] for name in ("v1_b", "v2_c")]
    assert [ratio.same for ratio in gains] == [True, False]
    assert str(gains[0]) == "= (0.98–0.98)" and gains[1].short == "×0.98"
    assert results.ratio([found], "v2_c", "v0_a", found.works[:1]).same
    assert ("v0_a (again)" not in found.names) and found.times("v0_a", found.works[:1]).popitem()[1] == 4.0


def test_without_enough_pairs_there_is_no_noise_band():
    first, again = twice("v0_a", 0.03)
    again = [record | {"impl": "v0_a (again)"} for record in again]
    assert run("x", "2026-01-01", first, again[:5]).noise == {}
    assert run("x", "2026-01-01", first, [r | {"impl": "v3_d", "source": "other"} for r in again]).noise == {}
    ratio, _ = results.gain([OLD], "v1_b", "v0_a", "fwd", 64)
    assert not ratio.same


def test_a_number_whose_code_has_changed_is_marked():
    v3 = stages.resolve("v3")
    now, later = (records(v3, 1.0, source=source) for source in (digest.current(v3, "forward"), "000000000000"))
    old = records("v0_a", 2.0)
    for found, changed in ((now, False), (later, True), (records(v3, 1.0), False)):
        ratio, _ = results.gain([run("x", "2026-01-01", found, old)], v3, "v0_a", "fwd", 64)
        assert ratio.changed == changed
    assert results.source(v3, "fwd+bwd") == "+".join(digest.current(v3, code) for code in ("forward", "backward"))
    assert results.source("sdpa-cudnn", "fwd") is results.source("v3_gone", "fwd") is None


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository without stages and results."""
    (tmp_path / "results").mkdir()
    (tmp_path / "stages").mkdir()
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(digest, "ROOT", tmp_path)
    monkeypatch.setattr(digest, "current", functools.cache(digest.digest))
    monkeypatch.setattr(stages, "__path__", [str(tmp_path / "stages")])
    return tmp_path


def write_stage(root, name, forward, backward=""):
    (root / "stages" / name).mkdir()
    for file, text in (("__init__", ""), ("forward", forward), ("backward", backward)):
        (root / "stages" / name / f"{file}.py").write_text(text)


def test_runs_are_found_by_what_they_hold(root):
    pair = records("v0_a", 2.0) + records("v1_b", 1.0)
    for name, ended, found in (
        ("z-older", "2026-01-01", pair),
        ("a-newer", "2026-01-02", pair + records("v2_c", 1.0, score_std=8.0)),
        ("other-dtype", "2026-01-03", [{**record, "dtype": "bfloat16"} for record in pair]),
        ("one-length", "2026-01-03", [record for record in pair if record["seq_len"] == 4096]),
        ("one-stage", "2026-01-03", records("v0_a", 2.0) + records("sdpa-cudnn", 1.0)),
    ):
        write(root / "results" / f"{name}.json", name, ended, found)
    (root / "results" / "traffic.json").write_text('{"records": []}')
    assert [run.machine["commit"] for run in results.runs()] == ["a-newer", "z-older"]


def test_a_pass_that_was_measured_as_the_parent_s_counts_as_the_stage_s(root):
    """Only v1's backward was measured. Its records count for v2 too, because v2's backward has the same code. They do not
    count for v0 and v3, and not as a pair that has measured the noise."""
    for name, code in {"v0_a": 0, "v1_b": 1, "v2_c": 1, "v3_d": 2}.items():
        write_stage(root, name, f"x = {name[1]}\n", f"x = {code}\n")
    found = records("v1_b", 2.0) + [
        record for name in ("v0_a", "v2_c", "v3_d") for record in records(name, 1.0, passes=["fwd"])
    ]
    write(root / "results" / "some.json", "some", "2026-01-04", found)
    (only,) = results.runs()
    assert results.gain([only], "v2_c", "v1_b", "bwd", 64)[0].mean == 1
    held = [only.holds(name, results.mean_over("bwd", 64)) for name in ("v0_a", "v1_b", "v2_c", "v3_d")]
    assert held == [False, True, True, False] and only.noise == {}


def test_comments_are_no_code(root):
    for name, text in (("v0_a", "x = 1\n"), ("v1_b", "# why\nx = 1  # so\n"), ("v2_c", "x = 2\n")):
        write_stage(root, name, text)
    assert results.same_code("v1_b", "v0_a", "fwd")
    assert not results.same_code("v2_c", "v1_b", "fwd")
    assert not results.same_code("v1_b", "v13_gone", "fwd") and not results.same_code("v12_gone", "v13_gone", "fwd")


@pytest.mark.parametrize("text", [None, "", '{"benchmarks": ['], ids=["missing", "empty", "half-written"])
def test_results_that_cannot_be_read_are_named_in_one_line(text, tmp_path):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    for load in (results.load_run, results.load_counts):
        with pytest.raises(SystemExit, match="run.json is missing or incomplete"):
            load(path)


def test_captions_name_each_run_once():
    other = results.Run(OLD.records, OLD.machine, "2026-01-01T23")
    found = [NEW, MIDDLE, other, OLD]
    assert [results.number(found, run) for run in found] == [3, 2, 1, 1]
    assert results.sources(found, [NEW, other, OLD, NEW]) == (
        "[1] X, torch 1, triton 2, commit old, 2026-01-01; [3] X, torch 1, triton 2, commit new, 2026-01-03"
    )


def test_bytes_are_said_in_words():
    assert results.bytes_in_words(194, 100) == "1.94 times fewer bytes"
    assert results.bytes_in_words(100, 192) == "1.92 times more bytes"
    assert results.bytes_in_words(1000, 1001) == "the same bytes"
