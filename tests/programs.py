"""Run Python programs in their own processes, without loading torch for each program.

Loading takes most of a small program's time. This file is also a script, which loads torch once and forks a process for each
program. Programs with the same preparation are forks of a process that has run it. This file imports nothing of the project:
the project reads environment variables when it is imported, and each program has its own variables.
"""

import atexit
import functools
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(*arguments, cwd=ROOT, prepare="", **variables) -> subprocess.CompletedProcess:
    """Run `python` with these arguments. The first argument is -c, -m or a script.

    With -c, the code `prepare` runs first, but only once for all programs with this code. They must have equal `variables`.

    The program can import the project's packages. It gets this process's environment and `variables`, but not pytest-xdist's
    variables, with which pytest-benchmark would measure nothing.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    with tempfile.TemporaryDirectory() as directory:
        said = [f"{directory}/{name}" for name in ("stdout", "stderr")]
        environment |= {"PYTHONPATH": str(ROOT)} | variables
        print(json.dumps([prepare, [*map(str, arguments)], str(cwd), environment, said]), file=_server().stdin, flush=True)
        status = int(_server().stdout.readline())
        return subprocess.CompletedProcess(arguments, status, *(Path(path).read_text() for path in said))


@functools.cache
def _server():
    return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _serve(requests, answers, prepared=""):
    """Fork a process for each program that `requests` describes, and write the process's exit status to `answers`.

    In the forked process, return the program's description. In the parent, return None when the requests end.
    """
    servers = {}  # code -> the requests and answers of the process that has run it
    for line in requests:
        prepare, *program = json.loads(line)
        if prepare != prepared:
            if prepare not in servers:
                inside, outside = socket.socketpair()
                if os.fork() == 0:
                    outside.close()  # so that the requests end with the process that sends them
                    os.environ.clear()
                    os.environ.update(program[2])
                    sys.path[:1] = [str(ROOT)]
                    exec(prepare, vars(sys.modules["__main__"]))
                    return _serve(inside.makefile("r"), inside.makefile("w"), prepare)
                inside.close()
                servers[prepare] = outside.makefile("r"), outside.makefile("w")
            results, programs = servers[prepare]
            print(line, end="", file=programs, flush=True)
            status = results.readline()
        elif (process := os.fork()) == 0:
            return program
        else:
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        print(int(status), file=answers, flush=True)
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
        exec(rest[0], vars(sys.modules["__main__"]))
    elif first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(first, run_name="__main__")


def _end(run):
    """Call `run`, and end the process at once, with the status of a program. Python would first take all modules apart, which
    takes a second."""
    status = 0
    try:
        run()
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else stopped.code is not None
        if isinstance(stopped.code, str):
            print(stopped.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    import torch  # noqa: F401

    serve, run, end = _serve, _run, _end
    sys.modules["__main__"] = types.ModuleType("__main__")  # that of the programs
    program = serve(sys.stdin, sys.stdout)
    end(lambda: program and run(*program))
