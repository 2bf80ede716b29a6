"""The site's pages load in Chromium. Their controls change the pictures. Readers with impaired vision can read them."""

import os
import re
import shutil

import pytest

playwright = pytest.importorskip("playwright.sync_api")
axe_playwright = pytest.importorskip("axe_playwright_python.sync_playwright")
pytest.importorskip("vl_convert")

WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 380, "height": 800}
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def page(site):
    """A page of Chromium, at first of a telephone's width."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not path:
        pytest.skip("no Chromium is installed; on Debian and Ubuntu: apt-get install chromium, or set CHROMIUM to its path")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses root
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=options)
        found = browser.new_page(viewport=NARROW)
        found.set_default_timeout(10_000)
        yield found
        browser.close()


@pytest.fixture
def opened(page, site):
    """A function that loads a page of the site. There must be no error, no warning and no request to a network."""
    noted = []
    events = {
        "console": lambda message: message.type in ("error", "warning") and noted.append(message.text),
        "pageerror": lambda error: noted.append(str(error)),
        "request": lambda request: request.url.startswith(("file:", "data:")) or noted.append(request.url),
    }
    for event, note in events.items():
        page.on(event, note)

    def load(address, size=WIDE):
        page.set_viewport_size(size)
        page.goto("about:blank")  # otherwise the page would not load again if only the part after # changes
        page.goto(f"{site.as_uri()}/{address}")
        return page

    yield load
    for event, note in events.items():
        page.remove_listener(event, note)
    assert noted == []


def visible(page, selector):
    return [each for each in page.query_selector_all(selector) if each.is_visible()]


def test_pages_open_and_fit_a_phone(opened):
    for name in ("index", "glossary", "measuring", "results", "v3", "v25"):
        width = opened(f"{name}.html", NARROW).evaluate("document.documentElement.scrollWidth")
        assert width <= NARROW["width"], name


@pytest.mark.parametrize(("name", "scheme"), [
    ("v25", "dark"), *(pytest.param(name, "light", marks=pytest.mark.long) for name in ("index", "glossary", "reading", "v3")),
])  # fmt: skip
def test_everyone_can_read_a_page(opened, name, scheme):
    """The accessibility checker axe finds no serious problem, for example of names, contrast or structure."""
    page = opened(f"{name}.html")
    page.emulate_media(color_scheme=scheme)
    found = axe_playwright.Axe().run(page, options={"resultTypes": ["violations"], "preload": False})
    serious = [each for each in found.response["violations"] if each["impact"] in ("serious", "critical")]
    assert [(each["id"], node["html"][:200]) for each in serious for node in each["nodes"][:3]] == []


def test_a_choice_changes_the_chart_and_the_address(opened):
    def bars():
        page.wait_for_selector("#chart .vega-embed svg, #chart svg.marks")
        page.wait_for_timeout(200)
        return [bar.get_attribute("aria-label") for bar in page.query_selector_all("#chart path[aria-label*='TFLOP']")]

    page = opened("index.html")
    before = bars()
    assert len(before) > 30
    page.select_option("#choices select[name=pass]", "bwd")
    after = bars()
    assert after and after != before and "pass=bwd" in page.url
    page = opened(f"index.html#{page.url.partition('#')[2]}")
    assert bars() == after and page.input_value("#choices select[name=pass]") == "bwd"


def test_the_controls_of_a_step(opened):
    """The buttons choose a pass, the slider moves through both traces, a tooltip names an access, and lines unfold."""
    page = opened("v3.html#time=0")
    assert [each.inner_text() for each in visible(page, ".parts")][0].startswith("forward.py")
    for share in (0, 0.25):  # the veil covers the accesses after the chosen time
        page.fill("#time", str(int(1000 * share)))
        veils = [each.evaluate("each => each.offsetLeft / each.parentElement.offsetWidth") for each in visible(page, ".veil")]
        assert veils == pytest.approx([share, share], abs=0.01)
    end = float(page.query_selector(".panel").get_attribute("data-end"))
    assert float(page.inner_text("#now").split()[0]) == pytest.approx(end / 4, abs=0.01) and "time=250" in page.url
    page.click("#play")
    page.wait_for_function("document.getElementById('time').value > 270")
    page.click("#play")
    assert page.inner_text("#play") == "Play" and f"time={page.input_value('#time')}" in page.url
    page.query_selector("svg[aria-label^='v3_fa2_causal: K'] path").hover()
    page.wait_for_selector("#box.on")
    assert re.match(r"program \d+ reads K, rows \d+ to \d+: [\d,]+ bytes", page.inner_text("#box"))
    count = page.locator(".diff tr:visible").count()
    page.click(".bar button")
    assert page.locator(".diff tr:visible").count() > count
    page.click("button[data-show=bwd]")
    assert [each.inner_text() for each in visible(page, ".parts")][0].startswith("backward.py") and "pass=bwd" in page.url


def test_zoom_widens_the_timelines_and_they_scroll_together(opened):
    page = opened("v25.html")
    field = visible(page, ".zoomed .field")[0]
    page.fill("#zoom", "8")
    width, shown = field.evaluate("each => [each.scrollWidth, each.clientWidth]")
    assert width == pytest.approx(8 * shown, rel=0.02)
    field.evaluate("each => { each.scrollLeft = 300; }")
    page.wait_for_timeout(100)
    assert [each.evaluate("each => each.scrollLeft") for each in visible(page, ".zoomed .field")] == [300, 300]
    assert "zoom=8" in page.url


def test_a_term_shows_its_definition_and_keys_lead_to_steps(opened):
    page = opened("v25.html")
    term = page.query_selector("a.term")
    for show in (term.hover, term.focus):
        show()
        page.wait_for_selector("#box.on")
        assert page.inner_text("#box").startswith(term.inner_text()) and term.get_attribute("aria-describedby") == "box"
        page.keyboard.press("Escape")
        assert not visible(page, "#box.on")
    page = opened("v3.html")
    page.focus("#time")
    page.keyboard.press("ArrowLeft")  # this key press moves the slider
    assert page.url.endswith("v3.html#time=999")
    page.evaluate("document.activeElement.blur()")
    page.evaluate("document.querySelector('a[rel=next]').onclick = () => { document.title = 'followed'; return false; }")
    page.keyboard.press("ArrowRight")
    assert page.title() == "followed"


def test_without_scripts_everything_is_there(page, site):
    bare = page.context.browser.new_page(java_script_enabled=False)
    bare.goto(f"{site.as_uri()}/v3.html")
    assert len(visible(bare, ".panel")) == 4 and len(visible(bare, ".parts")) == 2 and not visible(bare, "button")
    bare.goto(f"{site.as_uri()}/index.html")
    assert visible(bare, "#chart svg") and not visible(bare, "#choices")
