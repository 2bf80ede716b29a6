"""`make story` and `make diff` describe each step correctly, and each step follows the rules for steps."""

import re

import programs
import pytest
from test_results import records
from test_results import run as run_of

import stages
from common.show import results, story, tracks


def steps():
    """Return (parent, stage) of every step, including dead ends."""
    pairs = [(stages.parent(name), name) for name in stages.names()]
    return [pair for pair in pairs if pair[0]]


def run(*arguments):
    return programs.python("-m", "common.show.story", *arguments)


def write_stages(root, **files):
    """Write stages into a directory. Their forward.py has the given text, and their backward.py is empty."""
    for stage, text in files.items():
        (root / stage).mkdir()
        (root / stage / "forward.py").write_text(text)
        (root / stage / "backward.py").write_text("")


def test_a_change_is_lines_and_the_functions_that_they_are_in(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "__path__", [str(tmp_path)])
    old = "X = 1\n\n\n@cache\ndef a():\n    return 1\n\n\ndef b():\n    return 2\n\n\ndef c():\n    return 3\n"
    new = old.replace("@cache", "@other").replace("    return 3", "    x = 3\n    return x")
    write_stages(tmp_path, v0_a=old, v1_b=new, v2_c=old.replace("X = 1", "X = 2"))
    assert story.change("v0_a", "v1_b") == story.Change(added=3, removed=2, functions=("a", "c"))
    assert story.change("v0_a", "v2_c") == story.Change(added=1, removed=1, functions=())
    assert story.change("v0_a", "v0_a") == story.Change(added=0, removed=0, functions=())
    assert "no function" in str(story.change("v0_a", "v2_c"))


def test_what_moved_is_no_change(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "__path__", [str(tmp_path)])
    moved = "# why\nX = 1\n\n\ndef a():\n    return 1\n\n\n"
    own = "def b():\n    # NOTE: v1 is faster\n    return 2\n"
    write_stages(tmp_path, v0_a=moved + own, v1_b="from .forward_part import a\n\n\n" + own.replace("v1", "v2"))
    (tmp_path / "v1_b" / "forward_part.py").write_text(moved)
    assert story.change("v0_a", "v1_b") == story.Change(added=1, removed=0, functions=("b",))


def test_caching_delta_stays_a_small_change():
    """v5 changes few lines, because its idea is only to store delta."""
    change = story.change(stages.resolve("v4"), stages.resolve("v5"))
    assert 0 < change.added + change.removed <= 60
    assert "_forward_kernel" not in change.functions


@pytest.mark.parametrize(("old", "new"), steps())
def test_neighbours_define_what_they_share_in_the_same_order(old, new):
    """Functions keep their order. The diff would show a moved function as deleted and added."""
    for file in story.code_files(old, new):
        old_names, new_names = (list(story.functions(stages.source(stage, file))) for stage in (old, new))
        assert [name for name in old_names if name in new_names] == [name for name in new_names if name in old_names]
    for pass_ in results.CODE.values():
        assert list(story.functions(stages.source(new, f"{pass_}.py")))[-1] == pass_


def told_in_one_line(text):
    """Return wrapped text as one line."""
    return " ".join(text.split())


def test_story_tells_of_every_stage():
    done = run()
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= story.WIDTH
    told = told_in_one_line(done.stdout)
    for name in stages.names():
        assert f"{name} {story.idea(name)}" in told
    for old, new in steps():
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
    assert story.speed_line(runs, "v0_a", "v1_b", "bwd") == "speed: no run has both stages"


