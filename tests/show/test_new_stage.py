"""`make stage` copies any stage. The copy has its own name everywhere and passes the tests. Refused copies leave no files."""

import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stages
from common.measure import digest
from common.show import documents, new_stage, results, story

ROOT = Path(__file__).parents[2]
LAST = max((name for name in stages.names() if not stages.is_dead_end(name)), key=stages.position)
NUMBER = stages.position(LAST)[0]
COPIES = {"v3_fa2_causal": f"v{NUMBER}z_copy", LAST: f"v{NUMBER + 1}_copy"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the repository with a dead end and a next step. The code under test treats it as the repository."""
    root = tmp_path_factory.mktemp("tree") / "repository"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "__pycache__", "plots"))
    with pytest.MonkeyPatch.context() as patch:
        for module in (results, digest):
            patch.setattr(module, "ROOT", root)
        patch.setattr(stages, "__path__", [str(root / "stages")])
        patch.setattr(digest, "current", functools.cache(digest.digest))
        patch.setattr(documents, "FRONT", dict.fromkeys(documents.FRONT, str))  # slow
        for source, name in COPIES.items():
            results._loaded.cache_clear()  # the cached runs do not know the new stages
            new_stage.main([source, name])
        yield root


@pytest.mark.parametrize(("source", "name"), COPIES.items())
def test_a_copy_has_its_own_name_and_its_parent(tree, source, name):
    texts = {path.name: path.read_text() for path in (tree / "stages" / name).iterdir()}
    assert set(texts) >= {"forward.py", "backward.py"} and new_stage.IDEA[1:] in texts["README.md"]
    assert stages.parent(name) == source
    assert ("PARENT = " in texts["__init__.py"]) == (source != LAST)
    assert str(story.change(source, name)).startswith("0 lines changed")
    del texts["README.md"], texts["__init__.py"]  # they name the parent
    assert not [file for file, text in texts.items() if re.search(rf"\b{stages.version(source)}(\b|_)", text)]


@pytest.mark.long
def test_the_tests_pass_with_new_stages(tree):
    """A copied stage passes the tests of files, names, documents and style."""
    tests = ("stages/test_contract", "stages/test_readmes", "show/test_documents", "show/test_story", "test_rooms")
    chosen = " or ".join([*COPIES.values(), "test_documents_agree", "test_ruff"])
    options = ["-q", "-p", "no:cacheprovider", *(f"tests/{file}.py" for file in tests), "-k", chosen]
    for module in (["common.show.documents"], ["pytest", *options]):
        run = subprocess.run([sys.executable, "-m", *module], cwd=tree, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout


def test_notes_that_point_ahead_stay():
    """A dead end made from v4 comes before v5, so it keeps notes about v5. v5 and later stages drop such notes."""
    code = "x = 1\n    # NOTE: this is read twice; v5 reads it once.\n    # NOTE: this is slow.\ny = 2  # v5's\n"
    assert new_stage.without_past_notes(code, "v4c_some") == code
    for name in ("v5_other", "v5a_some", "v16_some"):
        assert new_stage.without_past_notes(code, name) == "x = 1\n    # NOTE: this is slow.\ny = 2  # v5's\n"


def contents(tree):
    return {path: path.is_file() and path.read_bytes() for path in [tree / "README.md", *(tree / "stages").rglob("*")]}


@pytest.mark.parametrize(("source", "name", "message"), [
    ("v98", "v99_some", "no stage is called 'v98'"),
    ("v0", f"v{NUMBER + 2}", "no name of a stage: v<number>[letter]_<snake_case>"),
    ("v0", f"v{NUMBER}_some", f"there is stages/{LAST}"),
    ("v0", f"v{NUMBER + 3}_some", f"there is no v{NUMBER + 2}"),
    ("v0", f"v{NUMBER + 2}_some", "stopped"),
])  # fmt: skip
def test_what_fails_leaves_everything_as_it_was(tree, monkeypatch, capsys, source, name, message):
    def stop(*args):
        raise ValueError("stopped")

    monkeypatch.setattr(documents, "documents", stop)
    before = contents(tree)
    with pytest.raises(SystemExit) as stopped:
        new_stage.main([source, name])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith("make stage: ") and error.count("\n") == 1 and message in error
    assert contents(tree) == before
