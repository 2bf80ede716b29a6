"""Make a new stage from another one: copy the kernels, and add lines to README.md and tests/predictions.py.

    make stage FROM=v29 NAME=v29x_yours

A stage's code does not contain the stage's name, so a copy of the code works unchanged. The idea and the README are not copied.
The copy leaves out each `NOTE` that names a stage before the new stage.
"""

import argparse
import ast
import re
import shutil
import sys
import tempfile
from pathlib import Path
from string import ascii_lowercase

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
  tests/predictions.py: bytes and FLOPs of {version}; {prediction}
Then run:
  make test ARGS="-k {version}"
  make bench STAGE={version}
  make readme plots
"""


def checked(source: str, name: str) -> str:
    """Return the directory name of the stage `source`, which may be a short name such as v29.

    Raises:
        ValueError: there is no such stage, or `name` cannot be the name of a new stage. The error message is one line.
    """
    for variable, value in (("FROM", source), ("NAME", name)):
        if not value:
            raise ValueError(f"{variable}= is missing; try {example(stages.names()[-1])}")
    source = stages.resolve(source)
    hint = f"try {example(source)}, or NAME={free_number()}_yours for the next step of the main ladder"
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a stage: v<number>[letter]_<snake_case>; {hint}")
    position = stages.position(name)
    at = {stages.position(other): other for other in stages.names()}
    if position in at or (results.ROOT / "stages" / name).exists():
        raise ValueError(f"{name!r} is taken: there is stages/{at.get(position, name)}; {hint}")
    number, branch = position
    number -= not branch
    if (number, "") not in at:
        raise ValueError(f"{name!r} skips a stage: there is no v{number}; {hint}")
    return source


def free_number() -> str:
    """Return the version of the next step: v50 if v49 is the last."""
    return f"v{max(stages.position(name)[0] for name in stages.names()) + 1}"


def example(source: str) -> str:
    """Return a command that makes a dead end from the stage `source`."""
    number, _ = stages.position(source)
    taken = {stages.position(name) for name in stages.names()}
    free = [letter for letter in ascii_lowercase if (number, letter) not in taken]
    return f"make stage FROM={stages.version(source)} NAME={f'v{number}{free[-1]}' if free else free_number()}_yours"


def without_past_notes(code: str, name: str) -> str:
    """Remove the lines `# NOTE: …` that name stage `name` or an earlier stage. Notes are about later stages, so these notes
    would be wrong in stage `name`."""

    def kept(match):
        named = [stages.position(f"{version}_") for version in re.findall(r"\bv\d+[a-z]?\b", match[0])]
        return "" if any(position <= stages.position(name) for position in named) else match[0]

    return re.sub(r"^ *# NOTE: .*\n", kept, code, flags=re.MULTILINE)


def with_docstring(code: str, docstring: str) -> str:
    """Replace the docstring in a module's code."""
    rest = code.splitlines(keepends=True)[ast.parse(code).body[0].end_lineno :]
    return "".join([f'"""{docstring}"""\n', *rest])


def with_parent(code: str, source: str, name: str) -> str:
    """Return the code of __init__.py for the new stage `name`. `code` is stage `source`'s __init__.py. Add a line `PARENT = …`
    unless the new stage's number implies the parent."""
    code = re.sub(r"^PARENT = .*\n", "", code, flags=re.MULTILINE)
    if stages.parent(name) == source:
        return code
    return re.sub(r"^__all__ = .*\n", rf'\g<0>\nPARENT = "{stages.version(source)}"\n', code, count=1, flags=re.MULTILINE)


def with_line(text: str, pattern: str, line: str) -> str:
    """Insert `line` into `text`, among the lines that match `pattern`, in the order of the stages.

    Raises:
        ValueError: no lines match, or the matching lines are not adjacent.
    """
    lines = re.findall(f"^{pattern}\n", text, re.MULTILINE)
    if not lines or "".join(lines) not in text:
        raise ValueError(f"the lines {pattern!r} are not side by side")
    at = {stages.position(re.search(r"v\d+[a-z]?", line)[0] + "_"): line for line in [*lines, line]}
    return text.replace("".join(lines), "".join(at[position] for position in sorted(at)))


def make(source: str, name: str) -> bool:
    """Write stages/`name` with the code of stage `source`, and the new stage's lines in README.md and tests/predictions.py. If
    an error occurs, undo all changes.

    Returns:
        Whether tests/predictions.py predicts `source`'s bytes and FLOPs. If so, `name` gets a copy of the prediction.
    """
    directory = results.ROOT / "stages"
    old, new = source.split("_")[0], name.split("_")[0]
    readme, predictions = results.ROOT / "README.md", results.ROOT / "tests" / "predictions.py"
    before = {path: path.read_text() for path in (readme, predictions)}
    after = {}
    prediction = re.search(rf'^    "{old}": (.*\n)', before[predictions], re.MULTILINE)
    if prediction:
        line = f'    "{new}": {prediction[1]}'
        after[predictions] = with_line(before[predictions], r' {4}"v\d+[a-z]?": .*', line)
    idea = ("A dead end: " + IDEA) if stages.is_dead_end(name) else IDEA.capitalize()
    with tempfile.TemporaryDirectory(prefix=".new-", dir=directory) as temporary:  # moved when finished
        copy = Path(temporary) / name
        shutil.copytree(directory / source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for path in copy.glob("*.py"):
            files.replace(path, without_past_notes(path.read_text(), name))
        module = copy / "__init__.py"
        code = with_parent(with_docstring(module.read_text(), f"{idea}."), source, name)
        files.replace(module, code)
        text = README.format(version=new, idea=idea)
        stages.__path__.append(temporary)  # so that `stages.parent` finds the new stage
        try:
            files.replace(copy / "README.md", documents.with_table(text, "gain", documents.gain_table(name)))
            found = results.runs()
            text = documents.with_table(before[readme], "headline", documents.headline(found))
            after[readme] = documents.with_table(text, "ladder", documents.ladder(found))
        finally:
            stages.__path__.remove(temporary)
        try:
            for path, text in after.items():
                files.replace(path, text)
            copy.rename(directory / name)
        except BaseException:
            for path, text in before.items():
                files.replace(path, text)
            raise
    return bool(prediction)


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
        predicted = make(source, options.name)
    except (OSError, ValueError) as error:
        parser.exit(2, f"make stage: {error}\n")
    prediction = f"now a copy of {stages.version(source)}'s" if predicted else "now missing"
    version = stages.version(options.name)
    print(NEXT.format(name=options.name, source=source, version=version, prediction=prediction), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
