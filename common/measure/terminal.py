"""Prepare standard output for terminals and pipes."""

import signal
import sys
import warnings


def prepare():
    """Let output replace characters that the terminal's encoding lacks by "?", and let a warning take one line.

    Also let the program end silently if a reader such as `head` closes the pipe.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")
    warnings.formatwarning = lambda message, *_: f"{message}\n"
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
