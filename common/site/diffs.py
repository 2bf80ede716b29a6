"""Show the code of two stages side by side, with changed words marked and equal lines folded."""

import ast
import difflib
import functools
import html
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES, Comment

import stages
from common.show.story import first_line

CONTEXT = 3  # this many equal lines stay visible before and after a change


class Line(NamedTuple):
    """A line of a file: its number, counted from 1, its HTML, and the spaces at its start."""

    number: int
    code: str
    spaces: str = ""


class Row(NamedTuple):
    """A row of the table, with a line of the old file and a line of the new file. One of the lines may be missing.

    Attributes:
        part: the name of the new file's function that begins in this row, or "".
    """

    old: Line | None
    new: Line | None
    changed: bool
    part: str


@functools.lru_cache(8)  # cached, because a step's new file is the next step's old file
def _tokens(text: str) -> list[list[tuple]]:
    """Return the tokens of each line as (type, text)."""
    lines = [[]]
    for kind, value in PythonLexer(stripnl=False).get_tokens(text):
        for place, piece in enumerate(value.split("\n")):
            if place:
                lines.append([])
            if piece:
                lines[-1].append((kind, piece))
    return lines


def _linked(comment: str) -> str:
    """Return a comment's HTML, in which the version of a stage becomes a link."""

    def link(found):
        exists = found[0] in map(stages.version, stages.names())
        return f'<a href="{found[0]}.html">{found[0]}</a>' if exists else found[0]

    return re.sub(r"\b[a-z]+\d+[a-z]?\b", link, html.escape(comment))


def _code(tokens: list[tuple], marks: str) -> str:
    """Return a line's HTML. A word is marked if `marks` has a character other than a space under it."""
    parts, at = [], 0
    for kind, text in tokens:
        shown = _linked(text) if kind in Comment else html.escape(text)
        shown = f'<span class="{STANDARD_TYPES[kind]}">{shown}</span>' if STANDARD_TYPES.get(kind) else shown
        parts.append(f"<mark>{shown}</mark>" if text.strip() and marks[at : at + len(text)].strip() else shown)
        at += len(text)
    return "".join(parts)


def _line(place: int, tokens: list[tuple], marks: str) -> Line:
    text = "".join(text for _, text in tokens)
    return Line(place + 1, _code(tokens, marks), text[: len(text) - len(text.lstrip(" "))])


def _compared(old: list[str], new: list[str]) -> Iterator[tuple[int | None, int | None, bool, tuple[str, str]]]:
    """Yield the places of two lines that stand side by side, whether they differ, and the marks under their characters.

    Similar lines stand side by side, and other changed lines in their order. None takes the place of a missing line.
    """
    lines = list(difflib.ndiff(old, new, charjunk=None))
    kinds = "".join(line[0] for line in lines) + "$"  # "-+" with a "?" behind one or both: similar lines, each with its marks
    numbers, apart = {"-": itertools.count(), "+": itertools.count()}, {"-": [], "+": []}
    for found in re.finditer(r"[ $]|-\?\+\??|-\+\?|[-+]", kinds):
        if found[0] in apart:
            apart[found[0]].append(next(numbers[found[0]]))
            continue
        yield from ((i, j, True, ("", "")) for i, j in itertools.zip_longest(*apart.values()))
        apart = {"-": [], "+": []}
        if found[0] != "$":
            left = lines[found.start() + 1][2:] if found[0][1:2] == "?" else ""
            right = lines[found.end() - 1][2:] if found[0][-1] == "?" else ""
            yield next(numbers["-"]), next(numbers["+"]), found[0] != " ", (left, right)


def _first_lines(text: str) -> dict[int, str]:
    """Return the first line of each function in a file, as {line number: name}."""
    return {first_line(node) + 1: node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def blocks(old: str, new: str) -> list[tuple[str, list[Row]]]:
    """Return the rows that show two files side by side, in blocks.

    Returns:
        For each block, its kind and its rows. The kind is "head" before the first function, "equal" for equal lines that are
        far from any change, and "" for other lines.
    """
    tokens, begins = (_tokens(old), _tokens(new)), (_first_lines(old), _first_lines(new))
    found = []
    for i, j, changed, marks in _compared(old.splitlines(), new.splitlines()):
        sides = zip((i, j), tokens, marks, strict=True)
        lines = [None if place is None else _line(place, of[place], under) for place, of, under in sides]
        found.append(Row(*lines, changed, begins[1].get(lines[1].number, "") if lines[1] else ""))
    starts = (any(line and line.number in of for line, of in zip(row, begins, strict=False)) for row in found)
    head = next((place for place, start in enumerate(starts) if start), 0)
    near = {place + step for place in range(head, len(found)) if found[place].changed for step in range(-CONTEXT, CONTEXT + 1)}
    kinds = ("head" if place < head else "" if place in near else "equal" for place in range(len(found)))
    groups = itertools.groupby(zip(kinds, found, strict=True), lambda pair: pair[0])
    return [(kind, [row for _, row in pairs]) for kind, pairs in groups]
