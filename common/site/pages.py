"""Build the site. `make site` writes the pages to site/, and a browser opens site/index.html from disk.

python -m common.site.pages              # all pages, in a minute or two
python -m common.site.pages --stage v3   # the page of v3, the start page and the documents
"""

import ast
import multiprocessing
import re
import shutil
import sys
from pathlib import Path

import jinja2
import vl_convert
from markupsafe import Markup

import stages
from common.measure import files, terminal
from common.measure.options import add_list
from common.show import front
from common.show.results import CODE, LEGEND, ROOT, origins, passes, runs
from common.show.story import functions, gains, idea, result, sources
from common.show.tables import PASS_NAMES
from common.show.traces import COLORS, Mark
from common.show.tracks import known
from common.site import charts, tree
from common.site.diffs import blocks
from common.site.scenes import MOST_ZOOM, described, scenes
from common.site.texts import Texts, code_page, colored, hanging, page_of

HERE = Path(__file__).parent
OUT = ROOT / "site"
LISTED = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "results" / "README.md"]
DOCUMENTS = [*LISTED, *(path for path in sorted((ROOT / "results").glob("*.md")) if path not in LISTED)]
CHOICES = [
    ("pass", "Pass", [("fwd", "forward"), ("bwd", "backward")]),
    ("d", "D", [("64", "64"), ("128", "128")]),
    ("causal", "Mask", [("yes", "causal"), ("no", "full")]),
    ("s", "S", [(charts.MEAN, "mean of 1024, 4096, 16384"), *((str(2**n), str(2**n)) for n in range(9, 15))]),
]
STEPS = [name for name in stages.names() if not stages.is_experiment(name)]
SELECTED = {"pass": "fwd", "d": "128", "causal": "yes", "s": charts.MEAN}


def drawn(marks: list[Mark], end: float) -> Markup:
    """Return the marks of a lane as SVG, in a rectangle of 1000 by 100. Marks with one tooltip are one path.

    Args:
        end: the end of the time axis.
    """
    paths = {}
    for mark in marks:
        look = f"c{mark.color}" if mark.kind in ("read", "busy") else mark.kind
        x, width = 1000 * mark.start / end, 1000 * (mark.end - mark.start) / end
        y, height = 4 + 92 * mark.top, max(92 * (mark.bottom - mark.top), 10)
        paths.setdefault((look, mark.words), []).append(f"M{x:.2f} {y:.1f}h{width:.2f}v{height:.1f}h-{width:.2f}z")
    path = Markup('<path class="{}" data-words="{}" d="{}"/>')
    return Markup("").join(path.format(*key, "".join(places)) for key, places in paths.items())


def sections(readme: str) -> dict[str, str]:
    """Return the sections of a stage's README by heading. "traffic" and "numbers" are the generated tables."""
    found = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL))
    table = re.compile(r"<!-- traffic:.*?<!-- /traffic -->\n?", re.DOTALL)
    found["traffic"] = "".join(table.findall(found["Problem"]))
    gain = re.search(r"<!-- gain:.*?<!-- /gain -->\n?", found["Gain"], re.DOTALL)
    found["numbers"], found["Gain"] = gain[0], found["Gain"].replace(gain[0], "")
    found["Idea"] = re.sub(r"^!\[.*\]\(\S*/traces/.*\n", "", found["Idea"], flags=re.MULTILINE)  # the page draws it
    return found | {"Problem": table.sub("", found["Problem"])}


