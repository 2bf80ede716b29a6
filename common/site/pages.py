"""Build the site. `make site` writes the pages to site/, and a browser opens site/index.html from disk.

python -m common.site.pages              # all pages, in a minute or two
python -m common.site.pages --stage v3   # the page of v3, the start page and the documents
"""

import argparse
import ast
import bisect
import multiprocessing
import re
import shutil
import sys
from pathlib import Path

import jinja2
from markupsafe import Markup

import stages
from common.measure import files, terminal
from common.measure.options import add_list
from common.show import front
from common.show.results import CODE, LEGEND, ROOT, origins, runs, same_code
from common.show.story import idea, result, sources
from common.show.tables import PASS_NAMES
from common.show.traces import COLORS
from common.show.tracks import TRACKS
from common.site import charts
from common.site.diffs import changed_parts, rows
from common.site.scenes import MOST_ZOOM, Mark, scenes
from common.site.texts import Texts, colored_file, page_of

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
SELECTED = {"pass": "fwd", "d": "128", "causal": "yes", "s": charts.MEAN}


def drawn(marks: list[Mark], end: float, grouped: bool) -> Markup:
    """Return the marks of a lane as SVG, in a rectangle of 1000 by 100.

    Args:
        end: the end of the time axis.
        grouped: whether marks with equal tooltips become one path. This saves space if there are thousands of marks.
    """
    paths = {}
    for place, mark in enumerate(marks):
        look = f"c{mark.color}" if mark.kind in ("read", "busy") else mark.kind
        key = (look, mark.words) if grouped else (look, mark.words, place)
        x, width = 1000 * mark.start / end, 1000 * (mark.end - mark.start) / end
        y, height = 4 + 92 * mark.top, max(92 * (mark.bottom - mark.top), 10)
        paths.setdefault(key, []).append(f"M{x:.2f} {y:.1f}h{width:.2f}v{height:.1f}h-{width:.2f}z")
    return Markup("").join(
        Markup('<path class="{}" data-words="{}" d="{}"/>').format(look, words, "".join(path))
        for (look, words, *_), path in paths.items()
    )


def sections(readme: str) -> dict[str, str]:
    """Return the sections of a stage's README by heading. "traffic" and "numbers" are the generated tables."""
    found = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL))
    table = re.compile(r"<!-- traffic:.*?<!-- /traffic -->\n?", re.DOTALL)
    found["traffic"] = "".join(table.findall(found["Problem"]))
    gain = re.search(r"<!-- gain:.*?<!-- /gain -->\n?", found["Gain"], re.DOTALL)
    found["numbers"], found["Gain"] = gain[0], found["Gain"].replace(gain[0], "")
    found["Idea"] = re.sub(r"^!\[.*\]\(\S*/traces/.*\n", "", found["Idea"], flags=re.MULTILINE)  # the page draws it
    return found | {"Problem": table.sub("", found["Problem"])}


def neighbors(name: str) -> tuple[str | None, str | None]:
    """Return the stages before and after a stage, leaving out dead ends."""
    line = [each for each in stages.names() if not stages.is_dead_end(each)]
    place = bisect.bisect_left(line, stages.position(name), key=stages.position)
    last = place + (name in line)
    return line[place - 1] if place else None, line[last] if last < len(line) else None


