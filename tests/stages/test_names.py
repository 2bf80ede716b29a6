"""Stages are found by their names, also by those from before the tree. Two stages with equal numbers are an error."""

import pathlib
import runpy
import warnings

import pytest

import stages
from common.show import story

ROOT = pathlib.Path(__file__).parents[2]
MESSAGE = "stages/v3_fa2_causal and stages/v3_twin have one number; rename one of them"


@pytest.fixture
def twin(tmp_path, monkeypatch):
    """A directory that adds a second stage v3 during the test."""
    (tmp_path / "v3_twin").mkdir()
    (tmp_path / "v3_twin" / "__init__.py").touch()
    monkeypatch.setattr(stages, "__path__", [*stages.__path__, str(tmp_path)])


@pytest.mark.parametrize(
    "command",
    [lambda: stages.resolve("v3"), lambda: story.main([]), lambda: runpy.run_path(str(ROOT / "bench.py"))],
    ids=["resolve", "story", "bench"],
)
def test_two_stages_with_one_number_stop_every_command(twin, command):
    with pytest.raises(SystemExit) as stopped:
        command()
    assert stopped.value.code == MESSAGE


@pytest.mark.parametrize("text", ["v3", "V3", "3", " v3 ", "V3_FA2_causal", "3_fa2_causal"])
def test_a_stage_goes_by_its_version_and_by_its_name(text):
    assert stages.resolve(text) == "v3_fa2_causal"


@pytest.mark.parametrize(("text", "meant"), [
    ("v3_fa2", "v3_fa2_causal"), ("naive", "v0_naive"), ("v2_x", "v2_fa1_tiling"), ("4a_k", "v4a_k_transposed"),
])  # fmt: skip
def test_a_typing_error_is_answered_with_the_stage_that_is_meant(text, meant):
    with pytest.raises(ValueError, match=f"^no stage is called '{text}'; did you mean {meant}\\?$"):
        stages.resolve(text)


@pytest.mark.parametrize("text", ["v99", "", "v3,", "/"])
def test_an_unknown_stage_is_answered_with_the_versions(text):
    last = stages.version([*filter(stages.is_dead_end, stages.names())][-1])
    with pytest.raises(ValueError, match=f"^no stage is called {text!r}; there are v0 to v.*{last}$"):
        stages.resolve(text)


@pytest.fixture
def moved(tmp_path, monkeypatch):
    """A tree in which v1 was v2, one1 was v1, and a track has three stages and an experiment."""
    tree = {
        "v0_a": "", "v1_b": 'WAS = "v2_b"', "one1_c": 'PARENT = "v0"\nWAS = "v1_c v3_d"', "one2_d": "",
        "one2a_e": 'A_DEAD_END = "yes"', "one2x_mine": "EXPERIMENT = True", "two1_mine": 'EXPERIMENT = True\nPARENT = "v1"',
    }  # fmt: skip
    for name, text in tree.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"{text}\n")
    monkeypatch.setattr(stages, "__path__", [str(tmp_path)])
    stages._say_moved.cache_clear()
    yield
    stages._say_moved.cache_clear()


def test_an_old_name_leads_to_the_new_one(moved):
    for old, now in (("v3", "v3_d is now one1_c"), ("v1_c", "v1_c is now one1_c"), ("v2", "v2_b is now v1_b")):
        with pytest.raises(ValueError, match=f"^no stage is called '{old}' any more; {now}$"):
            stages.resolve(old)


def test_a_number_that_now_means_another_stage_is_told_once(moved):
    with pytest.warns(UserWarning, match="^v1 is v1_b; v1_c is now one1_c$"):
        assert stages.resolve("v1") == "v1_b"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [*map(stages.resolve, ("v1", "v1_b", "v0", "one1"))] == ["v1_b", "v1_b", "v0_a", "one1_c"]
        stages._say_moved.cache_clear()
        assert stages.parent("two1_mine") == "v1_b"


def test_the_newest_stage_ends_the_trunk_and_experiments_are_in_no_line(moved):
    assert stages.resolve("newest") == "v1_b" and stages.tracks() == ["one"]
    assert stages.line("one") == ["one1_c", "one2_d"] and stages.is_dead_end("one2a_e")
    assert stages.children("one2_d") == ["one2a_e", "one2x_mine"] and not stages.is_dead_end("one2x_mine")
    assert stages.children("v0_a") == ["v1_b", "one1_c"]


def test_the_newest_stage_is_loaded_by_this_word():
    assert stages.load("newest") is stages.load(stages.line()[-1])
