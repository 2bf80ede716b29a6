"""Replace files in one step, so that no result is ever half written."""

import os
from pathlib import Path


def replace(path: Path, text: str):
    """Replace a file's content by `text`. A process that is killed meanwhile leaves the old content.

    The text first goes to a file next to it, with a dot before the name and ".partial" after it. The next call overwrites a
    left one.
    """
    path = path.resolve()  # replace the target of a link, not the link
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
