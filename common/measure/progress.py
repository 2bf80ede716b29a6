"""Show a command's progress and remaining time on stderr: a bar on a terminal, otherwise a line from time to time."""

import sys

from tqdm import tqdm

LINES_APART_S = 10  # minimum seconds between two lines, if stderr is no terminal
COLUMNS = 100


class _Lines:
    """A file to which tqdm writes if stderr is no terminal. It prints each state of the bar on a line of its own."""

    def write(self, text: str):
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)

    def flush(self):
        pass


class Progress(tqdm):
    """A progress bar for work of size `total`. Sizes are expected seconds, or proportional to them.

    Call `begin(name)` before a piece of work, and `update(size)` after the piece. The bar is a context manager.
    """

    def __init__(self, total: float):
        self._live = sys.stderr.isatty()
        left = "{percentage:3.0f} %, about {remaining} left"
        if self._live:
            options = {"bar_format": left + " |{bar:20}| {desc}"}
        else:
            options = {"bar_format": left + ": {desc}", "file": _Lines(), "miniters": 0}
            options |= {"mininterval": LINES_APART_S, "delay": LINES_APART_S}
        super().__init__(total=total, smoothing=0, ncols=COLUMNS, leave=False, **options)

    def begin(self, name: str):
        self.set_description_str(name, refresh=self._live)


def say(text: str):
    """Print a line on stderr, above the bar."""
    tqdm.write(text, file=sys.stderr)
