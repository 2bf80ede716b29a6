"""READMEs of stages have equal headings.

In all documents, links lead somewhere, and named files exist.
"""

import re
from pathlib import Path

import pytest
from cases import sources

import stages

ROOT = Path(__file__).parents[2]
HEADINGS = ["Problem", "Idea", "Derivation", "Algorithm", "Gain", "Limits"]
READMES = sorted([*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("stages/*/README.md")])


@pytest.fixture(params=stages.names())
def name(request):
    return request.param


@pytest.fixture
def readme(name):
    return (stages.directory(name) / "README.md").read_text()


def test_headings_are_the_same_in_every_stage(readme):
    assert re.findall(r"^#+ (.*)", readme, re.MULTILINE)[1:] == HEADINGS


def test_gain_has_its_markers_once_and_in_its_section(readme):
    section = readme.partition("## Gain")[2].partition("## Limits")[0]
    begin, end = "<!-- gain: make readme -->", "<!-- /gain -->"
    assert [readme.count(begin), readme.count(end)] == [1, 1]
    assert re.search(f"^{begin}\n.*^{end}$", section, re.MULTILINE | re.DOTALL)


def test_notes_that_are_quoted_are_in_the_code(name, readme):
    code = "".join(text for pass_ in ("forward", "backward") for text in sources(name, pass_).values())
    for note in re.findall(r"`(NOTE: .*?)`", readme, re.DOTALL):
        assert " ".join(note.split()) in code


def anchors(path):
    """Return the anchors of a document's headings."""
    headings = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(params=READMES, ids=lambda path: str(path.relative_to(ROOT)))
def document(request):
    return request.param


def test_links_lead_somewhere(document):
    lost = []
    code = False
    for number, line in enumerate(document.read_text().splitlines(), start=1):
        code ^= line.startswith("```")
        for link in [] if code else re.findall(r"\]\(([^)]*)\)", line):
            target, _, anchor = link.partition("#")
            path = document.parent / target if target else document
            if not target.startswith("https:") and (not path.exists() or anchor and anchor not in anchors(path)):
                lost.append(f"{document.relative_to(ROOT)}:{number}: {link} leads nowhere")
    assert not lost, "\n".join(lost)


def test_files_and_modules_that_are_named_exist(document):
    text = document.read_text()
    for name in re.findall(r"\b(?:common|tests|results|stages)/[\w/-]+\.(?:py|md|json|png)\b", text):
        assert (ROOT / name).exists() or (document.parent / name).exists(), name
    for module in re.findall(r"python -m (common[\w.]*)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
