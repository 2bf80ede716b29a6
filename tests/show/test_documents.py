"""The documents show what the committed results hold, and nothing else."""

import itertools
import json
import math

import pytest

import stages
from common.show import documents, results


def record(impl, ms, seq_len=1024, causal=False, **others):
    return {
        "impl": impl, "pass": "fwd", "batch": 1, "heads": 1, "seq_len": seq_len, "head_dim": 64, "causal": causal,
        "dtype": "float16", "ms": ms, "tflops": 100 / ms, "peak_extra_mib": 1.0, "host_us": 9.0, **others,
    }  # fmt: skip


def test_documents_agree_with_the_results():
    for path, text in documents.documents().items():
        assert path.read_text() == text, f"{path.name} and the results disagree: run make readme"


@pytest.mark.parametrize("name", stages.names())
def test_results_hold_every_stage_and_name_where_they_are_from(name):
    records, machine = results.load_run(results.RUN)
    assert all(machine[fact] for fact in ("gpu", "torch", "triton", "commit", "date", "matmul_tflops"))
    assert "dirty" not in machine["commit"]
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
    machine = {"gpu": "X", "torch": "1", "triton": "2", "commit": "abc", "date": "2026-01-02"}
    records = [record("v0_a", 2.0), record("v0_a", 3.0, dtype="bfloat16"), record("v1_b", 2.0), record("sdpa-x", 1.0)]
    records += [record("v1_b", 1.0, dtype="bfloat16"), record("sdpa-x", 9.0, dtype="bfloat16")]
    summary = documents.summary_table(records, machine)
    assert summary.endswith("takes 0.500 (v1, forward, D=64) to 1.500 (v0, forward, D=64) times as long.")


def test_summary_sets_the_last_stage_against_the_fastest_baseline_of_each_point():
    machine = {"gpu": "X", "torch": "1", "triton": "2", "commit": "abc", "date": "2026-01-02"}
    records = [record("sdpa-x", 4.0, seq_len=2048), record("sdpa-x", 1.0, seq_len=4096)]
    records += [record("flash-4", 2.0, seq_len=2048), record("flash-4", 2.0, seq_len=4096)]
    records += [record("v1_b", 1.0, seq_len=2048), record("v1_b", 2.0, seq_len=4096), record("v1_b", 100.0)]
    records += [record("v1a_c", 0.1, seq_len=2048), record("v0_a", 0.1, seq_len=2048)]
    sentence = "v1_b against the fastest of sdpa-x, flash-4 at each point, S ≥ 2048: forward D=64 ×1.00."
    assert sentence in documents.summary_table(records, machine)
    assert "against the fastest" not in documents.summary_table([record("v1_b", 1.0, seq_len=2048)], machine)


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
    machine = {"gpu": "X", "torch": "1", "triton": "2", "commit": "abc", "date": "2026-01-02"}
    records = [record("sdpa-cudnn", 1.0), record("v0_naive", 8.0), record("v1_x", 2.0), record("v3_z", 4.0)]
    records.append({**record("v2_y", 1.0), "failure": "OOM"})
    rows = {
        line.split("|")[1].strip(): line.split("|")[2:-1] for line in documents.summary_table(records, machine).splitlines()[2:]
    }
    assert [cell.strip() for cell in rows["v1_x"]] == ["50, **×4.00**, 50 %", "-", "-", "-", "-", "-", "9"]
    assert rows["v2_y"][0].strip() == "-"
    assert rows["v3_z"][0].strip() == "25, 25 %"  # the stage before was not measured


def test_table_replaces_what_is_between_its_markers_alone():
    text = "before\n<!-- x: written by make readme -->\nold\n<!-- end of x -->\nafter\n"
    once = documents.with_table(text, "x", "| new |")
    assert once == "before\n<!-- x: written by make readme -->\n\n| new |\n\n<!-- end of x -->\nafter\n"
    assert documents.with_table(once, "x", "| new |") == once
    for wrong in ("before\nafter\n", text + text):
        with pytest.raises(ValueError, match="exactly once"):
            documents.with_table(wrong, "x", "| new |")
