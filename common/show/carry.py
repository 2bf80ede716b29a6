"""Carry an edit of a stage to all stages that descend from it.

    make carry FROM=v11                # the uncommitted edit of v11's forward*.py and backward*.py
    make carry FROM=v11 SINCE=HEAD~1   # the edit since the commit before the last one
    make carry CONTINUE=yes            # after you have resolved a conflict; ABORT=yes undoes the carry instead

A child gets what the carry changed in its parent. Each definition is merged alone and found by its name, so a child may have
moved it to another file of the pass. NOTEs, READMEs and `__init__.py` stay as each stage has them.
"""

import argparse
import ast
import collections
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import stages
from common.measure import files, terminal
from common.show import story
from common.show.merge import MARKER, Carried, Texts, carried, edits

CODE = re.compile(r"(v[^/]+)/((?:forward|backward)\w*\.py)")  # a stage and its file, below stages/
CONFLICT = re.compile("<{7} ")  # the first line of a conflict


def descendants(source: str) -> dict[str, str]:
    """Return the parent of each stage that descends from `source`, parents before their children."""
    parents = {name: stages.parent(name) for name in stages.names()}
    order = [source]
    for name in order:
        order += [child for child, parent in parents.items() if parent == name]
    return {name: parents[name] for name in order[1:]}


def walk(parents: dict[str, str], before: dict[str, Texts], after: dict[str, Texts]) -> Iterator[tuple[str, Carried]]:
    """Carry an edit from stage to stage, and yield each stage with its new code.

    Args:
        parents: the parent of each stage to which the edit goes, parents before their children.
        before: the code of all stages before the carry.
        after: the code of the edited stage, and of stages to which the edit has gone. Each step adds a stage.
    """
    for child, parent in parents.items():
        if child not in after:
            made = carried(before[parent], after[parent], before[child], (child, parent))
            after[child] = made.texts
            yield child, made


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=stages.__path__[0], capture_output=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr.decode().splitlines()[0])
    return done.stdout


def _commit(revision: str) -> str:
    try:
        return _git("rev-parse", "--verify", f"{revision}^{{commit}}").decode().strip()
    except ValueError:
        raise ValueError(f"git knows no revision {revision!r}") from None


def _state() -> Path:
    """Return the path of the file that exists while a carry waits for a conflict to be resolved."""
    return Path(stages.__path__[0], _git("rev-parse", "--git-path", "carry.json").decode().strip())


def committed(revision: str) -> dict[str, Texts]:
    """Return the code of all stages at a revision."""
    found = collections.defaultdict(dict)
    with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", revision, "."))) as archive:
        for member in archive:
            if match := CODE.fullmatch(member.name):
                found[match[1]][match[2]] = archive.extractfile(member).read().decode()
    return found


def present(name: str) -> Texts:
    """Return a stage's code in the working tree.

    Raises:
        ValueError: a file has a conflict marker or a syntax error. The message names the first one.
    """
    texts = {file: stages.source(name, file) for file in story.code_files(name) if (stages.directory(name) / file).exists()}
    for file, text in texts.items():
        if lines := _marked(text, MARKER):
            raise ValueError(f"stages/{name}/{file}:{lines[0]} has a conflict marker; resolve the conflict first")
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise ValueError(f"stages/{name}/{file}:{error.lineno} has a syntax error: {error.msg}") from None
    return texts


def _marked(text: str, pattern: re.Pattern) -> list[int]:
    """Return the numbers of the lines that begin with a pattern."""
    return [number for number, line in enumerate(text.splitlines(), 1) if pattern.match(line)]


def write(name: str, texts: Texts):
    """Make `texts` the code of a stage in the working tree."""
    for file in {*story.code_files(name), *texts}:
        path = stages.directory(name) / file
        if file not in texts:
            path.unlink(missing_ok=True)
        elif stages.source(name, file) != texts[file]:
            files.replace(path, texts[file])


