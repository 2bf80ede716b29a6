"""The documents show the committed results, and nothing else."""

import functools
import itertools
import json
import math

import pytest
from test_results import records
from test_results import run as run_of

import bench
import stages
from common.show import documents, results, sinks, tracks

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
    assert f"`{path.name}`" in readme and f"GRID={name} FILE=results/{path.name}" in readme
    _, machine = results.load_run(path)
    assert all(machine[fact] for fact in ("gpu", "torch", "triton", "commit", "date", "matmul_tflops"))
    assert "dirty" not in machine["commit"]


@functools.cache
def measured_themselves():
    """Return the stages that some file of results/ measures."""
    paths = (results.ROOT / "results").glob("*ward-*.json")
    return {record["impl"] for path in paths for record in results.load_run(path)[0]}


@pytest.mark.parametrize("name", stages.names())
def test_results_hold_every_stage(name):
    if name not in measured_themselves():
        pytest.skip("not measured yet: make reference")
    records = [record for run in results.runs() for record in run.records]
    measured = {(r["pass"], r["head_dim"], r["causal"]) for r in records if r["impl"] == name and "ms" in r}
    if parent := stages.parent(name):  # a dead end's pass is not measured if it has the parent's code
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


def test_implementations_come_in_stage_order():
    names = ("v16_late", "v2_early", "sdpa-b", "v0_naive", "sdpa-a", "v2_early")
    assert results.implementations([{"impl": name} for name in names]) == [
        "sdpa-b",
        "sdpa-a",
        "v0_naive",
        "v2_early",
        "v16_late",
    ]


def test_table_replaces_what_is_between_its_markers_alone():
    text = "before\n<!-- x: make readme -->\nold\n<!-- /x -->\nafter\n"
    once = documents.with_table(text, "x", "| new |")
    assert once == "before\n<!-- x: make readme -->\n\n| new |\n\n<!-- /x -->\nafter\n"
    assert documents.with_table(once, "x", "| new |") == once
    for wrong in ("before\nafter\n", text + text):
        with pytest.raises(ValueError, match="exactly once"):
            documents.with_table(wrong, "x", "| new |")


def cells(table, *labels):
    """Find the table's row that begins with the cells `labels`. Return its other cells."""
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
    assert cells(table, "forward", "64", "full")[1:] == ["-"] + ["×2.50"] * 2
    assert cells(table, "backward", "64", "full")[1:] == ["-"] * 3
    assert "Not measured against v0 yet: backward, D = 64; backward, D = 128." in table
    assert ", newer)" in table and "older" not in table
    assert cells(documents.gain_table(V0), "forward", "64", "full") == ["5.00"] * 3


def test_passes_with_the_parents_code_have_no_rows():
    for make in (documents.tuned_table, documents.traffic_of_step, documents.gain_table):
        rows = [line for line in make(stages.resolve("v5")).splitlines() if line.startswith("| ")]
        assert len(rows) > 1 and not any(row.startswith("| forward") for row in rows), make.__name__


def test_a_step_that_moves_the_same_says_so_in_a_line():
    assert documents.traffic_of_step(stages.resolve("v29")).count("|") > 9  # v29's tiles differ from its parent's
    assert documents.traffic_of_step(stages.resolve("v4")) == "Same bytes and FLOPs as v3."


@functools.cache
def committed():
    return [
        record
        for name in ("forward-d64", "forward-d128", "backward-d64", "backward-d128")
        for record in results.load_run(results.run_file(name))[0]
    ]


def times(impl, pass_, head_dim, causal):
    """Return an implementation's times in the committed runs, as {sequence length: milliseconds}."""
    records = committed()
    wanted = (impl, pass_, head_dim, causal, "float16")
    found = [r for r in records if (r["impl"], r["pass"], r["head_dim"], r["causal"], r["dtype"]) == wanted and "ms" in r]
    return {r["seq_len"]: r["ms"] for r in sorted(found, key=lambda r: r["seq_len"])}


def gains(new, old, pass_, head_dim, causal):
    """Return the speedups of `new` over `old`, as {sequence length: speedup}."""
    before, after = (times(impl, pass_, head_dim, causal) for impl in (old, new))
    return {seq_len: before[seq_len] / ms for seq_len, ms in after.items()}


def test_claims_of_the_documents_about_lengths_hold():
    names = "v1 v2 v6 v7 v8 v9 v10 v22 v23 v24".split()
    v1, v2, v6, v7, v8, v9, v10, v22, v23, v24 = map(stages.resolve, names)
    for causal in (False, True):
        assert max(gains(v2, v1, "fwd", 128, causal).values()) < 1
        for head_dim in results.HEAD_DIMS:
            assert max(gains(v7, v6, "bwd", head_dim, causal).values()) < 1
            assert max(gains(v8, v6, "fwd", head_dim, causal).values()) < 1
            assert gains(v9, v8, "fwd", head_dim, causal)[1024] > 1
            assert min(gains(v10, v8, "bwd", head_dim, causal).values()) > 1
    for head_dim in results.HEAD_DIMS:
        assert max(gains(v23, v22, "fwd", head_dim, True).values()) < 1 < min(gains(v24, v23, "fwd", head_dim, True).values())


def test_claims_of_the_documents_about_spread_scores_hold():
    table = documents.spread_table("v28_dependent_launch")
    for mask in ("full", "causal"):
        found = {dtype: cells(table, dtype, mask) for dtype in ("float16", "bfloat16")}
        narrow, *_, wide = (float(ratio.removeprefix("×")) for ratio in found["float16"])
        assert (narrow > 1) == (mask == "causal") and wide == pytest.approx(1 / 2, abs=0.05)
        narrow, *wider = (float(ratio.removeprefix("×")) for ratio in found["bfloat16"])
        assert (min(narrow, *wider) > 1) == (mask == "causal")
        assert min(wider) >= narrow - 0.02, "in bfloat16 spread scores cost nothing"
    assert set(cells(documents.spread_table("v5_tuned"), "float16", "full")) == {"-"}  # that run has no v5


