"""The stages of the evolution, one package each. No code outside a stage's directory lists its name.

A name gives a stage's position: v4_… is the fourth step, v4a_… a dead end that branches off it. The main ladder leads to the
fastest attention for training. Tracks go on from its end, each for one other workload.
"""

import contextlib
import difflib
import functools
import importlib
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from common.kernels.tuning import WITH_TMA, tuners
from common.runtime import architecture


@functools.cache  # callers sort by it, thousands of times
def position(name: str) -> tuple[int, str] | None:
    """Return a stage's position: (4, "") for v4_…, (4, "a") for v4a_…; None for other names."""
    match = re.match(r"v(\d+)([a-z]?)_", name)
    return match and (int(match[1]), match[2])


def is_dead_end(name: str) -> bool:
    """Whether a stage is a dead end, from which the evolution does not continue."""
    return (position(name) or (0, ""))[1] != ""


def names() -> list[str]:
    """Return the directory names of all stages in order, dead ends after the stage that they branch off: ['v0_naive', …].

    Raises:
        SystemExit: two stages have the same number, so a step's parent would be ambiguous.
    """
    folders = {(root, name) for root in __path__ for name in os.listdir(root) if position(name)}
    found = list({name for root, name in folders if os.path.exists(f"{root}/{name}/__init__.py")})
    found.sort(key=lambda name: (position(name), name))
    for first, second in itertools.pairwise(found):
        if position(first) == position(second):
            raise SystemExit(f"stages/{first} and stages/{second} have one number; rename one of them")
    return found


def _recorded(name: str, what: str) -> str | None:
    """Return the string that a stage's `__init__.py` assigns to the name `what`; None if it does not."""
    module = directory(name) / "__init__.py"
    found = module.exists() and re.search(rf"^{what} = [\"'](.*)[\"']", module.read_text(), re.MULTILINE)
    return found[1] if found else None


def track(name: str) -> str | None:
    """Return the track of a stage, `TRACK = "decoding"` in its `__init__.py`; None for a stage of the main ladder.

    `common.show.tracks` lists the tracks and their benchmarks.
    """
    return _recorded(name, "TRACK")


def version(name: str) -> str:
    """Return the version in a stage's name: "v3" for "v3_fa2_causal"."""
    return name.partition("_")[0]


def directory(name: str) -> Path:
    """The directory of the stage with this directory name; it need not exist."""
    paths = [Path(root, name) for root in __path__]
    return next((path for path in paths if path.exists()), paths[0])


def files(pass_: str, *names: str) -> list[str]:
    """Return the names of all files that these stages have for a pass, "forward" or "backward": `forward.py`, then its parts,
    `forward_….py`."""
    parts = {path.name for name in names for path in directory(name).glob(f"{pass_}_*.py")}
    return [f"{pass_}.py", *sorted(parts)]


def source(name: str, file: str) -> str:
    """Return the text of a stage's file; "" if the stage has no such file."""
    path = directory(name) / file
    return path.read_text() if path.exists() else ""


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


def resolve(name: str) -> str:
    """Return the directory name of a stage; `name` is a directory name or a version ("v3", "V3" or "3").

    Raises:
        ValueError: there is no such stage. The message names a similar one, or all versions.
    """
    wanted = name.strip().lower()
    wanted = f"v{wanted}" if wanted[:1].isdigit() else wanted
    if wanted in (known := names()):
        return wanted
    found = [stage for stage in known if version(stage) == version(wanted)]
    if found and version(wanted) == wanted:
        return found[0]
    if similar := found or difflib.get_close_matches(wanted, known, n=1):
        raise ValueError(f"no stage is called {name!r}; did you mean {similar[0]}?")
    line, dead_ends = ([version(stage) for stage in known if is_dead_end(stage) == dead] for dead in (False, True))
    raise ValueError(
        f"no stage is called {name!r}; there are {line[0]} to {line[-1]}, and the dead ends {', '.join(dead_ends)}"
    )


def load(name: str) -> ModuleType:
    """Import a stage's module, with `attention`, `forward` and `backward`; `name` as in `resolve`."""
    return importlib.import_module(f"{__name__}.{resolve(name)}")


def parent(name: str) -> str | None:
    """Return the directory name of the stage that `name` was made from; None if there is no such stage, as for the first one.

    `PARENT = "v29"` in a stage's `__init__.py` names its parent. Without it, the parent is the stage of the main ladder
    before it; a dead end's parent has its own number.

    Args:
        name: a directory name. A stage that no longer exists, in old results, counts as one without a `PARENT`.

    Raises:
        SystemExit: `PARENT` names no stage.
    """
    if recorded := _recorded(name, "PARENT"):
        try:
            return resolve(recorded)
        except ValueError:
            module = directory(name) / "__init__.py"
            raise SystemExit(f"{module}: PARENT = {recorded!r} names no stage") from None
    number, branch = position(name) or (0, "")
    line = [other for other in names() if not is_dead_end(other) and position(other) < (number + bool(branch), "")]
    return line[-1] if line else None


def unavailable(name: str) -> str | None:
    """Return why a stage cannot run here, from its own `unavailable()`; None if it can, or if it has no such function."""
    return getattr(load(name), "unavailable", lambda: None)()


def recommended() -> str:
    """Return the directory name of the stage to use here: the newest stage, not a dead end, that runs well on the current GPU.

    Autotuned kernels move their tiles through tensor descriptors. GPUs before Hopper have no TMA, so these kernels get only
    small tiles (`common.kernels.tuning`), and a stage with fixed tiles is faster. On the interpreter every stage runs.
    """
    arch = architecture()
    has_tma = arch is None or arch in WITH_TMA
    line = (name for name in reversed(names()) if not is_dead_end(name) and not unavailable(name))
    return next(name for name in line if has_tma or not tuners(load(name)))
