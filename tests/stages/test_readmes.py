"""The READMEs of the stages can be read side by side, and the commands that they quote exist. None of them is run here."""

import re
import shlex
from pathlib import Path

import pytest

import stages
from common.show import counts

ROOT = Path(__file__).parents[2]
HEADINGS = ["What the stage before wastes", "The idea", "Derivation", "Algorithm", "Gain", "Limits"]
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.fixture
def readme(stage):
    return (Path(stage.__file__).parent / "README.md").read_text()


def test_headings_are_the_same_in_every_stage(readme):
    assert re.findall(r"^#+ (.*)", readme, re.MULTILINE)[1:] == HEADINGS


def test_gain_has_its_markers_once_and_in_its_section(readme):
    section = readme.partition("## Gain")[2].partition("## Limits")[0]
    begin, end = "<!-- gain: written by make readme -->", "<!-- end of gain -->"
    assert [readme.count(begin), readme.count(end)] == [1, 1]
    assert re.search(f"^{begin}\n.*^{end}$", section, re.MULTILINE | re.DOTALL)


def test_make_commands_name_targets_and_stages_that_exist(readme):
    for command in re.findall(r"`make (.*?)`", readme):
        target, *variables = shlex.split(command)
        assert target in TARGETS, command
        values = dict(variable.split("=", 1) for variable in variables)
        for name in ",".join(values.get(variable, "") for variable in ("STAGE", "A", "B")).split(","):
            assert not name or stages.resolve(name), command
        if target == "traffic":
            counts.parse_options(shlex.split(values.get("ARGS", "")))


def test_notes_that_are_quoted_are_in_the_code(stage, readme):
    code = "".join((Path(stage.__file__).parent / f"{part}.py").read_text() for part in ("forward", "backward"))
    for note in re.findall(r"`(NOTE: .*?)`", readme, re.DOTALL):
        assert " ".join(note.split()) in code