def test_signs_of_noise_and_changed_code_are_explained_where_they_are(monkeypatch):
    v4, v5 = map(stages.resolve, ("v4", "v5"))
    times = [(v4, 4.0), (f"{v4} (again)", 4.2), (v5, 4.1)]
    measured = run_of("x", "2026-01-01", *(records(name, ms, source="0" * 12) for name, ms in times))
    monkeypatch.setattr(results, "runs", lambda: [measured])
    lines = story.step_lines(v4, v5)
    assert "        speed: =† (D=64, 0.98–0.98), =† (D=128, 0.98–0.98) [1]" in lines
    assert set(results.LEGEND.values()) <= set(story.sources(lines))
    assert not set(results.LEGEND.values()) & set(story.sources(lines[:1]))


def test_a_stage_is_compared_with_the_parent_that_it_names(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stages, "__path__", [str(tmp_path)])
    monkeypatch.setattr(results, "same_code", lambda new, old, pass_: False)
    write_stages(tmp_path, v0_a="x = 1\n", v1_b="x = 2\n", v2_c="x = 3\n")
    for stage, parent in (("v0_a", ""), ("v1_b", ""), ("v2_c", 'PARENT = "v0"\n')):
        (tmp_path / stage / "__init__.py").write_text(f'"""The idea of {stage}."""\n{parent}')
    measured = run_of("some", "2026-01-01", records("v0_a", 6.0) + records("v1_b", 3.0) + records("v2_c", 1.0))
    monkeypatch.setattr(results, "runs", lambda: [measured])
    story.print_story()
    told = capsys.readouterr().out
    assert "v2_c\n    The idea of v2_c.\n    from v0_a: 2 lines changed (+1 -1)" in told
    assert "×6.00 (D=64, 6.00–6.00)" in told and "×3.00" not in told


def shown_files(diff):
    return re.findall(r"^\+\+\+ stages/\w+/(\S+)", diff, re.MULTILINE)


def test_diff_shows_the_code_first_and_then_what_it_gained():
    old, new = (stages.resolve(name) for name in ("v4", "v5"))
    done = run("diff", "v4", "v5")
    assert done.returncode == 0, done.stderr
    assert shown_files(done.stdout) in (["backward.py", "__init__.py"], [*story.code_files(old, new), "__init__.py"])
    lines = story.step_lines(old, new)
    code, told, end = done.stdout.partition("\n".join(["", new, *lines, "", ""]))
    assert told and told_in_one_line(end) == told_in_one_line(" ".join(story.sources(lines))) and code.startswith("diff ")
    assert all(len(line) <= story.WIDTH for line in (told + end).splitlines())


def test_diff_leaves_out_notes_and_white_space(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "__path__", [str(tmp_path)])
    old = "def a():\n    # NOTE: v1 indents\n    return 1\n\n\ndef b():\n    return 2\n"
    write_stages(tmp_path, v0_a=old, v1_b=old.replace("    # NOTE: v1 indents\n    return", "        return").replace("2", "3"))

    def changed(exact):
        return [line for line in story._git_diff("v0_a", "v1_b", "forward.py", exact).splitlines() if line[:1] in "+-"][2:]

    assert changed(exact=False) == ["-    return 2", "+    return 3"]
    assert changed(exact=True) == [
        "-    # NOTE: v1 indents",
        "-    return 1",
        "+        return 1",
        "-    return 2",
        "+    return 3",
    ]


@pytest.mark.parametrize(("given", "said"), [("v4", "v4 and v4 are the same stage\n"), ("v99", "'v99'")])
def test_diff_of_no_two_stages_fails(given, said):
    done = run("diff", "v4", given)
    assert done.returncode and said in done.stderr and not done.stdout


def test_without_results_the_story_says_so(monkeypatch, capsys):
    monkeypatch.setattr(results, "TRAFFIC", results.ROOT / "results" / "not-there.json")
    monkeypatch.setattr(results, "runs", lambda: [])
    monkeypatch.setattr(tracks, "gain", lambda *_: None)
    story.print_story()
    told = told_in_one_line(capsys.readouterr().out)
    assert "speed: ×" not in told and "counted:" not in told and "speed: no run has both stages" in told
    assert told.endswith("No run in results/ has speeds.")