def test_tuned_tiles_of_v4_mostly_move_more_than_v3_s():
    more = []
    for pass_, head_dim in results.COLUMNS:
        for causal in (False, True):
            cases = [results.tuned_case(name, pass_, head_dim, causal) for name in ("v3_fa2_causal", "v4_autotune_descriptor")]
            old, new = map(results.bytes_of, cases)
            assert old <= new or pass_ == "bwd"
            more.append(old < new)
    assert sum(more) > len(more) / 2
    assert results.tuned_case("v28_dependent_launch", "fwd", 256, False) is None


KINDS_OF_TABLES = {
    "forward-d64-h100": "Forward, all stages",
    "shared-h200": "Shared K/V", "decode-d64-h100": "Decoding", "traffic-h200-d64": "Counted and measured traffic",
    "energy-d64-h200": "Energy", "ring-h200-x2": "One sequence", "timeline": "The model", "units-h200": "How busy",
    "choice": "Which stage",
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS_OF_TABLES)
def test_a_command_prints_the_tables_of_any_run(name, capsys):
    documents.main([str(results.ROOT / "results" / f"{name}.json")])
    shown = capsys.readouterr().out
    assert shown.startswith(f"# {KINDS_OF_TABLES[name]}") and shown.count("\n|") > 3


@pytest.mark.parametrize("file", ["results/rates-h200.json", "results/none.json", "README.md"])
def test_a_file_without_tables_is_refused(file, capsys):
    with pytest.raises(SystemExit) as stopped:
        documents.main([str(results.ROOT / file)])
    assert stopped.value.code == 2 and file in capsys.readouterr().err


def test_few_tables_are_kept():
    """results/ keeps few and short tables."""
    found = {path.stem for path in (results.ROOT / "results").glob("*.md")} - {"README"}
    assert found == set(documents.KEPT)
    assert sum(path.stat().st_size for path in (results.ROOT / "results").glob("*.md")) <= 150_000


def words(path):
    """Return a document's number of words, without its tables."""
    return sum(len(line.split()) for line in path.read_text().splitlines() if not line.startswith("|"))


def test_a_gain_names_its_run_if_the_table_is_from_another(monkeypatch):
    monkeypatch.setattr(tracks, "place", lambda key: "X, 1")
    assert "On the track's workloads (X, 1): ×" in documents.gain_table(stages.resolve("v36"))


def test_documents_stay_small():
    root = results.ROOT
    assert words(root / "README.md") <= 700
    assert sum(map(words, [root / "CONTRIBUTING.md", *root.glob("docs/*.md")])) <= 4500
    assert sum(map(words, root.glob("stages/*/README.md"))) <= 16_000


FRONT = [results.ROOT / "README.md", *(results.ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("path", FRONT, ids=lambda path: path.name)
def test_tables_of_the_front_documents_are_narrow(path):
    if path.name == "several-gpus.md":
        pytest.skip("its table has a row a case")
    rows = [line for line in path.read_text().splitlines() if line.startswith("|")]
    assert max((row.count("|") - 1 for row in rows), default=0) <= 7


def test_sinks_are_shown_next_to_the_stage_with_a_running_maximum(monkeypatch, tmp_path):
    """A cell has v43's speedup over v25, and in brackets v38's speedup over v25. A wrong result has no speedup."""
    ms = {"v25_second_q": 2.0, "v38_second_kv": 4.0, "v43_safe_speculation": 1.0}
    point = {"head_dim": 64, "dtype": "float16", "causal": False, "seq_len": 4096, "score_std": 1.0}
    records = [point | {"impl": impl, "sink": sink, "ms": time} for impl, time in ms.items() for sink in (0.0, 16.0)]
    del records[3]["ms"]  # v38 with a sink
    machine = {"gpu": "a GPU", "torch": "2", "triton": "3", "commit": "0" * 40}
    monkeypatch.setattr(sinks, "run_file", lambda name: tmp_path)
    monkeypatch.setattr(sinks, "load_run", lambda path: (records, machine))
    assert sinks.sinks_table("v43_safe_speculation").count("a GPU") == 1  # both runs have one origin
    runs = iter([(records, machine), (records, machine | {"gpu": "another GPU"})])
    monkeypatch.setattr(sinks, "load_run", lambda path: next(runs))
    table = sinks.sinks_table("v43_safe_speculation")
    assert "a GPU" in table and "another GPU" in table
    assert "deviation 1 |" in table and "sink of 16 |" in table
    assert cells(table, "64", "float16", "full") == ["2.00 (0.50)", "2.00 (wrong)"]


def test_wide_heads_are_next_to_the_stage_before_and_the_libraries(monkeypatch, tmp_path):
    rates = {"sdpa-cudnn": 400.0, "v48_dq_roles": 100.0, "v49_wide_overlap": 500.0}
    records = [{"impl": i, "pass": "bwd", "causal": True, "seq_len": 4096, "tflops": rate} for i, rate in rates.items()]
    machine = {"gpu": "a GPU", "torch": "2", "triton": "3", "commit": "0" * 40}
    monkeypatch.setattr(documents, "run_file", lambda name: tmp_path)
    monkeypatch.setattr(documents, "load_run", lambda path: (records, machine))
    table = documents.wide_table("v49_wide_overlap")
    assert cells(table, "backward", "causal", "4096") == ["500", "×5.00", "125 %"]
    assert "forward" not in table.split("\n\n")[1]  # it was not measured
