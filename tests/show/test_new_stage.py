"""`make stage` copies any stage. The copy has its own name everywhere and passes the tests. Refused copies leave no files."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from string import ascii_lowercase

import pytest
from cases import cells, check, make_inputs

import bench
import stages
from common.measure.workloads import Workload
from common.show import documents, new_stage, results, story
from common.show.summary import summary
from common.show.tables import speed_table

ROOT = Path(__file__).parents[2]
LAST = max((name for name in stages.names() if not stages.is_dead_end(name)), key=stages.position)
V0 = stages.names()[0]
NUMBER = stages.position(LAST)[0]
FREE = (f"v{number}{letter}_copy" for number in (NUMBER, NUMBER - 1) for letter in reversed(ascii_lowercase[1:]))
COPIES = dict(zip([*stages.names()[::4], LAST], FREE, strict=False))
NEXT = f"v{NUMBER + 1}_copy"


def version(name):
    return name.split("_")[0]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the repository with new stages: dead ends that copy some stages, and `NEXT`, which copies the last stage."""
    root = tmp_path_factory.mktemp("tree") / "repository"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "__pycache__", "plots"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "ROOT", root)
        patch.setattr(stages, "__path__", [str(root / "stages")])
        with patch.context() as quick:
            quick.setattr(documents, "ladder", lambda found: "")  # slow, and needed only when the last new stage is made
            quick.setattr(documents, "headline", lambda found: "")
            for source, name in COPIES.items():
                new_stage.main([source, name])
        results._run.cache_clear()  # the cached runs do not know the new stages
        new_stage.main([LAST, NEXT])
    return root


@pytest.fixture
def inside(tree, monkeypatch):
    """The copy of the repository. The code under test treats it as the repository."""
    monkeypatch.setattr(results, "ROOT", tree)
    monkeypatch.setattr(stages, "__path__", [str(tree / "stages")])
    return tree


def contents(root):
    """Return the content of every file that `make stage` could change. Directories have the value False."""
    paths = [root / "README.md", root / "tests" / "predictions.py", *(root / "stages").rglob("*")]
    return {path: path.is_file() and path.read_bytes() for path in paths}


@pytest.mark.parametrize(("source", "name"), [*COPIES.items(), (LAST, NEXT)])
def test_the_old_stage_s_name_is_gone(tree, source, name):
    old = re.compile(rf"\b{version(source)}(\b|_)")
    files = {path.name: path.read_text() for path in (tree / "stages" / name).iterdir()}
    assert set(files) >= {"__init__.py", "forward.py", "backward.py", "README.md"}
    files["README.md"] = documents.with_table(files["README.md"], "gain", "")  # the gain table names the previous stage
    number, branch = stages.position(name)
    named = [] if stages.position(source) == (number if branch else number - 1, "") else [version(source)]
    assert re.findall('^PARENT = "(.*)"', files["__init__.py"], re.MULTILINE) == named
    files["__init__.py"] = re.sub("^PARENT = .*", "", files["__init__.py"], flags=re.MULTILINE)
    for file, text in files.items():
        assert not old.search(text), file
        assert text == new_stage.without_past_notes(text, name), file


@pytest.mark.parametrize("source", COPIES)
def test_a_copy_computes_what_its_own_directory_says(tree, source, tmp_path, monkeypatch):
    """A copy gives right results, and wrong results after its own forward is changed to return zeros."""
    if reason := stages.unavailable(source):
        pytest.skip(f"{source} {reason}")
    name = COPIES[source]
    shutil.copytree(tree / "stages" / name, tmp_path / name)
    monkeypatch.setattr(stages, "__path__", [str(tmp_path)])

    def load():
        for module in [module for module in sys.modules if module.startswith(f"stages.{name}")]:
            monkeypatch.delitem(sys.modules, module)
        importlib.invalidate_caches()
        return stages.load(name)

    inputs = make_inputs(9, 20, 16, batch=1, heads=1)
    copy = load()
    assert copy.attention.__module__ == f"stages.{name}"
    check(copy, *inputs, causal=True)
    with (tmp_path / name / "forward.py").open("a") as file:
        file.write("\n\nright = forward\n\n\ndef forward(q, k, v, **options):\n")
        file.write("    out, lse = right(q, k, v, **options)\n    return torch.zeros_like(out), lse\n")
    with pytest.raises(AssertionError, match="out"):
        check(load(), *inputs, causal=True)


