"""The stages of the evolution, one package each; nothing outside a stage's directory lists its name.

A name says where a stage stands: v4_… is the fourth step, v4a_… a dead end, which branches off it and leads nowhere.
"""

import difflib
import importlib
import itertools
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import common  # noqa: F401  (before any stage: it chooses between GPU and interpreter)
from common.kernels.tuning import WITH_COPY_ENGINE, tuners
from common.runtime import architecture


def position(name: str) -> tuple[int, str] | None:
    """Where a stage of that name stands: (4, "") for v4_…, (4, "a") for v4a_…; None for what is no stage."""
    match = re.match(r"v(\d+)([a-z]?)_", name)
    return match and (int(match[1]), match[2])


def is_dead_end(name: str) -> bool:
    """Whether that is a stage from which the evolution does not go on."""
    return (position(name) or (0, ""))[1] != ""


def names() -> list[str]:
    """The directory names of all stages, in stage order, dead ends after what they branch off: ['v0_naive', …].

    Raises:
        SystemExit: two have one number; no command, and no test, could tell which of them a step is from.
    """
    found = [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg and position(module.name)]
    found.sort(key=lambda name: (position(name), name))
    for first, second in itertools.pairwise(found):
        if position(first) == position(second):
            raise SystemExit(f"stages/{first} and stages/{second} have one number; rename one of them")
    return found


def version(name: str) -> str:
    """The part of a stage's name that tells it from all others: "v3" of "v3_fa2_causal"."""
    return name.partition("_")[0]


def directory(name: str) -> Path:
    """The directory of the stage with this directory name; it need not exist."""
    paths = [Path(root, name) for root in __path__]
    return next((path for path in paths if path.exists()), paths[0])


def resolve(name: str) -> str:
    """The directory name that `name` stands for: itself, or its version alone ("v3", "V3" or "3").

    Raises:
        ValueError: no stage is called that. The message names a similar one, or else says which there are.
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
    """The stage's module, with `attention`, `forward` and `backward`; `name` as in `resolve`."""
    return importlib.import_module(f"stages.{resolve(name)}")


def parent(name: str) -> str | None:
    """The directory name of the stage that `name` was made from; None where there is no such stage, as for the first one.

    A stage made from v14 that is not v15 or v14a says so: `PARENT = "v14"` in its `__init__.py`. Without a `PARENT`, a stage's
    parent has the number before, and a dead end's parent has its own number.

    Args:
        name: a directory name. That of a stage which is gone, as old results have it, counts as one without a `PARENT`.

    Raises:
        SystemExit: no stage is called what `PARENT` says.
    """
    module = directory(name) / "__init__.py"
    if recorded := module.exists() and re.search(r"^PARENT = [\"'](.*)[\"']", module.read_text(), re.MULTILINE):
        try:
            return resolve(recorded[1])
        except ValueError:
            raise SystemExit(f"{module}: {recorded[0]} names no stage") from None
    number, branch = position(name) or (0, "")
    return next((other for other in names() if position(other) == (number if branch else number - 1, "")), None)


def unavailable(name: str) -> str | None:
    """Why a stage cannot run here, as its own `unavailable()` has it; None where it can, as those without one can anywhere."""
    return getattr(load(name), "unavailable", lambda: None)()


def recommended() -> str:
    """The directory name of the stage to use here: the newest one that runs well on the current GPU, and no dead end.

    A stage with autotuned kernels moves its tiles through tensor descriptors. Before Hopper there is no TMA, so these kernels
    get small tiles only (`common.kernels.tuning`), and a stage with fixed tiles is faster. On the interpreter every stage runs.
    """
    arch = architecture()
    has_tma = arch is None or arch in WITH_COPY_ENGINE
    line = [name for name in names() if not is_dead_end(name) and not unavailable(name)]
    return [name for name in line if has_tma or not tuners(load(name))][-1]
