"""The documents show what the committed results hold, and nothing else."""

import functools
import itertools
import json
import math

import pytest

import bench
import stages
from common.show import documents, numbers, results
from common.show.decoding import decoding_tables
from common.show.shared import shared_tables

MACHINES = [{"gpu": "X", "torch": "1", "triton": "2", "commit": "abc", "date": "2026-01-02"}]


def record(impl, ms, seq_len=1024, causal=False, **others):
    return {
        "impl": impl, "pass": "fwd", "batch": 1, "heads": 1, "seq_len": seq_len, "head_dim": 64, "causal": causal,
        "dtype": "float16", "ms": ms, "tflops": 100 / ms, "peak_extra_mib": 1.0, "host_us": 9.0, **others,
    }  # fmt: skip


def test_documents_agree_with_the_results():
    for path, text in documents.documents().items():
        assert path.read_text() == text, f"{path.name} and the results disagree: run make readme"


@pytest.mark.parametrize("name", bench.GRIDS)
def test_a_part_of_the_reference_is_kept_with_its_document_and_where_it_is_from(name):
    assert name in documents.RUNS
    path = results.run_file(name)
    if not path.exists():
        pytest.skip("not measured yet: make reference")
    readme = (path.parent / "README.md").read_text()
    assert f"`{path.name}`" in readme and f"`{path.stem}.md`" in readme and f"GRID={name} FILE=results/{path.name}" in readme
    _, machine = results.load_run(path)
    assert all(machine[fact] for fact in ("gpu", "torch", "triton", "commit", "date", "matmul_tflops"))
    assert "dirty" not in machine["commit"]


def run_of(ended, passes=("fwd", "bwd"), commit="abc", **ms):
    """A run that has these implementations, each with one time at every point of the means, for D = 64 and 128."""
    points = itertools.product(passes, (64, 128), (False, True), results.MEAN_OVER)
    records = [
        record(impl.replace("__", "-"), time, seq_len, causal, head_dim=head_dim) | {"pass": pass_}
        for pass_, head_dim, causal, seq_len in points for impl, time in ms.items()
    ]  # fmt: skip
    return results.Run(records, MACHINES[0] | {"commit": commit, "date": ended}, ended)


V14, V15, V16 = map(stages.resolve, ("v14", "v15", "v16"))
OLD = run_of("2026-01-01", commit="old", v0_naive=40.0, **{V14: 4.0, V15: 2.0}, sdpa__cudnn=2.0)
NEW = run_of("2026-01-02", commit="new", **{V15: 3.0, V16: 1.0}, sdpa__cudnn=4.0)
BOTH = [NEW, OLD]


def test_a_gain_is_of_the_newest_run_that_has_both_stages():
    assert results.gain(BOTH, V15, V14, "fwd", 64) == (pytest.approx(2.0), OLD)
    assert results.gain(BOTH, V16, V15, "fwd", 64) == (pytest.approx(3.0), NEW)
    newer = run_of("2026-01-03", **{V14: 6.0, V15: 2.0})
    assert results.gain([newer, *BOTH], V15, V14, "bwd", 128) == (pytest.approx(3.0), newer)
    assert results.gain(BOTH, V16, V14, "fwd", 64) is None  # never in one run
    assert results.rate(BOTH, V15, "fwd", 64) == (pytest.approx(100 / 3), NEW)
    assert results.rate(BOTH, "flash-4", "fwd", 64) is None


def test_a_run_without_all_points_of_a_pass_gives_no_gain():
    part = run_of("2026-01-03", passes=("fwd",), **{V14: 6.0, V15: 2.0})
    assert results.gain([part, *BOTH], V15, V14, "bwd", 64) == (pytest.approx(2.0), OLD)
    short = results.Run([r for r in part.records if r["seq_len"] < 8192], part.machine, part.ended)
    assert results.gain([short, *BOTH], V15, V14, "fwd", 64) == (pytest.approx(2.0), OLD)


