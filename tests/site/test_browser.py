"""The site's pages load in Chromium. Their controls change the pictures. Readers with impaired vision can read them."""

import os
import re
import shutil

import pytest

playwright = pytest.importorskip("playwright.sync_api")
axe_playwright = pytest.importorskip("axe_playwright_python.sync_playwright")
pytest.importorskip("vl_convert")

import stages  # noqa: E402
from common.show import results  # noqa: E402

STEPS = [stages.version(name) for name in stages.names()]
DOCUMENTS = ["index", "glossary", "reading", "operator", "measuring", "interpreter", "several-gpus", "contributing", "results"]
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 380, "height": 800}


NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser():
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not path:
        pytest.skip("no Chromium is installed; on Debian and Ubuntu: apt-get install chromium, or set CHROMIUM to its path")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses root
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=path, args=options)
        yield found
        found.close()


class Watched:
    """A browser page whose errors and requests are recorded.

    Attributes:
        noted: the messages of errors and warnings, and the requests that are not for files.
    """

    def __init__(self, browser, site, **options):
        self.site, self.noted = site, []
        self.page = browser.new_page(**({"viewport": WIDE} | options))
        self.page.on("console", lambda message: message.type in ("error", "warning") and self.noted.append(message.text))
        self.page.on("pageerror", lambda error: self.noted.append(str(error)))
        self.page.on("request", lambda request: request.url.startswith(("file:", "data:")) or self.noted.append(request.url))

    def open(self, address):
        """Load a page of the site, and wait for its chart."""
        self.page.goto("about:blank")  # otherwise the page would not load again if only the part after # changes
        self.page.goto(f"{self.site.as_uri()}/{address}")
        if address.startswith("index"):
            self.page.wait_for_selector("#chart .vega-embed svg, #chart svg.marks")
        return self.page


@pytest.fixture
def watched(browser, site):
    found = Watched(browser, site)
    yield found
    found.page.close()
    assert found.noted == []


@pytest.fixture(scope="module")
def reader(browser, site):
    """A page that several tests use one after the other."""
    found = Watched(browser, site)
    yield found
    found.page.close()


def visible(page, selector):
    return [each for each in page.query_selector_all(selector) if each.is_visible()]


OPENED = [pytest.param(step, marks=[pytest.mark.long] if place % 12 else []) for place, step in enumerate(STEPS)]


@pytest.mark.parametrize("name", [*DOCUMENTS, *OPENED])
def test_a_page_opens_and_fits(reader, name):
    """A page has no errors, makes no request to a network, and is no wider than a phone."""
    reader.noted.clear()
    reader.page.set_viewport_size(NARROW)
    page = reader.open(f"{name}.html")
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    assert reader.noted == []


@pytest.mark.parametrize(("name", "scheme"), [
    ("index", "light"), ("v25", "dark"),
    *(pytest.param(*other, marks=pytest.mark.long)
      for other in [("index", "dark"), ("glossary", "light"), ("reading", "dark"), ("v3", "light")]),
])  # fmt: skip
def test_everyone_can_read_a_page(reader, name, scheme):
    """The accessibility checker axe finds no serious problem, for example of names, contrast or structure."""
    reader.page.set_viewport_size(WIDE)
    page = reader.open(f"{name}.html")
    page.emulate_media(color_scheme=scheme)
    found = axe_playwright.Axe().run(page, options={"resultTypes": ["violations"], "preload": False})
    page.emulate_media(color_scheme="light")
    serious = [each for each in found.response["violations"] if each["impact"] in ("serious", "critical")]
    assert [(each["id"], node["html"][:200]) for each in serious for node in each["nodes"][:3]] == []


def bars(page):
    return [bar.get_attribute("aria-label") for bar in page.query_selector_all("#chart path[aria-label*='TFLOP']")]


OTHER_CHOICES = [pytest.param(*choice, marks=pytest.mark.long) for choice in [("d", "64"), ("causal", "no"), ("s", "16384")]]


@pytest.mark.parametrize(("name", "value"), [("pass", "bwd"), *OTHER_CHOICES])
def test_a_choice_changes_the_chart_and_the_address(watched, name, value):
    page = watched.open("index.html")
    before = bars(page)
    measured = [name for name in stages.names() if results.newest(results.runs(), "fwd", 128, name)]
    assert len(before) > len(measured)
    page.select_option(f"#choices select[name={name}]", value)
    page.wait_for_timeout(200)
    after = bars(page)
    assert after and after != before
    assert f"{name}={value}" in page.url
    fragment = page.url.partition("#")[2]
    page = watched.open(f"index.html#{fragment}")
    page.wait_for_timeout(200)
    assert page.input_value(f"#choices select[name={name}]") == value and bars(page) == after


