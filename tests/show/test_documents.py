"""The documents show what the committed results hold, and nothing else."""

import functools
import itertools
import json
import math

import pytest
from test_results import records
from test_results import run as run_of

import bench
import stages
from common.show import documents, results, sinks
from common.show.decoding import decoding_tables
from common.show.shared import shared_tables

V0, V1, V2, V3 = map(stages.resolve, ("v0", "v1", "v2", "v3"))


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


@pytest.mark.parametrize("name", stages.names())
def test_results_hold_every_stage(name):
    records = [record for run in results.runs() for record in run.records]
    if name not in results.implementations(records):
        pytest.skip("not measured yet: make reference")
    measured = {(r["pass"], r["head_dim"], r["causal"]) for r in records if r["impl"] == name and "ms" in r}
    if parent := stages.parent(name):  # the reference skips a dead end's pass that has its parent's code
        same = [pass_ for pass_ in results.CODE if stages.is_dead_end(name) and results.same_code(name, parent, pass_)]
        measured |= set(itertools.product(same, (64, 128), (False, True)))
    assert set(itertools.product(("fwd", "bwd"), (64, 128), (False, True))) <= measured


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
    found = [rec for rec in records("v1_b", 2.0) + records("v0_a", 1.0) if rec["seq_len"] != 2048]
    found += records("v1_b", 1.0, lengths=[2048]) + records("v0_a", 1.0, lengths=[2048])
    found += records("sdpa-x", 4.0, lengths=[1024, 2048]) + records("sdpa-x", 1.0, lengths=[4096, 8192, 16384])
    found += records("flash-4", 2.0) + records("v1a_c", 0.1)
    sentence = documents.summary_table([run_of("only", "2026-01-01", found)]).splitlines()[-1]
    # 2 / 1 at S = 2048, 1 / 2 at the three longer ones: the fourth root of 1 / 4
    assert sentence.startswith(
        "v1_b against the fastest of sdpa-x, flash-4 at each point, S ≥ 2048, run 1: forward D=64 ×0.71,"
    )
    alone = [rec for rec in found if stages.position(rec["impl"])]
    assert "against the fastest" not in documents.summary_table([run_of("only", "2026-01-01", alone)])


def test_implementations_come_in_stage_order():
    names = ("v10_late", "v2_early", "sdpa-b", "v0_naive", "sdpa-a", "v2_early")
    assert results.implementations([{"impl": name} for name in names]) == [
        "sdpa-b",
        "sdpa-a",
        "v0_naive",
        "v2_early",
        "v10_late",
    ]


def summary_rows(runs):
    lines = [line for line in documents.summary_table(runs).splitlines() if line.startswith("| ")][1:]
    return {row[0]: row[1:] for row in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)}


def test_summary_shows_the_newest_rates_and_gains_of_one_run(monkeypatch):
    monkeypatch.setattr(documents, "same_code", lambda new, old, pass_: (new, pass_) == (V1, "bwd"))
    old = run_of("old", "2026-01-01", records(V0, 7.7), records(V1, 3.85), records("sdpa-flash", 10.0))
    new = run_of("new", "2026-01-02", records(V1, 2.0), records(V2, 1.0, passes=["bwd"]), records("sdpa-cudnn", 1.0))
    late = run_of("late", "2026-01-03", records(V3, 0.5))
    rows = summary_rows([late, new, old])
    assert list(rows) == ["sdpa-flash", "sdpa-cudnn", V0, V1, V2, V3]
    assert rows["sdpa-flash"] == ["1"] + ["10"] * 4
    assert rows[V0] == ["1"] + ["13"] * 4  # cuDNN is in another run
    assert rows[V1] == ["2; gain: 1"] + ["50, **×2.00**, 50 %"] * 2 + ["50, 50 %"] * 2
    assert rows[V2] == ["2"] + ["-"] * 2 + ["100, **×2.00**, 100 %"] * 2
    assert rows[V3] == ["3"] + ["200, not measured beside v2"] * 4
    assert documents.summary_table([late, new, old]).count("commit old") == 1


def test_table_replaces_what_is_between_its_markers_alone():
    text = "before\n<!-- x: written by make readme -->\nold\n<!-- end of x -->\nafter\n"
    once = documents.with_table(text, "x", "| new |")
    assert once == "before\n<!-- x: written by make readme -->\n\n| new |\n\n<!-- end of x -->\nafter\n"
    assert documents.with_table(once, "x", "| new |") == once
    for wrong in ("before\nafter\n", text + text):
        with pytest.raises(ValueError, match="exactly once"):
            documents.with_table(wrong, "x", "| new |")


