"""Walk from stage to stage. Only committed files are read.

python -m common.show.story                  # the trunk in a line per stage, and each track in a line
python -m common.show.story --stage v3       # one step: its size, the traffic that it saves, the speed that it gains
python -m common.show.story --track decode   # the steps of a track
python -m common.show.story diff v4 v5       # the code of one step
"""

import ast
import difflib
import functools
import io
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import stages
from common.measure import files, terminal
from common.measure.options import list_of, one_of, single
from common.show import results, tracks
from common.show.results import FASTEST, Gain, Run
from common.show.tables import PASS_NAMES, legend

WIDTH = 110  # characters in a line of a terminal
HEAD_DIM = max(results.HEAD_DIMS)  # the head dimension of the trunk's speeds, if a line has room for one
BAR, FASTEST_AT = 7, 6  # characters of a bar, and of the fastest library's speed
EIGHTHS = " ▏▎▍▌▋▊▉█"
INDENT = "\1"  # stands for a space of a line's indentation, so that git compares it
NO_HELPERS = ("common.operator", "common.runtime")  # stages import these for other ends than their kernels


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


def first_line(node: ast.stmt) -> int:
    """Return the first line of a definition, counted from 0. A decorator counts as the first line."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]) - 1


@functools.lru_cache(128)
def functions(text: str) -> dict[str, str]:
    """Return the source of each function in a file's text, including decorators, in order."""
    found, lines = [node for node in _tree(text).body if isinstance(node, ast.FunctionDef)], text.splitlines()
    return {node.name: "\n".join(lines[first_line(node) : node.end_lineno]) for node in found}


def _indented(text: str) -> str:
    """Return a file's text with `INDENT` for the indentation that has a meaning in Python: that of lines outside of brackets
    and multi-line strings."""
    depth, continued = 0, set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        continued.update(range(token.start[0] + 1, token.end[0] + 1 + (token.type == tokenize.NL and depth > 0)))
    lines = enumerate(text.splitlines(keepends=True), 1)
    spaces = re.compile("^ +")
    return "".join(line if at in continued else spaces.sub(lambda found: INDENT * len(found[0]), line) for at, line in lines)


def _git_diff(old: str, new: str, names: list[str], exact: bool) -> str:
    """Use git to compare these files of two stages, in this order. Unless `exact`, leave out NOTEs, and white space that has no
    meaning in Python."""
    options = ["--no-prefix", f"--color={'always' if sys.stdout.isatty() else 'never'}", *([] if exact else ["-w"])]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "order").write_text("\n".join(f"*/{file}" for file in names))
        for stage in (old, new):
            Path(folder, "stages", stage).mkdir(parents=True)
            for file in names:
                if text := stages.source(stage, file):
                    text = text if exact else without_notes(text)
                    files.replace(Path(folder, "stages", stage, file), _indented(text) if file.endswith(".py") else text)
        command = ["git", "diff", "--no-index", "-Oorder", *options, f"stages/{old}", f"stages/{new}"]
        shown = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
        return shown.replace(INDENT, " ")


def helpers(name: str, names: list[str]) -> dict[tuple[str, str], str]:
    """Return the source of the functions of `common` that these files of a stage import, and of functions beside them that they
    call. The keys are a file, as a path from the root, and the function's name."""
    imports = (node for file in names for node in _tree(stages.source(name, file)).body if isinstance(node, ast.ImportFrom))
    wanted = [
        (f"{node.module.replace('.', '/')}.py", alias.name)
        for node in imports
        if (node.module or "").startswith("common.") and node.module not in NO_HELPERS
        for alias in node.names
    ]
    found = {}
    for file, function in wanted:  # grows in the loop
        beside = functions((results.ROOT / file).read_text())
        if function in beside and (file, function) not in found:
            found[file, function] = beside[function]
            wanted += [(file, called) for called in re.findall(r"\w+(?=\()", beside[function])]
    return found


