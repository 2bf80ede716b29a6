"""Make an experiment: a copy of a stage's kernels to change, which is no step of the evolution.

    make stage FROM=v3 NAME=v3x_yours

A stage's code does not contain the stage's name, so a copy of the code works unchanged. The README is not copied.
"""

import ast
import re
import shutil
import sys

import stages
from common.measure import terminal

NAME = re.compile(r"[a-z]+(0|[1-9][0-9]*)[a-z]?(_[a-z0-9]+)+")
NEXT = """\
stages/{name} has the kernels of {source}, its parent. It is an experiment: no table, document or page shows it.
  change it:   stages/{name}/forward.py, backward.py; the first line of __init__.py says the idea
  test it:     make test STAGE={version}
  see it:      make diff A={parent} B={version}
  measure it:  make bench STAGE={version}
  remove it:   rm -r stages/{name}
CONTRIBUTING.md says how it becomes a step.
"""


def checked(source: str, name: str) -> str:
    """Return the directory name of the stage `source`, which may be a short name such as v3.

    Raises:
        ValueError: there is no such stage, or `name` cannot be the name of a new stage. The error message is one line.
    """
    source, at = stages.resolve(source), {stages.position(other): other for other in stages.names()}
    _, chain, number, _ = stages.position(source)
    free = (f"{chain}{number}{letter}_yours" for letter in "xyzuvw")
    hint = f"try NAME={next(other for other in free if stages.position(other) not in at)}"
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a stage: <letters><number>[letter]_<snake_case>; {hint}")
    if (place := stages.position(name)) in at or stages.directory(name).exists():
        raise ValueError(f"{name!r} is taken: there is stages/{at.get(place, name)}; {hint}")
    return source


def module(code: str, source: str) -> str:
    """Return the code of an experiment's `__init__.py`, from that of its parent `source`."""
    rest = "".join(code.splitlines(keepends=True)[ast.parse(code).body[0].end_lineno :])
    rest = re.sub(r"^(PARENT|WAS|EXPERIMENT) = .*\n", "", rest, flags=re.MULTILINE)
    lines = f'EXPERIMENT = True\nPARENT = "{stages.version(source)}"\n'
    rest = re.sub(r"^__all__ = \[.*?\]\n", rf"\g<0>\n{lines}", rest, count=1, flags=re.MULTILINE | re.DOTALL)
    return f'"""An experiment that starts from {stages.version(source)}."""\n{rest}'


def make(source: str, name: str):
    """Write stages/`name` with the code of stage `source`. If an error occurs, delete the new directory."""
    directory = stages.directory(name)
    try:
        directory.mkdir()
        for path in stages.directory(source).glob("*.py"):
            shutil.copyfile(path, directory / path.name)
        path = directory / "__init__.py"
        path.write_text(module(path.read_text(), source))
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    parser = terminal.Parser(prog="make stage", description="Make an experiment from a stage's kernels.")
    parser.add_argument("source", metavar="FROM", help="a stage, such as v3")
    parser.add_argument("name", metavar="NAME", help="<letters><number>_<name>, such as v3x_yours")
    options = parser.parse_args(argv)
    try:
        source = checked(options.source, options.name)
        make(source, options.name)
    except (OSError, ValueError) as error:
        parser.exit(2, f"make stage: {error}\n")
    versions = {"version": stages.version(options.name), "parent": stages.version(source)}
    print(NEXT.format(name=options.name, source=source, **versions), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
