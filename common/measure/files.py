"""Results that are whole: a file is replaced in one step, or stays as it was."""

import os
from pathlib import Path


def replace(path: Path, text: str):
    """Make `text` what a file holds. Whoever is killed before that is done leaves the file as it was.

    The text is first written next to it, to a name that starts with a dot and ends in ".partial", which the next call takes.
    """
    path = path.resolve()  # through a link: what it points to is replaced, not the link
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