def test_stages_of_two_runs_are_compared_through_one_that_both_have():
    links = results.chain(BOTH, V16, "v0_naive", "fwd", 64)
    assert [(new, old, ratio) for new, old, ratio, _ in links] == [
        (V15, "v0_naive", pytest.approx(20.0)),
        (V16, V15, pytest.approx(3.0)),
    ]
    assert results.chain(BOTH, V15, "v0_naive", "fwd", 64)[0][2] == pytest.approx(20.0)
    assert results.chain([NEW], V16, "v0_naive", "fwd", 64) is None


def test_runs_are_numbered_from_the_oldest_and_named_once():
    assert [results.number(BOTH, run) for run in BOTH] == [2, 1]
    where = "X, torch 1, triton 2, commit"
    assert results.sources(BOTH, [NEW, OLD, NEW]) == f"[1] {where} old, 2026-01-01; [2] {where} new, 2026-01-02"


def test_runs_are_found_by_what_they_hold(tmp_path, monkeypatch):
    """Whatever the files are called: not by a list of stages, nor of names."""

    def save(name, run, **workload):
        shape = {"batch": 16384 // 1024, "heads": 32, "kv_heads": 32}
        records = []
        for record in run.records:
            shape = {"batch": 16384 // record["seq_len"], "heads": 2048 // record["head_dim"]}
            records.append({"extra_info": record | shape | workload})
        saved = {"benchmarks": records, "failures": [], "machine_info": run.machine, "datetime": run.ended}
        (tmp_path / "results" / name).write_text(json.dumps(saved))

    (tmp_path / "results").mkdir()
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert results.runs() == []
    save("b.json", NEW)
    save("a.json", OLD)
    save("sinks.json", NEW, sink=16.0)
    save("half.json", NEW, dtype="bfloat16")
    save("superseded.json", run_of("2026-01-01", **{V15: 9.0}))
    (tmp_path / "results" / "rates.json").write_text("{}")
    assert [run.ended for run in results.runs()] == ["2026-01-02", "2026-01-01"]
    assert results.rate(results.runs(), V15, "fwd", 64)[0] == pytest.approx(100 / 3)


def test_code_is_the_same_whatever_the_comments(tmp_path, monkeypatch):
    for name, code in {"v1_a": "x = 1  # one", "v2_b": "# NOTE: v3\nx = 1", "v3_c": "x = 2"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "forward.py").write_text(code + "\n")
    monkeypatch.setattr(stages, "__path__", [str(tmp_path)])
    assert results.same_code("v2_b", "v1_a", "fwd") and not results.same_code("v3_c", "v2_b", "fwd")
    assert not results.same_code("v2_b", "v0_gone", "fwd")


@pytest.mark.parametrize(("before", "after", "words"), [
    (300, 100, "3.00 times fewer bytes"), (100, 150, "1.50 times more bytes"), (1000, 1001, "the same bytes"),
    (1000, 995, "1.01 times fewer bytes"),
])  # fmt: skip
def test_bytes_in_words(before, after, words):
    assert results.bytes_in_words(before, after) == words


@pytest.mark.parametrize("name", stages.names())
def test_results_hold_every_stage(name):
    found = results.runs()
    if name not in results.names_of(found):
        pytest.skip("not measured yet: make reference")
    records = [record for run in found for record in run.records]
    measured = {(r["pass"], r["head_dim"], r["causal"]) for r in records if r["impl"] == name and "ms" in r}
    passes = [pass_ for pass_ in ("fwd", "bwd") if not bench.repeats(name, pass_)]
    assert set(itertools.product(passes, (64, 128), (False, True))) <= measured


def test_saved_failures_are_records_too(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(
        json.dumps({"benchmarks": [{"extra_info": {"impl": "a"}}], "failures": [{"impl": "b"}], "machine_info": {}})
    )
    assert results.load_run(path) == ([{"impl": "a"}, {"impl": "b"}], {})


def test_speedup_is_the_geometric_mean_where_both_were_measured():
    old = [record("v0_naive", 2.0), record("v0_naive", 8.0, causal=True), record("v0_naive", 1.0, seq_len=512)]
    new = [record("v1_x", 1.0), record("v1_x", 1.0, causal=True), record("v1_x", 100.0, seq_len=2048)]
    lost = [{**record("v0_naive", 1.0, seq_len=4096), "failure": "OOM"}, record("v1_x", 9.0, seq_len=4096)]
    assert results.speedup(old + new + lost, "v1_x", "v0_naive", "fwd", 64) == pytest.approx(math.sqrt(2 * 8))
    assert results.speedup(old + new, "v1_x", "v0_naive", "bwd", 64) is None


def test_summary_sets_the_newest_stage_against_the_fastest_library_of_each_point():
    times = {"v1_b": 2.0, "v1a_c": 0.1, "v0_a": 0.1, "sdpa__x": 4.0, "flash__4": 3.0}
    run = run_of("2026-01-01", passes=("fwd",), **times)
    for record in run.records:
        if record["impl"] == "sdpa-x" and record["seq_len"] == 4096:
            record["ms"] = 1.0
    expected = math.prod([1.5, 0.5, 1.5, 1.5]) ** (1 / 4)
    said = f"v1_b against the fastest of sdpa-x, flash-4 at each point, S ≥ 2048, run 1: forward D=64 ×{expected:.2f}, "
    assert said in documents.summary_table([run])
    assert "against the fastest" not in documents.summary_table([run_of("2026-01-01", v1_b=1.0)])


def test_implementations_come_in_stage_order():
    names = ("v10_late", "v2_early", "sdpa-b", "v0_naive", "sdpa-a", "v2_early")
    assert results.implementations([{"impl": name} for name in names]) == [
        "sdpa-b",
        "sdpa-a",
        "v0_naive",
        "v2_early",
        "v10_late",
    ]


def rows_of(table):
    lines = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}


def test_summary_has_every_stage_in_its_newest_run_and_gains_from_a_run_with_the_parent():
    rows = rows_of(documents.summary_table(BOTH))
    assert rows["sdpa-cudnn"] == ["2"] + ["25, 100 %"] * 4
    assert rows["v0_naive"] == ["1"] + ["2, 5 %"] * 4
    assert rows[V14] == ["1"] + [
        "25, not measured beside v13, 50 %",
        "25, not measured beside v13, 50 %",
        "25, 50 %",
        "25, 50 %",
    ]
    assert rows[V15][:2] == ["2; gain: 1", "33, **×2.00**, 133 %"]
    assert rows[V16] == ["2"] + ["100, 400 %"] * 2 + ["100, **×3.00**, 400 %"] * 2  # the forward is v15's


def test_table_replaces_what_is_between_its_markers_alone():
    text = "before\n<!-- x: written by make readme -->\nold\n<!-- end of x -->\nafter\n"
    once = documents.with_table(text, "x", "| new |")
    assert once == "before\n<!-- x: written by make readme -->\n\n| new |\n\n<!-- end of x -->\nafter\n"
    assert documents.with_table(once, "x", "| new |") == once
    for wrong in ("before\nafter\n", text + text):
        with pytest.raises(ValueError, match="exactly once"):
            documents.with_table(wrong, "x", "| new |")


def cells(table, *labels):
    """The cells behind the labels of a table's row."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    (row,) = [row for row in rows if row[: len(labels)] == list(labels)]
    return row[len(labels) :]


def test_gain_is_shown_by_length_and_a_dash_where_it_was_not_measured(monkeypatch):
    run = run_of("2026-01-01", v0_naive=4.0, v1_online_softmax=1.6)
    for record in run.records:
        if record["impl"] == "v1_online_softmax" and record["seq_len"] == 4096:
            del record["ms"]
    monkeypatch.setattr(documents, "runs", lambda: [run])
    assert cells(documents.gain_table("v1_online_softmax"), "forward", "64", "full")[1:] == [
        "×2.50",
        "×2.50",
        "-",
        "×2.50",
        "×2.50",
    ]
    assert cells(documents.gain_table("v0_naive"), "forward", "64", "full") == ["4.00"] * 5


def test_a_step_that_no_run_has_is_said_to_be_unmeasured(monkeypatch):
    monkeypatch.setattr(documents, "runs", lambda: BOTH)
    table = documents.gain_table(V14)
    assert f"Not measured beside {stages.parent(V14)}: forward D=64, forward D=128, backward D=64, backward D=128." in table


def test_evolution_goes_from_the_first_stage_to_the_newest_next_to_the_libraries():
    where = "X, torch 1, triton 2, commit"
    assert documents.evolution_sentence(BOTH) == (
        "Geometric means, D = 128, float16. "
        "Forward: from v0's 2 to v16's 100 TFLOP/s, ×60; over cuDNN ×4.00. "
        "Backward: from v0's 2 to v16's 100 TFLOP/s, ×60; over cuDNN ×4.00. "
        "No run has both v0 and v16, so the factor multiplies v0 to v15 [1] by v15 to v16 [2]. "
        f"[1] {where} old, 2026-01-01; [2] {where} new, 2026-01-02."
    )
    one = run_of("2026-01-01", v0_a=10.0, v1_b=2.0, v1a_c=0.1)
    assert "v0's 10 to v1's 50 TFLOP/s, ×5. " in documents.evolution_sentence([one])


@functools.cache
def committed():
    """The records of the oldest run of all stages but the last."""
    paths = [results.run_file(f"float16-d{head_dim}") for head_dim in results.HEAD_DIMS]
    return [record for path in paths for record in results.load_run(path)[0]]


def times(impl, pass_, head_dim, causal):
    """Milliseconds of the committed runs, by sequence length."""
    records = committed()
    wanted = (impl, pass_, head_dim, causal, "float16")
    found = [r for r in records if (r["impl"], r["pass"], r["head_dim"], r["causal"], r["dtype"]) == wanted and "ms" in r]
    return {r["seq_len"]: r["ms"] for r in sorted(found, key=lambda r: r["seq_len"])}


def gains(new, old, pass_, head_dim, causal):
    """How many times as fast `new` was, by sequence length."""
    before, after = (times(impl, pass_, head_dim, causal) for impl in (old, new))
    return {seq_len: before[seq_len] / ms for seq_len, ms in after.items()}


def test_what_the_documents_say_of_lengths_holds():
    v0, v1, v2, v3, v5, v6, v7, v12, v13, v14 = map(stages.resolve, "v0 v1 v2 v3 v5 v6 v7 v12 v13 v14".split())
    for causal in (False, True):
        assert max(gains(v2, v1, "fwd", 128, causal).values()) < 1
        assert min(gains(v2, v1, "fwd", 128, causal).values()) < 0.5
        for pass_, head_dim in results.COLUMNS:
            over_v2 = gains(v3, v2, pass_, head_dim, causal)
            assert over_v2[512] < over_v2[1024] < over_v2[2048]
            assert all(1.75 < over_v2[2 * seq_len] / over_v2[seq_len] < 2.15 for seq_len in (4096, 8192))
        over_v12 = gains(v13, v12, "fwd", 64, causal)
        assert over_v12.pop(512) < 1 or not causal
        assert min(over_v12.values()) > 1
        assert all(gain > 1 for length, gain in gains(v14, v12, "fwd", 128, causal).items() if length >= 2048)
        assert min(gains(v7, v6, "bwd", 128, causal).values()) < 1
    assert all(gain > 1 for length, gain in gains(v13, v12, "fwd", 128, True).items() if length >= 4096)
    assert gains(v12, v5, "bwd", 64, True)[512] < 1
    assert gains(v12, "sdpa-cudnn", "fwd", 128, True)[512] < 1
    for pass_, head_dim in results.COLUMNS:
        full, causal = (times(v0, pass_, head_dim, causal) for causal in (False, True))
        assert all(causal[seq_len] > full[seq_len] for seq_len in causal)


def test_what_the_documents_say_of_spread_scores_holds():
    table = documents.spread_table("v13_speculative_softmax")
    for mask in ("full", "causal"):
        found = {dtype: cells(table, dtype, mask) for dtype in ("float16", "bfloat16")}
        narrow, *_, wide = (float(ratio.removeprefix("×")) for ratio in found["float16"])
        assert (narrow < 1) == (mask == "causal") and wide == pytest.approx(2, abs=0.2)
        narrow, *wider = (float(ratio.removeprefix("×")) for ratio in found["bfloat16"])
        assert (max(narrow, *wider) < 1) == (mask == "causal")
        assert max(wider) <= narrow + 0.02, "in bfloat16 spread scores cost nothing"
    assert set(cells(documents.spread_table("v5_tuned"), "float16", "full")) == {"-"}  # not in that run


def test_tuned_tiles_of_v4_mostly_move_more_than_those_of_v3():
    more = []
    for pass_, head_dim in results.COLUMNS:
        for causal in (False, True):
            cases = [results.tuned_case(name, pass_, head_dim, causal) for name in ("v3_fa2_causal", "v4_autotune_descriptor")]
            old, new = map(results.bytes_of, cases)
            assert old <= new or pass_ == "bwd"
            more.append(old < new)
    assert sum(more) > len(more) / 2
    assert results.tuned_case("v13_speculative_softmax", "fwd", 256, False) is None


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(("name", "tables"), [
    ("shared", shared_tables), ("decode-d64", decoding_tables), ("decode-d128", decoding_tables),
])  # fmt: skip
def test_document_is_made_where_the_run_is_there(name, tables, there, tmp_path, monkeypatch):
    path = tmp_path / "a-run.json"
    if there:
        path.write_text("a run")
    title, made_by = documents.RUNS[name]
    assert made_by is tables
    monkeypatch.setattr(documents, "RUNS", {name: (title, lambda records, machine: f"tables of {records}")})
    monkeypatch.setattr(documents, "PASSAGES", dict.fromkeys(documents.PASSAGES, lambda stage: ""))
    monkeypatch.setattr(documents, "run_file", lambda which: path)
    monkeypatch.setattr(documents, "load_run", lambda which: ("the run", None))
    found = documents.documents()
    assert (path.with_suffix(".md") in found) == there
    assert not there or "tables of the run" in found[path.with_suffix(".md")]


def test_short_caches_are_read_as_the_documents_say():
    records, _ = results.load_run(results.run_file("decode-d64"))
    short = [record for record in records if record["seq_len"] == 1 and record["kv_len"] <= 4096]
    ms = {(r["impl"], r["batch"], r["kv_heads"], r["kv_len"]): r["ms"] for r in short}
    v15 = stages.resolve("v15")
    ahead = [ms["sdpa-cudnn", *point] < time for (impl, *point), time in ms.items() if impl == v15]
    assert sum(ahead) > len(ahead) / 2


def test_numbers_are_next_to_the_stage_with_a_running_maximum(monkeypatch, tmp_path):
    """A stage's ratio, and in brackets that of the stage before; a result that was wrong has none."""
    ms = {"v12_persistent": 2.0, "v16_persistent_backward": 4.0, "v17_safe_speculation": 1.0}
    point = {"head_dim": 64, "dtype": "float16", "causal": False, "seq_len": 4096, "score_std": 1.0}
    records = [point | {"impl": impl, "sink": sink, "ms": time} for impl, time in ms.items() for sink in (0.0, 16.0)]
    del records[3]["ms"]  # v16's, with a sink
    machine = {"gpu": "a GPU", "torch": "2", "triton": "3", "commit": "0" * 40}
    monkeypatch.setattr(numbers, "run_file", lambda name: tmp_path)
    monkeypatch.setattr(numbers, "load_run", lambda path: (records, machine))
    table = numbers.numbers_table("v17_safe_speculation")
    assert "deviation 1 |" in table and "sink of 16 |" in table
    assert cells(table, "64", "float16", "full") == ["2.00 (0.50)", "2.00 (wrong)"]


def test_wide_heads_are_next_to_the_stage_before_and_the_libraries(monkeypatch, tmp_path):
    rates = {"sdpa-cudnn": 400.0, "v17_safe_speculation": 100.0, "v18_wide_backward": 500.0}
    records = [{"impl": i, "pass": "bwd", "causal": True, "seq_len": 4096, "tflops": rate} for i, rate in rates.items()]
    machine = {"gpu": "a GPU", "torch": "2", "triton": "3", "commit": "0" * 40}
    monkeypatch.setattr(documents, "run_file", lambda name: tmp_path)
    monkeypatch.setattr(documents, "load_run", lambda path: (records, machine))
    table = documents.wide_table("v18_wide_backward")
    assert cells(table, "backward", "causal", "4096") == ["500", "×5.00", "125 %"]
    assert cells(table, "forward", "full", "4096") == ["-", "-", "-"]
