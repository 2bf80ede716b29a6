"""Prepare standard output for terminals and pipes."""

import codecs
import signal
import sys

PLAIN = {
    "×": "x",
    "±": "+-",
    "µ": "u",
    "→": "->",
    "…": "...",
    "≥": ">=",
    "·": "*",
    "’": "'",
    "÷": "/",
    "–": "-",
    "²": "2",
    "³": "3",
}


def _plainly(error: UnicodeEncodeError) -> tuple[str, int]:
    """Replace characters that an encoding lacks by similar ones."""
    return "".join(PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def prepare():
    """Replace characters that the terminal's encoding lacks. If a reader such as `head` closes the pipe, end silently."""
    codecs.register_error("plainly", _plainly)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="plainly")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
