"""`make stage` copies any stage as an experiment, which is no step. Refused copies leave no files."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import cases
import programs
import pytest

import stages
from common.show import new_stage, story

ROOT = Path(__file__).parents[2]
END = stages.line((stages.tracks() or [stages.TRUNK])[-1])[-1]  # a track's end
COPIES = {"v3_fa2_causal": "v3x_copy", "v4a_k_transposed": "mine1_copy", END: f"v{len(stages.line())}_copy"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the repository with experiments. The code under test treats it as the repository."""
    root = tmp_path_factory.mktemp("tree") / "repository"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "__pycache__", "plots"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "__path__", [str(root / "stages")])
        for source, name in COPIES.items():
            new_stage.main([source, name])
        yield root


@pytest.mark.parametrize(("source", "name"), COPIES.items())
def test_a_copy_is_an_experiment_with_its_parent_s_code(tree, source, name):
    texts = {path.name: path.read_text() for path in (tree / "stages" / name).iterdir()}
    assert texts.keys() == {path.name for path in stages.directory(source).glob("*.py")}
    assert stages.parent(name) == source and stages.is_experiment(name) and not stages.is_dead_end(name)
    assert str(story.change(source, name)).startswith("0 lines changed")
    assert not re.search("^WAS = ", texts["__init__.py"], re.MULTILINE)
    del texts["__init__.py"]  # names the parent
    assert not [file for file, text in texts.items() if re.search(rf"\b{stages.version(source)}(\b|_)", text)]


def test_an_experiment_is_in_no_line(tree):
    assert stages.newest() not in COPIES.values() and "mine" not in stages.tracks()
    assert not {*COPIES.values()} & {name for track in (stages.TRUNK, *stages.tracks()) for name in stages.line(track)}


@pytest.mark.long
def test_the_tests_pass_with_experiments(tree):
    """An experiment passes the tests of files, names, documents and style, and changes no document."""
    tests = ("stages/test_contract", "stages/test_readmes", "show/test_documents", "show/test_story", "test_rooms")
    chosen = " or ".join([*COPIES.values(), "test_documents_agree", "test_ruff"])
    options = ["-q", "-p", "no:cacheprovider", *(f"tests/{file}.py" for file in tests), "-k", chosen]
    for module in (["common.show.documents"], ["pytest", *options]):
        run = subprocess.run([sys.executable, "-m", *module], cwd=tree, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout
    assert (tree / "README.md").read_text() == (ROOT / "README.md").read_text()


@pytest.mark.parametrize(("source", "name", "message"), [
    ("v98", "v99_some", "no stage is called 'v98'"),
    ("v0", "v7", "no name of a stage: <letters><number>[letter]_<snake_case>; try NAME=v0x_yours"),
    ("v3", "v3x_other", "there is stages/v3x_copy; try NAME=v3y_yours"),
    ("v3", "v3z_some", "stopped"),
])  # fmt: skip
def test_what_fails_leaves_everything_as_it_was(tree, monkeypatch, capsys, source, name, message):
    def stop(*args):
        raise ValueError("stopped")

    monkeypatch.setattr(new_stage, "module", stop)
    before = sorted((tree / "stages").rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        new_stage.main([source, name])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith("make stage: ") and error.count("\n") == 1 and message in error
    assert sorted((tree / "stages").rglob("*")) == before


@pytest.mark.parametrize("command", [
    ["common.show.story", "diff", "v3", "v3x"],
    pytest.param(["bench", "--stage=v3x"], marks=pytest.mark.long),
    pytest.param(["pytest", "-q", "tests/test_layout.py"], marks=pytest.mark.long),
], ids=" ".join)  # fmt: skip
def test_a_syntax_error_is_one_line_with_its_file(tree, command):
    path = tree / "stages" / "v3x_copy" / "forward.py"
    text = path.read_text()
    before, line = text.split("tl.exp2(m - m_new)", 1)[0], "rescale = tl.exp2(m - m_new"
    try:
        path.write_text(text.replace("tl.exp2(m - m_new)", "tl.exp2(m - m_new", 1))
        run = programs.python("-m", *command, cwd=tree)
    finally:
        path.write_text(text)
    wanted = f"stages/v3x_copy/forward.py:{before.count(chr(10)) + 1}: '(' was never closed: {line}"
    assert run.returncode > 0 and not run.stdout and wanted in run.stderr and run.stderr.strip().count("\n") == 0


def test_the_mistake_that_readers_try_makes_v3_fail(tmp_path):
    """CONTRIBUTING.md lets readers make it in a copy of v3."""
    wrong, text = "l = l + tl.sum(p, 1)", stages.source("v3_fa2_causal", "forward.py")
    changed = {"forward.py": text.replace("l = l * rescale + tl.sum(p, 1)", wrong)}
    assert f"`{wrong}`" in (ROOT / "CONTRIBUTING.md").read_text() and changed["forward.py"] != text
    with stages.changed("v3_fa2_causal", changed, tmp_path) as package:
        module, part = importlib.import_module(f"{package}.forward"), cases.Part("v3_fa2_causal", "forward")
        with pytest.raises(AssertionError, match=r"^out: largest error .* worst at "):
            cases.check(module, *cases.make_inputs(40, 100, **cases.FEW), causal=False, run=part)
