"""Run Python programs in their own processes, without loading torch for each program.

Loading torch takes most of a small program's time. This file is also a script, which loads torch once and forks a process for
each program. It imports nothing of the project: the project reads environment variables when it is imported, and each program
has its own variables.
"""

import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(*arguments, cwd=ROOT, **variables) -> subprocess.CompletedProcess:
    """Run `python` with these arguments. The first argument is -c, -m or a script.

    The program can import the project's packages. It gets this process's environment and `variables`, but not pytest-xdist's
    variables, with which pytest-benchmark would measure nothing.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    with tempfile.TemporaryDirectory() as directory:
        said = [f"{directory}/{name}" for name in ("stdout", "stderr")]
        environment |= {"PYTHONPATH": str(ROOT)} | variables
        print(json.dumps([[*map(str, arguments)], str(cwd), environment, said]), file=_server().stdin, flush=True)
        status = int(_server().stdout.readline())
        return subprocess.CompletedProcess(arguments, status, *(Path(path).read_text() for path in said))


@functools.cache
def _server():
    return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _serve():
    """Fork a process for each program that stdin describes, and print the process's exit status.

    In the forked process, return the program's description. In the parent, return None when stdin ends.
    """
    for line in sys.stdin:
        if (process := os.fork()) == 0:
            return json.loads(line)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    return None


def _run(arguments, cwd, environment, said):
    """Run the program in this process."""
    for descriptor, path in enumerate([os.devnull, *said]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:1] = [cwd, str(ROOT)]  # in place of this file's directory
    first, *rest = arguments
    sys.argv = [first, *rest[1:]] if first == "-c" else rest if first == "-m" else arguments
    if first == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(rest[0], vars(main))
    elif first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    import torch  # noqa: F401

    if program := _serve():
        _run(*program)
