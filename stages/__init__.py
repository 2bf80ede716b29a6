"""The stages of the evolution, one package each. They form a tree: each stage changes its parent's code by one idea.

A name gives a stage's place. v4_… is step 4 of the trunk, which leads to the fastest exact attention for training. decode2_… is
step 2 of the track `decode`, a branch for one other kind of workload. v4a_… is a dead end off v4. No code outside a stage's
directory lists its name.
"""

import ast
import contextlib
import difflib
import functools
import importlib
import itertools
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from common.kernels.tuning import WITH_TMA, tuners
from common.runtime import architecture

TRUNK = "v"


@functools.cache  # callers sort by it, thousands of times
def position(name: str) -> tuple[bool, str, int, str] | None:
    """Return a sortable position: (False, "v", 4, "") for v4_…, (True, "decode", 2, "a") for decode2a_…; None for names that no
    stage can have. The trunk comes first, then the tracks in alphabetical order."""
    match = re.match(r"([a-z]+)(\d+)([a-z]?)_", name)
    return match and (match[1] != TRUNK, match[1], int(match[2]), match[3])


def is_experiment(name: str) -> bool:
    """Whether a stage is a user's experiment, `EXPERIMENT = True`. An experiment is no step of the evolution."""
    return _recorded(name, "EXPERIMENT") is not None


def is_dead_end(name: str) -> bool:
    """Whether a stage is a dead end, from which the evolution does not continue."""
    place = position(name)
    return place is not None and place[-1] != "" and not is_experiment(name)


def _is_step(name: str) -> bool:
    return not is_dead_end(name) and not is_experiment(name)


def names() -> list[str]:
    """Return the directory names of all stages in order, dead ends after the stage that they branch off: ['v0_naive', …].

    Raises:
        SystemExit: two stages have the same place, so a step's parent would be ambiguous.
    """
    folders = {(root, name) for root in __path__ for name in os.listdir(root) if position(name)}
    found = list({name for root, name in folders if os.path.exists(f"{root}/{name}/__init__.py")})
    found.sort(key=lambda name: (position(name), name))
    for first, second in itertools.pairwise(found):
        if position(first) == position(second):
            raise SystemExit(f"stages/{first} and stages/{second} have one number; rename one of them")
    return found


def line(track: str = TRUNK) -> list[str]:
    """Return the stages of the trunk, or of a track, in order, without dead ends and experiments."""
    return [name for name in names() if position(name)[1] == track and _is_step(name)]


def tracks() -> list[str]:
    """Return the names of all tracks in order: ['decode', …]. Experiments make no track."""
    return list(dict.fromkeys(track(name) for name in names() if track(name) and _is_step(name)))


def newest() -> str:
    """Return the directory name of the trunk's last stage, which chooses among the ends of the tracks."""
    return line()[-1]


def _recorded(name: str, what: str) -> str | None:
    """Return what a stage's `__init__.py` assigns to the name `what`, a string without its quotes; None for nothing."""
    module = directory(name) / "__init__.py"
    found = module.exists() and re.search(rf"^{what} = (.*?)(?:  #.*)?$", module.read_text(), re.MULTILINE)
    return found[1].strip("\"'") if found else None


def track(name: str) -> str | None:
    """Return the track of a stage, such as "decode"; None for a stage of the trunk, and for names that no stage can have."""
    found = position(name)
    return found[1] if found and found[0] else None


def version(name: str) -> str:
    """Return the version in a stage's name: "v3" for "v3_fa2_causal"."""
    return name.partition("_")[0]


def directory(name: str) -> Path:
    """The directory of the stage with this directory name; it need not exist."""
    paths = [Path(root, name) for root in __path__]
    return next((path for path in paths if path.exists()), paths[0])


def imported(text: str, pass_: str) -> str | None:
    """Return the stage from which a `forward.py` or `backward.py` with this text takes its pass; None if it has its own."""
    found = re.search(rf"^from {__name__}\.(\w+)\.{pass_} import {pass_}$", text, re.MULTILINE)
    return found and found[1]


def home(name: str, pass_: str) -> str:
    """Return the stage that has the kernels of a stage's pass, "forward" or "backward".

    A branch that changes the forward alone has a `backward.py` that says `from stages.v26_second_q.backward import backward`.
    """
    path = directory(name) / f"{pass_}.py"
    return (imported(path.read_text(), pass_) if path.exists() else None) or name


def files(pass_: str, *names: str) -> list[str]:
    """Return the names of all files that these stages have for a pass, "forward" or "backward": `forward.py`, then its parts,
    `forward_….py`."""
    parts = {path.name for name in names for path in directory(home(name, pass_)).glob(f"{pass_}_*.py")}
    return [f"{pass_}.py", *sorted(parts)]


def source(name: str, file: str) -> str:
    """Return the text of a stage's file, or of the file in the pass that the stage takes over; "" if there is no such file."""
    pass_ = re.match("forward|backward|", file)[0]
    path = directory(home(name, pass_) if pass_ else name) / file
    return path.read_text() if path.exists() else ""


def syntax_errors(*names: str) -> list[str]:
    """Return the syntax errors in the files of these stages, each as `file:line: reason: the line's text`."""
    found = []
    for path in (path for name in names for path in sorted(directory(name).glob("*.py"))):
        try:
            ast.parse(path.read_text())
        except SyntaxError as error:
            found.append(f"stages/{path.parent.name}/{path.name}:{error.lineno}: {error.msg}: {(error.text or '').strip()}")
    return found


