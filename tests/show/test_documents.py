"""The documents show the committed results, and nothing else."""

import pytest
from test_results import machine, records
from test_results import run as run_of

import stages
from common.measure.workloads import Workload
from common.show import documents, results

V0, V1, V2, V3 = map(stages.resolve, ("v0", "v1", "v2", "v3"))


def test_documents_agree_with_the_results():
    for path, text in documents.documents().items():
        assert path.read_text() == text, f"{path.name} and the results disagree: run make readme"


@pytest.mark.parametrize("name", stages.names())
def test_results_hold_every_stage(name):
    if not any(name in run.names for run in results.runs()):
        pytest.skip("not measured yet: make reference")
    for pass_, head_dim in results.COLUMNS:
        assert results.newest(results.runs(), pass_, head_dim, name)


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


def test_gains_within_the_noise_and_of_changed_code_are_marked(monkeypatch):
    times = [("v0_naive", 4.0), ("v0_naive (again)", 4.2), (V1, 4.1)]
    noisy = run_of("noisy", "2026-01-01", *(records(impl, ms, source="0" * 12) for impl, ms in times))
    monkeypatch.setattr(documents, "runs", lambda: [noisy])
    table = documents.gain_table(V1)
    assert cells(table, "forward", "64", "full")[1:] == ["="] * 3
    assert "noisy†)" in table and results.LEGEND["="] in table


def test_passes_with_the_parents_code_have_no_rows():
    for make in (documents.traffic_of_step, documents.gain_table):
        rows = [line for line in make(stages.resolve("v5")).splitlines() if line.startswith("| ")]
        assert len(rows) > 1 and not any(row.startswith("| forward") for row in rows), make.__name__


def gains(new, old, pass_, head_dim, causal):
    """Return the speedups of `new` over `old` in the committed runs, as {sequence length: speedup}."""
    run = results.newest(results.runs(), pass_, head_dim, new, old)
    ours, theirs = (run.times(impl, results.mean_over(pass_, head_dim)) for impl in (new, old))
    return {work.seq_len: theirs[work] / ms for work, ms in ours.items() if work in theirs and work.causal == causal}


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
    table = documents.scores_table("v28_dependent_launch")
    for mask in ("full", "causal"):
        narrow, *_, wide = map(float, cells(table, "128", "float16", mask))
        assert (narrow > 1) == (mask == "causal") and wide == pytest.approx(1 / 2, abs=0.05)
        narrow, *wider = map(float, cells(table, "128", "bfloat16", mask))
        assert (min(narrow, *wider) > 1) == (mask == "causal")
        assert min(wider) >= narrow - 0.02, "in bfloat16 spread scores cost nothing"


KINDS_OF_TABLES = {
    "forward-d64-h100": "Benchmark", "decode-d64-h100": "Benchmark", "traffic-h200-d64": "Counted and measured traffic",
    "energy-d64-h200": "Energy", "ring-h200-x2": "One sequence", "timeline": "The model", "units-h200": "How busy",
    "constants-h200": "Constants", "traffic": "Counted traffic",
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS_OF_TABLES)
def test_a_command_prints_the_tables_of_any_file_by_its_contents(name, tmp_path, capsys):
    (tmp_path / "mine.json").write_text((results.ROOT / "results" / f"{name}.json").read_text())
    documents.main([str(tmp_path / "mine.json")])
    shown = capsys.readouterr().out
    assert shown.startswith(f"# {KINDS_OF_TABLES[name]}") and shown.count("\n|") > 3


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"machine_info": {}}', '{"machine_info": {}, "benchmarks": [{}]}', "no JSON", None]
)
def test_a_file_without_tables_is_refused(text, tmp_path, capsys):
    if text is not None:
        (tmp_path / "x.json").write_text(text)
    with pytest.raises(SystemExit) as stopped:
        documents.main([str(tmp_path / "x.json")])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and "x.json" in said and said.count("\n") == 1


def words(path):
    """Return a document's number of words, without its tables."""
    return sum(len(line.split()) for line in path.read_text().splitlines() if not line.startswith("|"))


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


def measured(monkeypatch, *runs):
    """Let `documents` find these runs in turn."""
    paths = iter(range(99))
    monkeypatch.setattr(documents, "run_file", lambda name: results.ROOT)
    monkeypatch.setattr(documents, "load_run", lambda path: runs[next(paths) % len(runs)])


def test_scores_are_shown_next_to_the_stage_with_a_running_maximum(monkeypatch):
    """A cell has v43's speedup over v25, and in brackets v38's speedup over v25. A wrong result has no speedup."""
    ms = {"v25_second_q": 2.0, "v38_second_kv": 4.0, "v43_safe_speculation": 1.0}
    works = [Workload("fwd", 1, 1, 4096, 64, False, "float16", sink=sink) for sink in (0.0, 16.0)]
    found = [{"impl": impl, "ms": time} | work.record() for impl, time in ms.items() for work in works]
    del found[3]["ms"]  # v38 with a sink
    narrow = [record for record in found if not record["sink"]]
    measured(monkeypatch, *(results.Run(some, machine(commit)) for some, commit in ((narrow, "a"), (found[1::2], "b"))))
    table = documents.scores_table("v43_safe_speculation")
    assert "X, a; X, b." in table and "deviation 1 |" in table and "sink of 16 |" in table
    assert cells(table, "64", "float16", "full") == ["2.00 (0.50)", "2.00 (wrong)"]


def test_wide_heads_are_next_to_the_stage_before_and_the_libraries(monkeypatch):
    work = Workload("bwd", 1, 1, 4096, 256, True, "float16")
    ms = {"sdpa-cudnn": 5.0, "v48_dq_roles": 20.0, "v49_wide_overlap": 4.0}
    found = [{"impl": impl, "ms": time, "tflops": 2000 / time} | work.record() for impl, time in ms.items()]
    measured(monkeypatch, results.Run(found, machine("a")))
    table = documents.wide_table("v49_wide_overlap")
    assert cells(table, "backward", "causal", "4096") == ["500", "×5.00", "125 %"]
    assert "forward" not in table.split("\n\n")[1]  # it was not measured
