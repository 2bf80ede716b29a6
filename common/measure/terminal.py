"""Prepare standard output for terminals and pipes."""

import signal
import sys


def prepare():
    """Let output replace characters that the terminal's encoding lacks by "?".

    Also let the program end silently if a reader such as `head` closes the pipe.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
