"""Write a stage as a package that needs nothing else of this repository: `make export STAGE=newest TO=some/folder`."""

import importlib.util
import keyword
import re
import sys
from modulefinder import ModuleFinder
from pathlib import Path

import stages
from common.measure import terminal
from common.show import story
from common.show.results import ROOT

PACKAGE = '''"""{idea}

{name} of the kernel evolution repository. `attention` says what it takes.
"""

from .stages.{name} import attention

__all__ = ["attention"]
'''
README = """# {package}: {name}

{idea}

```python
from {package} import attention

out = attention(q, k, v, causal=True)  # [B, H, Sq, Dv]; help(attention) says what it takes
```

{needs} It was run with {versions}.
"""


def files(name: str) -> list[str]:
    """Return the files that a stage consists of, as paths from the root: its own and all that they import."""
    finder = ModuleFinder([str(ROOT)])
    for path in stages.directory(name).glob("*.py"):
        finder.import_hook(f"stages.{name}.{path.stem}".removesuffix(".__init__"))
    return sorted(str(Path(module.__file__).relative_to(ROOT)) for module in finder.modules.values() if module.__file__)


def relative(path: str, text: str) -> str:
    """Return a file's text with relative imports of this repository's modules."""
    up = "." * (path.count("/") + 1)
    return re.sub(r"^(\s*from )((?:common|stages)\b[.\w]*)(?= import )", rf"\g<1>{up}\g<2>", text, flags=re.MULTILINE)


def export(name: str, folder: Path) -> int:
    """Write the package, and return the number of its files.

    Args:
        name: a stage's directory name or version.
        folder: the package's directory; its last part names the package.

    Raises:
        SystemExit: there is no such stage, the folder has files, or its name is no name of a package.
    """
    try:
        name = stages.resolve(name)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    package = folder.resolve().name
    if not package.isidentifier() or keyword.iskeyword(package):
        raise SystemExit(f"TO={folder}: {package!r} is not a name that Python can import")
    spec = importlib.util.find_spec(package)
    if spec and spec.origin:  # an empty folder has no origin
        raise SystemExit(f"TO={folder}: {package!r} is the name of another package; choose a new name")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SystemExit(f"TO={folder} is there already; name a new folder")
    texts = {path: relative(path, (ROOT / path).read_text()) for path in files(name)}
    # The operator's name is the package's, so that this package and the repository can be imported together.
    texts["common/operator.py"] = texts["common/operator.py"].replace('"kernel_evolution"', f'"{package}"')
    pinned = re.findall(r"^(torch|triton)==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    needs = "It needs a GPU, or TRITON_INTERPRET=1."
    if not any(".jit\n" in text for path, text in texts.items() if path.startswith("stages/")):
        needs = "It has no kernels of its own, and runs on a GPU or on the CPU."
    about = {"package": package, "name": name, "idea": story.idea(name), "needs": needs}
    about["versions"] = " and ".join(map(" ".join, pinned))
    texts |= {"__init__.py": PACKAGE.format(**about), "README.md": README.format(**about)}
    texts |= {path.name: path.read_text() for path in ROOT.glob("LICENSE*")}
    try:
        for path, text in texts.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    except OSError as error:
        raise SystemExit(f"TO={folder}: {error.strerror}") from None
    return len(texts)


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    parser = terminal.Parser(prog="make export", description=__doc__)
    parser.add_argument("stage", help="a stage, such as v3")
    parser.add_argument("folder", type=Path, help="the new package's directory")
    arguments = parser.parse_args(argv)
    number = export(arguments.stage, arguments.folder)
    print(f"{arguments.folder}: {number} files")


if __name__ == "__main__":
    main(sys.argv[1:])
