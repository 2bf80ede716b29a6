"""The site's pages have the right content and links. These tests need no browser."""

import html
import itertools
import re

import pytest

pytest.importorskip("vl_convert")

import cases  # noqa: E402
from built import LAST, VERSION  # noqa: E402

import stages  # noqa: E402
from common.measure.trace import trace  # noqa: E402
from common.measure.workloads import Workload  # noqa: E402
from common.show import results, story  # noqa: E402
from common.show.results import CODE  # noqa: E402
from common.show.story import result  # noqa: E402
from common.show.tables import PASS_NAMES  # noqa: E402
from common.show.traces import Mark  # noqa: E402
from common.site import charts, scenes, texts, tree  # noqa: E402
from common.site.diffs import blocks  # noqa: E402
from common.site.pages import STEPS, build, drawn, sections  # noqa: E402


def check(site, left_out=()):
    """Check the links, anchors, styles, scripts and pictures of all pages. Links may lead to pages that are left out."""
    pages = {path.name: path.read_text() for path in site.glob("*.html")}
    anchors = {page: re.findall(r' id="(.*?)"', text) for page, text in pages.items()}
    for page, text in pages.items():
        assert len(set(anchors[page])) == len(anchors[page]), page
        for link in re.findall(r'<a [^>]*href="(.*?)"', text):
            target, _, anchor = link.partition("#")
            if not re.match("https?:", link) and target not in left_out:
                assert (site / target).exists(), (page, link)
                assert not anchor or anchor in anchors[target or page], (page, link)
        loads = set(re.findall(r'<(?:script|img|link rel="stylesheet")[^>]* (?:src|href)="(.*?)"', text))
        assert loads and not [place for place in loads if ":" in place or not (site / place).exists()], page
    return pages


def test_pages_load_nothing_from_elsewhere_and_links_lead_somewhere(site):
    steps = {f"{stages.version(name)}.html" for name in stages.names()}
    pages = check(site, steps - {"v3.html", f"{VERSION}.html"})
    assert all(f'href="{step}"' in pages["index.html"] for step in steps)


def test_a_term_is_explained_where_it_is_first_named(site):
    shown = texts.Texts(site).html("TMA loads a tile, and a second tile. `TMA` and [a TMA](x.md) are no text.", texts.GLOSSARY)
    assert re.findall(r'data-term="(.*?)">(.*?)<', shown) == [("term-tma", "TMA"), ("term-tile", "tile")]


def test_readmes_are_shown_as_a_whole_with_their_formulas(site):
    converted = texts.Texts(site)
    for name in stages.names()[::4]:
        readme = (path := stages.directory(name) / "README.md").read_text()
        text = re.sub(r"^(!\[|## ).*\n", "", readme.partition("\n## ")[2], flags=re.MULTILINE).partition("\n")[2]
        assert set(text.split()) <= set(" ".join(sections(readme).values()).split()), name
        formulas = re.findall(r"<math.*?</math>", converted.html(readme, path), re.DOTALL)
        assert len(formulas) == len(re.findall(r"^```math|\$`", re.sub(r"`\$", "", readme), re.MULTILINE)), name
        assert not [formula for formula in formulas if "\\" in formula], name


@pytest.mark.parametrize("pass_", CODE)
def test_a_diff_holds_both_files(pass_):
    for name in stages.names()[1 :: 1 if cases.LONG else 12]:
        old, new = (stages.source(stage, f"{CODE[pass_]}.py") for stage in (stages.parent(name), name))
        found = blocks(old, new)
        rows = [row for _, block in found for row in block]
        for side, text in (("old", old), ("new", new)):
            lines = [getattr(row, side) for row in rows if getattr(row, side)]
            assert [line.number for line in lines] == list(range(1, len(lines) + 1)), name
            assert [html.unescape(re.sub("<.*?>", "", line.code)) for line in lines] == text.splitlines(), name
        assert all(row.old.code == row.new.code for row in rows if not row.changed), name
        assert not any(row.changed for kind, block in found for row in block if kind == "equal"), name


def test_a_diff_marks_the_words_that_change_and_links_stages():
    ((_, (row,)),) = blocks("total = first + second  # v5, v99\n", "total = first - second  # v5, v99\n")
    assert re.findall("<mark>(.*?)</mark>", row.old.code + row.new.code) == [
        '<span class="o">+</span>',
        '<span class="o">-</span>',
    ]
    assert '<a href="v5.html">v5</a>' in row.new.code and "v99.html" not in row.new.code
    ((_, rows),) = blocks("a = 1\nbc = [2]\n", "completely(different)\nbc = [3]\n")
    assert [(row.old.number, row.new.number, row.old.code.count("<mark>")) for row in rows] == [(1, 1, 0), (2, 2, 1)]