def test_the_pass_that_is_chosen_is_shown(watched):
    page = watched.open("v3.html")
    assert [each.inner_text() for each in visible(page, ".parts")][0].startswith("forward.py")
    page.click("button[data-show=bwd]")
    assert [each.inner_text() for each in visible(page, ".parts")][0].startswith("backward.py")
    shown = [each.inner_text() for each in visible(page, ".names")]
    assert len(shown) == 2 and all("dO" in names for names in shown)
    page = watched.open("v3.html#pass=bwd")
    assert [each.inner_text() for each in visible(page, ".parts")][0].startswith("backward.py")


def veils(page):
    """Return where the veil of each visible panel begins, as a fraction of the width.

    The veil covers the accesses after the chosen time.
    """
    places = "each => each.offsetLeft / each.parentElement.offsetWidth"
    return [each.evaluate(places) for each in visible(page, ".panel:not(.zoomed) .veil")]


def test_the_slider_moves_through_both_traces(watched):
    page = watched.open("v3.html#time=0")
    assert veils(page) == pytest.approx([0, 0], abs=0.01)
    page.fill("#time", "250")
    assert veils(page) == pytest.approx([0.25, 0.25], abs=0.01)
    end = float(page.query_selector(".panel").get_attribute("data-end"))
    assert float(page.inner_text("#now").split()[0]) == pytest.approx(end / 4, abs=0.01)
    assert "time=250" in page.url


def test_play_moves_until_it_is_paused(watched):
    page = watched.open("v3.html#time=0")
    page.click("#play")
    page.wait_for_function("document.getElementById('time').value > 20")
    page.click("#play")
    at = page.input_value("#time")
    page.wait_for_timeout(150)
    assert page.input_value("#time") == at and page.inner_text("#play") == "Play" and f"time={at}" in page.url


def test_an_access_tells_what_it_is(watched):
    page = watched.open("v3.html")
    page.query_selector("svg[aria-label^='v3_fa2_causal: K'] path").hover()
    page.wait_for_selector("#box.on")
    assert re.match(r"program \d+ reads K, rows \d+ to \d+: [\d,]+ bytes", page.inner_text("#box"))


def test_zoom_widens_the_timelines_and_they_scroll_together(watched):
    page = watched.open("v25.html")
    field = visible(page, ".zoomed .field")[0]
    width, opened = field.evaluate("each => [each.clientWidth, each.scrollWidth]")
    assert opened > 3 * width and field.evaluate("each => each.scrollLeft") > width
    page.fill("#zoom", "8")
    assert field.evaluate("each => each.scrollWidth") == pytest.approx(8 * width, rel=0.02)
    field.evaluate("each => { each.scrollLeft = 300; }")
    page.wait_for_timeout(100)
    assert [each.evaluate("each => each.scrollLeft") for each in visible(page, ".zoomed .field")] == [300, 300]
    assert "zoom=8" in page.url


def test_equal_lines_unfold_and_fold(watched):
    page = watched.open("v6.html")
    count = page.locator(".diff tr:visible").count()
    page.click(".bar button")
    unfolded = page.locator(".diff tr:visible").count()
    assert unfolded > count
    page.click(".bar button")
    assert page.locator(".diff tr:visible").count() == count


def test_keys_and_links_lead_from_step_to_step(watched):
    page = watched.open("v3.html")
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**/v4.html")
    page.keyboard.press("ArrowLeft")
    page.wait_for_url("**/v3.html")
    page.click("a[rel=prev]")
    page.wait_for_url("**/v2.html")
    page = watched.open("v4.html")
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**/v5.html")  # the dead end v4a is skipped
    page = watched.open("v3.html")
    page.focus("#time")
    page.keyboard.press("ArrowLeft")  # this key press moves the slider
    assert page.url.endswith("v3.html#time=999")


def test_a_part_of_the_code_is_one_click_away(watched):
    page = watched.open("v3.html")
    page.click(".parts a:has-text('_forward_kernel')")
    row = page.query_selector("#forward-_forward_kernel")
    box, frame = row.bounding_box(), page.query_selector(".scroll.code").bounding_box()
    assert frame["y"] <= box["y"] + 30 and box["y"] < frame["y"] + frame["height"]
    assert "forward-_forward_kernel" in page.url


@pytest.mark.parametrize("how", ["hover", "focus"])
def test_a_term_shows_its_definition(watched, how):
    page = watched.open("v24.html")
    term = page.query_selector("a.term:has-text('CTA')")
    getattr(term, how)()
    page.wait_for_selector("#box.on")
    assert "thread block" in page.inner_text("#box") and term.get_attribute("aria-describedby") == "box"
    page.keyboard.press("Escape")
    assert not visible(page, "#box.on")


def test_without_scripts_everything_is_there(browser, site):
    watched = Watched(browser, site, java_script_enabled=False)
    page = watched.page
    page.goto(f"{site.as_uri()}/v3.html")
    assert [each.inner_text().split(":")[0] for each in visible(page, ".parts")] == ["forward.py", "backward.py"]
    assert len(visible(page, ".panel")) == 4 and not visible(page, "button")
    page.goto(f"{site.as_uri()}/index.html")
    assert visible(page, "#chart svg") and not visible(page, "#choices")
    page.close()
