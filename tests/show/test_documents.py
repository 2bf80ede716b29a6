"""The documents show what the committed results hold, and nothing else."""

import functools
import itertools
import json
import math

import pytest

import bench
import stages
from common.measure.workloads import Workload
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


def test_runs_that_are_read_together_have_no_case_in_common():
    records, machines = results.load_runs(results.FLOAT16 + results.BFLOAT16)
    cases = [(r["impl"], Workload.of(r)) for r in records]
    assert len(set(cases)) == len(cases)
    assert len({machine["gpu"] for machine in machines}) == 1


def test_origins_are_named_once_each():
    other = MACHINES[0] | {"commit": "0123456789abcdef", "date": "2026-01-03"}
    assert results.origins([*MACHINES, other, *MACHINES]) == (
        "X, torch 1, triton 2, commit abc; X, torch 1, triton 2, commit 0123456789ab"
    )
    assert results.origins([*MACHINES, other], dated=True).count("2026-01-0") == 2
    assert results.origins([MACHINES[0], MACHINES[0] | {"date": "2026-01-03"}]) == "X, torch 1, triton 2, commit abc"


@pytest.mark.parametrize("name", stages.names())
def test_results_hold_every_stage(name):
    records, _ = results.load_runs(results.FLOAT16)
    if name not in results.implementations(records):
        pytest.skip("not measured yet: make reference")
    measured = {(r["pass"], r["head_dim"], r["causal"]) for r in records if r["impl"] == name and "ms" in r}
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
    assert results.speedup(old + new + lost, "v1_x", "v0_naive", ("fwd",), 64) == pytest.approx(math.sqrt(2 * 8))
    assert results.speedup(old + new, "v1_x", "v0_naive", ("bwd",), 64) is None


def test_passes_together_are_compared_where_both_were_measured():
    records = []
    for pass_, old, new in (("fwd", 2.0, 1.0), ("bwd", 6.0, 3.0)):
        records += [record("v0_a", old) | {"pass": pass_}, record("v1_b", new) | {"pass": pass_}]
    records.append(record("v1_b", 1.0, seq_len=2048))  # a forward without a backward
    assert results.speedup(records, "v1_b", "v0_a", ("fwd", "bwd"), 64) == pytest.approx(8 / 4)


def test_summary_says_how_bfloat16_compares():
    records = [record("v0_a", 2.0), record("v0_a", 3.0, dtype="bfloat16"), record("v1_b", 2.0), record("sdpa-x", 1.0)]
    records += [record("v1_b", 1.0, dtype="bfloat16"), record("sdpa-x", 9.0, dtype="bfloat16")]
    summary = documents.summary_table(records, MACHINES)
    assert summary.endswith("In bfloat16 a stage takes 0.500 (v1, forward, D=64) to 1.500 (v0, forward, D=64) times as long.")
    summary = documents.summary_table(records, [*MACHINES, MACHINES[0] | {"commit": "another"}])
    assert "In bfloat16, measured at another commit, a stage takes 0.500 " in summary


def test_summary_sets_the_last_stage_against_the_fastest_baseline_of_each_point():
    records = [record("sdpa-x", 4.0, seq_len=2048), record("sdpa-x", 1.0, seq_len=4096)]
    records += [record("flash-4", 2.0, seq_len=2048), record("flash-4", 2.0, seq_len=4096)]
    records += [record("v1_b", 1.0, seq_len=2048), record("v1_b", 2.0, seq_len=4096), record("v1_b", 100.0)]
    records += [record("v1a_c", 0.1, seq_len=2048), record("v0_a", 0.1, seq_len=2048)]
    sentence = "v1_b against the fastest of sdpa-x, flash-4 at each point, S ≥ 2048: forward D=64 ×1.00."
    assert sentence in documents.summary_table(records, MACHINES)
    assert "against the fastest" not in documents.summary_table([record("v1_b", 1.0, seq_len=2048)], MACHINES)


def test_implementations_come_in_stage_order():
    names = ("v10_late", "v2_early", "sdpa-b", "v0_naive", "sdpa-a", "v2_early")
    assert results.implementations([{"impl": name} for name in names]) == [
        "sdpa-b",
        "sdpa-a",
        "v0_naive",
        "v2_early",
        "v10_late",
    ]


def test_summary_shows_what_was_measured_and_a_dash_for_the_rest():
    records = [record("sdpa-cudnn", 1.0), record("v0_naive", 8.0), record("v1_x", 2.0), record("v3_z", 4.0)]
    records.append({**record("v2_y", 1.0), "failure": "OOM"})
    lines = documents.summary_table(records, MACHINES).splitlines()[2:]
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in lines}
    assert [cell.strip() for cell in rows["v1_x"]] == ["50, **×4.00**, 50 %", "-", "-", "-", "-", "-", "9"]
    assert rows["v2_y"][0].strip() == "-"
    assert rows["v3_z"][0].strip() == "25, 25 %"  # the stage before was not measured


def test_summary_shows_the_hosts_time_of_each_pass():
    records = [record("v0_x", 4.0), record("v0_x", 4.0, **{"pass": "bwd", "host_us": 20.0}), record("v1_y", 1.0)]
    table = documents.summary_table(records, MACHINES)
    assert "host µs, forward" in table and "host µs, backward" in table
    ends = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[-3:-1]] for line in table.splitlines()[2:]}
    assert ends["v0_x"] == ["9", "20"] and ends["v1_y"] == ["9", "-"]


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
    records = [record("v0_naive", 4.0, seq_len=512), record("v1_online_softmax", 1.6, seq_len=512)]
    records.append(record("v1_online_softmax", 1.0, seq_len=1024))
    monkeypatch.setattr(documents, "load_runs", lambda paths: (records, MACHINES))
    assert cells(documents.gain_table("v1_online_softmax"), "forward", "64", "full")[1:] == ["×2.50", "-"]
    assert cells(documents.gain_table("v0_naive"), "forward", "64", "full") == ["4.00", "-"]


def test_evolution_goes_from_the_first_stage_to_the_last_next_to_the_peers():
    records = []
    for impl, ms in (("v0_a", 10.0), ("v1_b", 2.0), ("v1a_c", 0.1), ("sdpa-cudnn", 3.0), ("flash-3", 1.0)):
        records += [record(impl, ms, head_dim=128) | {"pass": pass_} for pass_ in ("fwd", "bwd")]
    assert documents.evolution_sentence(records, MACHINES) == (
        "Means on an X, D = 128, float16. "
        "Forward: from v0's 10 to v1's 50 TFLOP/s, ×5; over cuDNN ×1.50, FlashAttention-3 ×0.50. "
        "Backward: from v0's 10 to v1's 50 TFLOP/s, ×5; over cuDNN ×1.50, FlashAttention-3 ×0.50."
    )


@functools.cache
def committed():
    return results.load_runs(results.FLOAT16)[0]


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