def test_a_panel_has_all_bytes_of_the_trace_to_scale():
    workload, name = Workload("fwd", 1, 1, 1024, 64, True, "float16"), LAST
    recorded = trace(stages.load(name), workload)
    panel = next(each for each in scenes.scenes(name)[0].accesses if each.stage == name)
    shown = [int(mark.words.split(": ")[-1].split()[0].replace(",", "")) for marks in panel.lanes.values() for mark in marks]
    lanes = [access.nbytes for access in recorded.accesses if recorded.tensors[access.tensor][1] > 1]
    assert sorted(shown) == sorted(lanes)
    assert panel.megabytes == pytest.approx(sum(access.nbytes for access in recorded.accesses) / 1e6)
    mark = Mark("read", 2, 25.0, 50.0, 0.5, 1.0, "program 2 reads <Q>")
    path = '<path class="c2" data-words="program 2 reads &lt;Q&gt;" d="M250.00 50.0h250.00v46.0h-250.00z"/>'
    assert drawn([mark], 100.0) == path


def test_pictures_of_a_shared_counter_show_who_takes_a_tile_and_who_is_idle():
    """Both stages compute the same tiles. With fixed tiles, an SM is idle for half of the time; with the counter, none is."""
    (scene,) = scenes.scenes(stages.resolve("v25_shared_counter"))
    fixed, counter = scene.shares
    taken, colors = [], []  # of each stage: lane -> tiles; tile -> color
    for panel in scene.shares:
        taken.append({lane: [mark.words.partition(":")[0] for mark in marks] for lane, marks in panel.lanes.items()})
        colors.append({mark.words.partition(":")[0]: mark.color for marks in panel.lanes.values() for mark in marks})
    assert len(taken[0]) == 4 and all(len(tiles) == 2 for lanes in taken for tiles in lanes.values())
    assert taken[0] != taken[1] and colors[0] == colors[1] and len(colors[0]) == 8
    assert min(fixed.busy.values()) < 0.6 and min(counter.busy.values()) > 0.95
    assert counter.end < 0.8 * fixed.end


def test_a_long_line_of_code_wraps_behind_its_indentation():
    assert texts.hanging("    ") == "--hang: 8ch" and texts.hanging(" " * 40) == f"--hang: {texts.DEEP}ch"
    shown = texts.colored('def f():\n    """a\n\n    b"""\n    return 1\n', "python")
    assert re.findall(r'<span class="line" style="--hang: (\d+)ch">', shown) == ["4", "8", "4", "8", "8"]
    assert html.unescape(re.sub("<.*?>", "", shown)).strip() == 'def f():\n    """a\n\n    b"""\n    return 1'
    ((_, (_, row)),) = blocks("if a:\n        b = 1\n", "if a:\n  b = 1\n")
    assert (len(row.old.spaces), len(row.new.spaces)) == (8, 2)


def test_a_page_begins_with_what_the_step_changes(site):
    """If parent and stage move the same bytes, the SM's timeline comes before the accesses."""
    text = {name: (site / f"{name}.html").read_text() for name in ("v3", VERSION)}
    words = {name: html.unescape(re.sub(r"\s+", " ", re.sub("<.*?>", "", page))) for name, page in text.items()}
    titles = {name: re.findall(r'<h2 id="(\w+)"', page) for name, page in text.items()}
    for lines in result(stages.resolve("v2"), stages.resolve("v3")).values():
        assert all(line in words["v3"].partition("Problem")[0] for line in lines)
    wanted = ["trace", "gain", "moves", "diff", "derivation"]  # links lead to a step's derivation
    assert [title for title in titles["v3"] if title in wanted] == wanted
    assert titles[VERSION].index("units") < titles[VERSION].index("trace") and "Backward: same code." in words[VERSION]
    assert re.findall(r'<a rel="(?:prev|next)" href="(\w+).html"', text["v3"]) == ["v2", "v4"]


