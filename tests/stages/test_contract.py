"""All stages have the same files and names, so a reader can compare them."""

import ast
import functools
import importlib.util
import inspect
import itertools
import pathlib
import re

import pytest

import stages

CACHED = "cache_seqlens", "page_table", "k_descale", "v_descale"  # arguments that describe a cache
PARTS = ("forward", "backward")


STEPS = [name for name in stages.names() if not stages.is_experiment(name)]


@pytest.fixture(params=stages.names(), scope="module")
def module(request):
    """The module of every stage, even if the stage cannot run here."""
    return stages.load(request.param)


@functools.lru_cache(16)  # the tests of a stage follow each other
def parsed(source):
    return ast.parse(source)


def test_a_stage_has_the_same_files_as_every_other(module):
    folder = pathlib.Path(module.__file__).parent
    needed = ["__init__.py", "forward.py", "backward.py", *["README.md"] * (folder.name in STEPS)]
    assert [file for file in needed if not (folder / file).is_file()] == []


def test_a_stage_exports_the_contract(module):
    """`forward`, `backward` and the operators have the same arguments in every stage. Passes may take lengths and starts."""
    assert set(module.__all__) >= {"attention", "forward", "backward"}
    arguments = {
        name: list(inspect.signature(getattr(module, name)).parameters)
        for name in ("attention", "attention_varlen", "forward", "backward")
    }
    lengths = [name for name in arguments["forward"][-3:] if name in ("lengths", "starts", "descales", "differentiable")]
    starts = ["starts"] if arguments["backward"][-1] == "starts" else []
    assert arguments == {
        "attention": ["q", "k", "v", "causal", "scale", "return_lse", *CACHED, "others"],
        "attention_varlen": ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "causal", "scale", "return_lse", "others"],
        "forward": ["q", "k", "v", "causal", "scale", "diagonal", *lengths],
        "backward": ["grad_out", "q", "k", "v", "out", "lse", "causal", "scale", "diagonal", *starts],
    }


def test_a_stage_answers_with_its_own_functions(module):
    """A stage does not use the functions of the stage that it was copied from. A pass that it takes over is its parent's."""
    directory = module.__name__.removeprefix("stages.")
    for pass_ in PARTS:
        home = getattr(module, pass_).__module__.split(".")[1]
        assert home == directory or home == stages.home(stages.parent(directory), pass_), pass_
        assert getattr(module, pass_).__module__ == f"stages.{home}.{pass_}"
    assert (module.attention.__module__, module.attention.__qualname__) == (module.__name__, "attention")
    operator = inspect.getclosurevars(module.attention).nonlocals["forward_op"]
    assert operator.name() == f"kernel_evolution::{directory}_forward"