def _new_helpers(old: str, new: str) -> str:
    """Return the `helpers` that a stage's changed files use, and that `old` does not use, as added lines."""
    changed = [file for file in code_files(old, new) if stages.source(old, file) != stages.source(new, file)]
    before, texts, lines = helpers(old, code_files(old)), {}, []
    for (file, function), text in helpers(new, changed).items():
        if (file, function) not in before:
            texts.setdefault(file, []).append(text)
    for file, added in texts.items():
        lines += ["", f"{file} has what {results.spoken(new)} uses and {results.spoken(old)} does not:"]
        lines += [f"+{line}" for text in added for line in ("", *text.splitlines())]
    green = ("\033[32m", "\033[m") if sys.stdout.isatty() else ("", "")
    return "".join(f"{green[0]}{line}{green[1]}\n" if line.startswith("+") else f"{line}\n" for line in lines)


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
            first = first_line(node)
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

    A definition that only moved to another file of its pass counts as unchanged. White space, indentation too, NOTEs and the
    docstrings of files do not count. Neither do the removed lines of a pass that has no kernels because it calls other stages.
    """
    added = removed = 0
    touched = []
    for pass_ in results.CODE.values():
        before, after = _texts(old, new, pass_)
        had, has = (any(".jit" in line for lines in texts.values() for line in lines) for texts in (before, after))
        for name in before | after:
            shown = list(difflib.unified_diff(before.get(name, []), after.get(name, []), n=0, lineterm=""))[2:]
            marks = [line[0] for line in shown]
            added, removed = added + marks.count("+"), removed + marks.count("-") * (has or not had)
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
    brackets have the run's GPU and commit."""
    cells = {}
    for head_dim in results.HEAD_DIMS:
        gain, run = results.gain(runs, new, old, pass_, head_dim) or (None, None)
        where = f" [{results.places([run])}]" if run else ": no run has both stages"
        cells.setdefault(where, []).append(f"{_sign(gain)} (D={head_dim}, {gain.spread})" if gain else f"D={head_dim}")
    return "speed: " + "; ".join(", ".join(texts) + where for where, texts in cells.items())


def result(old: str, new: str) -> dict[str, list[str]]:
    """Return what a step changes in speed, bytes and FLOPs, by pass: {"fwd": ["speed: ×1.51 (…)", …], "bwd": ["same code"]}."""
    runs, found, key = results.runs(), {}, stages.track(new)
    about = tracks.read(key)
    for pass_ in results.CODE:
        if results.same_code(new, old, pass_):
            found[pass_] = ["same code"]
            continue
        lines, told = [speed_line(runs, old, new, pass_)], []
        if about and about.pass_ == pass_ and (gain := tracks.gain(key, new, old)):
            facts = filter(None, (about.at, gain.spread, results.places(tracks.runs_of(key))))
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
    """Explain how to read `step_lines`."""
    text = "\n".join(lines)
    if not results.runs():
        return ["No run in results/ has speeds."]
    lengths = ", ".join(map(str, results.MEAN_OVER))
    parts = [
        'speed: the stage\'s speed divided by that of the stage after "from", in the newest run that has both. It is the '
        f"geometric mean over S={lengths}, with and without a causal mask, in float16; then the lowest and the highest of "
        "these ratios. Square brackets have the run's GPU and commit.",
        "track: the same on the workloads of the stage's track." if "track: " in text else "",
        f"counted: one pass without a mask, at S={results.COUNTED_AT} and with fixed tiles." if "counted: " in text else "",
    ]
    return [*filter(None, parts), *legend(text)]


def _print_sources(lines: list[str]):
    print(*(_wrapped(part, "", "    ") for part in sources(lines)), sep="\n")


def gains(name: str, over: str | None = None) -> dict[str, tuple[Gain | None, Gain | None]]:
    """Return a stage's gain over `over`, by default its parent, and its share of the fastest library's speed, by pass. A pass
    with the code of `over` is left out.

    The workloads are those of the stage's track, or the trunk's at D = `HEAD_DIM`.
    """
    over, key, found = over or stages.parent(name), stages.track(name), {}
    about = tracks.read(key)
    for pass_ in results.CODE:
        if over and results.same_code(name, over, pass_):
            continue
        if not key:
            both = (other and results.gain(results.runs(), name, other, pass_, HEAD_DIM) for other in (over, FASTEST))
            found[pass_] = tuple(gain and gain[0] for gain in both)
        elif about and about.pass_ == pass_:
            found[pass_] = tuple(tracks.gain(key, name, other) for other in (over, FASTEST))
    return found


def bar(share: float) -> str:
    """Return a bar of `FASTEST_AT` characters for 1, and of `BAR` characters at most."""
    eighths = min(round(share * FASTEST_AT * 8), BAR * 8)
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()).ljust(BAR)


def _row(first: str, text: str, found: dict[str, tuple[Gain | None, Gain | None]]) -> str:
    """Return a line of `WIDTH` characters: a text, then the gain and the bar of each pass."""
    cells = []
    for pass_ in results.CODE:
        gain, share = found.get(pass_, (None, None))
        cells.append(f"{_sign(gain) if gain else '':>6} {bar(share.mean if share else 0)}")
    end = "  ".join(cells)
    text = textwrap.shorten(text, WIDTH - len(end) - len(first) - 2, placeholder=" …")
    return f"{first} {text:<{WIDTH - len(end) - len(first) - 2}} {end}".rstrip()


