"""The documents show the committed results, and nothing else."""

import re
import statistics

import pytest
from test_results import failed, records
from test_results import run as run_of

import stages
from common.measure.workloads import Workload
from common.show import documents, front, results, tracks

ROOT = results.ROOT
V0, V1, V2, V3 = map(stages.resolve, ("v0", "v1", "v2", "v3"))


def test_documents_agree_with_the_results():
    for path, text in documents.documents().items():
        assert path.read_text() == text, f"{path.name} and the results disagree: run make readme"


def cells(table, *labels):
    """Find the table's row that begins with the cells `labels`. Return its other cells."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    (row,) = [row for row in rows if row[: len(labels)] == list(labels)]
    return row[len(labels) :]


def test_gain_is_shown_by_length(monkeypatch):
    older = run_of("older", "2026-01-01", records(V0, 1.0), records(V1, 1.0, passes=["fwd"]))
    newer = run_of("newer", "2026-01-02", records(V0, 5.0), failed(records(V1, 2.0, passes=["fwd"]), 1024))
    monkeypatch.setattr(results, "runs", lambda: [newer, older])
    table = documents.gain_table(V1)
    assert cells(table, "forward", "64", "full")[1:] == ["×2.50"] * 2 and "1024 tokens" not in table
    assert cells(table, "backward", "64", "full")[1:] == ["-"] * 2
    assert ", newer)" in table and "older" not in table
    assert cells(documents.gain_table(V0), "forward", "64", "full") == ["5.00"] * 3


def test_ladder_shows_the_newest_gains_and_shares_of_one_run(monkeypatch):
    monkeypatch.setattr(results, "same_code", lambda new, old, pass_: (new, pass_) == (V1, "bwd"))
    old = run_of("old", "2026-01-01", records(V0, 8.0), records(V1, 4.0), records("sdpa-flash", 2.0))
    new = run_of("new", "2026-01-02", records(V1, 4.0), records(V2, 1.0, passes=["bwd"]), records("sdpa-cudnn", 1.0))
    late = run_of("late", "2026-01-03", records(V3, 0.5, source="0" * 12), records(V2, 1.0, passes=["fwd"]))
    table = front.ladder([late, new, old])
    found = {name: cells(table, name)[2:] for name in re.findall(r"^\| (\[v[0-3]\].*?) \|", table, re.MULTILINE)}
    assert found[f"[v0](stages/{V0})"] == ["-", "25 %", "-", "25 %"]
    assert found[f"[v1](stages/{V1})"] == [
        "×2.00 (2.00–2.00)",
        "50 %",
        "same code",
        "25 %",
    ]  # the run with v0, and the newer one
    assert found[f"[v2](stages/{V2})"] == ["-", "-", "×4.00 (4.00–4.00)", "100 %"]
    assert found[f"[v3](stages/{V3})"] == ["×2.00 (2.00–2.00)†", "-", "-", "-"]  # its code has changed; no library; no v2
    assert re.search("commit old, 2026-01-01; .*, commit new, 2026-01-02", table)


def test_the_ladder_names_the_libraries_of_its_shares_alone():
    """v2's gain is from a run with FlashAttention-4, but its share from the run with more stages."""
    most = run_of("most", "2026-01-01", *(records(name, 4.0) for name in (V0, V1, V2)), records("sdpa-cudnn", 1.0))
    late = run_of("late", "2026-01-02", records(V2, 4.0), records(V1, 4.0), records("flash-4", 1.0))
    assert "Libraries: cuDNN. Measured" in front.ladder([late, most])


def test_the_headline_says_which_ratio_lacks_workloads(monkeypatch):
    monkeypatch.setattr(front, "versions", lambda used: "")
    few = failed(records(V0, 8.0, head_dims=[64]), 16384) + records(V0, 8.0, head_dims=[128])
    text = front.headline([run_of("one", "2026-01-01", few, records(V1, 4.0), records("flash-3", 4.0))])
    said = cells(text, "not measured everywhere")[0]
    assert said == "forward, D = 64, × v0: 4 of 6 workloads; backward, D = 64, × v0: 4 of 6 workloads"


def test_ladder_has_each_stage_once_and_dead_ends_apart():
    text, known = front.ladder([]), tracks.known()
    pieces = re.split("|".join(rf"\| {title} \|" for title in ["dead end", *(track.title for track in known.values())]), text)
    shown = [re.findall(r"\(stages/(\w+)\)", piece) for piece in pieces]
    of_tracks = [[stages.parent(line[0]), *line] for line in map(stages.line, known)]
    dead_ends = [name for name in stages.names() if stages.is_dead_end(name)]
    assert shown == [stages.line(), *of_tracks, dead_ends] and all(shown)


@pytest.mark.parametrize("name", stages.names())
def test_an_idea_is_said_in_twelve_words(name):
    text = front.idea(name)
    assert text.startswith("A dead end: ") == stages.is_dead_end(name)
    assert len(text.removeprefix("A dead end: ").split()) <= 12


