"""Merge a parent's edit into the code of a child, definition by definition. All functions work on texts in memory."""

import difflib
import itertools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from common.measure import files
from common.show import story
from common.show.story import without_notes

Texts = dict[str, str]  # the code of a stage: the text of each file by the file's name
Key = tuple[str, str]  # a file's name, and a definition in it; "" stands for the lines before the first definition
MARKER = re.compile(r"(<{7}|\|{7}|>{7}) |={7}$")  # at the start of a line


class Carried(NamedTuple):
    """A child's code after the carry."""

    texts: Texts  # with conflict markers, if the parent's edit and the child change the same lines
    news: list[str]  # what happened to each file and definition, such as "copied backward.py"


def code(text: str) -> str:
    """Return a text without NOTEs and without the empty lines at its end."""
    return without_notes(text).rstrip()


def _end(piece: str) -> str:
    """Return the line breaks at the end of a piece. They depend on what follows it."""
    return piece[len(piece.rstrip()) :]


def with_notes(text: str, noted: str) -> str:
    """Return `text`, which has no NOTEs, with the NOTEs of `noted`: each before the line that it precedes there."""
    lines, bare, notes = text.splitlines(keepends=True), [], {}
    for line in noted.splitlines(keepends=True):
        if without_notes(line):
            bare.append(line)
        else:
            notes.setdefault(len(bare), []).append(line)
    places = {len(bare): len(lines)}  # the place in `lines` of each line of `bare`
    for _, first, last, start, end in difflib.SequenceMatcher(None, bare, lines, autojunk=False).get_opcodes():
        places |= {number: max(start, min(start + number - first, end - 1)) for number in range(first, last)}
    for number in sorted(notes, reverse=True):
        lines[places[number] : places[number]] = notes[number]
    return "".join(lines)


def merged(old: str, new: str, child: str, labels: tuple[str, str]) -> str:
    """Merge the parent's change from `old` to `new` into the child's text, which keeps its NOTEs.

    Args:
        labels: the names of the child and the parent, for conflict markers.
    """
    end = _end(child) if _end(old) == _end(new) else _end(new)
    bodies = [code(text) + "\n" for text in (child, old, new)]
    text = bodies[2]
    if bodies[0] not in bodies[1:]:
        with tempfile.TemporaryDirectory() as folder:
            for name, body in zip(("child", "old", "new"), bodies, strict=True):
                files.replace(Path(folder, name), body)
            names = (labels[0], f"{labels[1]} before", f"{labels[1]} after")
            command = ["git", "merge-file", "--stdout", "--diff3", *(f"-L{name}" for name in names), "child", "old", "new"]
            text = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    return with_notes(text, child.rstrip() + "\n").rstrip() + end


def _pieces(texts: Texts) -> dict[Key, str]:
    return {(file, name): piece for file, text in texts.items() for name, piece in story.pieces(text).items()}


def place(key: Key, pieces: dict[Key, str], old: dict[Key, str]) -> Key | None:
    """Return where a definition of `old` stands in other `pieces`: in the same file, or in another file of the same pass where
    `old` has no definition with its name. Return None if `pieces` lacks the definition."""
    if key in pieces:
        return key
    file, name = key
    pass_ = re.match("forward|backward", file)[0]
    found = [other for other in pieces if name and other[1] == name and other not in old and other[0].startswith(pass_)]
    return found[0] if len(found) == 1 else None


def _with(pieces: dict[Key, str], key: Key, piece: str, new: dict[Key, str], old: dict[Key, str]) -> dict[Key, str]:
    """Insert a definition of the parent's `new` code behind the one that it follows there. Return `pieces` unchanged if the
    child lacks the file and all definitions before."""
    items = list(pieces.items())
    for other in reversed(list(itertools.takewhile(lambda other: other != key, new))):
        if other[0] == key[0] and (found := place(other, pieces, old)):
            at = list(pieces).index(found)
            items[at : at + 1] = (found, pieces[found].rstrip() + _end(new[other])), ((found[0], key[1]), piece)
            break
    return dict(items)


