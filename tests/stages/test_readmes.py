"""READMEs of stages have equal headings. In all documents, links lead somewhere, and named files exist."""

import re
from pathlib import Path

import pytest
from cases import sources

import stages

ROOT = Path(__file__).parents[2]
HEADINGS = ["Problem", "Idea", "Derivation", "Algorithm", "Gain", "Limits"]
READMES = sorted([*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("stages/*/README.md")])


@pytest.mark.parametrize("name", [name for name in stages.names() if not stages.is_experiment(name)])
def test_a_stage_s_readme_has_the_usual_headings_its_gain_and_no_lost_note(name):
    readme = (stages.directory(name) / "README.md").read_text()
    assert re.findall(r"^#+ (.*)", readme, re.MULTILINE)[1:] == HEADINGS
    gain = re.search(
        r"^## Gain\n.*^<!-- gain: make readme -->\n.*^<!-- /gain -->$.*^## Limits", readme, re.MULTILINE | re.DOTALL
    )
    assert gain and readme.count("<!-- gain:") == 1
    code = "".join(text for pass_ in ("forward", "backward") for text in sources(name, pass_).values())
    for note in re.findall(r"`(NOTE: .*?)`", readme, re.DOTALL):
        assert " ".join(note.split()) in code


def anchors(path):
    """Return the anchors of a document's headings."""
    headings = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere_and_named_files_exist(document):
    text = document.read_text()
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)]*)\)", prose):
        target, _, anchor = link.partition("#")
        path = document.parent / target if target else document
        assert target.startswith("https:") or (path.exists() and (not anchor or anchor in anchors(path))), link
    for name in re.findall(r"\b(?:common|tests|results|stages)/[\w/-]+\.(?:py|md|json|png)\b", text):
        assert (ROOT / name).exists() or (document.parent / name).exists(), name
    for module in re.findall(r"python -m (common[\w.]*)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
