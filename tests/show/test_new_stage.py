"""`make stage` copies any stage. The copy has its own name everywhere and passes the tests. Refused copies leave no files."""

import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from string import ascii_lowercase

import pytest

import stages
from common.measure import digest
from common.show import documents, new_stage, results, story

ROOT = Path(__file__).parents[2]
LAST = max((name for name in stages.names() if not stages.is_dead_end(name)), key=stages.position)
V0 = stages.names()[0]
NUMBER = stages.position(LAST)[0]
FREE = (f"v{number}{letter}_copy" for number in (NUMBER, NUMBER - 1) for letter in reversed(ascii_lowercase[1:]))
COPIES = dict(zip([*stages.names()[::16], LAST], FREE, strict=False)) | {LAST: f"v{NUMBER + 1}_copy"}


def point_at(root, patch):
    """Let the code under test treat `root` as the repository."""
    for module in (results, digest):
        patch.setattr(module, "ROOT", root)
    patch.setattr(stages, "__path__", [str(root / "stages")])
    patch.setattr(digest, "current", functools.cache(digest.digest))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the repository with new stages: dead ends that copy some stages, and a stage that copies the last one."""
    root = tmp_path_factory.mktemp("tree") / "repository"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "__pycache__", "plots"))
    with pytest.MonkeyPatch.context() as patch:
        point_at(root, patch)
        for source, name in COPIES.items():
            results._loaded.cache_clear()  # the cached runs do not know the new stages
            if source == LAST:
                patch.undo()
                point_at(root, patch)
            else:
                patch.setattr(documents, "FRONT", documents.FRONT | dict.fromkeys(("headline", "ladder"), str))  # slow
            new_stage.main([source, name])
    return root


@pytest.fixture
def inside(tree, monkeypatch):
    """The copy of the repository. The code under test treats it as the repository."""
    point_at(tree, monkeypatch)
    return tree


def contents(root):
    """Return the content of every file that `make stage` could change. Directories have the value False."""
    paths = [root / "README.md", root / "tests" / "predictions.py", *(root / "stages").rglob("*")]
    return {path: path.is_file() and path.read_bytes() for path in paths}


@pytest.mark.parametrize(("source", "name"), COPIES.items())
def test_the_old_stage_s_name_is_gone(tree, source, name):
    old = re.compile(rf"\b{stages.version(source)}(\b|_)")
    files = {path.name: path.read_text() for path in (tree / "stages" / name).iterdir()}
    assert set(files) >= {"__init__.py", "forward.py", "backward.py", "README.md"}
    files["README.md"] = documents.with_passages(files["README.md"], {"gain": str})  # the gain table names the previous stage
    number, branch = stages.position(name)
    named = [] if stages.position(source) == (number if branch else number - 1, "") else [stages.version(source)]
    assert re.findall('^PARENT = "(.*)"', files["__init__.py"], re.MULTILINE) == named
    files["__init__.py"] = re.sub("^PARENT = .*", "", files["__init__.py"], flags=re.MULTILINE)
    for file, text in files.items():
        assert not old.search(text), file
        assert text == new_stage.without_past_notes(text, name), file


@pytest.mark.long
def test_the_tests_pass_with_new_stages(tree):
    """A copied stage passes the tests of files, names, documents and style."""
    files = ("stages/test_contract", "stages/test_readmes", "show/test_documents", "show/test_story", "test_rooms")
    chosen = " or ".join([*COPIES.values(), "test_documents_agree", "test_neighbours", "test_ruff"])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{file}.py" for file in files), "-k", chosen],
        cwd=tree, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout


def test_a_new_stage_s_parent_is_the_stage_that_it_was_copied_from(inside):
    assert all(stages.parent(name) == source for source, name in COPIES.items())
    assert all(story.change(source, name) == story.Change(0, 0, ()) for source, name in COPIES.items() if source == LAST)


def test_notes_that_point_ahead_stay():
    """A dead end made from v4 comes before v5, so it keeps notes about v5. v5 and later stages drop such notes."""
    code = "x = 1\n    # NOTE: this is read twice; v5 reads it once.\n    # NOTE: this is slow.\ny = 2  # v5's\n"
    assert new_stage.without_past_notes(code, "v4c_some") == code
    for name in ("v5_other", "v5a_some", "v16_some"):
        assert new_stage.without_past_notes(code, name) == "x = 1\n    # NOTE: this is slow.\ny = 2  # v5's\n"


@pytest.mark.parametrize(("source", "name", "message"), [
    ("v98", "v99_some", "no stage is called 'v98'"),
    ("v0", f"v{NUMBER + 2}", "no name of a stage: v<number>[letter]_<snake_case>"),
    ("v0", f"v0{NUMBER + 2}_some", "no name of a stage"),
    ("v0", LAST, f"there is stages/{LAST}"),
    ("v0", f"v{NUMBER}_some", f"there is stages/{LAST}"),
    ("v0", f"v{NUMBER + 3}_some", f"there is no v{NUMBER + 2}"),
    ("v0", f"v{NUMBER + 2}a_some", f"there is no v{NUMBER + 2}"),
    ("v0", f"v{NUMBER + 2}_{'x' * 300}", "too long"),
])  # fmt: skip
def test_an_impossible_stage_is_refused_in_one_line(inside, capsys, source, name, message):
    before = contents(inside)
    with pytest.raises(SystemExit) as stopped:
        new_stage.main([source, name])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("make stage: ") and error.count("\n") == 1 and message in error
    assert contents(inside) == before


def test_a_directory_that_is_no_stage_is_left_alone(inside, capsys):
    directory = inside / "stages" / f"v{NUMBER + 2}_some"
    directory.mkdir()
    with pytest.raises(SystemExit):
        new_stage.main(["v0", directory.name])
    assert f"there is stages/{directory.name}" in capsys.readouterr().err
    directory.rmdir()  # fails if the directory is not empty


@pytest.mark.parametrize("step", ["copytree", "documents"])
def test_a_failure_leaves_everything_as_it_was(inside, monkeypatch, step):
    def fail(*args, **options):
        raise KeyboardInterrupt

    before = contents(inside)
    monkeypatch.setattr({"copytree": shutil, "documents": documents}[step], step, fail)
    with pytest.raises(KeyboardInterrupt):
        new_stage.main(["v0", f"v{NUMBER + 2}_some"])
    assert contents(inside) == before
