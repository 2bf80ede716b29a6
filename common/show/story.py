"""Walk from stage to stage.

Show each idea, the size of the change, the traffic that the change saves, and the speed that it gains.

python -m common.show.story               # all steps; reads only committed files
python -m common.show.story diff v4 v5    # one step, with its code
"""

import argparse
import ast
import difflib
import functools
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

import stages
from common.measure import files, terminal
from common.measure.options import single
from common.show import results, tracks
from common.show.results import Gain, Run
from common.show.tables import PASS_NAMES, legend

WIDTH = 100  # characters in a line of a terminal


@dataclass(frozen=True)
class Change:
    """The difference between the code of two stages: numbers of lines, and changed functions."""

    added: int
    removed: int
    functions: tuple[str, ...]

    def __str__(self):
        size = f"{self.added + self.removed} lines changed (+{self.added} -{self.removed})"
        return f"{size}, in {', '.join(self.functions) or 'no function'}"


def code_files(*names: str) -> list[str]:
    """Return the names of the files that have the code of these stages' passes."""
    return [file for pass_ in results.CODE.values() for file in stages.files(pass_, *names)]


@functools.lru_cache(256)  # neighboring stages have many equal files
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


def _first_line(node: ast.stmt) -> int:
    """Return the first line of a definition, counted from 0. A decorator counts as the first line."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]) - 1


@functools.lru_cache(128)
def functions(text: str) -> dict[str, str]:
    """Return the source of each function in a file's text, including decorators, in order."""
    found, lines = [node for node in _tree(text).body if isinstance(node, ast.FunctionDef)], text.splitlines()
    return {node.name: "\n".join(lines[_first_line(node) : node.end_lineno]) for node in found}


