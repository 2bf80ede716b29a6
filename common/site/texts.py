"""Turn the repository's Markdown into HTML.

Formulas become MathML, links lead to pages of the site, and the glossary's terms are explained where they first occur.
"""

import html
import re
import shutil
from pathlib import Path

from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.anchors import anchors_plugin
from mdit_py_plugins.anchors.index import slugify
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

import stages
from common.show.results import ROOT

GLOSSARY = ROOT / "docs" / "reading.md"
LETTERS = {"B", "H", "S", "D", "P", "O"}  # pages do not explain these terms, because single letters have other meanings too
DEEP = 16  # a wrapped line of code is indented by at most this many characters
PICTURES = (".png", ".svg")


def mathml(formula: str, display: bool) -> str:
    """Convert a formula from LaTeX to MathML."""
    plain = re.sub(r"\\[Bb]igg?[lr]?(?=\\|\(|\)|\[|\]|\|)", "", formula)  # MathML chooses the size of brackets itself
    return convert(plain.replace(r"\textstyle", ""), display="block" if display else "inline")


def page_of(path: Path) -> str:
    """Return the file name of the page that shows a Markdown file or a stage's directory."""
    if path.name == "README.md":
        path = path.parent
    if path == ROOT:
        return "index.html"
    if path.parent == ROOT / "stages":
        return f"{stages.version(path.name)}.html"
    return f"{path.stem.lower()}.html"


