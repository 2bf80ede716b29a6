"""Take the README's pictures of the site. `make screenshots` runs this module."""

import sys

from common.measure import terminal
from common.show.results import PLOTS
from common.site.browser import chromium
from common.site.pages import OUT

PICTURES = PLOTS / "site"
SIZE = {"width": 1440, "height": 900}
SETTLED = 1000  # milliseconds until the charts of a page are drawn
SHOTS = {"start": "index.html", "v3": "v3.html#time=700", "v25": "v25.html"}


def main():
    """Write a picture of each page in SHOTS. The picture shows what a visitor sees first."""
    terminal.prepare()
    if not (OUT / "index.html").exists():
        raise SystemExit(f"{OUT} does not exist; run make site first")
    PICTURES.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        page = browser.new_page(viewport=SIZE)
        for name, address in SHOTS.items():
            page.goto(f"{OUT.as_uri()}/{address}")
            page.wait_for_timeout(SETTLED)
            page.screenshot(path=PICTURES / f"{name}.png")
            print(PICTURES / f"{name}.png")


if __name__ == "__main__":
    sys.exit(main())
