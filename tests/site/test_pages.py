"""The site's pages have the right content, links and sizes. These tests need no browser."""

import html
import re
import time
from html.parser import HTMLParser

import pytest

pytest.importorskip("vl_convert")

import stages  # noqa: E402
from common.measure.trace import trace  # noqa: E402
from common.measure.workloads import Workload  # noqa: E402
from common.show import results  # noqa: E402
from common.show.results import CODE  # noqa: E402
from common.show.story import result  # noqa: E402
from common.site import charts, scenes, texts  # noqa: E402
from common.site.diffs import rows  # noqa: E402
from common.site.pages import build, drawn, sections  # noqa: E402

STEPS = [(stages.parent(name), name) for name in stages.names() if stages.parent(name)]
LARGEST = 1.5e6  # maximum bytes of a page with its styles, scripts and pictures


class Links(HTMLParser):
    """The links, loaded files and anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.anchors = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors += [attrs["id"]] if "id" in attrs else []
        self.links += [attrs["href"]] if tag == "a" else []
        if tag in ("script", "img") and "src" in attrs:
            self.loads.append(attrs["src"])
        if tag == "link" and attrs["rel"] == "stylesheet":
            self.loads.append(attrs["href"])


@pytest.fixture(scope="module")
def pages(site):
    return {path.name: Links(path.read_text()) for path in site.glob("*.html")}


def test_every_step_and_document_has_a_page(pages):
    assert {f"{stages.version(name)}.html" for name in stages.names()} <= set(pages)
    assert {"index.html", "glossary.html", "reading.html", "operator.html", "measuring.html", "contributing.html"} <= set(pages)


def test_links_lead_somewhere(pages, site):
    broken = []
    for page, found in pages.items():
        assert len(set(found.anchors)) == len(found.anchors), page
        for link in found.links:
            target, _, anchor = link.partition("#")
            if re.match("https?:", link):
                continue
            known = pages.get(target or page)
            if not known and not (site / target).exists() or anchor and anchor not in known.anchors:
                broken.append((page, link))
    assert broken == []


def test_nothing_is_loaded_from_elsewhere_and_no_page_is_large(pages, site):
    for page, found in pages.items():
        assert not [place for place in found.loads if ":" in place], page
        total = sum((site / name).stat().st_size for name in [page, *set(found.loads)])
        assert total <= LARGEST, f"{page}: {total} bytes"


def test_each_term_of_the_glossary_is_defined_and_explained_where_it_is_named(pages, site):
    found = texts.Texts(site)
    assert len(found.definitions) > 30
    assert set(found.definitions) <= set(pages["glossary.html"].anchors)
    shown = found.html("TMA loads a tile, and a second tile. `TMA` and [a TMA](x.md) are no text.", texts.GLOSSARY)
    assert re.findall(r'data-term="(.*?)">(.*?)<', shown) == [("term-tma", "TMA"), ("term-tile", "tile")]


@pytest.mark.parametrize("name", stages.names()[::4])
def test_a_readme_is_shown_as_a_whole_with_its_formulas(name, site):
    path = stages.directory(name) / "README.md"
    readme, shown = path.read_text(), set(" ".join(sections(path.read_text()).values()).split())
    text = re.sub(r"^(!\[|## ).*\n", "", readme.partition("\n## ")[2], flags=re.MULTILINE)
    assert [word for word in text.partition("\n")[2].split() if word not in shown] == []
    formulas = re.findall(r"<math.*?</math>", texts.Texts(site).html(readme, path), re.DOTALL)
    assert len(formulas) == len(re.findall(r"^```math|\$`", re.sub(r"`\$", "", readme), re.MULTILINE))
    assert not [formula for formula in formulas if "\\" in formula]


@pytest.mark.parametrize(("parent", "name"), STEPS[::4])
@pytest.mark.parametrize("pass_", CODE)
def test_a_diff_holds_both_files(parent, name, pass_):
    old, new = (stages.source(stage, f"{CODE[pass_]}.py") for stage in (parent, name))
    found = rows(old, new)
    for side, text in (("old", old), ("new", new)):
        lines = [getattr(row, side) for row in found if getattr(row, side)]
        assert [line.number for line in lines] == list(range(1, len(lines) + 1))
        assert [html.unescape(re.sub("<.*?>", "", line.code)) for line in lines] == text.splitlines()
    equal = [row for row in found if not row.changed]
    assert all(row.old.code == row.new.code for row in equal)
    assert not [row for row in found if row.changed and row.folded and not row.head]
    head = [line for row in found if row.head for line in (row.old, row.new) if line]
    assert not [line for line in head if re.search(r"^(def |@)", re.sub("<.*?>", "", line.code))]


def test_a_diff_marks_the_words_that_change():
    (row,) = rows("total = first + second\n", "total = first - second\n")
    assert "<mark>" in row.old.code and re.sub("<.*?>", "", re.search("<mark>(.*?)</mark>", row.new.code)[1]) == "-"
    assert rows("a = 1\n", "completely(different)\n")[0].old.code.count("<mark>") == 0


def test_notes_link_to_the_step_that_answers_them():
    (row,) = rows("# NOTE: slow; v5 is faster, v99 is not here\n", "# NOTE: slow; v5 is faster, v99 is not here\n")
    assert '<a href="v5.html">v5</a>' in row.new.code and "v99.html" not in row.new.code


@pytest.mark.parametrize("name", ["v2_fa1_tiling", "v25_second_q"])
def test_a_panel_has_all_bytes_of_the_trace(name):
    workload = Workload("fwd", 1, 1, 1024, 64, True, "float16")
    recorded = trace(stages.load(name), workload)
    panel = next(each for each in scenes.scenes(name)[0].accesses if each.stage == name)
    shown = [int(mark.words.split(": ")[-1].split()[0].replace(",", "")) for marks in panel.lanes.values() for mark in marks]
    lanes = [access.nbytes for access in recorded.accesses if recorded.tensors[access.tensor][1] > 1]
    assert sorted(shown) == sorted(lanes)
    assert panel.megabytes == pytest.approx(sum(access.nbytes for access in recorded.accesses) / 1e6)


def body(site, name):
    """Return the page of a stage as text, and the titles of its sections."""
    text = (site / f"{stages.version(stages.resolve(name))}.html").read_text()
    return html.unescape(re.sub(r"\s+", " ", re.sub("<.*?>", "", text))), re.findall(r'<h2 id="(\w+)"', text)


def test_a_page_begins_with_what_the_step_changes(site):
    words, titles = body(site, "v3")
    parent, name = map(stages.resolve, ("v2", "v3"))
    for lines in result(parent, name).values():
        assert all(line in words.partition("Problem")[0] for line in lines)
    assert "1.40 times more FLOPs" in words and "The number in square brackets names the run." in words
    assert titles.index("trace") < titles.index("gain") < titles.index("moves") < titles.index("diff")
    assert "Backward: same code." in body(site, "v25")[0] and "track: ×" in body(site, "v38")[0]


@pytest.mark.parametrize(("name", "first"), [("v3", "trace"), ("v7", "trace"), ("v25", "units")])
def test_a_page_begins_with_the_picture_of_what_changes(site, name, first):
    """A page shows the accesses first. If parent and stage move the same bytes, it shows the SM's timeline first."""
    titles = body(site, name)[1]
    assert min(titles.index(title) for title in ("trace", "units") if title in titles) == titles.index(first)


