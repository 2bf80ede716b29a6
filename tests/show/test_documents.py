"""The documents show the committed results, and nothing else."""

import re

import pytest
from test_results import failed, records
from test_results import run as run_of

import stages
from common.show import documents, front, results
from common.show.tracks import TRACKS, stages_of

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


def test_gain_is_shown_by_length_and_says_what_is_not_measured(monkeypatch):
    older = run_of("older", "2026-01-01", records(V0, 1.0), records(V1, 1.0, passes=["fwd"]))
    newer = run_of("newer", "2026-01-02", records(V0, 5.0), failed(records(V1, 2.0, passes=["fwd"]), 1024))
    monkeypatch.setattr(results, "runs", lambda: [newer, older])
    table = documents.gain_table(V1)
    assert cells(table, "forward", "64", "full") == ["×2.50"] * 2 and "S = 1024" not in table
    assert cells(table, "backward", "64", "full") == ["-"] * 2
    assert "Not measured against v0 yet: backward, D = 64; backward, D = 128." in table
    assert ", newer)" in table and "older" not in table
    assert cells(documents.gain_table(V0), "forward", "64", "full") == ["5.00"] * 3


def test_ladder_shows_the_newest_gains_and_shares_of_one_run(monkeypatch):
    monkeypatch.setattr(results, "same_code", lambda new, old, pass_: (new, pass_) == (V1, "bwd"))
    old = run_of("old", "2026-01-01", records(V0, 8.0), records(V1, 4.0), records("sdpa-flash", 2.0))
    new = run_of("new", "2026-01-02", records(V1, 4.0), records(V2, 1.0, passes=["bwd"]), records("sdpa-cudnn", 1.0))
    late = run_of("late", "2026-01-03", records(V3, 0.5, source="0" * 12), records(V2, 1.0, passes=["fwd"]))
    table = front.ladder([late, new, old])
    found = {name: cells(table, name)[2:] for name in re.findall(r"^\| (\[v.*?) \|", table, re.MULTILINE)}
    assert found[f"[v0](stages/{V0})"] == ["-", "25 %", "-", "25 %"]
    assert found[f"[v1](stages/{V1})"] == ["×2.00 (2.00–2.00)", "25 %", "same code", "25 %"]  # only the newer run has cuDNN
    assert found[f"[v2](stages/{V2})"] == ["-", "-", "×4.00 (4.00–4.00)", "100 %"]
    assert found[f"[v3](stages/{V3})"] == ["×2.00 (2.00–2.00)†", "-", "-", "-"]  # its code has changed; no library; no v2
    assert re.search("commit old, 2026-01-01; .*, commit new, 2026-01-02", table)


def test_ladder_has_each_stage_once_and_dead_ends_apart():
    rest, dead_ends = front.ladder([]).split("| dead end |")
    line, *of_tracks = re.split("|".join(rf"\| {track.title} \|" for track in TRACKS.values()), rest)
    shown = [re.findall(r"\(stages/(\w+)\)", text) for text in (line, *of_tracks, dead_ends)]
    main = [name for name in stages.names() if not stages.is_dead_end(name) and not stages.track(name)]
    assert shown == [main, *map(stages_of, TRACKS), [*filter(stages.is_dead_end, stages.names())]] and all(shown)


@pytest.mark.parametrize("name", stages.names())
def test_an_idea_is_said_in_twelve_words(name):
    text = front.idea(name)
    assert text.startswith("A dead end: ") == stages.is_dead_end(name)
    assert len(text.removeprefix("A dead end: ").split()) <= 12


def test_claims_of_the_documents_about_lengths_hold():
    v1, v2, v6, v7, v8, v9, v10, v22, v23, v24 = map(stages.resolve, "v1 v2 v6 v7 v8 v9 v10 v22 v23 v24".split())

    def gains(new, old, pass_, head_dim, causal):
        run = results.newest(results.runs(), pass_, head_dim, new, old)
        works = [results.paper(pass_, head_dim, causal, s) for s in results.MEAN_OVER]
        return [gain.mean for work in works if (gain := results.ratio([run], new, old, [work]))]

    for causal in (False, True):
        assert max(gains(v2, v1, "fwd", 128, causal)) < 1
        for head_dim in results.HEAD_DIMS:
            assert max(gains(v7, v6, "bwd", head_dim, causal)) < 1
            assert max(gains(v8, v6, "fwd", head_dim, causal)) < 1
            assert gains(v9, v8, "fwd", head_dim, causal)[0] > 1
            assert min(gains(v10, v8, "bwd", head_dim, causal)) > 1
    for head_dim in results.HEAD_DIMS:
        assert max(gains(v23, v22, "fwd", head_dim, True)) < 1 < min(gains(v24, v23, "fwd", head_dim, True))


KINDS_OF_TABLES = {
    "forward-d64-h100": "Benchmark", "traffic-h200-shared": "Counted and measured traffic", "energy-d64-h200": "Energy",
    "ring-h200-x2": "One sequence", "units-h200": "How busy", "constants-h200": "Constants",
    "traffic": "Counted traffic",
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS_OF_TABLES)
def test_a_command_prints_the_tables_of_any_file_by_its_contents(name, tmp_path, capsys):
    (tmp_path / "mine.json").write_text((ROOT / "results" / f"{name}.json").read_text())
    documents.main([str(tmp_path / "mine.json")])
    shown = capsys.readouterr().out
    assert shown.startswith(f"# {KINDS_OF_TABLES[name]}") and shown.count("\n|") > 3


@pytest.mark.parametrize("text", ["[]", '{"machine_info": {}, "benchmarks": [{}]}', "no JSON", None])
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
    assert sum(map(words, ROOT.glob("stages/*/README.md"))) <= 16_000
