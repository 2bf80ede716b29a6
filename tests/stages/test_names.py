"""Two stages with equal numbers are an error, which every command reports in one line."""

import os
import pathlib
import runpy
import subprocess
import sys

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
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        lambda: stages.resolve("v3"),
        lambda: story.main([]),
        lambda: runpy.run_path(str(ROOT / "bench.py")),
    ],
    ids=["resolve", "story", "bench"],
)
def test_two_stages_with_one_number_stop_every_command(twin, command, monkeypatch, capsys):
    monkeypatch.setattr(pathlib.Path, "write_text", lambda *_: pytest.fail("wrote a file"))
    with pytest.raises(SystemExit) as stopped:
        command()
    assert stopped.value.code == MESSAGE and not capsys.readouterr().out


def test_two_stages_with_one_number_stop_the_collection_of_the_tests(twin):
    """pytest stops with one line before any test."""
    source = f"import pytest, stages\nstages.__path__.append({str(twin)!r})\npytest.main(['-q', 'tests/test_rooms.py'])"
    run = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}, check=False,
    )  # fmt: skip
    assert run.returncode == 1 and run.stderr == MESSAGE + "\n" and "Traceback" not in run.stdout


@pytest.mark.parametrize("text", ["v3", "V3", "3", " v3 ", "v3_fa2_causal", "V3_FA2_causal", "3_fa2_causal"])
def test_a_stage_goes_by_its_version_and_by_its_name(text):
    assert stages.resolve(text) == "v3_fa2_causal"


@pytest.mark.parametrize(("text", "meant"), [
    ("v3_fa2", "v3_fa2_causal"), ("naive", "v0_naive"), ("v49_x", "v49_wide_overlap"), ("4a_k", "v4a_k_transposed"),
])  # fmt: skip
def test_a_typing_error_is_answered_with_the_stage_that_is_meant(text, meant):
    with pytest.raises(ValueError, match=f"^no stage is called '{text}'; did you mean {meant}\\?$"):
        stages.resolve(text)


@pytest.mark.parametrize("text", ["v99", "", "v3,", "v-1", "/"])
def test_an_unknown_stage_is_answered_with_the_versions(text):
    with pytest.raises(ValueError) as refused:
        stages.resolve(text)
    message = str(refused.value)
    assert message.startswith(f"no stage is called {text!r}; there are v0 to v") and message.endswith(
        stages.version([name for name in stages.names() if stages.is_dead_end(name)][-1])
    )
    assert "\n" not in message and not any(name in message for name in stages.names())