def _rows(track: str) -> Iterator[str]:
    """Yield a heading, a line for each stage of the trunk or of a track, and a line that names the dead ends."""
    heading = "  ".join(f"{PASS_NAMES[pass_]:<{7 + BAR}}" for pass_ in results.CODE)
    about = tracks.read(stages.track(stages.line(track)[0]))
    title = "The trunk" if track == stages.TRUNK else f"{track}: {about.title}" if about else track
    yield f"{title:<{WIDTH - len(heading) - 1}} {heading}".rstrip()
    line = stages.line(track)
    longest = max(len(stages.version(name)) for name in line)
    for name in line:
        yield _row(f"{stages.version(name):<{longest}}", idea(name).rstrip("."), gains(name))
    dead_ends = [name for name in stages.names() if stages.is_dead_end(name) and stages.position(name)[1] == track]
    if dead_ends:
        yield f"Dead ends: {', '.join(map(stages.version, dead_ends))}."


def _track_row(track: str, longest: int) -> str:
    """Return a line for a track: its title, its number of steps, and the gain of its end over the stage that it starts from."""
    line, about = stages.line(track), tracks.read(track)
    first = stages.parent(line[0])
    title = f"{about.title}, " if about else ""
    steps = f"{len(line)} step{'s' * (len(line) > 1)} from {stages.version(first)}"
    return _row(f"{track:<{longest}}", title + steps, gains(line[-1], first))


def print_story(track: str | None = None):
    """Print a line for each stage of a track. By default, print a line for each stage of the trunk and for each track."""
    shown = [*_rows(track or stages.TRUNK), ""]
    if found := [] if track else stages.tracks():
        shown.append("Tracks: from the stage where a track starts to its end, on the workloads of the track's table")
        shown += [*(_track_row(each, max(map(len, found))) for each in found), ""]
    about = tracks.read(track)
    where = f"Workloads: {about.words}." if about else "" if track else f"Trunk: D = {HEAD_DIM}, float16."
    words = (
        f"×: speed over the stage before. Bar: share of the fastest library's speed, 100 %: {bar(1).strip()}. "
        f"Empty: not measured, or same code. {where}"
    )
    print(*shown, *(_wrapped(part) for part in (words, *legend("\n".join(shown)))), sep="\n")
    print(f"next: {after(stages.line(track or stages.TRUNK)[0])}")


def print_steps(names: list[str]):
    """Print each of these steps in a paragraph."""
    shown = []
    for name in names:
        print(name, _wrapped(idea(name), "    "), sep="\n")
        if old := stages.parent(name):
            shown += (lines := step_lines(old, name))
            print(*lines, sep="\n")
        print()
    if shown:
        _print_sources(shown)
    print(f"next: {after(names[-1])}")


def after(name: str) -> str:
    """Return the command that shows a stage's code or, for the first stage, the step after it."""
    if parent := stages.parent(name):
        return f"make diff A={stages.version(parent)} B={stages.version(name)}"
    return f"make story STAGE={stages.version(stages.children(name)[0])}"


def print_diff(old: str, new: str, prose: bool, exact: bool, gain: bool):
    """Print the change of the code between two stages and its size, then its gain or a question. With `prose`, also compare the
    READMEs."""
    print(_git_diff(old, new, [*code_files(old, new), "__init__.py", *["README.md"] * prose], exact), end="")
    print(_new_helpers(old, new), end="")
    lines = step_lines(old, new)
    print("", new, *lines[: None if gain else 1], "", sep="\n")
    command = f"make diff A={stages.version(old)} B={stages.version(new)}"
    if gain:
        _print_sources(lines)
        later = [name for name in stages.children(new) if not stages.is_dead_end(name)]
        print(f"next: make story{f' STAGE={stages.version(later[0])}' if later else ''}")
    else:
        print(f"What does this gain? {command} GAIN=yes shows it.")


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    parser = terminal.Parser(prog="python -m common.show.story", description="Walk from stage to stage.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--stage", type=list_of(stages.resolve), metavar="LIST", help="steps to show in full, such as v3")
    which.add_argument("--track", type=single(one_of(stages.tracks())), help="the track whose steps to show")
    diff = parser.add_subparsers(dest="command").add_parser("diff", help="show one step")
    diff.add_argument("old", type=single(stages.resolve))
    diff.add_argument("new", type=single(stages.resolve))
    for option, words in (
        ("prose", "whether to show the READMEs too"), ("exact", "whether to show NOTEs and white space too"),
        ("gain", "whether to show the gain"),
    ):  # fmt: skip
        diff.add_argument(f"--{option}", choices=["no", "yes"], default="no", help=words)
    options = parser.parse_args(argv)
    if not shutil.which("git"):
        raise SystemExit("the story needs git to compare stages, but git is not on the PATH")
    if options.command == "diff":
        if options.old == options.new:
            raise SystemExit(f"{results.spoken(options.old)} and {results.spoken(options.new)} are the same stage")
        print_diff(options.old, options.new, *(getattr(options, each) == "yes" for each in ("prose", "exact", "gain")))
    elif options.stage:
        print_steps(options.stage)
    else:
        print_story(options.track)


if __name__ == "__main__":
    main(sys.argv[1:])