def begin(source: str, since: str) -> dict:
    """Return the state of a new carry.

    Raises:
        ValueError: the carry cannot begin. The error message is one line.
    """
    source = stages.resolve(source)
    if _state().exists():
        raise ValueError("a carry is in progress; end it with `make carry CONTINUE=yes` or `make carry ABORT=yes`")
    if not (children := descendants(source)):
        raise ValueError(f"no stage descends from {source}")
    own = [f":(glob){child}/{pass_}*.py" for child in children for pass_ in ("forward", "backward")]
    if changed := _git("status", "--porcelain", "--untracked-files=all", "--", *own).decode().splitlines():
        raise ValueError(f"commit or undo your edit of {changed[0][3:]} first; the carry would mix with it")
    state = {"source": source, "since": _commit(since), "head": _commit("HEAD"), "news": {}}
    if source not in (old := committed(state["since"])):
        raise ValueError(f"{source} does not exist at {since}")
    if not edits(old[source], present(source)):
        raise ValueError(f"the code of {source} has no change since {since}, NOTEs aside")
    return state


def go_on(state: dict) -> list[str]:
    """Carry the edit up to the first conflict or to the end, and write the stages.

    Returns:
        The places of the conflicts, such as "stages/v13_producer/forward.py:20". Empty at the end.

    Raises:
        ValueError: the edited stage, or the stage whose conflict has been resolved, has conflict markers or syntax errors.
    """
    source = state["source"]
    before = committed(state["head"])
    before[source] = committed(state["since"])[source]
    after, found, conflicts = {name: present(name) for name in (source, *state["news"])}, {}, []
    for child, made in walk(descendants(source), before, after):
        state["news"][child], found[child] = made.news, made.texts
        conflicts = [f"stages/{child}/{file}:{line}" for file, text in made.texts.items() for line in _marked(text, CONFLICT)]
        if conflicts:
            break
    files.replace(_state(), json.dumps(state))  # before the stages, so that an interrupted carry can be undone
    for child, texts in found.items():
        write(child, texts)
    if not conflicts:
        _state().unlink()
    return conflicts


def abort(state: dict):
    """Give each stage to which the edit has gone its code before the carry."""
    before = committed(state["head"])
    for child in state["news"]:
        write(child, before[child])
    _state().unlink()


def summary(news: dict[str, list[str]]) -> str:
    """Format a line for each stage, and then the number of files and definitions by what happened to them."""
    lines = [f"{child}: {'; '.join(told) or 'not affected'}" for child, told in news.items()]
    counts = collections.Counter(line.split()[0] for told in news.values() for line in told)
    kept = sum(all(line.startswith(("found", "has no")) for line in told) for told in news.values())
    words = {"copied": "copied", "merged": "merged", "added": "added", "deleted": "deleted", "conflict": "resolved by hand"}
    total = [f"{counts[word]} {said}" for word, said in words.items() if counts[word]]
    total = [", ".join(total) or "none changed", f"definitions in another file than the parent's: {counts['found']}"]
    return "\n".join([*lines, f"files: {'; '.join(total)}; stages left alone: {kept} of {len(news)}"])


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    parser = argparse.ArgumentParser(prog="make carry", description="Carry an edit of a stage to its descendants.")
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument("source", metavar="FROM", nargs="?", help="the edited stage, such as v11")
    ways.add_argument("--continue", dest="go_on", action="store_true", help="go on after you have resolved a conflict")
    ways.add_argument("--abort", action="store_true", help="undo the carry in progress, but not your edit")
    parser.add_argument("--since", metavar="REV", default="HEAD", help="the revision with the stage's code before the edit")
    options = parser.parse_args(argv)
    try:
        if options.source:
            state = begin(options.source, options.since)
        elif _state().exists():
            state = json.loads(_state().read_text())
        else:
            raise ValueError("no carry is in progress; begin one, such as make carry FROM=v11")
        if options.abort:
            return abort(state)
        conflicts = go_on(state)
    except (OSError, ValueError) as error:
        parser.exit(2, f"make carry: {error}\n")
    if conflicts:
        print(*(f"{place}: conflict" for place in conflicts), sep="\n")
        parser.exit(1, "Resolve it in the file, then run `make carry CONTINUE=yes`. `make carry ABORT=yes` undoes the carry.\n")
    print(summary(state["news"]))


if __name__ == "__main__":
    main(sys.argv[1:])
