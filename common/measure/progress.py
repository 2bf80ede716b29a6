"""How far a command is and how long it still takes, on stderr: a live bar on a terminal, now and then a line elsewhere."""

import sys

from tqdm import tqdm

LINES_APART_S = 10  # where stderr is no terminal
COLUMNS = 100


class _Lines:
    """What tqdm writes its bar to where stderr is no terminal: each bar becomes a line, without a carriage return."""

    def write(self, text: str):
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)

    def flush(self):
        pass


class Progress(tqdm):
    """A bar for work of a total size, in any unit in which time passes evenly, such as expected seconds.

    `begin(name)` a piece of work, and `update(size)` after it. A context manager.
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
    """A line on stderr, above the bar."""
    tqdm.write(text, file=sys.stderr)