def _text(pieces: list[str]) -> str:
    """Join a file's pieces. Two empty lines are around functions and classes."""
    pieces = list(filter(None, pieces))
    large = [bool(re.search("^(def|class|@)", piece, re.MULTILINE)) for piece in pieces]
    for number, both in enumerate(itertools.pairwise(large)):
        if any(both):
            pieces[number] = pieces[number].rstrip() + "\n\n\n"
    return "".join(pieces).rstrip() + "\n" if pieces else ""


def _edits(before: dict[Key, str], after: dict[Key, str]) -> list[tuple[Key | None, Key | None]]:
    places = {key: place(key, after, before) for key in before}
    new = [(None, key) for key in after if key not in places.values()]
    old = [(key, to) for key, to in places.items() if key != to or code(before[key]) != code(after[key])]
    return [
        *(edit for edit in new if not edit[1][1]),
        *(edit for edit in old if edit[0][1]),
        *(edit for edit in new if edit[1][1]),
        *(edit for edit in old if not edit[0][1]),
    ]


def edits(old: Texts, new: Texts) -> list[tuple[Key | None, Key | None]]:
    """Return where each changed definition stands before and after an edit. None stands for no place.

    New files come first and the first lines of other files last, so that definitions can move between files.
    """
    return _edits(_pieces(old), _pieces(new))


def carried(old: Texts, new: Texts, child: Texts, labels: tuple[str, str]) -> Carried:
    """Carry a parent's change from `old` to `new` into a child's code.

    Args:
        labels: the names of the child and the parent, for conflict markers.
    """
    before, after, mine = map(_pieces, (old, new, child))
    result, news = dict(mine), []
    for key, to in _edits(before, after):
        file, name = key or to
        at = place((file, name), mine, before)
        if at and at != (file, name):
            news.append(f"found {name} in {at[0]}")
        if at and to:
            result[at] = merged(before.get(key, ""), after[to], mine[at], labels)
            if at == key != to and (to[0], "") in result:
                result = _with(result, to, result.pop(at), after, before)
        elif at:
            needed = not name and [other[0] for other in result].count(file) > 1
            if needed or code(mine[at]) != code(before[key]):
                result[at] = f"<<<<<<< {labels[0]}\n{mine[at].rstrip()}\n=======\n>>>>>>> {labels[1]} has deleted this\n"
            else:
                del result[at]
        elif key:
            news.append(f"has no {name or file}")
        elif name:
            larger = _with(result, to, without_notes(after[to]), after, before)
            news += [f"has no {file} for {name}"] if larger == result else []
            result = larger
        else:
            result[to] = without_notes(after[to])
    for file in new.keys() - old.keys() - child.keys():
        if sum(key[0] == file for key in result) == 1 < sum(key[0] == file for key in after):
            del result[file, ""]  # the child has none of the definitions that move to this file
    return _joined(old, new, child, result, news)


def _joined(old: Texts, new: Texts, child: Texts, pieces: dict[Key, str], news: list[str]) -> Carried:
    """Join the pieces of a child's new code, and add to `news` what happened to each file."""
    texts = {}
    for file in dict.fromkeys(file for file, _ in pieces):
        mine = {key[1]: piece for key, piece in pieces.items() if key[0] == file}
        texts[file] = _text(list(mine.values()))
        if file in old and file in new and code(child.get(file, "")) == code(old[file]):
            if mine.keys() == story.pieces(new[file]).keys():
                texts[file] = with_notes(without_notes(new[file]), child[file])  # definitions in the parent's order
    for file in dict.fromkeys([*child, *texts]):
        if file not in child:
            news.append(f"added {file}")
        elif file not in texts:
            news.append(f"deleted {file}")
        elif texts[file] != child[file]:
            conflict = any(map(MARKER.match, texts[file].splitlines()))
            same = file in new and code(texts[file]) == code(new[file])
            news.append(f"{'conflict in' if conflict else 'copied' if same else 'merged'} {file}")
    return Carried(texts, news)
