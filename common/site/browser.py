"""Start the installed Chromium, to take pictures of the site and to test the site."""

import contextlib
import os
import shutil
from collections.abc import Iterator

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HINT = "no Chromium is installed; on Debian and Ubuntu: apt-get install chromium, or set CHROMIUM to its path"


def path() -> str | None:
    """Return the path of a Chromium, or None if none is installed."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Enter a context that yields a Chromium without a window.

    Raises:
        SystemExit: no Chromium is installed.
    """
    if not path():
        raise SystemExit(HINT)
    options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # Chromium's sandbox refuses root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path(), args=options)
        try:
            yield browser
        finally:
            browser.close()