def test_links_follow_the_tree(site):
    """A page leads to its parent, to the next step of its line, and to the tracks that start from it."""
    shown, found = (site / f"{VERSION}.html").read_text(), stages.children(LAST)
    later = [stages.version(name) for name in found if not stages.is_dead_end(name) and not stages.is_experiment(name)]
    assert all(f'href="{version}.html"' in shown.partition("</nav>\n</header>")[0] for version in later)
    nodes = tree.nodes()
    assert [node.version for node in nodes if node.kind == "trunk"] == [*map(stages.version, stages.line())]
    assert {node.version for node in nodes} == {stages.version(name) for name in STEPS}
    assert len({(node.x, node.y) for node in nodes}) == len(nodes)
    labels = [(node.x, node.y + 10, node.y + 18) for node in nodes if node.kind != "dead"]  # the middles of labels
    for node in nodes[1:]:
        x, start, end = map(int, re.fullmatch(r"M(\d+) (-?\d+)V(-?\d+)H\d+", node.edge).groups())
        assert not [label for label in labels if label[0] == x and min(start, end) < label[2] and max(start, end) > label[1]]
        parent = next(each for each in nodes if (each.x, each.y) == node.parent)
        assert parent.version == stages.version(stages.parent(stages.resolve(node.version)))


def test_cards_show_the_gain_on_the_stage_s_own_workloads(site):
    cards = re.findall(r'<a class="card" href="(\w+).html">(.*?)</a>', (site / "index.html").read_text(), re.DOTALL)
    assert [version for version, _ in cards] and len(cards) == len(STEPS)
    for version, card in cards:
        found = story.gains(stages.resolve(version))
        assert [PASS_NAMES[pass_] for pass_ in found] == re.findall("<i>((?:for|back)ward)</i>", card), version
        assert all(str(gain) in card for gain, _ in found.values() if gain)


def shown(rows, work):
    """Return the implementations that have a bar for pass, D, mask and S."""
    return {row["impl"] for row in rows if (row["pass"], row["d"], row["causal"], row["s"]) == work}


def test_the_chart_says_where_its_bars_are_from():
    found = charts.speeds()
    assert {"sdpa-cudnn", "flash-3", LAST} <= {row["impl"] for row in found}
    assert all(re.search("NVIDIA .*, commit [0-9a-f]{12}, ", row["run"]) and row["tflops"] > 0 for row in found)


@pytest.mark.parametrize("pass_", CODE)
@pytest.mark.parametrize("d", results.HEAD_DIMS)
def test_the_chart_leaves_out_stages_that_a_workload_does_not_concern(pass_, d):
    rows, same = charts.speeds(), same_as_parent(pass_)
    sentences = charts.left_out(rows, STEPS)
    for causal, s in itertools.product((True, False), (charts.MEAN, *results.LENGTHS)):
        bars, words = shown(rows, (pass_, d, causal, s)), sentences[f"{pass_} {d} {'yes' if causal else 'no'} {s}"]
        ours = [name for name in bars if stages.position(name)]
        assert ours and not [name for name in ours if stages.parent(name) in bars and name in same]
        assert not [name for name in ours if stages.track(name) in ("decode", "groups", "lengths", "wide")]  # other workloads
        assert d == 64 or not [name for name in ours if stages.track(name) == "shortbwd"]  # its benchmark has D = 64
        assert sum(map(int, re.findall(r"(\d+) stages", words))) == len(STEPS) - len(ours), words
        assert re.search(rf"\d+ stages with their parent's {CODE[pass_]}; .* other workloads \(.*wide\)", words)


def same_as_parent(pass_):
    return [name for name in STEPS if stages.parent(name) and results.same_code(name, stages.parent(name), pass_)]


def test_the_chart_leaves_out_no_stage_that_a_workload_concerns():
    rows, same, work = charts.speeds(), same_as_parent("fwd"), Workload("fwd", 16, 16, 1024, 128, True, "float16")
    measured = {name for run in results.runs() for name in run.names if run.times(name, [work])}
    own = {name for name in measured & {*stages.line()} if name not in same}
    assert len(own) > 10 and own <= shown(rows, ("fwd", 128, True, 1024))


@pytest.mark.long
def test_every_page_has_the_traces_of_its_step(tmp_path):
    build(tmp_path / "site", stages.names())
    check(tmp_path / "site")
    for name in stages.names():
        panels = (tmp_path / "site" / f"{stages.version(name)}.html").read_text().count('<figure class="panel')
        assert panels >= len(results.passes(name)) * (2 if stages.parent(name) else 1), name
