"""A reader can paste every command that documents, docstrings and messages show: its target, variables, stages and options
exist."""

import argparse
import importlib
import os
import re
import shlex
import sys
from pathlib import Path

import programs
import pytest
from test_makefile import make

from common.runtime import DEVICE
from common.show import new_stage

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
FILES = [ROOT / "Makefile", ROOT / "bench.py", *ROOT.glob("*.md"), *ROOT.glob("[cders]*/**/*.md")]
FILES += [path for room in ("common", "examples", "stages") for path in ROOT.glob(f"{room}/**/*.py")]

PROGRAM = r"(?:make|python3? -m (?:common|examples)[\w.]*|python3? bench\.py|\.venv/bin/[^\s`]+)"
SHOWN = re.compile(
    rf"`(?:\w+=\S+ )*({PROGRAM}(?: [^`\n]*)?)`"  # in a sentence
    rf"|^ *(?:\w+=\S+ )*(make [a-z-]+(?: *#| [A-Z]+=|$).*|(?!make){PROGRAM}(?: .*)?)$"  # a line of its own
    rf"|: ({PROGRAM} [A-Z].*)$"  # at the end of a line of help
    rf"|EXAMPLE = ({PROGRAM} .*)$",
    re.MULTILINE,
)


def commands():
    """Return each command that a file shows, with the file and line where it appears first."""
    found = {}
    for path in sorted(set(FILES)):
        text = path.read_text()
        for match in SHOWN.finditer(text):
            command = re.sub(r"(\s+#|; |  ?\().*", "", next(filter(None, match.groups()))).strip()
            if not re.search(r"[{…$]", command):  # leaves out templates, which a reader fills in
                found.setdefault(command, f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}")
    return found


COMMANDS = commands()


class Parsed(Exception):
    """Raised when a command has parsed its options without an error."""


def run_to_the_parser(module, arguments, monkeypatch):
    """Run a command until its parser has read the arguments. Wrong arguments raise SystemExit."""
    parse = argparse.ArgumentParser.parse_known_args

    def parse_and_stop(self, *given, **options):
        found, unknown = parse(self, *given, **options)
        if all(word.startswith("--benchmark-") for word in unknown):  # bench.py hands these to pytest-benchmark
            raise Parsed
        return found, unknown

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_stop)
    if hasattr(program := importlib.import_module(module), "INTERPRETED"):
        monkeypatch.setattr(program, "INTERPRETED", True)  # otherwise the command restarts itself before it parses
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("would run another program"))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # ring attention's processes have these variables
        monkeypatch.setenv(name, "1")
    with pytest.raises(Parsed):
        importlib.import_module(module).main(arguments)


def check_python(words, monkeypatch):
    """Check a `python` command. The command's module must exist and take the arguments."""
    module, arguments = ("bench", words[2:]) if words[1] == "bench.py" else (words[2], words[3:])
    path = ROOT / f"{module.replace('.', '/')}.py"
    assert path.exists(), path
    if module.startswith("examples."):
        pytest.importorskip("transformers")
    if module.startswith("common.site."):
        pytest.importorskip("vl_convert")
    if arguments and arguments != ["--help"]:
        run_to_the_parser(module, arguments, monkeypatch)


def check_make(words, monkeypatch):
    """Check a `make` command. The targets must exist and use the variables. The targets' programs must take the arguments."""
    given = dict(word.split("=", 1) for word in words[1:] if "=" in word and not word.startswith("PYTHON="))
    for target in (word for word in words[1:] if "=" not in word):
        rules = "".join(re.findall(rf"^{target}:.*\n(?:\t.*\n)*", MAKEFILE, re.MULTILINE))
        assert "##" in rules and all(re.search(rf"\b{name}\b", rules) for name in given), target
        if target == "stage":
            new_stage.checked(given["FROM"], given["NAME"])
        elif given and not target.startswith("test"):
            variables = {**given, "PYTHON": sys.executable, "missing": ""}  # so make does not ask Python for missing packages
            shown = make(ROOT, "--dry-run", target, *(f"{name}={value}" for name, value in variables.items()))
            line = shown.stdout.replace("\\\n", " ").strip().splitlines()[-1]
            *_, last = re.split(r"(?=-m (?:common|examples)|bench\.py)", line.partition(";")[0])
            check_python(["python", *shlex.split(last)], monkeypatch)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{COMMANDS[command]} {command}".replace("/", "."))
def test_a_command_that_is_shown_can_be_pasted(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    if words[0] == "make":
        check_make(words, monkeypatch)
    elif words[0].startswith("python"):
        check_python(words, monkeypatch)
    else:
        assert Path(sys.executable).with_name(Path(words[0]).name).exists() or words[0] == ".venv/bin/python", words[0]


def test_commands_are_found():
    places = {place.split(":")[0] for place in COMMANDS.values()}
    assert {"README.md", "CONTRIBUTING.md", "docs/measuring.md", "results/README.md", "Makefile"} <= places
    assert {"make bench STAGE=v3", "make stage FROM=v3 NAME=v3x_yours"} <= COMMANDS.keys()


def test_the_stage_of_the_readme_runs_as_pasted():
    """Only the interpreter of a machine without a GPU needs a variable."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    program = f"{code}\nprint(out.isfinite().all().item())"
    run = programs.python("-c", program, TRITON_INTERPRET=str(int(DEVICE != "cuda")))
    assert run.stdout == "torch.Size([1, 8, 256, 64])\nTrue\n", run.stderr
