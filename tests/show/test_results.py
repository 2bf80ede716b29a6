"""Measured gains come from the right run, and missing numbers stay missing. The runs are invented."""

import itertools
import json

import pytest

import stages
from common.show import results


def machine(commit, date="2026-01-02"):
    return {"gpu": "X", "torch": "1", "triton": "2", "commit": commit, "date": date}


def records(impl, ms, passes=("fwd", "bwd"), head_dims=results.HEAD_DIMS, lengths=results.MEAN_OVER, **others):
    """Return an implementation's records for every workload of the means. Each has `ms` and 100 / `ms` TFLOP/s."""
    return [
        {
            "impl": impl, "pass": pass_, "batch": 16384 // seq_len, "heads": 2048 // head_dim, "seq_len": seq_len,
            "head_dim": head_dim, "causal": causal, "dtype": "float16", "ms": ms, "tflops": 100 / ms, "peak_extra_mib": 1.0,
        } | others
        for pass_, head_dim, causal, seq_len in itertools.product(passes, head_dims, (False, True), lengths)
    ]  # fmt: skip


def run(commit, ended, *parts):
    """Return a run with the records of all `parts`."""
    return results.Run(sum(parts, []), machine(commit, ended), ended)


def write(directory, name, ended, found, failures=()):
    benchmarks = [{"extra_info": record} for record in found]
    saved = {"benchmarks": benchmarks, "failures": list(failures), "machine_info": machine(name), "datetime": ended}
    (directory / f"{name}.json").write_text(json.dumps(saved))


OLD = run("old", "2026-01-01", records("v0_a", 8.0), records("v1_b", 4.0), records("sdpa-cudnn", 2.0))
MIDDLE = run("middle", "2026-01-02", records("v1_b", 6.0), records("v2_c", 2.0), records("v0_a", 24.0, passes=["bwd"]))
NEW = run("new", "2026-01-03", records("v2_c", 1.0), records("v3_d", 0.5), records("flash-3", 0.75))
RUNS = [NEW, MIDDLE, OLD]


def test_a_gain_is_from_the_newest_run_that_has_both():
    assert results.gain(RUNS, "v1_b", "v0_a", "fwd", 64) == (pytest.approx(2), OLD)
    assert results.gain(RUNS, "v1_b", "v0_a", "bwd", 64) == (pytest.approx(4), MIDDLE)
    assert results.gain(RUNS, "v3_d", "v2_c", "fwd", 128) == (pytest.approx(2), NEW)
    assert results.gain(RUNS, "v3_d", "v1_b", "fwd", 64) is None


def test_a_rate_is_from_the_newest_run():
    assert results.rate(RUNS, "v2_c", "fwd", 64) == (pytest.approx(100), NEW)
    assert results.rate(RUNS, "v1_b", "fwd", 64) == (pytest.approx(100 / 6), MIDDLE)
    assert results.rate(RUNS, "v13_z", "fwd", 64) is None


def test_a_chain_multiplies_gains_that_are_each_of_one_run():
    links = results.chain(RUNS, "v3_d", "v0_a", "fwd", 64)
    assert [(new, old, run) for new, old, _, run in links] == [
        ("v1_b", "v0_a", OLD), ("v2_c", "v1_b", MIDDLE), ("v3_d", "v2_c", NEW)
    ]  # fmt: skip
    assert [ratio for *_, ratio, _ in links] == pytest.approx([2, 3, 2])
    assert len(results.chain(RUNS, "v3_d", "v0_a", "bwd", 64)) == 2  # v0 to v2 and v2 to v3
    assert results.chain([NEW, OLD], "v3_d", "v0_a", "fwd", 64) is None


def test_a_run_with_few_of_the_points_does_not_count():
    few = run("few", "2026-01-09", records("v0_a", 1.0, lengths=(4096,)), records("v1_b", 1.0, lengths=(4096,)))
    assert results.gain([few, OLD], "v1_b", "v0_a", "fwd", 64)[1] is OLD


def test_a_point_that_failed_was_tried():
    found = [{**r, "failure": "OOM"} if r["seq_len"] == 16384 else r for r in records("v0_a", 8.0)]
    newer = run("newer", "2026-01-09", found, records("v1_b", 1.0))
    assert results.gain([newer, OLD], "v1_b", "v0_a", "fwd", 64) == (pytest.approx(8), newer)


