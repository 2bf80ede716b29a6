"""Replace files in one step, so that no result is ever half written."""

import os
from pathlib import Path


def replace(path: Path, text: str):
    """Replace a file's content by `text`.

    A process that is killed meanwhile leaves the old content.

    The text first goes to a temporary file next to it, whose name has a dot before it and ".partial" after it. The next call
    overwrites a temporary file that is left.
    """
    path = path.resolve()  # replace the target of a link, not the link
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