class Site:
    """Empty a folder, and write the pages into it."""

    def __init__(self, out: Path):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        self._out = out
        self._texts = Texts(out)
        folder = jinja2.FileSystemLoader(HERE / "templates")
        self._templates = jinja2.Environment(loader=folder, autoescape=True, trim_blocks=True)
        self._templates.globals |= {"drawn": drawn, "described": described, "hanging": hanging}
        self._templates.filters["version"] = stages.version

    def _write(self, page: str, template: str, **values):
        terms = {anchor: self._texts.definitions[anchor] for anchor in sorted(self._texts.used)}
        files.replace(self._out / page, self._templates.get_template(template).render(terms=terms, **values))
        self._texts.used = set()

    def _html(self, text: str, source: Path) -> Markup:
        return Markup(self._texts.html(text, source))

    def start(self):
        """Write the start page."""
        cards = []
        for name in STEPS:
            _, words, lines = front.start(name)
            of_pass = {pass_: [gain or "-", share.percent if share else "-"] for pass_, (gain, share) in gains(name).items()}
            numbers = [(PASS_NAMES[pass_], *map(str, both)) for pass_, both in of_pass.items()]
            cards.append({
                "version": stages.version(name), "idea": Markup(self._texts.inline(words, ROOT / "README.md")), "lines": lines,
                "passes": numbers, "dead_end": stages.is_dead_end(name), "track": stages.track(name),
            })  # fmt: skip
        speeds = charts.speeds()
        spec, left_out = charts.speed_spec(speeds), charts.left_out(speeds, STEPS)
        titles = [(page_of(path), path.read_text().partition("\n")[0].lstrip("# ")) for path in LISTED]
        self._write(
            "index.html", "index.html", title="How attention got fast", cards=cards, spec=vl_convert.vegalite_to_vega(spec),
            chart=Markup(vl_convert.vegalite_to_svg(spec)), choices=CHOICES, selected=SELECTED, first=stages.version(STEPS[0]),
            measured="; ".join(origins(runs())), documents=titles, tracks=known(), pass_names=PASS_NAMES,
            legend=LEGEND.values(), tree=tree.nodes(), left_out=left_out, left_out_first=left_out[" ".join(SELECTED.values())],
        )  # fmt: skip

    def document(self, path: Path):
        """Write the page of a Markdown file."""
        text = path.read_text()
        self._text(page_of(path), text.partition("\n")[0].lstrip("# "), self._html(text, path))

    def _text(self, page: str, title: str, body: Markup):
        self._write(page, "document.html", title=title, body=body)

    def glossary(self):
        """Write the page with all terms of the glossary."""
        term = Markup('<p id="{}">{}</p>')
        terms = [term.format(anchor, Markup(words)) for anchor, words in self._texts.definitions.items()]
        self._text("glossary.html", "Glossary", Markup("<h1>Glossary</h1>") + Markup("").join(terms))

    def step(self, name: str, found):
        """Write the page of a stage. `found` has the stage's scenes."""
        parent, readme = stages.parent(name), stages.directory(name) / "README.md"
        children = [each for each in stages.children(name) if each in STEPS]
        dropped = [each for each in children if stages.is_dead_end(each)]
        later = [each for each in children if each not in dropped]
        after = later[:1] if later and stages.track(later[0]) == stages.track(name) else []
        told = result(parent, name) if parent else {}
        parts = {title: self._html(text, readme) for title, text in sections(readme.read_text()).items()}
        words = Markup(self._texts.inline(idea(name).rstrip("."), readme))
        self._write(
            f"{stages.version(name)}.html", "step.html", title=f"{stages.version(name)}: {idea(name)}".replace("`", ""),
            name=name, parent=parent, after=after, branches=later[len(after) :], idea=words,
            dropped={each: idea(each).removeprefix("A dead end: ").rstrip(".") for each in dropped},
            dead_end=stages.is_dead_end(name), sections=parts, scenes=found, pass_names=PASS_NAMES,
            colors=len(COLORS), most_zoom=MOST_ZOOM, zoom=next((scene.zoom for scene in found if scene.units), 1),
            gains_time_alone=bool(found) and all(scene.moves_the_same for scene in found),
            diffs=self._diffs(name, parent) if parent else [],
            result=told, sources=sources([line for lines in told.values() for line in lines]),
        )  # fmt: skip

    def _diffs(self, name, parent):
        """Return the comparison of each file that differs from the parent's file, for the passes that the stage changes."""
        found = []
        for pass_ in passes(name):
            for file in stages.files(CODE[pass_], parent, name):
                old, new = (stages.source(stage, file) for stage in (parent, name))
                if old != new:
                    before, after = functions(old), functions(new)
                    parts = [part for part in after if before.get(part) != after[part]]
                    found.append({"pass_": pass_, "file": file, "parts": parts, "blocks": blocks(old, new)})
        return found

    def code(self):
        """Write a page for each file or directory that texts link to."""
        for path in sorted(self._texts.files):
            if path.is_dir():
                modules = [each for each in sorted(path.glob("*.py")) if each.name != "__init__.py"]
                about = {each.name: ast.get_docstring(ast.parse(each.read_text())).partition("\n")[0] for each in modules}
                body = self._html("\n".join(f"- `{name}`: {words}" for name, words in about.items()), path)
            else:
                body = Markup(colored(path.read_text(), path.suffix[1:] or path.name))
            title = str(path.relative_to(ROOT))
            self._text(code_page(path), title, Markup("<h1>{}</h1>").format(title) + body)

    def assets(self):
        """Copy the styles and scripts."""
        for path in (HERE / "assets").iterdir():
            shutil.copyfile(path, self._out / path.name)
        files.replace(self._out / "vega.js", vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def build(out: Path, names: list[str]):
    """Write the site to a folder, with the pages of the stages `names`."""
    site = Site(out)
    site.assets()
    site.start()
    for path in DOCUMENTS:
        site.document(path)
    site.glossary()
    with multiprocessing.Pool(min(2, multiprocessing.cpu_count())) as pool:
        for name, found in zip(names, pool.imap(scenes, names), strict=True):
            site.step(name, found)
    site.code()


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    parser = terminal.Parser(prog="python -m common.site.pages", description="Build the site. LIST is comma-separated.")
    add_list(parser, "--stage", ",".join(STEPS))
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="folder to write the site to (default: site)")
    options = parser.parse_args(argv)
    if left_out := [name for name in options.stage if name not in STEPS]:
        parser.error(f"{left_out[0]} is an experiment, and the site has no page for it")
    build(options.out, options.stage)
    print(options.out / "index.html")


if __name__ == "__main__":
    main(sys.argv[1:])
