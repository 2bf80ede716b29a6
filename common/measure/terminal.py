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
    "†": "~",
}


def _plainly(error: UnicodeEncodeError) -> tuple[str, int]:
    """Return replacements of characters that an encoding lacks, and the position after these characters."""
    return "".join(PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def prepare():
    """In output, replace characters that the terminal's encoding lacks.

    Also let the program end silently if a reader such as `head` closes the pipe.
    """
    codecs.register_error("plainly", _plainly)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="plainly")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
