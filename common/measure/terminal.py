"""Prepare the commands' output for terminals and pipes, and begin it with what is wrong."""

import argparse
import signal
import sys
import tokenize
import warnings

import stages
from common.runtime import NO_GPU


class Parser(argparse.ArgumentParser):
    """A parser of options that says first what is wrong, and then how to use the command."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n{self.format_usage()}")


def prepare():
    """Let output replace characters that the terminal's encoding lacks by "?", and let a warning take one line.

    Also let the program end silently if a reader such as `head` closes the pipe. If a syntax error in a stage ends the program,
    let it name the file and the line. If a missing GPU does, let it say so.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")
    warnings.formatwarning = lambda message, *_: f"{message}\n"
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.excepthook = _explain


def _explain(kind, error, trace):
    """Print the error that ends the program. Commands parse the texts of stages without their files' names."""
    found = stages.syntax_errors(*stages.names()) if isinstance(error, SyntaxError | tokenize.TokenError) else []
    if found:
        print(*found, sep="\n", file=sys.stderr)
    elif isinstance(error, RuntimeError) and NO_GPU in str(error):
        print("Triton finds no GPU here; with TRITON_INTERPRET=1, kernels run on the CPU", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
