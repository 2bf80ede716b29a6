"""The walk from stage to stage: what it says of the steps, and what the steps must be like."""

import re
import subprocess
import sys

import pytest

import stages
from common.show import results, story


def steps():
    """(old, new) of every step, those into dead ends included."""
    at = {stages.position(name): name for name in stages.names()}
    pairs = [(at.get(stages.before(stages.position(name))), name) for name in stages.names()]
    return [pair for pair in pairs if pair[0]]


def run(*arguments):
    command = [sys.executable, "-m", "common.show.story", *arguments]
    return subprocess.run(command, cwd=results.ROOT, capture_output=True, text=True, check=False)


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
    records, _ = results.load_run(results.RUN)
    for old, new in steps():
        assert f"from {old}: {story.change(old, new)}" in done.stdout
        assert story.measured_gain(records, old, new) in done.stdout
    gain = results.speedup(records, stages.resolve("v3"), stages.resolve("v2"), ("fwd",), 64)
    assert f"forward ×{gain:.2f} (D=64)" in done.stdout


def test_diff_shows_the_code_first_and_then_what_it_gained():
    old, new = (stages.resolve(name) for name in ("v4", "v5"))
    done = run("diff", "v4", "v5")
    assert done.returncode == 0, done.stderr
    files = re.findall(r"^\+\+\+ stages/\w+/(\S+)", done.stdout, re.MULTILINE)
    assert files == ["backward.py", "__init__.py", "README.md"] or files == list(story.FILES)
    end = [f"{old} to {new}: {story.change(old, new)}", *story.gain_lines(old, new), story.sources()]
    assert done.stdout.endswith("\n" + "\n".join(end) + "\n")


def test_diff_of_a_stage_that_is_not_there():
    done = run("diff", "v4", "v99")
    assert done.returncode == 2 and "'v99'" in done.stderr