def test_a_stage_with_another_s_functions_is_found(tmp_path):
    path = tmp_path / "__init__.py"
    path.write_text(f"from stages.{stages.names()[0]} import attention, backward, forward\n")
    spec = importlib.util.spec_from_file_location("stages.v99_copy", path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    with pytest.raises(AssertionError):
        test_a_stage_answers_with_its_own_functions(copy)


def taken_from_others(path, package):
    """Return a stage file's imports from other stages as (file, module, name). The name is None for a whole module."""
    found = []
    for node in ast.walk(parsed(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found += [(module, alias.name) for alias in node.names]
    return [(path.stem, *taken) for taken in found if re.match(rf"stages\b(?!\.{package.split('.')[1]}\b)", taken[0])]


def is_pass(file, module, name):
    """Return whether a forward.py imports another stage's forward, or a backward.py another stage's backward."""
    return file == name and name in PARTS and module in {f"stages.{other}.{name}" for other in stages.names()}


def test_a_stage_imports_only_passes_from_other_stages(module):
    """The newest stage, which chooses among the ends of the tracks, also imports what their plans need."""
    paths = pathlib.Path(module.__file__).parent.glob("**/*.py")
    taken = [found for path in paths for found in taken_from_others(path, module.__name__)]
    if module.__name__ == f"stages.{stages.newest()}":
        plans = {"forward_plan": (".forward", ".forward_plan"), "choice": (".backward_splits",)}
        taken = [found for found in taken if not found[1].endswith(plans.get(found[0], ()))]
    assert [found for found in taken if not is_pass(*found)] == []


@pytest.mark.parametrize(("line", "allowed"), [
    ("from stages.{0}.forward import forward as forward_of_v0", True),
    ("from .backward import SUMS", True),
    ("from . import backward", True),
    ("from stages.{0}.forward import LOG2_E", False),
    ("from stages.{0}.backward import backward", False),  # in a forward.py
    ("from stages.{0} import forward", False),
    ("from stages import load", False),
    ("from ..{0}.forward import LOG2_E", False),
    ("import stages", False),
    ("import stages.{0}.forward", False),
])  # fmt: skip
def test_imports_that_a_stage_may_have(tmp_path, line, allowed):
    path = tmp_path / "forward.py"
    path.write_text(line.format(stages.names()[0]))
    assert all(is_pass(*found) for found in taken_from_others(path, "stages.v99_some")) == allowed


def test_the_code_of_a_stage_does_not_hold_its_name(module):
    """A stage's code does not contain the stage's name, so a copy needs no change."""
    directory = pathlib.Path(module.__file__).parent
    version = directory.name.split("_")[0]
    for path in directory.glob("**/*.py"):
        assert not re.search(rf"\b{version}(\b|_)", path.read_text()), path.name


@pytest.mark.parametrize("name", STEPS)
def test_the_readmes_name_a_stage(name):
    """The stage's README has the stage's name in its title. The project's README has the name in a table."""
    directory, version = stages.directory(name), stages.version(name)
    assert (directory / "README.md").read_text().startswith(f"# {version}: ")
    assert f"\n| [{version}](stages/{name}) |" in (directory.parents[1] / "README.md").read_text()


def test_a_stage_has_docstrings(module):
    for text in (module.__doc__, module.attention.__doc__, module.forward.__doc__, module.backward.__doc__):
        assert text


def test_stages_load_by_version_alone(module):
    name = module.__name__.removeprefix("stages.")
    assert stages.load(name) is stages.load(name.split("_")[0]) is module


@pytest.mark.parametrize("name", ["v", "v99", "naive", ""])
def test_a_stage_that_is_not_there(name):
    with pytest.raises(ValueError, match="no stage is called"):
        stages.load(name)


def test_a_pass_without_a_change_has_the_same_files():
    """A changed pass differs from the parent's in more than `# NOTE:` comments."""
    for name in stages.names():
        parent = stages.parent(name)
        for pass_ in PARTS if parent else ():
            before, after = ({file: stages.source(one, file) for file in stages.files(pass_, one)} for one in (parent, name))
            bare = [
                {file: re.sub(r"(?m)^ *# NOTE:.*\n", "", text) for file, text in texts.items()} for texts in (before, after)
            ]
            assert before == after or bare[0] != bare[1], f"{name}: the {pass_} differs from {parent}'s in NOTEs alone"


def test_stages_are_in_order_and_form_one_tree():
    positions = [stages.position(name) for name in stages.names()]
    assert positions == sorted(set(positions))
    parents = [stages.parent(name) for name in STEPS]
    assert [name for name, parent in zip(STEPS, parents, strict=True) if not parent] == STEPS[:1]
    assert all(STEPS.index(parent) < place for place, parent in enumerate(parents) if parent)
    below = [name for name, parent in zip(STEPS, parents, strict=True) if parent == "v26_second_q"]  # also begins tracks
    assert len(below) > 2 and set(below) <= set(stages.children("v26_second_q"))


def bodies(name):
    """Return a stage's functions as (arguments and statements, where it is), without names, docstrings and comments."""
    found = {}
    for path in sorted(stages.directory(name).glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                where, node.name = f"{name}/{path.name}: {node.name}", ""
                node.body = node.body[ast.get_docstring(node) is not None :]
                found[ast.dump(node)] = where
    return found


def own_functions(chain):
    """Return the functions of a line of stages that the stage from which it starts does not have."""
    before = bodies(stages.parent(chain[0]))
    return {body: where for name in chain for body, where in bodies(name).items() if body not in before}


def shared_by_tracks():
    """Return the functions that two lines have, and of which neither line starts from the other, directly or indirectly.

    The lines are the tracks with their dead ends, and the newest stage, which chooses among the tracks.
    """
    chains = {track: [name for name in STEPS if stages.track(name) == track] for track in stages.tracks()}
    starts = {track: stages.parent(chain[0]) for track, chain in chains.items()}

    def above(track):
        start = stages.track(starts[track]) if track in starts else None
        return {track} | (above(start) if start else set())

    own = {track: own_functions(chain) for track, chain in (chains | {"newest": [stages.newest()]}).items()}
    apart = [(a, b) for a, b in itertools.combinations(own, 2) if a not in above(b) and b not in above(a)]
    return [(own[a][body], own[b][body]) for a, b in apart for body in own[a].keys() & own[b].keys()]


def test_a_branch_holds_no_code_of_another_track():
    """A function that a track adds or changes is in no other track, unless one track starts from the other."""
    assert shared_by_tracks() == []


def test_code_of_another_track_is_found(tmp_path, monkeypatch):
    """The track `two` starts from `one`, and `three` from the trunk. Names, comments and docstrings do not hide a copy."""
    own, copied = "def f(x):\n    return x + 1\n", 'def g(x):\n    """Add."""\n    return x + 1  # one\n'
    tree = {"v0_a": ("", "A = 1\n"), "v1_b": ("", "A = 2\n"), "one1_a": ('PARENT = "v0"', own),
            "two1_a": ('PARENT = "one1"', own), "three1_a": ('PARENT = "v0"', copied)}  # fmt: skip
    for name, (parent, code) in tree.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"{parent}\n")
        (tmp_path / name / "forward.py").write_text(code)
    monkeypatch.setattr(stages, "__path__", [str(tmp_path)])
    monkeypatch.setitem(globals(), "STEPS", stages.names())
    assert shared_by_tracks() == [("one1_a/forward.py: f", "three1_a/forward.py: g")]
    (tmp_path / "v1_b" / "forward.py").write_text(own)
    assert ("one1_a/forward.py: f", "v1_b/forward.py: f") in shared_by_tracks()


def stage_with(parent, directory):
    """Make a new stage in `directory` that records this parent, and return the stage's name."""
    name = "v99_mine"
    (directory / name).mkdir()
    (directory / name / "__init__.py").write_text(f"PARENT = {parent!r}\n")
    return name


@pytest.mark.parametrize("recorded", ["v3", "v3_fa2_causal"])
def test_a_stage_records_its_parent(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "__path__", [*stages.__path__, str(tmp_path)])
    assert stages.parent(stage_with(recorded, tmp_path)) == "v3_fa2_causal"


def test_a_parent_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "__path__", [*stages.__path__, str(tmp_path)])
    name = stage_with("v77", tmp_path)
    with pytest.raises(SystemExit, match=f"{name}/__init__.py: PARENT = 'v77' names no stage"):
        stages.parent(name)


def test_a_stage_without_a_recorded_parent_follows_the_number_before():
    assert stages.parent("v4_autotune_descriptor") == "v3_fa2_causal"
    assert stages.parent("v4a_k_transposed") == "v4_autotune_descriptor"
    assert stages.parent("v5_gone_since") == "v4_autotune_descriptor"
    assert stages.parent("v0_naive") is stages.parent("sdpa-cudnn") is None


def by_position(source):
    """Return the places where a Gluon kernel unpacks or indexes a tuple, or computes a slot or phase with % or //."""
    found = []
    for node in ast.walk(parsed(source)):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=[_, _, _, *_])], value=ast.Name()):
                found.append(ast.unparse(node))
            case ast.Subscript(value=ast.Name(), slice=ast.Constant(value=int())):
                found.append(ast.unparse(node))
            case ast.BinOp(op=ast.Mod(), right=ast.Name(id=name)) if name.endswith("STAGES"):
                found.append(ast.unparse(node))
            case ast.BinOp(left=ast.BinOp(op=ast.FloorDiv()), op=ast.BitAnd(), right=ast.Constant(value=1)):
                found.append(ast.unparse(node))
    return found


def test_gluon_kernels_use_names(module):
    for path in pathlib.Path(module.__file__).parent.glob("*.py"):
        if "import gluon" in path.read_text():
            assert by_position(path.read_text()) == [], path


def too_large(source):
    """Return the functions of a file that are too large, with their numbers of lines and parameters.

    If the file is too long, also return "the file".
    """
    found = ["the file"] if source.count("\n") > 450 else []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines, parameters = node.end_lineno + 1 - first, len(node.args.args + node.args.kwonlyargs)
            if lines > 80 or parameters > 24:
                found.append((node.name, lines, parameters))
    return found


def test_files_and_functions_have_a_size_to_hold_in_mind(module):
    for path in pathlib.Path(module.__file__).parent.glob("*.py"):
        assert too_large(path.read_text()) == [], path
