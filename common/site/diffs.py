"""Show the code of two stages side by side, with changed words marked and equal lines folded."""

import ast
import difflib
import functools
import html
import re
from collections.abc import Iterable
from dataclasses import dataclass

from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES, Comment

import stages
from common.show.story import functions

CONTEXT = 3  # this many equal lines stay visible before and after a change
ALIKE = 0.5  # two lines are similar if more than this share of them is equal
MANY = 4000  # look for similar lines only in changed blocks with at most this many pairs of lines


@dataclass
class Line:
    """A line of a file: its number, counted from 1, and its HTML."""

    number: int
    code: str


@dataclass
class Row:
    """A row of the table, with a line of the old file and a line of the new file. One of the lines may be missing.

    Attributes:
        part: the name of the function or class that begins in this row, or "".
        folded: whether this row is hidden at first, because it is far from any change or belongs to the head of a file.
        head: whether this row belongs to the head of a file, which is everything before the first function.
    """

    old: Line | None
    new: Line | None
    changed: bool
    part: str = ""
    folded: bool = False
    head: bool = False


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


def _linked(comment: str, known: frozenset[str]) -> str:
    """Return a comment's HTML. A stage's version in the comment becomes a link if it is in `known`."""

    def link(found):
        return f'<a href="{found[0]}.html">{found[0]}</a>' if found[0] in known else found[0]

    return re.sub(r"\bv\d+[a-z]?\b", link, html.escape(comment))


def _code(tokens: list[tuple], changed: set[int], known: frozenset[str]) -> str:
    """Return a line's HTML. `changed` has the positions of the characters to mark."""
    parts, at = [], 0
    for kind, text in tokens:
        marks = [at + place in changed for place in range(len(text))]
        at += len(text)
        first = 0
        for place in range(1, len(text) + 1):
            if place < len(text) and marks[place] == marks[first]:
                continue
            piece = text[first:place]
            shown = _linked(piece, known) if kind in Comment else html.escape(piece)
            shown = f'<span class="{STANDARD_TYPES[kind]}">{shown}</span>' if STANDARD_TYPES.get(kind) else shown
            parts.append(f"<mark>{shown}</mark>" if marks[first] else shown)
            first = place
    return "".join(parts)


def _differences(old: str, new: str) -> tuple[set[int], set[int]]:
    """For each of two lines, return the positions of the characters in changed words.

    Return no positions if the lines have little in common.
    """
    words = [re.findall(r"\w+|\s+|[^\w\s]", line) for line in (old, new)]
    matcher = difflib.SequenceMatcher(None, *words, autojunk=False)
    if matcher.ratio() < ALIKE:
        return set(), set()
    found = set(), set()
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            for line, (first, last), characters in zip(words, ((a, b), (c, d)), found, strict=True):
                begin = sum(map(len, line[:first]))
                characters.update(range(begin, begin + sum(map(len, line[first:last]))))
    return found


def _paired(old: list[str], new: list[str]) -> Iterable[tuple[int | None, int | None]]:
    """Yield pairs of line numbers in a changed block, so that similar lines stand side by side.

    Pair the two most similar lines. Do the same with all lines before this pair, and with all lines after it. If no two lines
    of a block are similar, pair its lines in their order. None takes the place of a missing line.
    """
    best, pair = ALIKE, None
    if len(old) * len(new) <= MANY:
        for i, a in enumerate(old):
            matcher = difflib.SequenceMatcher(None, "", a.strip(), autojunk=False)
            for j, b in enumerate(new):
                matcher.set_seq1(b.strip())
                if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best and matcher.ratio() > best:
                    best, pair = matcher.ratio(), (i, j)
    if pair:
        i, j = pair
        yield from _paired(old[:i], new[:j])
        yield i, j
        yield from ((i + 1 + a if a is not None else None, j + 1 + b if b is not None else None)
                    for a, b in _paired(old[i + 1 :], new[j + 1 :]))  # fmt: skip
        return
    for place in range(max(len(old), len(new))):
        yield place if place < len(old) else None, place if place < len(new) else None


def _first_lines(text: str) -> dict[int, str]:
    """Return the first line of each function and class in a file, as {line number: name}.

    A decorator counts as the first line.
    """
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {min([node.lineno, *(each.lineno for each in node.decorator_list)]): node.name for node in found}


def _head(text: str) -> int:
    """Return the number of the last line before a file's first function. Classes do not count as functions."""
    lines = _first_lines(text)
    return min((line for line, name in lines.items() if not name[0].isupper()), default=1) - 1


def rows(old_text: str, new_text: str) -> list[Row]:
    """Return the rows that show two files side by side."""
    old, new = old_text.splitlines(), new_text.splitlines()
    old_tokens, new_tokens = _tokens(old_text), _tokens(new_text)
    begins = _first_lines(new_text)
    known = frozenset(map(stages.version, stages.names()))
    found = []

    def line(tokens, place, changed=frozenset()):
        return None if place is None else Line(place + 1, _code(tokens[place], changed, known))

    for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        pairs = zip(range(a, b), range(c, d), strict=True)
        if tag != "equal":
            pairs = ((None if i is None else a + i, None if j is None else c + j) for i, j in _paired(old[a:b], new[c:d]))
        for i, j in pairs:
            left, right = set(), set()
            if tag != "equal" and i is not None and j is not None:
                left, right = _differences(old[i], new[j])
            part = begins.get(j + 1, "") if j is not None else ""
            found.append(Row(line(old_tokens, i, left), line(new_tokens, j, right), tag != "equal", part))
    heads = _head(old_text), _head(new_text)
    for row in found:
        row.head = all(line.number <= last for line, last in zip((row.old, row.new), heads, strict=True) if line)
    changes = [place for place, row in enumerate(found) if row.changed and not row.head]
    near = {place + step for place in changes for step in range(-CONTEXT, CONTEXT + 1)}
    for place, row in enumerate(found):
        row.folded = row.head or place not in near
    return found


def changed_parts(old: str, new: str, file: str) -> list[str]:
    """Return the names of a file's functions that the stage `new` adds or changes."""
    before, after = (functions(stages.source(name, file)) for name in (old, new))
    return [part for part in after if before.get(part) != after[part]]