def summary(path: Path) -> str:
    """Return the first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


class Site:
    """Empty a folder, and write the pages into it."""

    def __init__(self, out: Path):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        self._out = out
        self._texts = Texts(out)
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE / "templates"), autoescape=True, trim_blocks=True
        )
        self._templates.globals["drawn"] = drawn

    def _write(self, page: str, template: str, **values):
        terms = {anchor: self._texts.definitions[anchor] for anchor in sorted(self._texts.used)}
        files.replace(self._out / page, self._templates.get_template(template).render(terms=terms, **values))
        self._texts.page()

    def _html(self, text: str, source: Path) -> Markup:
        return Markup(self._texts.html(text, source))

    def start(self):
        """Write the start page."""
        found = runs()
        cards = []
        for name in stages.names():
            _, words, lines = front.start(name)
            words = Markup(self._texts.inline(words, ROOT / "README.md"))
            passes = [(PASS_NAMES[pass_], *both) for pass_, both in front.numbers(found, name)[0].items()]
            cards.append({
                "version": stages.version(name), "idea": words, "lines": lines, "passes": passes,
                "dead_end": stages.is_dead_end(name), "track": stages.track(name),
            })  # fmt: skip
        spec = charts.speed_spec(charts.speeds())
        titles = [(page_of(path), path.read_text().partition("\n")[0].lstrip("# ")) for path in LISTED]
        self._write(
            "index.html", "index.html", title="How attention got fast", cards=cards, spec=charts.compiled(spec),
            chart=Markup(charts.svg(spec)), choices=CHOICES, selected=SELECTED, first=stages.version(stages.names()[0]),
            measured="; ".join(origins(found)), documents=titles, tracks=TRACKS, pass_names=PASS_NAMES, legend=LEGEND.values(),
        )  # fmt: skip

    def document(self, path: Path):
        """Write the page of a Markdown file."""
        text = path.read_text()
        body = self._html(text, path)
        self._write(page_of(path), "document.html", title=text.partition("\n")[0].lstrip("# "), body=body)

    def glossary(self):
        """Write the page with all terms of the glossary."""
        body = Markup("<h1>Glossary</h1>") + Markup("").join(
            Markup('<p id="{}">{}</p>').format(anchor, Markup(words)) for anchor, words in self._texts.definitions.items()
        )
        self._texts.page()
        self._write("glossary.html", "document.html", title="Glossary", body=body)

    def step(self, name: str, found):
        """Write the page of a stage. `found` has the stage's scenes."""
        parent, readme = stages.parent(name), stages.directory(name) / "README.md"
        before, after = neighbors(name)
        dropped = [each for each in stages.names() if stages.is_dead_end(each) and stages.parent(each) == name]
        self._texts.page()
        words = Markup(self._texts.inline(idea(name).rstrip("."), readme))
        told = result(parent, name) if parent else {}
        parts = {title: self._html(text, readme) for title, text in sections(readme.read_text()).items()}
        self._write(
            f"{stages.version(name)}.html", "step.html", title=f"{stages.version(name)}: {idea(name)}".replace("`", ""),
            version=stages.version(name), parent=parent and stages.version(parent), idea=words,
            before=before and stages.version(before), after=after and stages.version(after),
            dropped=[(stages.version(each), idea(each).removeprefix("A dead end: ").rstrip(".")) for each in dropped],
            dead_end=stages.is_dead_end(name),
            colors=len(COLORS), most_zoom=MOST_ZOOM, zoom=next((scene.zoom for scene in found if scene.units), 1),
            sections=parts, traffic=parts["traffic"], scenes=found, pass_names=PASS_NAMES,
            gains_time_alone=bool(found) and all(scene.moves_the_same for scene in found),
            diffs=self._diffs(name, parent) if parent else [],
            result=told, sources=sources([line for lines in told.values() for line in lines]),
        )  # fmt: skip

    def _diffs(self, name, parent):
        """Return the comparison of each file that differs from the parent's file, for the passes that the stage changes."""
        return [
            self._diff(name, parent, pass_, file)
            for pass_ in CODE
            if not same_code(name, parent, pass_)
            for file in stages.files(CODE[pass_], parent, name)
            if stages.source(parent, file) != stages.source(name, file)
        ]

    @staticmethod
    def _diff(name, parent, pass_, file):
        blocks = []
        for row in rows(stages.source(parent, file), stages.source(name, file)):
            if not blocks or (blocks[-1]["folded"], blocks[-1]["head"]) != (row.folded, row.head):
                blocks.append({"folded": row.folded, "head": row.head, "rows": []})
            blocks[-1]["rows"].append(row)
        return {"pass_": pass_, "file": file, "parts": changed_parts(parent, name, file), "blocks": blocks}

    def code(self):
        """Write a page for each file or directory that texts link to."""
        while self._texts.files:
            path = self._texts.files.pop()
            if path.is_dir():
                inside = [each for each in sorted(path.glob("*.py")) if each.name != "__init__.py"]
                items = [Markup("<li><code>{}</code>: {}</li>").format(each.name, summary(each)) for each in inside]
                body = Markup("<ul>") + Markup("").join(items) + Markup("</ul>")
            else:
                body = Markup(colored_file(path))
            where = path.relative_to(ROOT)
            heading = Markup("<h1>{}</h1>").format(where)
            self._write(self._texts.page_of_file(path), "document.html", title=str(where), body=heading + body)

    def assets(self):
        """Copy the styles and scripts."""
        for path in (HERE / "assets").iterdir():
            shutil.copyfile(path, self._out / path.name)
        files.replace(self._out / "vega.js", charts.library())


def build(out: Path, names: list[str], recorded: list[str] | None = None):
    """Write the site to a folder, with the pages of the stages `names`.

    Args:
        recorded: the stages whose pages show the accesses of their kernels. None means all stages in `names`.
    """
    recorded = names if recorded is None else recorded
    site = Site(out)
    site.assets()
    site.start()
    for path in DOCUMENTS:
        site.document(path)
    site.glossary()
    with multiprocessing.Pool(min(2, multiprocessing.cpu_count())) as pool:
        found = dict(zip(recorded, pool.imap(scenes, recorded), strict=True))
        for name in names:
            site.step(name, found.get(name, []))
    site.code()


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    parser = argparse.ArgumentParser(prog="python -m common.site.pages", description="Build the site. LIST is comma-separated.")
    add_list(parser, "--stage", ",".join(stages.names()))
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="folder to write the site to (default: site)")
    options = parser.parse_args(argv)
    build(options.out, options.stage)
    print(options.out / "index.html")


if __name__ == "__main__":
    main(sys.argv[1:])
