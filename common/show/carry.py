"""Carry an edit of a stage to all stages that descend from it.

    make carry FROM=v3                # the uncommitted edit of v3's forward*.py and backward*.py
    make carry FROM=v3 SINCE=HEAD~1   # the edit since the commit before the last one
    make carry CONTINUE=yes           # after you have resolved a conflict; ABORT=yes undoes the carry instead

A child gets what the carry changed in its parent. Each definition is merged alone and found by its name, so a child may have
moved it to another file of the pass. NOTEs, READMEs and `__init__.py` stay as each stage has them.
"""

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
from common.show.merge import CONFLICT, Texts, carried, edits

CODE = re.compile(r"([a-z]+\d[^/]*)/((?:forward|backward)\w*\.py)")  # a stage and its file, below stages/


def descendants(source: str, parents: dict[str, str] | None = None) -> dict[str, str]:
    """Return the parent of each stage that descends from `source`, parents before their children, one branch after the other.

    Args:
        parents: the parent of each stage; by default, that of the stages as they are now.
    """
    parents, found = parents or {name: stages.parent(name) for name in stages.names()}, {}
    for child in [name for name, parent in parents.items() if parent == source]:
        found |= {child: source} | descendants(child, parents)
    return found


def walk(source: str, before: dict[str, Texts], after: dict[str, Texts]) -> Iterator[tuple[str, Texts, list[str]]]:
    """Carry an edit from stage to stage, and yield each stage with its new code and what happened to its files.

    Args:
        before: the code of all stages before the carry.
        after: the code of `source`, and of stages to which the edit has gone. Each step adds a stage.
    """
    for child, parent in descendants(source).items():
        if child not in after:
            after[child], news = carried(before[parent], after[parent], before[child], (child, parent))
            yield child, after[child], news


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=stages.__path__[0], capture_output=True, check=False)
    if done.returncode:
        raise ValueError(f"git {arguments[0]}: {done.stderr.decode().splitlines()[0]}")
    return done.stdout


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


def conflicts(name: str, texts: Texts) -> list[str]:
    """Return the places of a stage's conflicts, such as "stages/v3_fa2_causal/forward.py:20"."""
    lines = ((file, number, line) for file, text in texts.items() for number, line in enumerate(text.splitlines(), 1))
    return [f"stages/{name}/{file}:{number}" for file, number, line in lines if line.startswith(CONFLICT)]


def present(name: str) -> Texts:
    """Return a stage's code in the working tree.

    Raises:
        ValueError: a file has a conflict or a syntax error. The message names the first one.
    """
    paths = [stages.directory(name) / file for file in story.code_files(name)]
    texts = {path.name: path.read_text() for path in paths if path.exists()}
    if found := conflicts(name, texts):
        raise ValueError(f"{found[0]} has a conflict; resolve it first")
    for file, text in texts.items():
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise ValueError(f"stages/{name}/{file}:{error.lineno} has a syntax error: {error.msg}") from None
    return texts


def write(name: str, texts: Texts):
    """Make `texts` the code of a stage in the working tree."""
    for file in {*story.code_files(name), *texts}:
        path = stages.directory(name) / file
        if file not in texts:
            path.unlink(missing_ok=True)
        elif not path.exists() or path.read_text() != texts[file]:
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
    if source not in (old := committed(since)):
        raise ValueError(f"{source} does not exist at {since}")
    if not edits(old[source], present(source)):
        raise ValueError(f"the code of {source} has no change since {since}, NOTEs aside")
    hashes = {key: _git("rev-parse", revision).decode().strip() for key, revision in (("since", since), ("head", "HEAD"))}
    return {"source": source, "news": {}, **hashes}


def go_on(state: dict) -> list[str]:
    """Carry the edit up to the first conflict or to the end, and write the stages.

    Returns:
        The places of the conflicts. Empty at the end.

    Raises:
        ValueError: the edited stage, or the stage whose conflict has been resolved, has conflicts or syntax errors.
    """
    source, found, places = state["source"], {}, []
    before = committed(state["head"])
    before[source] = committed(state["since"])[source]
    for child, texts, news in walk(source, before, {name: present(name) for name in (source, *state["news"])}):
        state["news"][child], found[child] = news, texts
        if places := conflicts(child, texts):
            break
    files.replace(_state(), json.dumps(state))  # before the stages, so that an interrupted carry can be undone
    for child, texts in found.items():
        write(child, texts)
    if not places:
        _state().unlink()
    return places


def abort(state: dict):
    """Give each stage to which the edit has gone its code before the carry."""
    before = committed(state["head"])
    for child in state["news"]:
        write(child, before[child])
    _state().unlink()


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    parser = terminal.Parser(prog="make carry", description="Carry an edit of a stage to its descendants.")
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument("source", metavar="FROM", nargs="?", help="the edited stage, such as v3")
    ways.add_argument("--continue", dest="go_on", action="store_true", help="go on after you have resolved a conflict")
    ways.add_argument("--abort", action="store_true", help="undo the carry in progress, but not your edit")
    parser.add_argument("--since", metavar="REV", default="HEAD", help="the revision with the stage's code before the edit")
    options = parser.parse_args(argv)
    try:
        if not options.source and not _state().exists():
            raise ValueError("no carry is in progress; begin one, such as make carry FROM=v3")
        state = begin(options.source, options.since) if options.source else json.loads(_state().read_text())
        if options.abort:
            return abort(state)
        places = go_on(state)
    except (OSError, ValueError) as error:
        parser.exit(2, f"make carry: {error}\n")
    if places:
        print(*(f"{place}: conflict" for place in places), sep="\n")
        parser.exit(1, "Resolve it in the file, then run `make carry CONTINUE=yes`. `make carry ABORT=yes` undoes the carry.\n")
    print(*(f"{child}: {'; '.join(news) or 'not affected'}" for child, news in state["news"].items()), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
