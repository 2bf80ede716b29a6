"""Two stages with equal numbers are an error, which every command reports in one line."""

import pathlib
import runpy

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
    ("v3_fa2", "v3_fa2_causal"), ("naive", "v0_naive"), ("v49_x", "v49_wide_overlap"), ("4a_k", "v4a_k_transposed"),
])  # fmt: skip
def test_a_typing_error_is_answered_with_the_stage_that_is_meant(text, meant):
    with pytest.raises(ValueError, match=f"^no stage is called '{text}'; did you mean {meant}\\?$"):
        stages.resolve(text)


@pytest.mark.parametrize("text", ["v99", "", "v3,", "/"])
def test_an_unknown_stage_is_answered_with_the_versions(text):
    last = stages.version([*filter(stages.is_dead_end, stages.names())][-1])
    with pytest.raises(ValueError, match=f"^no stage is called {text!r}; there are v0 to v.*{last}$"):
        stages.resolve(text)
