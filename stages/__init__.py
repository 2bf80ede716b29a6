"""The stages of the evolution, one package each; nothing outside a stage's directory lists its name."""

import importlib
import pkgutil
from types import ModuleType

import common  # noqa: F401  (before any stage: it chooses between GPU and interpreter)


def names() -> list[str]:
    """The directory names of all stages, in stage order: ['v0_naive', 'v1_online_softmax', …]."""
    found = [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg and module.name.startswith("v")]
    return sorted(found, key=lambda name: int(name[1:].split("_")[0]))


def resolve(name: str) -> str:
    """The directory name that `name` stands for: itself, or its version alone ('v3').

    Raises:
        ValueError: no stage is called that; the message lists them.
    """
    matches = [stage for stage in names() if name in (stage, stage.split("_")[0])]
    if len(matches) != 1:
        raise ValueError(f"no stage is called {name!r}; there are {', '.join(names())}")
    return matches[0]


def load(name: str) -> ModuleType:
    """The stage's module, with `attention`, `forward` and `backward`; `name` as in `resolve`."""
    return importlib.import_module(f"stages.{resolve(name)}")


def unavailable(name: str) -> str | None:
    """Why a stage cannot run here, as its own `unavailable()` has it; None where it can, as those without one can anywhere."""
    return getattr(load(name), "unavailable", lambda: None)()
