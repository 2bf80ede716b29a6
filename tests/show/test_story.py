"""The walk from stage to stage: what it says of the steps, and what the steps must be like."""

import re

import programs
import pytest

import stages
from common.measure.ncu import READ, WRITTEN
from common.show import results, story
from common.show.tables import title


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
    assert max(map(len, done.stdout.splitlines())) <= story.WIDTH
    told = " ".join(done.stdout.split())
    for name in stages.names():
        assert f"{title(name)} {story.idea(name)}" in told
    for old, new in steps():
        assert f"from {old}: {story.change(old, new)}" in told
        for line in story.step_lines(old, new):
            assert line in done.stdout
    ratio, _ = results.gain(results.runs(), stages.resolve("v3"), stages.resolve("v2"), "fwd", 64)
    assert f"speed: ×{ratio:.2f} (D=64)" in told


def test_the_newest_stage_has_speeds():
    newest = [name for name in stages.names() if not stages.is_dead_end(name)][-1]
    if newest not in results.names_of(results.runs()):
        pytest.skip("not measured yet: make reference")
    assert any("speed: ×" in line for line in story.step_lines(stages.parent(newest), newest))


def shown_files(diff):
    return re.findall(r"^\+\+\+ stages/\w+/(\S+)", diff, re.MULTILINE)


def test_a_pass_with_the_code_of_its_parent_has_no_gain():
    """v5's forward is v4's: its tuner ended with other tiles, which is no gain of the step."""
    lines = story.step_lines(*(stages.resolve(name) for name in ("v4", "v5")))
    assert "    forward: same code" in lines and "    backward:" in lines
    assert not any("÷" in line for line in lines)


def test_bytes_are_told_in_words_and_of_the_same_tiles_alone(monkeypatch):
    counts = {("v2_fa1_tiling", 64): 300, ("v3_fa2_causal", 64): 100, ("v2_fa1_tiling", 128): 100, ("v3_fa2_causal", 128): 200}
    monkeypatch.setattr(results, "counted", lambda _, name, pass_, head_dim, causal: {"n": counts[name, head_dim]})
    monkeypatch.setattr(results, "moved", lambda count: count["n"])

    def case(name, tile):
        kernels = [{READ: counts[name, 64], WRITTEN: 0}]
        return {"tuned": True, "kernels": kernels, "counted": [{"name": "_forward_kernel", "tile": tile}]}

    tiles = {"v2_fa1_tiling": "128×64", "v3_fa2_causal": "128×64"}
    monkeypatch.setattr(results, "tuned_case", lambda name, pass_, head_dim, causal: case(name, tiles[name]))
    told = "moves 3.00 times fewer bytes (D=64), 2.00 times more bytes (D=128)"
    same = "measured: moves 3.00 times fewer bytes (D=64), 3.00 times fewer bytes (D=128)"
    assert story.bytes_lines([], "v2_fa1_tiling", "v3_fa2_causal", "fwd") == [f"counted: {told}", same]
    tiles["v3_fa2_causal"] = "64×64"
    assert story.bytes_lines([], "v2_fa1_tiling", "v3_fa2_causal", "fwd") == [f"counted: {told}"]


def test_diff_shows_the_code_first_and_then_what_it_gained():
    old, new = (stages.resolve(name) for name in ("v4", "v5"))
    done = run("diff", "v4", "v5")
    assert done.returncode == 0, done.stderr
    assert shown_files(done.stdout) in (["backward.py", "__init__.py"], list(story.FILES))
    end = ["", new, *story.step_lines(old, new), "", story.sources()]
    assert done.stdout.endswith("\n".join(end) + "\n")


def test_diff_of_a_stage_with_itself_is_refused():
    done = run("diff", "v4", "v4")
    assert done.returncode == 1 and done.stderr == "v4 and v4 are the same stage\n" and not done.stdout


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


def test_without_results_the_story_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "TRAFFIC", results.ROOT / "results" / "not-there" / "traffic.json")
    monkeypatch.setattr(results, "runs", lambda: [])
    story.print_story()
    told = " ".join(capsys.readouterr().out.split())
    for old, new in steps():
        assert story.idea(new) in told and f"from {old}: {story.change(old, new)}" in told
    assert "speed: ×" not in told and "counted: moves" not in told
    assert "speed: not measured beside v2" in told
    assert "Without results/not-there/traffic.json there are no counted bytes." in told
    assert "No run in results/ has speeds." in told


@pytest.mark.parametrize("text", [None, "", '{"benchmarks": ['], ids=["missing", "empty", "half-written"])
def test_results_that_cannot_be_read_are_named_in_one_line(text, tmp_path):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    for load in (results.load_run, results.load_counts):
        with pytest.raises(SystemExit, match="run.json is needed, and is missing or not whole"):
            load(path)