@pytest.fixture
def track(tmp_path, monkeypatch):
    """A tree with the track `made`, which starts from v3 and has two stages. A run measured them and a library."""
    about = 'title = "Made"\npass = "fwd"\nwords = "some words"\nat = "some"\n[runs]\nmade = []\n'
    for name, line in {"made1_a": 'PARENT = "v3"', "made2_b": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f'"""{name}."""\n{line}\n')
    (tmp_path / "made1_a" / "benchmark.toml").write_text(about)
    monkeypatch.setattr(stages, "__path__", [*stages.__path__, str(tmp_path)])
    monkeypatch.setattr(results, "same_code", lambda new, old, pass_: pass_ == "bwd")
    found = [record for name, ms in ((V3, 4.0), ("made1_a", 2.0), ("made2_b", 2.0), ("flash-3", 1.0)) for record in
             records(name, ms, passes=["fwd"], head_dims=[64])]  # fmt: skip
    found = [record | {"ms": 1.0} if (record["impl"], record["seq_len"]) == ("made2_b", 1024) else record for record in found]
    monkeypatch.setattr(tracks, "runs_of", lambda key: [run_of("here", "2026-01-01", found)])
    monkeypatch.setattr(results, "run_file", lambda part: tmp_path)


def test_a_stage_of_a_track_shows_its_gain_on_the_track_s_benchmark(track):
    table = documents.gain_table("made2_b")
    assert table.startswith("| X, here ")
    assert documents.gain_table("made1_a").startswith("The track's benchmark: some words.\n\n| X, here ")
    assert cells(table, "all workloads") == ["×1.26 (1.00–2.00)", "×2.52 (2.00–4.00)", "63 %"]
    assert cells(table, "1024 queries") == ["×2.00 (2.00–2.00)", "×4.00 (4.00–4.00)", "100 %"]
    assert cells(table, "causal") == ["×1.26 (1.00–2.00)", "×2.52 (2.00–4.00)", "63 %"] and "D = 64" not in table
    shown = front.track_table("made", tracks.read("made"))
    assert "Measured on X, here.\n\n|" in shown
    assert cells(shown, f"[v3](stages/{V3})")[-2:] == ["-", "25 %"]
    assert cells(shown, "[made1](stages/made1_a)")[-2:] == ["×2.00 (2.00–2.00)", "50 %"]


def test_a_track_s_parts_without_a_file_are_named(track, monkeypatch, tmp_path):
    monkeypatch.setattr(results, "run_file", lambda part: tmp_path / "missing.json")
    assert "Measured on X, here. Not measured yet: made.\n\n|" in front.track_table("made", tracks.read("made"))
    assert "some words. Not measured yet: made.\n\n| X, here " in documents.gain_table("made1_a")
    monkeypatch.setattr(tracks, "runs_of", lambda key: [])
    assert documents.gain_table("made1_a") == "The track's benchmark: some words. Not measured yet."


def test_workloads_are_grouped_by_what_distinguishes_them():
    """All workloads with one query have 64 keys, so groups by keys would tell nothing more."""
    shape = {"batch": 1, "heads": 4, "head_dim": 64, "causal": False, "dtype": "float16"}
    works = [Workload("fwd", **shape, kv_heads=kv_heads, seq_len=s, kv_len=64 * s, sink=sink, sink_key=5 * (sink > 0))
             for s in (1, 16) for kv_heads in (4, 1) for sink in (0, 8)]  # fmt: skip
    found = {name: len(group) for name, group in documents.groups(works).items()}
    wanted = ["1 query", "16 queries", "H / Hkv = 1", "H / Hkv = 4", "narrow scores", "sink=8@5"]
    assert found == {"all workloads": 8} | dict.fromkeys(wanted, 4)


KINDS_OF_TABLES = {
    "forward-d64-h200": "Benchmark", "traffic-h200-d64": "Counted and measured traffic", "energy-d128-h200": "Energy",
    "ring-h200-x2": "One sequence", "units-h200": "How busy", "traffic": "Counted traffic",
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS_OF_TABLES)
def test_a_command_prints_the_tables_of_any_file_by_its_contents(name, tmp_path, capsys):
    (tmp_path / "mine.json").write_text((ROOT / "results" / f"{name}.json").read_text())
    documents.main([str(tmp_path / "mine.json")])
    shown = capsys.readouterr().out
    assert shown.startswith(f"# {KINDS_OF_TABLES[name]}") and shown.count("\n|") > 3


GONE = '{"machine_info": {}, "cases": [{"impl": "v99_gone", "counted": []}]}'


@pytest.mark.parametrize("text", ["[]", GONE, '{"machine_info": {}, "benchmarks": [{}]}', "no JSON", None])
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
    assert words(ROOT / "README.md") <= 700
    assert sum(map(words, [ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])) <= 4500
    assert statistics.mean(map(words, ROOT.glob("stages/*/README.md"))) <= 225
