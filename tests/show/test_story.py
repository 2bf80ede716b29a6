"""`make story` and `make diff` describe each step correctly, and each step follows the rules for steps."""

import re

import pytest
from test_results import records
from test_results import run as run_of

import stages
from common.show import results, story, tracks

OLD, NEW = map(stages.resolve, ("v4", "v5"))
STEPS = [(stages.parent(name), name) for name in stages.names() if stages.parent(name)]


def write_stages(root, monkeypatch, **files):
    """Let the stages be those in a directory. Their forward.py has the given text, and their backward.py is empty."""
    monkeypatch.setattr(stages, "__path__", [str(root)])
    for stage, text in files.items():
        (root / stage).mkdir()
        (root / stage / "__init__.py").write_text(f'"""The idea of {stage}."""\n')
        (root / stage / "forward.py").write_text(text)
        (root / stage / "backward.py").write_text("")


def test_a_change_is_lines_and_the_functions_that_they_are_in(tmp_path, monkeypatch):
    old = "X = 1\n\n\n@cache\ndef a():\n    return 1\n\n\ndef b():\n    return 2\n\n\ndef c():\n    return 3\n"
    new = old.replace("@cache", "@other").replace("    return 3", "    x = 3\n    return x")
    write_stages(tmp_path, monkeypatch, v0_a=old, v1_b=new, v2_c=old.replace("X = 1", "X = 2"))
    assert story.change("v0_a", "v1_b") == story.Change(added=3, removed=2, functions=("a", "c"))
    assert story.change("v0_a", "v2_c") == story.Change(added=1, removed=1, functions=())
    assert story.change("v0_a", "v0_a") == story.Change(added=0, removed=0, functions=())


def test_what_moved_is_no_change(tmp_path, monkeypatch):
    moved = "# why\nX = 1\n\n\ndef a():\n    return 1\n\n\n"
    own = "def b():\n    # NOTE: v1 is faster\n    return 2\n"
    changed = "from .forward_part import a\n\n\n" + own.replace("v1", "v2")
    write_stages(tmp_path, monkeypatch, v0_a=moved + own, v1_b=changed)
    (tmp_path / "v1_b" / "forward_part.py").write_text(moved)
    assert story.change("v0_a", "v1_b") == story.Change(added=1, removed=0, functions=("b",))


def test_caching_delta_stays_a_small_change():
    """v5 changes few lines, because its idea is only to store delta."""
    change = story.change(OLD, NEW)
    assert 0 < change.added + change.removed <= 60
    assert "_forward_kernel" not in change.functions


def test_neighbours_define_what_they_share_in_the_same_order():
    """Functions keep their order. The diff would show a moved function as deleted and added."""
    for old, new in STEPS:
        for file in story.code_files(old, new):
            both = [list(story.functions(stages.source(stage, file))) for stage in (old, new)]
            kept = [[name for name in names if name in both[0] and name in both[1]] for names in both]
            assert kept[0] == kept[1], f"{new}/{file}"
        for pass_ in results.CODE.values():
            assert list(story.functions(stages.source(new, f"{pass_}.py")))[-1] == pass_, new


def told_in_one_line(text):
    """Return wrapped text as one line."""
    return " ".join(text.split())


def test_story_tells_of_every_stage(capsys):
    story.print_story()
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= story.WIDTH
    told = told_in_one_line(shown)
    assert all(f"{name} {story.idea(name)}" in told for name in stages.names())
    for old, new in (STEPS[0], STEPS[-1]):
        assert f"from {old}: {story.change(old, new)}" in told
        assert all(line in told for lines in story.result(old, new).values() for line in lines)
    assert "speed: ×" in told.rpartition(stages.names()[-1])[2]  # the newest stage's gain


def test_speed_names_its_run_or_says_that_there_is_none():
    both = records("v0_a", 4.0, passes=["fwd"]) + records("v1_b", 2.0, passes=["fwd"])
    runs = [run_of("new", "2026-01-02", [r for r in both if r["head_dim"] == 64]), run_of("old", "2026-01-01", both)]
    d64, d128 = "×2.00 (D=64, 2.00–2.00)", "×2.00 (D=128, 2.00–2.00)"
    assert story.speed_line(runs[1:], "v0_a", "v1_b", "fwd") == f"speed: {d64}, {d128} [1]"
    assert story.speed_line(runs, "v0_a", "v1_b", "fwd") == f"speed: {d64} [2]; {d128} [1]"
    assert story.speed_line(runs[:1], "v0_a", "v1_b", "fwd") == f"speed: {d64} [1]; D=128: no run has both stages"


def test_signs_of_noise_and_changed_code_are_explained_where_they_are(monkeypatch):
    times = [(OLD, 4.0), (f"{OLD} (again)", 4.2), (NEW, 4.1)]
    measured = run_of("x", "2026-01-01", *(records(name, ms, source="0" * 12) for name, ms in times))
    monkeypatch.setattr(results, "runs", lambda: [measured])
    lines = story.step_lines(OLD, NEW)
    assert "        speed: =† (D=64, 0.98–0.98), =† (D=128, 0.98–0.98) [1]" in lines
    assert set(results.LEGEND.values()) <= set(story.sources(lines))
    assert not set(results.LEGEND.values()) & set(story.sources(lines[:1]))


def test_diff_shows_the_code_first_and_then_what_it_gained(capsys):
    story.main(["diff", "v4", "v5"])
    shown = capsys.readouterr().out
    files = re.findall(r"^\+\+\+ stages/\w+/(\S+)", shown, re.MULTILINE)
    assert files in (["backward.py", "__init__.py"], [*story.code_files(OLD, NEW), "__init__.py"])
    lines = story.step_lines(OLD, NEW)
    code, told, end = shown.partition("\n".join(["", NEW, *lines, "", ""]))
    assert told and told_in_one_line(end) == told_in_one_line(" ".join(story.sources(lines))) and code.startswith("diff ")


def test_diff_leaves_out_notes_and_white_space(tmp_path, monkeypatch):
    old = "def a():\n    # NOTE: v1 indents\n    return 1\n\n\ndef b():\n    return 2\n"
    new = old.replace("    # NOTE: v1 indents\n    return", "        return").replace("2", "3")
    write_stages(tmp_path, monkeypatch, v0_a=old, v1_b=new)

    def changed(exact):
        shown = story._git_diff("v0_a", "v1_b", ["forward.py"], exact).splitlines()
        return [line for line in shown if re.match(r"[-+] ", line)]

    assert changed(exact=False) == ["-    return 2", "+    return 3"]
    noted = ["-    # NOTE: v1 indents", "-    return 1", "+        return 1"]
    assert changed(exact=True) == [*noted, "-    return 2", "+    return 3"]


@pytest.mark.parametrize(("given", "said"), [("v4", "v4 and v4 are the same stage"), ("v99", "'v99'")])
def test_diff_of_no_two_stages_fails(given, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        story.main(["diff", "v4", given])
    assert said in f"{stopped.value}{capsys.readouterr().err}"


def test_without_results_the_story_says_so(monkeypatch):
    monkeypatch.setattr(results, "TRAFFIC", results.ROOT / "results" / "not-there.json")
    monkeypatch.setattr(results, "runs", lambda: [])
    monkeypatch.setattr(tracks, "gain", lambda *_: None)
    lines = story.step_lines(OLD, NEW)
    assert lines[-1].strip() == "speed: D=64, D=128: no run has both stages"
    assert story.sources(lines) == ["No run in results/ has speeds."]