def test_runs_are_found_by_what_they_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    directory = tmp_path / "results"
    directory.mkdir()
    pair = records("v0_a", 2.0) + records("v1_b", 1.0)
    write(directory, "z-older", "2026-01-01", pair)
    write(directory, "a-newer", "2026-01-02", pair + records("v2_c", 1.0, score_std=8.0))
    write(directory, "other-dtype", "2026-01-03", [{**record, "dtype": "bfloat16"} for record in pair])
    write(directory, "one-length", "2026-01-03", [record for record in pair if record["seq_len"] == 4096])
    write(directory, "one-stage", "2026-01-03", records("v0_a", 2.0) + records("sdpa-cudnn", 1.0))
    write(directory, "few-heads", "2026-01-03", [{**record, "heads": 2} for record in pair])
    (directory / "traffic.json").write_text('{"records": []}')
    found = results.runs()
    assert [run.machine["commit"] for run in found] == ["a-newer", "z-older"]
    assert results.implementations(found[0].records) == ["v0_a", "v1_b"]


def test_a_pass_that_was_measured_as_the_parent_s_counts_as_the_stage_s(tmp_path, monkeypatch):
    """Only v1's backward was measured. Its records count for v2 too, because v2's backward has the same code. They do not
    count for v0 and v3."""
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(stages, "__path__", [str(tmp_path)])
    for name, code in {"v0_a": 0, "v1_b": 1, "v2_c": 1, "v3_d": 2}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "forward.py").write_text(f"x = {name[1]}\n")
        (tmp_path / name / "backward.py").write_text(f"x = {code}\n")
    found = records("v1_b", 2.0) + [
        record for name in ("v0_a", "v2_c", "v3_d") for record in records(name, 1.0, passes=["fwd"])
    ]
    write(tmp_path / "results", "some", "2026-01-04", found)
    (only,) = results.runs()
    assert results.speedup(only.records, "v2_c", "v1_b", "bwd", 64) == pytest.approx(1)
    assert [only.holds(name, "bwd", 64) for name in ("v0_a", "v1_b", "v2_c", "v3_d")] == [False, True, True, False]


def test_captions_name_each_run_once():
    other = results.Run(OLD.records, OLD.machine, "2026-01-01T23")
    found = [NEW, MIDDLE, other, OLD]
    assert [results.number(found, run) for run in found] == [3, 2, 1, 1]
    assert results.sources(found, [NEW, other, OLD, NEW]) == (
        "[1] X, torch 1, triton 2, commit old, 2026-01-01; [3] X, torch 1, triton 2, commit new, 2026-01-03"
    )


def test_comments_are_no_code(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "__path__", [str(tmp_path)])
    for name, text in (("v0_a", "x = 1\n"), ("v1_b", "# why\nx = 1  # so\n"), ("v2_c", "x = 2\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "forward.py").write_text(text)
    assert results.same_code("v1_b", "v0_a", "fwd")
    assert not results.same_code("v2_c", "v1_b", "fwd")
    assert not results.same_code("v1_b", "v13_gone", "fwd")


def test_bytes_are_said_in_words():
    assert results.bytes_in_words(194, 100) == "1.94 times fewer bytes"
    assert results.bytes_in_words(100, 192) == "1.92 times more bytes"
    assert results.bytes_in_words(1000, 1001) == "the same bytes"


def test_tiles_are_compared_kernel_by_kernel():
    def case(**tiles):
        return {"counted": [{"name": name, "tile": tile} for name, tile in tiles.items()] + [{"name": "aten.sum"}]}

    assert results.same_tiles(case(dq={"M": 64}), case(dq={"M": 64}, delta={"M": 32}))
    assert not results.same_tiles(case(dq={"M": 64}), case(dq={"M": 32}))
    assert not results.same_tiles(case(dq={"M": 64}), case(one={"M": 64}))


def test_mean_ratio_is_geometric_over_what_both_have():
    assert results.mean_ratio({1: 2.0, 2: 4.0, 3: 1.0}, {1: 8.0, 2: 2.0, 4: 9.0}) == pytest.approx(2**0.5)
    assert results.mean_ratio({1: 2.0}, {2: 2.0}) is None and results.mean_ratio({}, {}) is None
