"""Identify the code of a stage's pass by a hash, which comments, docstrings and layout do not change."""

import ast
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import stages

ROOT = Path(__file__).parents[2]


def _from_disk(path: str) -> str | None:
    file = ROOT / path
    return file.read_text() if file.is_file() else None


def _written(node) -> str:
    """Return a syntax tree as text, equal in all versions of Python."""
    if isinstance(node, list):
        return f"[{','.join(map(_written, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    body = getattr(node, "body", None)
    fields = {name: value for name, value in ast.iter_fields(node) if value not in (None, [])}
    if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        fields["body"] = body[1:]  # without the docstring
    parts = (f"{name}={_written(fields[name])}" for name in fields if name not in ("ctx", "kind", "type_comment"))
    return f"{type(node).__name__}({','.join(parts)})"


@functools.cache  # stages have many equal files
def _parsed(text: str) -> tuple[str, list[ast.ImportFrom]]:
    tree = ast.parse(text)
    return _written(tree), [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def _files(path: str, imported: ast.ImportFrom) -> list[str]:
    """Return the files, in stages and in `common.kernels`, that an import in the file `path` may read."""
    above = path.split("/")[: -imported.level] if imported.level else []
    package = above + (imported.module.split(".") if imported.module else [])
    if package[:1] != ["stages"] and package[:2] != ["common", "kernels"]:
        return []
    return ["/".join(package) + ".py", *("/".join([*package, alias.name]) + ".py" for alias in imported.names)]


def files_of(name: str, pass_: str, read: Callable[[str], str | None] = _from_disk) -> dict[str, str]:
    """Return the files that a stage's pass consists of: its own, those of other stages, and those of `common.kernels`.

    Args:
        name: the directory name of the stage.
        pass_: "forward" or "backward".
        read: returns the text of a file of this repository, or None if there is no such file.

    Returns:
        A dict from each file's path to its syntax tree, as text without comments and docstrings.
    """
    home = stages.imported(read(f"stages/{name}/{pass_}.py") or "", pass_) or name
    found, waiting = {}, [f"stages/{home}/{pass_}.py"]
    while waiting:
        path = waiting.pop()
        if path not in found and (text := read(path)) is not None:
            found[path], imports = _parsed(text)
            waiting += [file for imported in imports for file in _files(path, imported)]
    return found


def digest(name: str, pass_: str, read: Callable[[str], str | None] = _from_disk) -> str:
    """Return 12 hexadecimal digits that are equal for equal code. The arguments are those of `files_of`.

    The name of the stage's directory does not count, so two stages with equal passes have one digest. Neither does code
    that calls stages: `common.entry`, `recording` and `layout`.
    """
    return hashlib.sha256("\n".join(sorted(files_of(name, pass_, read).values())).encode()).hexdigest()[:12]


@functools.cache
def current(name: str, pass_: str) -> str:
    """Return the digest of a stage's pass as it is now; each pass is read once."""
    home = stages.home(name, pass_)
    return digest(name, pass_) if home == name else current(home, pass_)
