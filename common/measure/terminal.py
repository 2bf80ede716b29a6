"""What every command does before it prints: signs that a terminal cannot show, and readers that have seen enough."""

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
    """The signs that an encoding lacks, as it can write them."""
    return "".join(PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def prepare():
    """Print in the terminal's encoding whatever it is, and end without a word where a reader such as `head` has seen enough."""
    codecs.register_error("plainly", _plainly)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="plainly")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
