"""The README's headline, and its ladder (the table of all stages), have the right numbers."""

import re

import pytest
from test_results import records
from test_results import run as run_of

import stages
from common.measure.workloads import Workload
from common.show import front, tracks
from common.show.results import Run
from common.show.tracks import TRACKS, stages_of

V0, V1, V2, V3 = map(stages.resolve, ("v0", "v1", "v2", "v3"))


@pytest.fixture
def code(monkeypatch):
    """Let the backward of v1 be identical to its parent's backward."""
    monkeypatch.setattr(front, "same_code", lambda new, old, pass_: (new, pass_) == (V1, "bwd"))


def rows(table):
    lines = [line for line in table.splitlines() if line.startswith("| [")]
    return {row[0]: row[3:] for row in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)}


def test_ladder_shows_the_newest_gains_and_shares_of_one_run(code):
    old = run_of("old", "2026-01-01", records(V0, 8.0), records(V1, 4.0), records("sdpa-flash", 2.0))
    new = run_of("new", "2026-01-02", records(V1, 4.0), records(V2, 1.0, passes=["bwd"]), records("sdpa-cudnn", 1.0))
    late = run_of("late", "2026-01-03", records(V3, 0.5))
    table = front.ladder([late, new, old])
    found = rows(table)
    assert found[f"[v0](stages/{V0})"] == ["-", "25 %", "-", "25 %"]
    assert found[f"[v1](stages/{V1})"] == ["×2.00 (2.00–2.00)", "25 %", "same code", "25 %"]  # only the newer run has cuDNN
    assert found[f"[v2](stages/{V2})"] == ["-", "-", "×4.00 (4.00–4.00)", "100 %"]
    assert found[f"[v3](stages/{V3})"] == ["-"] * 4  # its run has no library and no other stage
    assert "commit old (2026-01-01), new (2026-01-02)." in table


def test_numbers_whose_code_has_changed_are_marked(code):
    measured = run_of("x", "2026-01-01", records(V2, 4.0), records(V3, 1.0, passes=["bwd"], source="0" * 12))
    found = rows(front.ladder([measured]))
    assert found[f"[v3](stages/{V3})"] == ["-", "-", "×4.00 (4.00–4.00)†", "-"] and "†" not in str(found[f"[v2](stages/{V2})"])


def test_ladder_has_each_stage_once_and_dead_ends_apart():
    table = front.ladder([])
    for name in stages.names():
        assert table.count(f"(stages/{name})") == 1
    rest, dead_ends = table.split("| dead end |")
    line, *of_tracks = re.split("|".join(rf"\| {track.title} \|" for track in TRACKS.values()), rest)
    assert len(of_tracks) == len(TRACKS)
    for name in stages.names():
        assert (f"(stages/{name})" in line) == (not stages.is_dead_end(name) and not stages.track(name))
        assert (f"(stages/{name})" in dead_ends) == stages.is_dead_end(name)
    for key, shown in zip(TRACKS, of_tracks, strict=True):
        assert re.findall(r"\(stages/(\w+)\)", shown) == stages_of(key) != []
    assert "[v5](stages/v5_tuned) | Delta" in line


@pytest.mark.parametrize("library", [True, False])
def test_a_track_has_a_column_for_libraries_if_its_runs_have_one(library, monkeypatch):
    work = Workload("bwd", 1, 1, 4096, 256, False, "float16")
    times = {"v43_safe_speculation": 3.0, "v44_wide_kernel": 1.5} | ({"sdpa-cudnn": 3.0} if library else {})
    measured = Run(
        [{"impl": impl, "ms": ms} | work.record() for impl, ms in times.items()], {"gpu": "a GPU", "commit": "0" * 40}
    )
    monkeypatch.setattr(tracks, "runs_of", lambda key: [measured])
    shown = tracks.table("wide", lambda name: [name, "idea", "1"])
    (row,) = [line for line in shown.splitlines() if "v44_wide_kernel" in line]
    assert ("% of fastest" in shown) == ("Libraries: cuDNN." in shown) == library
    assert [cell.strip() for cell in row.split("|")[4:-1]] == (["×2.00", "200 %"] if library else ["×2.00"])


@pytest.mark.parametrize("name", stages.names())
def test_an_idea_is_said_in_twelve_words(name):
    text = front.idea(name)
    assert text.startswith("A dead end: ") == stages.is_dead_end(name)
    assert len(text.removeprefix("A dead end: ").split()) <= 12


def test_headline_compares_the_newest_stage_with_the_first_and_the_libraries():
    old = run_of("old", "2026-01-01", records("v0_a", 10.0), records("v1_b", 2.0), records("v1a_x", 0.1))
    new = run_of("new", "2026-01-02", records("v0_a", 20.0), records("v2_c", 1.0), records("sdpa-cudnn", 1.5))
    table, _, words = front.headline([new, old]).partition("\n\n")
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "---" not in line] == [
        ["v2, D = 128", "TFLOP/s", "× v0", "× cuDNN"],
        ["forward", "100", "×20 (20–20)", "×1.50 (1.50–1.50)"],
        ["backward", "100", "×20 (20–20)", "×1.50 (1.50–1.50)"],
    ]
    assert "Measured on X, torch 1, triton 2, commit new (2026-01-02)." in words
    assert "×5.00 (5.00–5.00) |" in front.headline([old])  # cuDNN is not in this run
    apart = run_of("apart", "2026-01-03", records("v3_d", 1.0), records("v4_e", 1.0))
    assert "|       100 |      - |" in front.headline([apart, old])  # no run has both v4 and v0
    assert front.headline([]) == "Not measured yet."
