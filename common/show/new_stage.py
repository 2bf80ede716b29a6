"""Make a new stage from another one: copy the kernels, and add lines to README.md.

    make stage FROM=v29 NAME=v29x_yours

A stage's code does not contain the stage's name, so a copy of the code works unchanged. The idea and the README are not copied.
The copy leaves out each `NOTE` that names a stage before the new stage.
"""

import argparse
import ast
import re
import shutil
import sys

import stages
from common.measure import files, terminal
from common.show import documents, results

NAME = re.compile(r"v(0|[1-9][0-9]*)[a-z]?(_[a-z0-9]+)+")
IDEA = "what this stage does and its parent does not"
README = """\
# {version}: the idea in a few words

{idea}. Name the paper that it is from.

## Problem

Say which bytes, FLOPs or cycles the parent wastes, and how many.

## Idea

Say what to do instead.

## Derivation

Show in formulas why the result is the same, and what the idea saves. `make traffic STAGE={version}` counts bytes and FLOPs.

## Algorithm

Pseudocode with the names of the code.

## Gain

<!-- gain: make readme -->
<!-- /gain -->

Say why the gain is larger or smaller than predicted.

## Limits

- Say what the stage does not do, and where it is slower.
"""
NEXT = """\
stages/{name} has the kernels of {source}, its parent. Write next:
  stages/{name}/forward.py, backward.py and their parts: the idea; keep names, order and formatting
  stages/{name}/__init__.py: the idea in at most 12 words, on the first line; `make story` and README.md show it
  stages/{name}/README.md: the text under the headings
Then run:
  make test ARGS="-k {version}"
  make bench STAGE={version}
  make traffic ARGS="--seq-len {seq_len} --json results/traffic.json"
  make readme plots
"""


def checked(source: str, name: str) -> str:
    """Return the directory name of the stage `source`, which may be a short name such as v29.

    Raises:
        ValueError: there is no such stage, or `name` cannot be the name of a new stage. The error message is one line.
    """
    source = stages.resolve(source)
    at = {stages.position(other): other for other in stages.names()}
    hint = f"try {example(source)}"
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a stage: v<number>[letter]_<snake_case>; {hint}")
    if (position := stages.position(name)) in at or stages.directory(name).exists():
        raise ValueError(f"{name!r} is taken: there is stages/{at.get(position, name)}; {hint}")
    number, branch = position
    if (number - (not branch), "") not in at:
        raise ValueError(f"{name!r} skips a stage: there is no v{number - (not branch)}; {hint}")
    return source


def example(source: str) -> str:
    """Return a command that makes the next step from the stage `source`: NAME=v50_yours if v49 is the last."""
    number = max(stages.position(name)[0] for name in stages.names()) + 1
    return f"make stage FROM={stages.version(source)} NAME=v{number}_yours"


def without_past_notes(code: str, name: str) -> str:
    """Remove the lines `# NOTE: …` that name stage `name` or an earlier stage. Notes are about later stages, so these notes
    would be wrong in stage `name`."""

    def kept(match):
        named = [stages.position(f"{version}_") for version in re.findall(r"\bv\d+[a-z]?\b", match[0])]
        return "" if any(position <= stages.position(name) for position in named) else match[0]

    return re.sub(r"^ *# NOTE: .*\n", kept, code, flags=re.MULTILINE)


def module(code: str, idea: str, source: str, name: str) -> str:
    """Return the code of __init__.py for the new stage `name`, from that of the stage `source`. Add a line `PARENT = …` unless
    the new stage's number implies the parent."""
    rest = code.splitlines(keepends=True)[ast.parse(code).body[0].end_lineno :]
    code = re.sub(r"^PARENT = .*\n", "", f'"""{idea}."""\n{"".join(rest)}', flags=re.MULTILINE)
    number, branch = stages.position(name)
    if stages.position(source) == (number - (not branch), ""):
        return code
    return re.sub(r"^__all__ = .*\n", rf'\g<0>\nPARENT = "{stages.version(source)}"\n', code, count=1, flags=re.MULTILINE)


def make(source: str, name: str):
    """Write stages/`name` with the code of stage `source`, and the new stage's lines in README.md. If an error occurs, delete
    the new directory."""
    directory = results.ROOT / "stages" / name
    idea = ("A dead end: " + IDEA) if stages.is_dead_end(name) else IDEA.capitalize()
    try:
        shutil.copytree(stages.directory(source), directory, ignore=shutil.ignore_patterns("__pycache__"))
        for path in directory.glob("*.py"):
            path.write_text(without_past_notes(path.read_text(), name))
        path = directory / "__init__.py"
        path.write_text(module(path.read_text(), idea, source, name))
        (directory / "README.md").write_text(README.format(version=stages.version(name), idea=idea))
        texts = documents.documents(name)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    for path, text in texts.items():
        files.replace(path, text)


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    parser = argparse.ArgumentParser(
        prog="make stage", usage=example(stages.names()[-1]), description="Make a new stage from another one's kernels."
    )
    parser.add_argument("source", metavar="FROM", help="such as v29 or v4_autotune_descriptor")
    parser.add_argument("name", metavar="NAME", help="v<number>_<name>, or v<number><letter>_<name> for a dead end")
    options = parser.parse_args(argv)
    try:
        source = checked(options.source, options.name)
        make(source, options.name)
    except (OSError, ValueError) as error:
        parser.exit(2, f"make stage: {error}\n")
    print(
        NEXT.format(name=options.name, source=source, version=stages.version(options.name), seq_len=results.COUNTED_AT), end=""
    )


if __name__ == "__main__":
    main(sys.argv[1:])
