"""The site's pages load in Chromium. Their controls change the pictures. Readers with impaired vision can read them."""

import functools
import itertools
import os
import re
import shutil

import pytest
from built import VERSION

playwright = pytest.importorskip("playwright.sync_api")
axe_playwright = pytest.importorskip("axe_playwright_python.sync_playwright")
pytest.importorskip("vl_convert")


@pytest.fixture(scope="module")
def browser(site):
    """A function that opens a new page of Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if not path:
        pytest.skip("no Chromium is installed; on Debian and Ubuntu: apt-get install chromium, or set CHROMIUM to its path")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses root
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=path, args=options)
        yield functools.partial(found.new_page, base_url=f"{site.as_uri()}/", viewport={"width": 1440, "height": 900})
        found.close()


@pytest.fixture
def page(browser):
    """A page of the browser. It must have no error and no warning, and make no request to a network."""
    found, noted = browser(), []
    found.on("console", lambda message: message.type in ("error", "warning") and noted.append(message.text))
    found.on("pageerror", lambda error: noted.append(str(error)))
    found.on("request", lambda request: request.url.startswith(("file:", "data:")) or noted.append(request.url))
    yield found
    found.close()
    assert noted == []


def visible(page, selector):
    return [each for each in page.query_selector_all(selector) if each.is_visible()]


def test_pages_open_and_fit_a_phone(page):
    """A long path in a heading breaks, and a long line of an algorithm scrolls in its block. The page does not scroll."""
    page.set_viewport_size({"width": 380, "height": 800})
    page.goto("v3.html")
    for where, what in (("h1", "path_" * 30), (".two section", f"<pre>{'long ' * 30}</pre>")):
        page.eval_on_selector(where, "(each, what) => { each.innerHTML += what; }", what)
        assert page.evaluate("document.documentElement.scrollWidth") <= 380, where
    for name in ("index", "glossary", "measuring", "results", "v3", VERSION, "code-common-operator.py"):
        page.goto(f"{name}.html")
        assert page.evaluate("document.documentElement.scrollWidth") <= 380, name
    shown = page.eval_on_selector_all(".code .line", "lines => lines.filter(each => each.checkVisibility()).length")
    assert shown > 300  # of the page of code, which is the last
    assert page.evaluate("[...document.querySelectorAll('pre')].every(each => each.scrollWidth <= each.clientWidth)")


WIDE = ".scroll, .field, .text table, .text pre"


@pytest.mark.parametrize("width", [380, pytest.param(1200, marks=pytest.mark.long)])
def test_what_goes_on_beyond_its_edge_says_so(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    wide = []
    for name in ("index", "measuring", VERSION):
        page.goto(f"{name}.html")
        page.wait_for_timeout(200)
        for part in visible(page, WIDE):
            goes_on = part.evaluate("each => each.scrollWidth - each.clientWidth - each.scrollLeft > 1")
            hint = part.evaluate("each => (each.closest('.lanes') ?? each).previousElementSibling.textContent")
            faded = part.evaluate("each => getComputedStyle(each).maskImage") != "none"
            assert ("→" in hint, faded) == (goes_on, bool(hint)), (name, hint)
            wide += [part] if goes_on and "←" not in hint else []
        if name == "measuring":
            wide[-1].evaluate("each => { each.scrollLeft = each.scrollWidth; }")
            page.wait_for_timeout(100)
            assert wide[-1].evaluate("each => each.previousElementSibling.textContent") == "← scroll"
    assert wide


BOXES = """([texts, points]) => [texts, points].map(chosen => [...document.querySelectorAll(chosen)].filter(each =>
    each.tagName != "text" || each.textContent).map(each => { const box = each.getBoundingClientRect();
    return [each.textContent || each.tagName, box.left, box.top, box.right, box.bottom]; }))"""


def overlap(a, b):
    """Whether two boxes have more than half a pixel in common, in both directions. A horizontal line has no height."""
    return min(a[3], b[3]) - max(a[1], b[1]) > 0.5 and min(a[4], b[4] + 1) - max(a[2], b[2] - 1) > 0.5


@pytest.mark.parametrize("width", [380, pytest.param(1200, marks=pytest.mark.long)])
def test_numbers_of_a_time_axis_do_not_overlap(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(f"{VERSION}.html")
    for zoom in ("1", "3", "24", "1"):
        page.fill("#zoom", zoom)
        ticks = page.query_selector(".ticks").query_selector_all("span")
        boxes = [tick.bounding_box() for tick in ticks if tick.is_visible()]
        assert len(boxes) > 2 and all(a["x"] + a["width"] < b["x"] for a, b in itertools.pairwise(boxes))


@pytest.mark.parametrize("width", [380, pytest.param(1200, marks=pytest.mark.long)])
def test_labels_cover_no_points_and_no_labels(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    page.goto("index.html")
    for pass_, s in (("fwd", "mean"), ("bwd", "1024"), ("fwd", "512")):
        page.select_option("#choices select[name=pass]", pass_)
        page.select_option("#choices select[name=s]", s)
        page.wait_for_timeout(300)
        for chosen in (("#chart svg text", "#chart svg .mark-rule line"), ("#tree text", "#tree circle")):
            texts, points = page.evaluate(BOXES, chosen)
            assert len(texts) > 10 and points
            pairs = [*itertools.combinations(texts, 2), *itertools.product(texts, points)]
            assert not [(a[0], b[0]) for a, b in pairs if overlap(a, b)], (pass_, s)
        picture = page.query_selector("#chart svg").bounding_box()
        left, right = picture["x"], picture["x"] + picture["width"]
        texts, _ = page.evaluate(BOXES, ("#chart svg text", "none"))
        assert all(left <= text[1] and text[3] <= right for text in texts)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["reading", *(pytest.param(name, marks=pytest.mark.long) for name in ("v3", VERSION, "index"))]
)
@pytest.mark.parametrize("scheme", ["dark", pytest.param("light", marks=pytest.mark.long)])
def test_everyone_can_read_a_page(page, name, scheme):
    """The accessibility checker axe finds no serious problem, for example of names, contrast or structure."""
    page.goto(f"{name}.html")
    page.emulate_media(color_scheme=scheme)
    found = axe_playwright.Axe().run(page, options={"resultTypes": ["violations"], "preload": False})
    serious = [each for each in found.response["violations"] if each["impact"] in ("serious", "critical")]
    assert [(each["id"], node["html"][:200]) for each in serious for node in each["nodes"][:3]] == []


def test_a_choice_changes_the_chart_its_line_and_the_address(page):
    """A line under the chart says which stages it leaves out."""

    def bars():
        page.wait_for_selector("#chart .vega-embed svg, #chart svg.marks")
        page.wait_for_timeout(200)
        return [bar.get_attribute("aria-label") for bar in page.query_selector_all("#chart path[aria-label*='TFLOP']")]

    page.goto("index.html")
    before = bars()
    left_out = r"Left out: \d+ stages with their parent's {}; \d+ stages of tracks for other workloads"
    assert re.match(left_out.format("forward"), page.inner_text("#left-out"))
    page.select_option("#choices select[name=pass]", "bwd")
    after = bars()
    assert re.match(left_out.format("backward"), page.inner_text("#left-out"))
    assert len(before) > 15 < len(after) and after != before and "pass=bwd" in page.url
    page.reload()
    assert bars() == after and page.input_value("#choices select[name=pass]") == "bwd"


def test_the_controls_of_a_step(page):
    """The slider moves through both traces, a tooltip names an access, lines unfold, and buttons choose a pass."""
    page.goto("v3.html#time=0")
    assert visible(page, ".parts")[0].inner_text().startswith("forward.py")
    for share in (0, 0.25):  # the veil covers the accesses after the chosen time
        page.fill("#time", str(int(1000 * share)))
        veils = [each.evaluate("each => each.offsetLeft / each.parentElement.offsetWidth") for each in visible(page, ".veil")]
        assert veils == pytest.approx([share, share], abs=0.01)
    assert "time=250" in page.url
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
    assert visible(page, ".parts")[0].inner_text().startswith("backward.py") and "pass=bwd" in page.url


@pytest.mark.long
def test_zoom_widens_the_timelines_and_they_scroll_together(page):
    page.goto(f"{VERSION}.html")
    field = visible(page, ".zoomed .field")[0]
    page.fill("#zoom", "8")
    width, shown = field.evaluate("each => [each.scrollWidth, each.clientWidth]")
    assert width == pytest.approx(8 * shown, rel=0.02) and "zoom=8" in page.url
    field.evaluate("each => { each.scrollLeft = 300; }")
    page.wait_for_timeout(100)
    assert [each.evaluate("each => each.scrollLeft") for each in visible(page, ".zoomed .field")] == [300, 300]


@pytest.mark.long
def test_a_term_shows_its_definition_and_keys_lead_to_steps(page):
    page.goto("v3.html")
    term = page.query_selector("a.term")
    for show in (term.hover, term.focus):
        show()
        page.wait_for_selector("#box.on")
        assert (
            page.inner_text("#box").startswith(term.inner_text().capitalize())
            and term.get_attribute("aria-describedby") == "box"
        )
        page.keyboard.press("Escape")
        assert not visible(page, "#box.on")
    page.evaluate("document.querySelector('a[rel=next]').onclick = () => { document.title = 'followed'; return false; }")
    page.keyboard.press("ArrowRight")
    assert page.title() == "followed"


@pytest.mark.long
def test_without_scripts_everything_is_there(browser):
    page = browser(java_script_enabled=False)
    page.goto("v3.html")
    assert len(visible(page, ".panel")) == 4 and len(visible(page, ".parts")) == 2 and not visible(page, "button")
    page.goto("index.html")
    assert visible(page, "#chart svg") and not visible(page, "#choices")
