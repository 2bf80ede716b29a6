"""Merge a parent's edit into the code of a child, definition by definition. All functions work on texts in memory."""

import difflib
import re
import subprocess
import tempfile
from pathlib import Path

from common.show import story
from common.show.story import without_notes

Texts = dict[str, str]  # the code of a stage: the text of each file by the file's name
Key = tuple[str, str]  # a file's name, and a definition in it; "" stands for the lines before the first definition
CONFLICT = "<<<<<<< "  # the beginning of a conflict's first line


def code(text: str) -> str:
    """Return a text without NOTEs, and without the empty lines around it."""
    return without_notes(text).strip("\n")


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
    """Merge the parent's change of a definition from `old` to `new` into the child's text, which keeps its NOTEs.

    Args:
        labels: the names of the child and the parent, for conflict markers.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {"child": child, "old": old, "new": new}.items():
            Path(folder, name).write_text(code(text) + "\n")
        names = (labels[0], f"{labels[1]} before", f"{labels[1]} after")
        command = ["git", "merge-file", "--stdout", "--diff3", *(f"-L{name}" for name in names), "child", "old", "new"]
        text = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    body = child.lstrip("\n")
    return child[: -len(body)] + with_notes(text, body)


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


def _inserted(pieces: dict[Key, str], key: Key, piece: str, old: dict[Key, str], new: dict[Key, str]) -> dict[Key, str] | None:
    """Insert a definition of the parent's `new` code behind the one that it follows there, or into a new file. Return None if
    the child lacks the file and all definitions before."""
    file, name = key
    before = list(new)[: list(new).index(key)]
    for other in reversed(before):
        if other[0] == file and (at := place(other, pieces, old)):
            items = list(pieces.items())
            items.insert(list(pieces).index(at) + 1, ((at[0], name), piece))
            return dict(items)
    return None if (file, "") in old else pieces | {(file, ""): without_notes(new[file, ""]), key: piece}


def _defined(pieces: dict[Key, str], file: str) -> set[str]:
    """Return the names of the definitions of a file's pass, without the entry, `forward` or `backward`, that each stage has."""
    pass_ = re.match("forward|backward", file)[0]
    return {name for other, name in pieces if other.startswith(pass_)} - {"", pass_}


def edits(old: Texts, new: Texts) -> list[tuple[Key | None, Key | None]]:
    """Return where each changed definition stands before and after an edit. None stands for no place.

    The first lines of files come last, so that a file's definitions can leave it before.
    """
    before, after = _pieces(old), _pieces(new)
    places = {key: place(key, after, before) for key in before}
    found = [(key, to) for key, to in places.items() if key != to or code(before[key]) != code(after[key])]
    found += [(None, key) for key in after if key[1] and key not in places.values()]
    return sorted(found, key=lambda edit: not (edit[0] or edit[1])[1])


def carried(old: Texts, new: Texts, child: Texts, labels: tuple[str, str]) -> tuple[Texts, list[str]]:
    """Carry a parent's change from `old` to `new` into a child's code.

    Args:
        labels: the names of the child and the parent, for conflict markers.

    Returns:
        The child's new code, with conflict markers if parent and child change the same lines. And what happened to each file,
        such as "copied backward.py". A pass that shares no definition with the parent's keeps its code.
    """
    before, after, mine = map(_pieces, (old, new, child))
    result, news = dict(mine), []
    for key, to in edits(old, new):
        file, name = key or to
        if (theirs := _defined(before, file)) and not theirs & _defined(mine, file):
            news += [] if (own := f"keeps its own {file}") in news else [own]
        elif not (at := place((file, name), mine, before)):
            larger = None if key else _inserted(result, to, without_notes(after[to]), before, after)
            news += [] if larger else [f"has no {name or file}"]
            result = larger or result
        elif to:
            text = merged(before.get(key, ""), after[to], mine[at], labels)
            rest = {other: piece for other, piece in result.items() if other != at}
            result = (at == key != to and _inserted(rest, to, text, before, after)) or result | {at: text}
        elif code(mine[at]) == code(before[key]) and (name or [other[0] for other in result].count(file) == 1):
            del result[at]
        else:
            result[at] = f"\n\n{CONFLICT}{labels[0]}\n{code(mine[at])}\n=======\n>>>>>>> {labels[1]} has deleted this\n"
    texts = {}
    for (file, _), piece in result.items():
        texts[file] = (texts.get(file, "") + piece).lstrip("\n")
    for file in texts.keys() & old.keys() & new.keys():
        if code(child.get(file, "")) == code(old[file]) and story.pieces(texts[file]).keys() == story.pieces(new[file]).keys():
            texts[file] = with_notes(without_notes(new[file]), child[file])  # a copy has its definitions in the parent's order
    for file in dict.fromkeys([*child, *texts]):
        if file not in texts:
            news.append(f"deleted {file}")
        elif texts[file] != child.get(file):
            copied = file in new and code(texts[file]) == code(new[file])
            news.append(f"{'conflict in' if CONFLICT in texts[file] else 'copied' if copied else 'merged'} {file}")
    return texts, news