def _git_diff(old: str, new: str, names: list[str], exact: bool) -> str:
    """Use git to compare these files of two stages, in this order. Unless `exact`, leave out NOTEs and white space."""
    options = ["--no-prefix", f"--color={'always' if sys.stdout.isatty() else 'never'}", *([] if exact else ["-w"])]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "order").write_text("\n".join(f"*/{file}" for file in names))
        for stage in (old, new):
            Path(folder, "stages", stage).mkdir(parents=True)
            for file in names:
                if text := stages.source(stage, file):
                    files.replace(Path(folder, "stages", stage, file), text if exact else without_notes(text))
        command = ["git", "diff", "--no-index", "-Oorder", *options, f"stages/{old}", f"stages/{new}"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


@functools.lru_cache(128)
def pieces(text: str) -> dict[str, str]:
    """Return a file's text in pieces, one for each top-level definition (function, class or variable), by its name in order.

    A piece begins with the empty lines and comments before its definition. The name "" has the lines before the first
    definition. The pieces joined are the text.
    """
    lines = text.splitlines(keepends=True)
    firsts = {"": 0}
    for node in _tree(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign):
            name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else node.name
            first = _first_line(node)
            while first and lines[first - 1].startswith("#"):
                first -= 1
            while first and not lines[first - 1].strip():
                first -= 1
            firsts.setdefault(name, first)
    ends = [*firsts.values(), len(lines)][1:]
    return {name: "".join(lines[first:end]) for (name, first), end in zip(firsts.items(), ends, strict=True)}


def without_notes(text: str) -> str:
    """Remove the lines `# NOTE: …`, which say what a later stage does better."""
    return re.sub(r"(?m)^ *# NOTE:.*\n", "", text)


@functools.lru_cache(128)
def _lines(text: str) -> dict[str, list[str]]:
    """Return the lines of a file's `pieces`, without indentation, empty lines, NOTEs and the file's docstring."""
    found = pieces(text)
    module = _tree(text)
    if ast.get_docstring(module):
        found = found | {"": "".join(found[""].splitlines(keepends=True)[module.body[0].end_lineno :])}
    return {name: [line.strip() for line in without_notes(piece).splitlines() if line.strip()] for name, piece in found.items()}


def _texts(old: str, new: str, pass_: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return each stage's lines by file name. A definition that moved to another file has its own entry, so that it is compared
    with itself."""
    files = stages.files(pass_, old, new)
    parts = [{file: _lines(stages.source(stage, file)) for file in files} for stage in (old, new)]
    homes = [{name: file for file in files for name in found[file] if name} for found in parts]
    moved = {name for name in homes[0].keys() & homes[1].keys() if homes[0][name] != homes[1][name]}
    texts = {}, {}
    for text, found in zip(texts, parts, strict=True):
        for file in files:
            for name, lines in found[file].items():
                text.setdefault(name if name in moved else file, []).extend(lines)
    return texts


def change(old: str, new: str) -> Change:
    """Compare the code of stages `old` and `new`, given as directory names.

    A definition that only moved to another file of its pass counts as unchanged. White space, NOTEs and the docstrings of
    files do not count.
    """
    added = removed = 0
    touched = []
    for pass_ in results.CODE.values():
        before, after = _texts(old, new, pass_)
        for name in before | after:
            shown = list(difflib.unified_diff(before.get(name, []), after.get(name, []), n=0, lineterm=""))[2:]
            marks = [line[0] for line in shown]
            added, removed = added + marks.count("+"), removed + marks.count("-")
        before, after = (
            {name: text for file in stages.files(pass_, stage) for name, text in functions(stages.source(stage, file)).items()}
            for stage in (old, new)
        )
        touched += [function for function in (before | after) if before.get(function) != after.get(function)]
    return Change(added, removed, tuple(dict.fromkeys(touched)))


def idea(name: str) -> str:
    """Return a stage's idea: the first line of its docstring."""
    return ast.get_docstring(ast.parse((stages.directory(name) / "__init__.py").read_text())).splitlines()[0]


def _wrapped(text: str, indent: str = "", hanging: str = "") -> str:
    """Wrap `text` at `WIDTH` characters. Lines after the first are indented by `hanging` more."""
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent + hanging, break_on_hyphens=False)


def _sign(gain: Gain) -> str:
    return gain.short + results.CHANGED * gain.changed


def speed_line(runs: list[Run], old: str, new: str, pass_: str) -> str:
    """Return a line with the speed of `new`'s pass divided by the speed of `old`'s pass, for each head dimension. Square
    brackets have the number of the run."""
    cells, origins = {}, results.origins(runs)
    for head_dim in results.HEAD_DIMS:
        gain, run = results.gain(runs, new, old, pass_, head_dim) or (None, None)
        where = f" [{origins.index(results.origin(run.machine)) + 1}]" if run else ": no run has both stages"
        cells.setdefault(where, []).append(f"{_sign(gain)} (D={head_dim}, {gain.spread})" if gain else f"D={head_dim}")
    return "speed: " + "; ".join(", ".join(texts) + where for where, texts in cells.items())


def result(old: str, new: str) -> dict[str, list[str]]:
    """Return what a step changes in speed, bytes and FLOPs, by pass: {"fwd": ["speed: ×1.51 (…)", …], "bwd": ["same code"]}."""
    runs, found, key = results.runs(), {}, stages.track(new)
    for pass_ in results.CODE:
        if results.same_code(new, old, pass_):
            found[pass_] = ["same code"]
            continue
        lines, told = [speed_line(runs, old, new, pass_)], []
        if (track := tracks.read(key)) and track.pass_ == pass_ and (gain := tracks.gain(key, new, old)):
            facts = filter(None, (track.at, gain.spread, tracks.place(key)))
            lines.append(f"track: {_sign(gain)} ({'; '.join(facts)})")
        for what, of in (("bytes", results.moved), ("FLOPs", lambda count: count["flops_executed"])):
            words = {}  # text -> the head dimensions for which it is true
            for head_dim in results.HEAD_DIMS:
                both = [results.counted(name, pass_, head_dim, False) for name in (old, new)]
                if all(both):
                    words.setdefault(results.bytes_in_words(*map(of, both), what), []).append(f"D={head_dim}")
            if words and words.keys() != {"the same FLOPs"}:
                told.append(", ".join(f"{text} ({', '.join(where)})" for text, where in words.items()))
        found[pass_] = lines + ([f"counted: {'; '.join(told)}"] if told else [])
    return found


def step_lines(old: str, new: str) -> list[str]:
    """Return the size of a step and the gain of each pass, in lines of at most `WIDTH` characters."""
    lines = [_wrapped(f"from {old}: {change(old, new)}", "    ", "    ")]
    for pass_, told in result(old, new).items():
        if told == ["same code"]:
            lines.append(f"    {PASS_NAMES[pass_]}: same code")
        else:
            lines += [f"    {PASS_NAMES[pass_]}:", *(_wrapped(line, "        ", "    ") for line in told)]
    return lines


def sources(lines: list[str]) -> list[str]:
    """Explain how to read `step_lines`, and name the measured runs that the lines have."""
    found, text = results.runs(), "\n".join(lines)
    if not found:
        return ["No run in results/ has speeds."]
    lengths = ", ".join(map(str, results.MEAN_OVER))
    parts = [
        "speed: the stage's speed divided by its parent's, in the newest run that has both stages. It is the geometric mean "
        f"over S={lengths}, with and without a causal mask, in float16; then the lowest and the highest of these ratios. The "
        "number in square brackets names the run.",
        "track: the same on the workloads of the stage's track." if "track: " in text else "",
        f"counted: one pass without a mask, at S={results.COUNTED_AT} and with fixed tiles." if "counted: " in text else "",
    ]
    named = [f"[{number}] {origin}" for number, origin in enumerate(results.origins(found), 1)]
    return [*filter(None, parts), *legend(text), *(run for run in named if run.split()[0] in text)]


def _print_sources(lines: list[str]):
    print(*(_wrapped(part, "", "    ") for part in sources(lines)), sep="\n")


def print_story():
    """Print each step of the walk, with dead ends after the stage that they branch off."""
    shown, track = [], None
    print(_wrapped("Each step has an idea, changed code, and a gain for each pass. The end explains the numbers.") + "\n")
    for name in stages.names():
        if (about := tracks.read(key := stages.track(name))) and key != track:
            heading = f"Track: {about.title} ({PASS_NAMES[about.pass_]}, {about.words})"
            print(_wrapped(heading), "", sep="\n")
        track = key
        print(name, _wrapped(idea(name), "    "), sep="\n")
        if old := stages.parent(name):
            shown += (lines := step_lines(old, name))
            print(*lines, sep="\n")
        print()
    _print_sources(shown)


def print_diff(old: str, new: str, prose: bool, exact: bool):
    """Print the change of the code between two stages, then its size and gain. With `prose`, also compare the READMEs."""
    print(_git_diff(old, new, [*code_files(old, new), "__init__.py", *["README.md"] * prose], exact), end="")
    lines = step_lines(old, new)
    print("", new, *lines, "", sep="\n")
    _print_sources(lines)


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    parser = argparse.ArgumentParser(prog="python -m common.show.story", description="Walk from stage to stage.")
    commands = parser.add_subparsers(dest="command")
    diff = commands.add_parser("diff", help="show one step")
    diff.add_argument("old", type=single(stages.resolve))
    diff.add_argument("new", type=single(stages.resolve))
    diff.add_argument("--prose", choices=["no", "yes"], default="no", help="whether to show the READMEs too")
    diff.add_argument("--exact", choices=["no", "yes"], default="no", help="whether to show NOTEs and white space too")
    options = parser.parse_args(argv)
    if not shutil.which("git"):
        raise SystemExit("the story needs git to compare stages, but git is not on the PATH")
    if options.command == "diff":
        if options.old == options.new:
            raise SystemExit(f"{results.spoken(options.old)} and {results.spoken(options.new)} are the same stage")
        print_diff(options.old, options.new, options.prose == "yes", options.exact == "yes")
    else:
        print_story()


if __name__ == "__main__":
    main(sys.argv[1:])
