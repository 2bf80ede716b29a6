"""The walk from stage to stage: the idea, the size of the change, the traffic it saves and the speed it gained.

python -m common.show.story               # all of it, from what is committed alone
python -m common.show.story diff v4 v5    # one step, code first
"""

import argparse
import ast
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass

import stages
from common.measure.options import single
from common.show import results
from common.show.tables import PASS_NAMES

CODE = ("forward.py", "backward.py")
FILES = (*CODE, "__init__.py")
STAGES = results.ROOT / "stages"


@dataclass(frozen=True)
class Change:
    """What differs in the code of two stages: lines, and the functions that are not the same."""

    added: int
    removed: int
    functions: tuple[str, ...]

    def __str__(self):
        size = f"{self.added + self.removed} lines changed (+{self.added} -{self.removed})"
        return f"{size}, in {', '.join(self.functions) or 'no function'}"


def functions(path) -> dict[str, str]:
    """The source of each function of a file, decorators included, in the file's order."""
    text = path.read_text()
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    sources = {}
    for node in found:
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        sources[node.name] = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return sources


def change(old: str, new: str) -> Change:
    """How the code of stage `new` differs from that of `old`; both directory names."""
    added = removed = 0
    touched = []
    for name in CODE:
        paths = [STAGES / stage / name for stage in (old, new)]
        counted = subprocess.run(
            ["git", "diff", "--no-index", "--numstat", *map(str, paths)], capture_output=True, text=True, check=False
        )  # 1 where they differ
        if counted.stdout:
            plus, minus, _ = counted.stdout.split("\t", 2)
            added, removed = added + int(plus), removed + int(minus)
        before, after = map(functions, paths)
        touched += [function for function in (before | after) if before.get(function) != after.get(function)]
    return Change(added, removed, tuple(dict.fromkeys(touched)))


def idea(name: str) -> str:
    """A stage in one sentence: the first line of its docstring."""
    return stages.load(name).__doc__.splitlines()[0]


def measured_gain(records: list[dict], old: str, new: str) -> str:
    """How many times as fast `new` was measured to be, by pass and head dimension; empty where it was not."""
    parts = []
    for pass_ in ("fwd", "bwd"):
        gains = {head_dim: results.speedup(records, new, old, (pass_,), head_dim) for head_dim in results.HEAD_DIMS}
        cells = [f"×{gain:.2f} (D={head_dim})" for head_dim, gain in gains.items() if gain]
        parts += [f"{PASS_NAMES[pass_]} {', '.join(cells)}"] if cells else []
    return "; ".join(parts)


def saved_traffic(counts: list[dict], old: str, new: str) -> str:
    """How many times as many bytes `old` moves, by pass and head dimension, without a mask; empty where none were counted."""
    parts = []
    for pass_ in ("fwd", "bwd"):
        cells = []
        for head_dim in results.HEAD_DIMS:
            before, after = (results.counted(counts, name, pass_, head_dim, False) for name in (old, new))
            if before and after:
                cells.append(f"÷{results.moved(before) / results.moved(after):.2f} (D={head_dim})")
        parts += [f"{PASS_NAMES[pass_]} {', '.join(cells)}"] if cells else []
    return "; ".join(parts)


def tuned_traffic(old: str, new: str) -> str:
    """The same as measured on a GPU, with the tiles that the tuner chose there; empty where it chose none of `new`'s."""
    parts = []
    for pass_ in ("fwd", "bwd"):
        cells = []
        for head_dim in results.HEAD_DIMS:
            before, after = (results.tuned_case(name, pass_, head_dim, False) for name in (old, new))
            if before and after and after["tuned"]:
                cells.append(f"÷{results.bytes_of(before) / results.bytes_of(after):.2f} (D={head_dim})")
        parts += [f"{PASS_NAMES[pass_]} {', '.join(cells)}"] if cells else []
    return "; ".join(parts)


def _measured():
    """The runs of all stages that are there."""
    return [path for path in results.FLOAT16 if path.exists()]


def gain_lines(old: str, new: str) -> list[str]:
    """What the committed results say of a step; nothing of what they do not have."""
    lines = {}
    if results.TRAFFIC.exists():
        lines["bytes at fixed tiles"] = saved_traffic(results.load_counts(results.TRAFFIC)[0], old, new)
    lines["bytes at the tuned tiles"] = tuned_traffic(old, new)
    lines["speed"] = measured_gain(results.load_runs(_measured())[0], old, new)
    return [f"{name}: {text}" for name, text in lines.items() if text]


def sources() -> str:
    """Where the numbers of `gain_lines` are from, and which are left out."""
    parts = []
    if results.TRAFFIC.exists():
        parts.append(
            f"Bytes without a mask at S={results.COUNTED_AT}: at fixed tiles as counted, at the tuned ones as measured,\n"
            "spilled registers included."
        )
    _, machines = results.load_runs(_measured())
    if machines:
        lengths = ", ".join(map(str, results.MEAN_OVER))
        where = results.origins(machines, dated=True)
        parts.append(f"Speed: float16, geometric means over S={lengths},\ncausal and not: {where}")
    missing = [str(path.relative_to(results.ROOT)) for path in (results.TRAFFIC, *results.FLOAT16) if not path.exists()]
    if missing:
        parts.append(f"Without {', '.join(missing)} the gains that they have are left out.")
    return " ".join(parts)


def print_story():
    """Each step of the walk, dead ends where they branch off."""
    for name in stages.names():
        print(f"{name}\n    {idea(name)}")
        if old := stages.parent(name):
            print(f"    from {old}: {change(old, name)}")
            for line in gain_lines(old, name):
                print(f"    {line}")
        print()
    print(sources())


def print_diff(old: str, new: str, prose: bool):
    """The change from one stage to another, code first, then its size and what it gained; with the READMEs where asked."""
    for name in (*FILES, "README.md") if prose else FILES:
        sys.stdout.flush()
        subprocess.run(
            ["git", "--no-pager", "diff", "--no-index", "--no-prefix", f"stages/{old}/{name}", f"stages/{new}/{name}"],
            cwd=results.ROOT, check=False,
        )  # fmt: skip
    print("\n".join([f"\n{old} to {new}: {change(old, new)}", *gain_lines(old, new), sources()]))


def main(argv: list[str]):
    """The command line."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as `head` may have seen enough
    parser = argparse.ArgumentParser(prog="python -m common.show.story", description="Walk from stage to stage.")
    commands = parser.add_subparsers(dest="command")
    diff = commands.add_parser("diff", help="show one step")
    diff.add_argument("old", type=single(stages.resolve))
    diff.add_argument("new", type=single(stages.resolve))
    diff.add_argument("--prose", choices=["no", "yes"], default="no", help="whether to show the READMEs too")
    options = parser.parse_args(argv)
    if not shutil.which("git"):
        raise SystemExit("git is needed, which compares the stages, and it is not on the PATH")
    if options.command == "diff":
        print_diff(options.old, options.new, options.prose == "yes")
    else:
        print_story()


if __name__ == "__main__":
    main(sys.argv[1:])
