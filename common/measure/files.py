"""Replace files in one step, so that no results file is ever half written."""

import os
from pathlib import Path


def replace(path: Path, text: str):
    """Replace a file's content by `text`. If the process is killed meanwhile, the file keeps its old content.

    The text first goes to a temporary file in the same directory, `.{name}.partial`.
    """
    path = path.resolve()  # replace the target of a link, not the link
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
