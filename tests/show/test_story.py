"""The walk from stage to stage: what it says of the steps, and what the steps must be like."""

import re

import programs
import pytest

import stages
from common.measure.ncu import READ, WRITTEN
from common.show import results, story


def steps():
    """(old, new) of every step, those into dead ends included."""
    pairs = [(stages.parent(name), name) for name in stages.names()]
    return [pair for pair in pairs if pair[0]]


def run(*arguments):
    return programs.python("-m", "common.show.story", *arguments)


def write_stages(root, **files):
    """Stages in a directory, each the text of its forward.py, with an empty backward.py."""
    for stage, text in files.items():
        (root / stage).mkdir()
        (root / stage / "forward.py").write_text(text)
        (root / stage / "backward.py").write_text("")


def test_a_change_is_lines_and_the_functions_that_they_are_in(tmp_path, monkeypatch):
    monkeypatch.setattr(story, "STAGES", tmp_path)
    old = "X = 1\n\n\n@cache\ndef a():\n    return 1\n\n\ndef b():\n    return 2\n\n\ndef c():\n    return 3\n"
    new = old.replace("@cache", "@other").replace("    return 3", "    x = 3\n    return x")
    write_stages(tmp_path, v0_a=old, v1_b=new, v2_c=old.replace("X = 1", "X = 2"))
    assert story.change("v0_a", "v1_b") == story.Change(added=3, removed=2, functions=("a", "c"))
    assert story.change("v0_a", "v2_c") == story.Change(added=1, removed=1, functions=())
    assert story.change("v0_a", "v0_a") == story.Change(added=0, removed=0, functions=())
    assert "no function" in str(story.change("v0_a", "v2_c"))


def test_caching_delta_stays_a_small_change():
    """More than delta would be in it."""
    change = story.change(stages.resolve("v4"), stages.resolve("v5"))
    assert 0 < change.added + change.removed <= 60
    assert "_forward_kernel" not in change.functions


@pytest.mark.parametrize("file", story.CODE)
@pytest.mark.parametrize(("old", "new"), steps())
def test_neighbours_define_what_they_share_in_the_same_order(old, new, file):
    """A function that moved would show as taken out in one place and put in at another."""
    old_names, new_names = (list(story.functions(story.STAGES / stage / file)) for stage in (old, new))
    assert [name for name in old_names if name in new_names] == [name for name in new_names if name in old_names]
    assert file.removesuffix(".py") == new_names[-1]


def test_story_tells_of_every_stage():
    done = run()
    assert done.returncode == 0, done.stderr
    for name in stages.names():
        assert name in done.stdout and story.idea(name) in done.stdout
    records, _ = results.load_runs(results.FLOAT16)
    for old, new in steps():
        assert f"from {old}: {story.change(old, new)}" in done.stdout
        assert story.measured_gain(records, old, new) in done.stdout
    gain = results.speedup(records, stages.resolve("v3"), stages.resolve("v2"), ("fwd",), 64)
    assert f"forward ×{gain:.2f} (D=64)" in done.stdout


def shown_files(diff):
    return re.findall(r"^\+\+\+ stages/\w+/(\S+)", diff, re.MULTILINE)


def test_tuned_tiles_move_other_bytes_than_fixed_ones():
    """v4 asks for the same bytes as v3 at the same tiles; its tuner chose smaller ones, which ask for more."""
    old, new = stages.resolve("v3"), stages.resolve("v4")
    lines = dict(line.split(": ", 1) for line in story.gain_lines(old, new))
    assert "forward ÷1.00 (D=64), ÷1.00 (D=128)" in lines["bytes at fixed tiles"]
    cases = [results.tuned_case(name, "bwd", 128, False) for name in (old, new)]
    before, after = (sum(kernel[READ] + kernel[WRITTEN] for kernel in case["kernels"]) for case in cases)
    assert f"÷{before / after:.2f} (D=128)" in lines["bytes at the tuned tiles"].partition("backward")[2]
    assert story.tuned_traffic(stages.resolve("v2"), old) == ""  # v3's are fixed


def test_diff_shows_the_code_first_and_then_what_it_gained():
    old, new = (stages.resolve(name) for name in ("v4", "v5"))
    done = run("diff", "v4", "v5")
    assert done.returncode == 0, done.stderr
    assert shown_files(done.stdout) in (["backward.py", "__init__.py"], list(story.FILES))
    end = [f"{old} to {new}: {story.change(old, new)}", *story.gain_lines(old, new), story.sources()]
    assert done.stdout.endswith("\n" + "\n".join(end) + "\n")


def test_diff_of_a_stage_that_is_not_there():
    done = run("diff", "v4", "v99")
    assert done.returncode == 2 and "'v99'" in done.stderr


def test_diff_shows_prose_where_asked():
    done = run("diff", "v4", "v5", "--prose=yes")
    assert done.returncode == 0 and shown_files(done.stdout)[-1] == "README.md"


@pytest.mark.parametrize("arguments", [[], ["diff", "v4", "v5"]], ids=["story", "diff"])
def test_without_git_one_line_says_that_it_is_needed(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="^git is needed"):
        story.main(arguments)
    assert not capsys.readouterr().out


def test_without_results_the_story_leaves_out_the_gains_and_says_so(tmp_path, monkeypatch, capsys):
    away = results.ROOT / "results" / "not-there"
    monkeypatch.setattr(results, "TRAFFIC", away / "traffic.json")
    monkeypatch.setattr(results, "FLOAT16", (away / "a.json", away / "b.json"))
    story.print_story()
    told = capsys.readouterr().out
    for old, new in steps():
        assert story.idea(new) in told and f"from {old}: {story.change(old, new)}" in told
    assert "speed:" not in told and "fixed tiles:" not in told
    missing = ", ".join(f"results/not-there/{name}.json" for name in ("traffic", "a", "b"))
    assert f"Without {missing} the gains" in told


def test_story_tells_of_the_part_that_was_measured(monkeypatch):
    there, _ = results.FLOAT16
    monkeypatch.setattr(results, "FLOAT16", (there, results.ROOT / "results" / "not-there.json"))
    old, new = (stages.resolve(name) for name in ("v2", "v3"))
    speed = dict(line.split(": ", 1) for line in story.gain_lines(old, new))["speed"]
    assert "(D=64)" in speed and "(D=128)" not in speed
    told = story.sources()
    assert results.load_run(there)[1]["date"] in told and "Without results/not-there.json the gains" in told


@pytest.mark.parametrize("text", [None, "", '{"benchmarks": ['], ids=["missing", "empty", "half-written"])
def test_results_that_cannot_be_read_are_named_in_one_line(text, tmp_path):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    for load in (results.load_run, results.load_counts):
        with pytest.raises(SystemExit, match="run.json is needed, and is missing or not whole"):
            load(path)