class Texts:
    """Turn Markdown into HTML, and collect the terms and files that the texts name.

    Attributes:
        definitions: the glossary's entries as HTML, by anchor.
        used: the anchors of the terms that the current page names. A page explains each term at its first occurrence.
        files: the code files that texts link to.
    """

    def __init__(self, out: Path):
        self._out = out
        self.used: set[str] = set()
        self.files: set[Path] = set()
        self._parser = MarkdownIt("gfm-like", {"linkify": False, "html": True})
        self._parser.use(anchors_plugin, max_level=3)
        self._parser.inline.ruler.before("backticks", "math", _math)
        self._parser.add_render_rule("math", lambda renderer, tokens, at, *_: mathml(tokens[at].content, False))
        self._parser.add_render_rule("fence", lambda renderer, tokens, at, *_: colored(tokens[at].content, tokens[at].info))
        self._parser.core.ruler.push("places", self._places)
        self._parser.core.ruler.push("terms", self._mark_terms)
        _, _, text = GLOSSARY.read_text().partition("## Glossary")
        entries = re.findall(r"^\*\*(.+?)\.\*\* (.*?)(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
        titles = {f"term-{slugify(title.split(',')[0])}": title for title, _ in entries}
        words = (self.inline(f"**{title}.** {words}", GLOSSARY) for title, words in entries)
        self.definitions = dict(zip(titles, words, strict=True))
        terms = {term: anchor for anchor, title in titles.items() for term in title.split(", ") if term not in LETTERS}
        names = sorted(terms, key=len, reverse=True)
        self._anchors = [terms[name] for name in names]  # the anchor of each group of the pattern
        self._pattern = re.compile(rf"(?<![\w/-])(?:{'|'.join(map(_either_case, names))})(?:s|es)?(?![\w-])")

    def html(self, text: str, source: Path) -> str:
        """Return the HTML of a text.

        Args:
            source: the file that has the text. Links in the text are relative to this file.
        """
        found = self._parser.render(text, {"source": source, "explain": True})
        return re.sub(r"<!--.*?-->\n?", "", found, flags=re.DOTALL)

    def inline(self, text: str, source: Path) -> str:
        """Return the HTML of a sentence, without a paragraph around it and without explained terms."""
        return self._parser.renderInline(text, {"source": source, "explain": False})

    def _mark_terms(self, state):
        """Mark each term where a page first names it, except in headings and links."""
        heading = False
        for token in state.tokens:
            heading = token.type == "heading_open" or (heading and token.type != "heading_close")
            if token.type == "inline" and not heading and state.env["explain"]:
                token.children = list(self._with_terms(token.children))

    def _with_terms(self, tokens):
        inside = 0
        for token in tokens:
            inside += {"link_open": 1, "link_close": -1}.get(token.type, 0)
            if token.type != "text" or inside:
                yield token
                continue
            at = 0
            for found in self._pattern.finditer(token.content):
                if (anchor := self._anchors[found.lastindex - 1]) not in self.used:
                    self.used.add(anchor)
                    yield Token("text", "", 0, content=token.content[at : found.start()])
                    link = f'<a class="term" href="glossary.html#{anchor}" data-term="{anchor}">{html.escape(found[0])}</a>'
                    yield Token("html_inline", "", 0, content=link)
                    at = found.end()
            yield Token("text", "", 0, content=token.content[at:])

    def _places(self, state):
        """Let links lead to pages of the site. Copy pictures into the site, and show the copies."""
        folder = state.env["source"].parent
        for token in state.tokens:
            if token.type == "table_open":
                token.attrSet("tabindex", "0")  # so that the arrow keys scroll a wide table
            for child in token.children or []:
                if child.type == "link_open":
                    child.attrSet("href", self._link(child.attrGet("href"), folder))
                if child.type == "image":
                    child.attrSet("src", self._picture((folder / child.attrGet("src")).resolve()))

    def _picture(self, path: Path) -> str:
        """Copy a picture into the site, and return its path there."""
        name = "-".join(path.relative_to(ROOT / "plots").parts)
        (self._out / "pictures").mkdir(exist_ok=True)
        shutil.copyfile(path, self._out / "pictures" / name)
        return f"pictures/{name}"

    def _link(self, target: str, folder: Path) -> str:
        name, _, anchor = target.partition("#")
        if re.match(r"\w+:", target) or not name:
            return target
        path = (folder / name).resolve()
        if path == GLOSSARY and anchor == "glossary":
            return "glossary.html"
        if path.suffix == ".md" or path.parent == ROOT / "stages":
            return page_of(path) + (f"#{anchor}" if anchor else "")
        if path.suffix in PICTURES:
            return self._picture(path)
        self.files.add(path)
        return code_page(path)


def code_page(path: Path) -> str:
    """Return the name of the page that shows a file or lists a directory. `Site.code` writes this page."""
    return f"code-{'-'.join(path.relative_to(ROOT).parts)}.html"


def colored(code: str, language: str) -> str:
    """Return highlighted code, or a formula in "math", as HTML. Code in an unknown language is not highlighted.

    A highlighted line that is too long wraps, with a hanging indent.
    """
    if language == "math":
        return mathml(code.strip(), True)
    try:
        shown = highlight(code, get_lexer_by_name(language), HtmlFormatter(cssclass="code", linespans="line"))
        begins = re.compile(r'<span id="line-\d+">((?:<span class="\w+">)?( *))')
        shown = begins.sub(lambda line: f'<span class="line" style="{hanging(line[2])}">{line[1]}', shown)
    except ClassNotFound:
        shown = f"<pre>{html.escape(code)}</pre>"
    return shown.replace("<pre>", "<pre tabindex=0>", 1)


def hanging(spaces: str) -> str:
    """Return the style of a line of code that begins with `spaces`: how far its rest is indented if the line wraps."""
    return f"--hang: {min(len(spaces) + 4, DEEP)}ch"


def _math(state, silent: bool) -> bool:
    """Parse an inline formula as GitHub writes it: $`…`$."""
    found = re.compile(r"\$`(.+?)`\$", re.DOTALL).match(state.src, state.pos)
    if not found:
        return False
    if not silent:
        state.push("math", "", 0).content = found[1]
    state.pos = found.end()
    return True


def _either_case(term: str) -> str:
    """Return a group of a pattern for a term. A term in lower case may begin with a capital letter."""
    first = term[0]
    if term[1:].islower() or " " in term:
        return f"([{first.upper()}{first.lower()}]{re.escape(term[1:])})"
    return f"({re.escape(term)})"