def test_neighbors_are_on_the_main_line_and_dead_ends_apart(site, pages):
    for name in stages.names():
        text = (site / f"{stages.version(name)}.html").read_text()
        around = re.findall(r'<a rel="(?:prev|next)" href="(\w+).html"', text)
        assert around and not any(stages.is_dead_end(stages.resolve(version)) for version in around)
    assert re.findall(r'rel="(?:prev|next)" href="(\w+)', (site / "v4a.html").read_text()) == ["v4", "v5"]
    apart = re.search("Tried and dropped:(.*?)</span>", (site / "v4.html").read_text(), re.DOTALL)[1]
    assert re.findall(r'href="(\w+)', apart) == ["v4a", "v4b"]


def test_marks_are_drawn_to_scale():
    mark = scenes.Mark("read", 2, 25.0, 50.0, 0.5, 1.0, "program 2 reads <Q>")
    assert drawn([mark], 100.0, False) == (
        '<path class="c2" data-words="program 2 reads &lt;Q&gt;" d="M250.00 50.0h250.00v46.0h-250.00z"/>'
    )
    later = scenes.Mark("read", 2, 75.0, 100.0, 0.5, 1.0, mark.words)
    assert drawn([mark, later], 100.0, True).count("<path") == 1
    assert drawn([mark, later], 100.0, False).count("<path") == 2


def test_the_chart_has_every_implementation_and_says_where_it_is_from():
    found = charts.speeds()
    measured = {row["impl"] for row in found}
    of_runs = {record["impl"] for run in results.runs() for record in run.records}
    assert of_runs & set(stages.names()) <= measured and "sdpa-cudnn" in measured
    assert all(re.search("NVIDIA .*, commit [0-9a-f]{12}, ", row["run"]) and row["tflops"] > 0 for row in found)
    keys = [tuple(row[name] for name in ("impl", "pass", "d", "causal", "s")) for row in found]
    assert len(set(keys)) == len(keys)


@pytest.mark.long
def test_everything_is_built_in_time(tmp_path):
    """`make site` takes at most two minutes, and each page has the traces of its step."""
    began = time.monotonic()
    build(tmp_path / "site", stages.names())
    assert time.monotonic() - began < 120
    for name in stages.names():
        page = tmp_path / "site" / f"{stages.version(name)}.html"
        panels = page.read_text().count('<figure class="panel')
        assert panels >= len(scenes.passes(name)) * (2 if stages.parent(name) else 1), name
        assert page.stat().st_size + (tmp_path / "site" / "site.css").stat().st_size < LARGEST, name