def test_the_tests_pass_with_new_stages(tree):
    """A copied stage passes the tests of files, names, documents and style."""
    files = ("stages/test_contract", "stages/test_readmes", "show/test_documents", "show/test_story", "test_rooms")
    chosen = " or ".join([*COPIES.values(), NEXT, "test_documents_agree", "test_ruff"])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{file}.py" for file in files), "-k", chosen],
        cwd=tree, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout


def test_the_story_tells_of_new_stages(inside, monkeypatch, capsys):
    """The story says that a copy of the last stage changes no lines."""
    monkeypatch.setattr(stages, "names", lambda: [V0, LAST, COPIES[V0], NEXT])
    story.print_story()
    told = " ".join(capsys.readouterr().out.split())
    assert f"{NEXT} {new_stage.IDEA.capitalize()}. from {LAST}: {story.Change(0, 0, ())}" in told
    assert f"{COPIES[V0]} A dead end: {new_stage.IDEA}. from {V0}: " in told  # the size of the change follows


def test_tables_and_benchmark_compare_a_new_stage_with_its_parent(inside):
    """A copy is compared with the parent that it records, although its number suggests another parent."""
    copy = COPIES[V0]
    assert stages.parent(copy) == V0 and bench.chosen_stages([copy]) == [V0, copy]
    counts = {"bytes_read": 3e6, "bytes_written": 1e6, "flops_executed": 8e6, "bound": "bytes", "kernel_launches": 1}
    counts |= {"tiles": "", "peak_extra_mib": 1.0}
    workload = Workload("fwd", 1, 1, 64, 64, False, "float16").record()
    times = ((V0, 6.0), (LAST, 4.0), (copy, 2.0))
    records = [{"impl": name, "roofline_us": time} | workload | counts for name, time in times]
    machine = {"gpu": None, "torch": "", "triton": "", "commit": "", "date": "", "matmul_tflops": {}, "roofline": ""}
    assert "3.00" in cells(speed_table(records, machine), f"{copy} (dead end)")[0]
    assert "×3.00" in summary(records, machine, copy)


def test_a_stage_made_from_a_new_one_has_it_as_parent(inside):
    """A copy records the stage that it was copied from, and drops the `PARENT` of that stage."""
    for source, name, parent in ((COPIES[V0], f"v{NUMBER + 2}_next", COPIES[V0]), (NEXT, f"v{NUMBER + 2}_next", NEXT)):
        new_stage.main([source, name])
        assert stages.parent(name) == parent
        recorded = re.findall("^PARENT = .*", (inside / "stages" / name / "__init__.py").read_text(), re.MULTILINE)
        assert recorded == ([] if source == NEXT else [f'PARENT = "{version(source)}"'])
        shutil.rmtree(inside / "stages" / name)
        for path in (inside / "README.md", inside / "tests" / "predictions.py"):
            path.write_text("".join(line for line in path.read_text().splitlines(True) if f"v{NUMBER + 2}" not in line))


def test_notes_that_point_ahead_stay():
    """A dead end made from v4 comes before v5, so it keeps notes about v5. v5 and later stages drop such notes."""
    code = "x = 1\n    # NOTE: this is read twice; v5 reads it once.\n    # NOTE: this is slow.\ny = 2  # v5's\n"
    assert new_stage.without_past_notes(code, "v4c_some") == code
    for name in ("v5_other", "v5a_some", "v16_some"):
        assert new_stage.without_past_notes(code, name) == "x = 1\n    # NOTE: this is slow.\ny = 2  # v5's\n"