def cells(table, *labels):
    """The cells after the labels of a table's row."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    (row,) = [row for row in rows if row[: len(labels)] == list(labels)]
    return row[len(labels) :]


def test_gain_is_shown_by_length_and_says_what_is_not_measured(monkeypatch):
    found = records(V1, 2.0, passes=["fwd"])
    for record in found:
        if record["seq_len"] == 1024 and not record["causal"]:
            del record["ms"]
            record["failure"] = "OOM"
    older = run_of("older", "2026-01-01", records(V0, 1.0), records(V1, 1.0, passes=["fwd"]))
    newer = run_of("newer", "2026-01-02", records(V0, 5.0), found)
    monkeypatch.setattr(documents, "runs", lambda: [newer, older])
    table = documents.gain_table(V1)
    assert cells(table, "forward", "64", "full")[1:] == ["-"] + ["×2.50"] * 4
    assert cells(table, "backward", "64", "full")[1:] == ["-"] * 5
    assert f"Not measured beside {V0}: backward D=64, backward D=128." in table
    assert "commit newer" in table and "commit older" not in table
    assert cells(documents.gain_table(V0), "forward", "64", "full") == ["5.00"] * 5


def test_a_tuned_pass_with_the_parents_code_says_so():
    table = documents.tuned_table(stages.resolve("v5"))
    assert cells(table, "forward", "64", "full")[-1] == "same code"
    assert "bytes" in cells(table, "backward", "64", "full")[-1] and "÷" not in table


def test_evolution_multiplies_gains_where_no_run_has_both_ends():
    old = run_of("old", "2026-01-01", records("v0_a", 10.0), records("v1_b", 2.0), records("v1a_x", 0.1))
    new = run_of("new", "2026-01-02", records("v1_b", 4.0), records("v2_c", 1.0), records("sdpa-cudnn", 1.5))
    assert documents.evolution_sentence([new, old]) == (
        "Geometric means, D = 128, float16. Forward: from v0's 10 to v2's 100 TFLOP/s, ×20; over cuDNN ×1.50. "
        "Backward: from v0's 10 to v2's 100 TFLOP/s, ×20; over cuDNN ×1.50. "
        "No run has both v0 and v2, so the factor multiplies v0 to v1 [1] by v1 to v2 [2]. "
        "[1] X, torch 1, triton 2, commit old, 2026-01-01; [2] X, torch 1, triton 2, commit new, 2026-01-02."
    )
    assert "from v0's 10 to v1's 50 TFLOP/s, ×5. " in documents.evolution_sentence([old])
    apart = run_of("apart", "2026-01-03", records("v3_d", 1.0), records("v4_e", 1.0))
    assert "to v4's 100 TFLOP/s. " in documents.evolution_sentence([apart, old])  # no factor


@functools.cache
def committed():
    return [record for name in ("float16-d64", "float16-d128") for record in results.load_run(results.run_file(name))[0]]


def times(impl, pass_, head_dim, causal):
    """Milliseconds of the committed runs, by sequence length."""
    records = committed()
    wanted = (impl, pass_, head_dim, causal, "float16")
    found = [r for r in records if (r["impl"], r["pass"], r["head_dim"], r["causal"], r["dtype"]) == wanted and "ms" in r]
    return {r["seq_len"]: r["ms"] for r in sorted(found, key=lambda r: r["seq_len"])}


def gains(new, old, pass_, head_dim, causal):
    """The speedup of `new` over `old`, by sequence length."""
    before, after = (times(impl, pass_, head_dim, causal) for impl in (old, new))
    return {seq_len: before[seq_len] / ms for seq_len, ms in after.items()}


def test_claims_of_the_documents_about_lengths_hold():
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


def test_claims_of_the_documents_about_spread_scores_hold():
    table = documents.spread_table("v13_speculative_softmax")
    for mask in ("full", "causal"):
        found = {dtype: cells(table, dtype, mask) for dtype in ("float16", "bfloat16")}
        narrow, *_, wide = (float(ratio.removeprefix("×")) for ratio in found["float16"])
        assert (narrow < 1) == (mask == "causal") and wide == pytest.approx(2, abs=0.2)
        narrow, *wider = (float(ratio.removeprefix("×")) for ratio in found["bfloat16"])
        assert (max(narrow, *wider) < 1) == (mask == "causal")
        assert max(wider) <= narrow + 0.02, "in bfloat16 spread scores cost nothing"
    assert set(cells(documents.spread_table("v5_tuned"), "float16", "full")) == {"-"}  # not in that run


def test_tuned_tiles_of_v4_mostly_move_more_than_v3_s():
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


def test_claims_of_the_documents_about_short_caches_hold():
    records, _ = results.load_run(results.run_file("decode-d64"))
    short = [record for record in records if record["seq_len"] == 1 and record["kv_len"] <= 4096]
    ms = {(r["impl"], r["batch"], r["kv_heads"], r["kv_len"]): r["ms"] for r in short}
    v15 = stages.resolve("v15")
    ahead = [ms["sdpa-cudnn", *point] < time for (impl, *point), time in ms.items() if impl == v15]
    assert sum(ahead) > len(ahead) / 2


def test_sinks_are_shown_next_to_the_stage_with_a_running_maximum(monkeypatch, tmp_path):
    """A cell has the stage's ratio, and in brackets the previous stage's. A wrong result has no ratio."""
    ms = {"v12_persistent": 2.0, "v16_persistent_backward": 4.0, "v17_safe_speculation": 1.0}
    point = {"head_dim": 64, "dtype": "float16", "causal": False, "seq_len": 4096, "score_std": 1.0}
    records = [point | {"impl": impl, "sink": sink, "ms": time} for impl, time in ms.items() for sink in (0.0, 16.0)]
    del records[3]["ms"]  # v16 with a sink
    machine = {"gpu": "a GPU", "torch": "2", "triton": "3", "commit": "0" * 40}
    monkeypatch.setattr(sinks, "run_file", lambda name: tmp_path)
    monkeypatch.setattr(sinks, "load_run", lambda path: (records, machine))
    table = sinks.sinks_table("v17_safe_speculation")
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