@contextlib.contextmanager
def changed(name: str, texts: dict[str, str], folder: Path) -> Iterator[str]:
    """Make a package in `folder` with the files of a stage's passes, some with other texts.

    Its modules import each other and not the stage's.

    Args:
        texts: the other texts by the names of their files.

    Yields:
        The package's name, under which its modules can be imported.
    """
    package = ModuleType(f"{__name__}.{name}.changed")
    package.__path__ = [str(folder)]
    for file in (*files("forward", name), *files("backward", name)):
        (folder / file).write_text(texts.get(file, source(name, file)))
    sys.modules[package.__name__] = package
    try:
        yield package.__name__
    finally:
        for module in [module for module in sys.modules if module.startswith(package.__name__)]:
            del sys.modules[module]


def moved() -> dict[str, str]:
    """Return the present names of stages by the names that they had before the tree.

    A stage records its old name: `WAS = "v31_split_keys"`. A stage that took in several others names them all, with spaces.
    """
    return {old: name for name in names() for old in (_recorded(name, "WAS") or "").split()}


@functools.cache  # says it once
def _say_moved(found: str):
    """Warn if the short name of the stage `found` meant another stage before the tree."""
    for old, new in moved().items():
        if version(old) == version(found) and new != found:
            warnings.warn(f"{version(found)} is {found}; {old} is now {new}", stacklevel=4)


def _find(name: str) -> str | None:
    """Return the directory name of the stage with this directory name or version; None if there is no such stage."""
    if position(name) and (directory(name) / "__init__.py").exists():
        return name
    return next((stage for stage in names() if name in (stage, version(stage))), None)


def resolve(name: str) -> str:
    """Return the directory name of a stage; `name` is a directory name, a version ("v3", "V3" or "3"), or "newest".

    Raises:
        ValueError: there is no such stage. The message names a similar one, or all versions.
    """
    wanted = name.strip().lower()
    wanted = f"{TRUNK}{wanted}" if wanted[:1].isdigit() else wanted
    if wanted == "newest":
        return newest()
    if found := _find(wanted):
        if found != wanted:
            _say_moved(found)
        return found
    for old, new in moved().items():
        if wanted in (old, version(old)):
            raise ValueError(f"no stage is called {name!r} any more; {old} is now {new}")
    known, same = names(), _find(version(wanted))
    if similar := [same] if same else difflib.get_close_matches(wanted, known, n=1):
        raise ValueError(f"no stage is called {name!r}; did you mean {similar[0]}?")
    ends = [[version(line(track)[end]) for end in (0, -1)] for track in (TRUNK, *tracks())]
    chains = [" to ".join(dict.fromkeys(each)) for each in ends]
    dead_ends = ", ".join(version(stage) for stage in known if is_dead_end(stage))
    raise ValueError(f"no stage is called {name!r}; there are {', '.join(chains)}, and the dead ends {dead_ends}")


def load(name: str) -> ModuleType:
    """Import a stage's module, with `attention`, `forward` and `backward`; `name` as in `resolve`."""
    return importlib.import_module(f"{__name__}.{resolve(name)}")


def parent(name: str, known: list[str] | None = None) -> str | None:
    """Return the directory name of the stage that `name` was made from; None if there is no such stage, as for the first one.

    `PARENT = "v26"` in a stage's `__init__.py` names its parent. Without it, the parent is the stage before it in the trunk or
    in its track; a dead end's parent has its own number.

    Args:
        name: a directory name. A stage that no longer exists, in old results, counts as one without a `PARENT`.
        known: `names()`, from callers that ask for many parents.

    Raises:
        SystemExit: `PARENT` names no stage, or is missing in a track's first stage.
    """
    if recorded := _recorded(name, "PARENT"):
        if found := _find(recorded):
            return found
        raise SystemExit(f"{directory(name) / '__init__.py'}: PARENT = {recorded!r} names no stage")
    if not (place := position(name)):
        return None
    *chain, number, letter = place
    steps = ((*chain, before, "") for before in range(number - (not letter), -1, -1))
    at = {position(other): other for other in known or names()}
    before = next((at[step] for step in steps if step in at and not is_experiment(at[step])), None)
    if not before and track(name) and directory(name).exists():
        raise SystemExit(
            f"{directory(name) / '__init__.py'}: PARENT is missing, which names the stage that the track starts from"
        )
    return before


def children(name: str) -> list[str]:
    """Return the stages whose parent is `name`: the next step of its line first, then first steps of tracks, then others."""
    known = names()
    found = [other for other in known if parent(other, known) == name]
    return sorted(found, key=lambda other: (is_experiment(other), is_dead_end(other), track(other) != track(name)))


def unavailable(name: str) -> str | None:
    """Return why a stage cannot run here, from its own `unavailable()`; None if it can, or if it has no such function."""
    return getattr(load(name), "unavailable", lambda: None)()


def recommended() -> str:
    """Return the directory name of the stage to use here: the trunk's newest stage that runs well on the current GPU.

    Autotuned kernels move their tiles through tensor descriptors. GPUs before Hopper have no TMA, so these kernels get only
    small tiles (`common.kernels.tuning`), and a stage with fixed tiles is faster. On the interpreter every stage runs.
    """
    arch = architecture()
    has_tma = arch is None or arch in WITH_TMA
    found = (name for name in reversed(line()) if not unavailable(name))
    return next(name for name in found if has_tma or not tuners(load(name)))
