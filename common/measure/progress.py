"""Show a command's progress and remaining time on stderr."""

import sys

from tqdm import tqdm

COLUMNS = 100


class Progress(tqdm):
    """A progress bar for work of size `total`. Sizes are expected seconds, or proportional to them.

    Call `begin(name)` before a piece of work, and `update(size)` after the piece. The bar is a context manager.
    """

    def __init__(self, total: float):
        super().__init__(
            total=total, smoothing=0, ncols=COLUMNS, leave=False, mininterval=0.1 if sys.stderr.isatty() else 10,
            bar_format="{percentage:3.0f} %, about {remaining} left |{bar:20}| {desc}",
        )  # fmt: skip

    def begin(self, name: str):
        self.set_description_str(name, refresh=sys.stderr.isatty())


def say(text: str):
    """Print a line on stderr, above the bar."""
    tqdm.write(text, file=sys.stderr)