def test_lines_are_put_in_the_order_of_the_stages():
    text = "above\n| v2 | b |\n| v13 | c |\nbelow\n"
    assert new_stage.with_line(text, r"\| v\d+ .*", "| v16 | d |\n") == text.replace("| c |\n", "| c |\n| v16 | d |\n")
    assert new_stage.with_line(text, r"\| v\d+ .*", "| v3 | d |\n") == text.replace("| v13", "| v3 | d |\n| v13")
    assert new_stage.with_line(text, r"\| v\d+ .*", "| v13 | d |\n") == text.replace("| c |", "| d |")
    for wrong in ("above\n", text + text):
        with pytest.raises(ValueError, match="side by side"):
            new_stage.with_line(wrong, r"\| v\d+ .*", "| v3 | d |\n")


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("", "v99_some", "FROM= is missing"),
        ("v0", "", "NAME= is missing"),
        ("v98", "v99_some", "no stage is called 'v98'"),
        ("v0", f"v{NUMBER + 2}", "no name of a stage: v<number>[letter]_<snake_case>"),
        ("v0", f"v{NUMBER + 2}_Some", "no name of a stage"),
        ("v0", f"v{NUMBER + 2}_", "no name of a stage"),
        ("v0", f"v0{NUMBER + 2}_some", "no name of a stage"),
        ("v0", f"v{NUMBER + 2}_so/me", "no name of a stage"),
        ("v0", "some", "no name of a stage"),
        ("v0", LAST, f"there is stages/{LAST}"),
        ("v0", f"v{NUMBER}_some", f"there is stages/{LAST}"),
        ("v0", f"v{NUMBER}z_some", f"there is stages/v{NUMBER}z_copy"),
        ("v0", f"v{NUMBER + 3}_some", f"there is no v{NUMBER + 2}"),
        ("v0", f"v{NUMBER + 2}a_some", f"there is no v{NUMBER + 2}"),
        ("v0", f"v{NUMBER + 2}_{'x' * 300}", "too long"),
    ],
)
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


@pytest.mark.parametrize("step", ["copytree", "gain_table", "rename"])
def test_a_failure_leaves_everything_as_it_was(inside, monkeypatch, step):
    def fail(*args, **options):
        raise KeyboardInterrupt

    before = contents(inside)
    owner = {"copytree": shutil, "gain_table": documents, "rename": Path}[step]
    monkeypatch.setattr(owner, step, fail)
    with pytest.raises(KeyboardInterrupt):
        new_stage.main(["v0", f"v{NUMBER + 2}_some"])
    assert contents(inside) == before


def test_what_to_write_next_is_printed(inside, capsys):
    name = f"v{NUMBER + 1}a_some"
    new_stage.main(["v0", name])
    shown = capsys.readouterr().out
    for path in (*(f"stages/{name}/{file}" for file in ("__init__.py", "forward.py", "README.md")), "tests/predictions.py"):
        assert path in shown
    for command in (f'test ARGS="-k {version(name)}"', f"bench STAGE={version(name)}", "readme plots"):
        assert f"make {command}\n" in shown
    shutil.rmtree(inside / "stages" / name)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_passes_on_its_variables():
    def shown(*variables):
        return subprocess.run(
            ["make", "--no-print-directory", "--dry-run", "stage", f"PYTHON={sys.executable}", *variables],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert shown("FROM=v25", "NAME=v28_some").splitlines()[-1] == (
        f'{sys.executable} -m common.show.new_stage -- "v25" "v28_some"'
    )


def test_the_example_of_a_message_can_be_pasted(inside, capsys):
    with pytest.raises(SystemExit):
        new_stage.main(["v29", LAST])
    *_, source, name = re.search(r"try make stage FROM=(\S+) NAME=(\w+), or NAME=(\w+)", capsys.readouterr().err).groups()
    for given in (("v29", source), ("v29", name)):
        assert new_stage.checked(*given) == "v29_short_tiles"
