"""`make carry` brings an edit of a stage to all stages that descend from it, and changes nothing else in them."""

import subprocess

import pytest

import stages
from common.show import carry
from common.show.merge import carried

V0, V1, V2, V2A, V3, ONE1 = STAGES = ["v0_first", "v1_second", "v2_third", "v2a_dead_end", "v3_fourth", "one1_branch"]
HEADER = '"""What the file does."""\n\nimport math\n'
PARTS = "\n# why 1\nONE = 1\n\n\ndef helper(x):\n    # the reason\n    return x + ONE\n"
KERNEL = "\n\n@jit\ndef kernel(x):\n    a = helper(x)\n    b = a * 2\n    c = b * 3\n    d = c * 4\n    return d\n"
FORWARD = "\n\ndef forward(x):\n    return kernel(x)\n"
OWN = KERNEL.replace("    return d", "    # NOTE: v9 is faster\n    return d + 1")
BACKWARD = {"backward.py": "import math\n"}
TEXTS = {  # v1 changes the kernel's end; v2 moves definitions to another file; v3 changes the kernel's beginning
    V0: BACKWARD | {"forward.py": HEADER + PARTS + KERNEL + FORWARD},
    V1: BACKWARD | {"forward.py": HEADER.replace("What", "Change from v0: what") + PARTS + OWN + FORWARD},
    V2: BACKWARD | {"forward.py": HEADER + "from .forward_part import helper\n" + OWN + FORWARD, "forward_part.py": PARTS[1:]},
}
TEXTS[V2A] = TEXTS[V2] | {"forward.py": TEXTS[V2]["forward.py"].replace("    c =", "    # NOTE: v3 is better\n    c =")}
TEXTS[V3] = TEXTS[V2] | {"forward.py": TEXTS[V2]["forward.py"].replace("helper(x)\n", "helper(x) + 3\n")}
TEXTS[ONE1] = TEXTS[V2]


def git(*arguments):
    command = ["git", "-c", "user.name=n", "-c", "user.email=e", *arguments]
    subprocess.run(command, cwd=stages.__path__[0], capture_output=True, check=True)


def commit():
    git("add", ".")
    git("commit", "-qm", "change")


def code():
    """Return the code of all stages in the working tree."""
    return {
        name: {path.name: path.read_text() for path in stages.directory(name).glob("*.py") if path.name[0] in "fb"}
        for name in STAGES
    }


def edited(texts, old, new):
    """Return texts with `new` in the place of `old`, which they have once."""
    assert sum(text.count(old) for text in texts.values()) == 1
    return {file: text.replace(old, new) for file, text in texts.items()}


def edit(stage, old, new):
    """Replace text in a stage's files."""
    carry.write(stage, edited(code()[stage], old, new))


def run(*arguments):
    """Run the command, and return its exit status."""
    try:
        carry.main(list(arguments))
    except SystemExit as end:
        return end.code
    return 0


@pytest.fixture(autouse=True)
def _tree(tmp_path, monkeypatch):
    """A repository with the stages of `TEXTS`."""
    monkeypatch.setattr(stages, "__path__", [str(tmp_path / "stages")])
    for name, texts in TEXTS.items():
        (tmp_path / "stages" / name).mkdir(parents=True)
        for file, text in (texts | {"__init__.py": 'PARENT = "v2"\n' * (name == ONE1), "README.md": name}).items():
            (stages.directory(name) / file).write_text(text)
    git("init", "-q", "..")
    commit()


def test_an_edit_reaches_all_descendants(capsys):
    """The edit changes a function that v2 has moved, and the middle of one that v1 and v3 have changed."""
    edit(V0, "x + ONE", "x + ONE + ONE")
    edit(V0, "c = b * 3", "c = b * 33")
    assert run("v0") == 0
    for name, texts in TEXTS.items():
        assert code()[name] == edited(edited(texts, "x + ONE", "x + ONE + ONE"), "b * 3", "b * 33")
    assert capsys.readouterr().out.splitlines() == [
        f"{V1}: merged forward.py", f"{V2}: merged forward.py; merged forward_part.py",
        f"{V2A}: copied forward.py; copied forward_part.py", f"{V3}: merged forward.py; copied forward_part.py",
        f"{ONE1}: copied forward.py; copied forward_part.py",
    ]  # fmt: skip


def test_a_committed_edit_of_a_later_stage_leaves_earlier_stages_and_siblings_alone(capsys):
    edit(V2, "x + ONE", "x - ONE")
    commit()
    edit(V3, "return d + 1", "return d + 7")
    commit()
    before = code()
    assert run(V2) == 2 and "has no change since HEAD" in capsys.readouterr().err
    assert run(V2, "--since=HEAD~2") == 0
    assert code() == before | {name: edited(before[name], "x + ONE", "x - ONE") for name in (V2A, V3, ONE1)}


def test_a_conflict_stops_the_carry_until_it_is_resolved(capsys):
    """The resolved text goes to the children."""
    edit(V0, "return d", "return d - 1")  # v1 has changed the same line
    assert run("v0") == 1
    output = capsys.readouterr()
    assert output.out == f"stages/{V1}/forward.py:20: conflict\n" and "CONTINUE=yes" in output.err
    marked = stages.source(V1, "forward.py")
    theirs = f"||||||| {V0} before\n    return d\n=======\n    return d - 1\n>>>>>>> {V0} after\n"
    assert f"<<<<<<< {V1}\n    # NOTE: v9 is faster\n    return d + 1\n{theirs}" in marked
    assert code() == TEXTS | {V0: code()[V0], V1: TEXTS[V1] | {"forward.py": marked}}
    resolved = edited(TEXTS[V1], "return d + 1", "return d + 1 - 1")["forward.py"]
    tries = ((marked, ":20 has a conflict"), ("def f(:\n", ":1 has a syntax error"), (resolved, "a carry is in progress"))
    for text, said in tries:
        (stages.directory(V1) / "forward.py").write_text(text)
        assert run("v0" if text == resolved else "--continue") == 2
        assert said in capsys.readouterr().err
    assert run("--continue") == 0
    changed = {name: edited(TEXTS[name], "return d + 1", "return d + 1 - 1") for name in STAGES[1:]}
    assert code() == changed | {V0: code()[V0]}
    assert run("--continue") == 2 and "no carry is in progress" in capsys.readouterr().err


def test_abort_restores_all_stages_but_the_edited_one():
    edit(V0, "    a = helper(x)", "    a = -helper(x)")  # v3 has changed the same line
    (stages.directory(V0) / "forward_new.py").write_text("def new():\n    pass\n")
    mine = code()[V0]
    assert run("v0") == 1 and code()[V1] != TEXTS[V1] and "<<<<<<< " in stages.source(V3, "forward.py")
    assert run("--abort") == 0
    assert code() == TEXTS | {V0: mine}


def test_notes_stay_where_they_are():
    """The edit adds a NOTE and removes one. Neither is carried, and the children's NOTEs keep their places."""
    edit(V1, "    # NOTE: v9 is faster\n", "")
    edit(V1, "    b = a * 2\n", "    # NOTE: v2 is shorter\n    b = a * 2\n    b += 1\n")
    edit(V1, "    d = c * 4\n    return d + 1", "    return 4 * c + 1")  # around v1's NOTE, next to v2a's
    assert run("v1") == 0
    for name in STAGES[2:]:
        changed = edited(TEXTS[name], "    d = c * 4\n    # NOTE: v9 is faster\n    return d + 1",
                         "    # NOTE: v9 is faster\n    return 4 * c + 1")  # fmt: skip
        assert code()[name] == edited(changed, "    b = a * 2\n", "    b = a * 2\n    b += 1\n")


def test_new_and_deleted_files_and_definitions():
    """The edit moves the kernel to a new file, adds a function and a constant, and deletes the backward."""
    last = "\n\ndef last():\n    # NOTE: v1 needs none\n    return TWO\n"
    new = HEADER.replace("import math", "from .forward_kernel import kernel\nimport math")
    new += PARTS.replace("ONE = 1\n", "ONE = 1\nTWO = 2\n", 1) + last + FORWARD
    edit(V0, TEXTS[V0]["forward.py"], new)
    (stages.directory(V0) / "forward_kernel.py").write_text('"""The kernel."""\n' + KERNEL)
    (stages.directory(V0) / "backward.py").unlink()
    assert run("v0") == 0
    found = code()
    bare = new.replace("    # NOTE: v1 needs none\n", "").replace("What", "Change from v0: what")
    assert found[V1] == {"forward.py": bare, "forward_kernel.py": '"""The kernel."""\n' + OWN}
    for name in STAGES[2:]:
        assert found[name].keys() == {"forward.py", "forward_part.py", "forward_kernel.py"}
        assert "def kernel" not in found[name]["forward.py"] and "return d + 1" in found[name]["forward_kernel.py"]
        assert "ONE = 1\nTWO = 2\n\n\ndef helper" in found[name]["forward_part.py"]
        assert found[name]["forward_part.py"].endswith("\n\n\ndef last():\n    return TWO\n")
    assert "helper(x) + 3" in found[V3]["forward_kernel.py"] and "NOTE: v3" in found[V2A]["forward_kernel.py"]


F, G, OTHER = (f"\n\ndef {name}():\n    return {number}\n" for name, number in (("f", 1), ("g", 2), ("own", 3)))
DELETED = "=======\n>>>>>>> parent has deleted this\n"


@pytest.mark.parametrize(("old", "new", "child", "made"), [
    pytest.param(
        ["import math\n" + F], ["import abc\nimport math\n\nA = 1\n" + F], ["import math\nimport re\n\nOWN = 1\n" + F],
        ["import abc\nimport math\nimport re\n\nA = 1\n\nOWN = 1\n" + F], id="a variable after the imports",
    ),
    pytest.param(
        [F[2:] + G], [F[2:]], [F[2:] + G.replace("2", "3")],
        [F[2:] + "\n\n<<<<<<< child\ndef g():\n    return 3\n" + DELETED], id="a deleted function that the child has changed",
    ),
    pytest.param(
        [F[2:], "import abc\n" + G], [F[2:]], [F[2:], "import abc\n" + OTHER],
        [F[2:], "<<<<<<< child\nimport abc\n" + DELETED + OTHER], id="a deleted file in which the child has an own function",
    ),
    pytest.param(
        [F[2:] + G, "import abc\n"], [G[2:], "import abc\n" + F], [F[2:] + G], [F[2:] + G],
        id="a move to a file that the child lacks",
    ),
    pytest.param(
        ["import abc\n" + F], ["import re\n" + F.replace("1", "2")], ["import abc\n" + OTHER], ["import abc\n" + OTHER],
        id="a stage that shares no definition with its parent",
    ),
    pytest.param(
        [G[2:], F[2:], F[2:]], [G[2:], F[2:], F[2:].replace("1", "2")], [G[2:], "import re\n" + F], [G[2:], "import re\n" + F],
        id="the name in another file of the parent",
    ),
])  # fmt: skip
def test_edits_of_one_parent(old, new, child, made):
    """Compare texts in memory, for layouts that the stages on disk do not have."""
    files = ("forward.py", "forward_a.py", "forward_b.py")
    old, new, child, made = (dict(zip(files, texts, strict=False)) for texts in (old, new, child, made))
    assert carried(old, new, child, ("child", "parent"))[0] == made


def test_refusals(capsys):
    """An edit of v1's NOTEs alone is no edit. At last, the descendant v2a has an edit of its own, a new file."""
    edit(V1, "# NOTE: v9 is faster", "# NOTE: v9 is slower")
    git("config", "status.showUntrackedFiles", "no")
    for arguments, said in (
        (["v7"], "no stage is called 'v7'"), (["v3"], "no stage descends from v3_fourth"), (["v1", "--since=nothing"], "git "),
        (["v1"], "the code of v1_second has no change since HEAD"),
    ):  # fmt: skip
        assert run(*arguments) == 2 and f"make carry: {said}" in capsys.readouterr().err
    edit(V1, "x + ONE", "x - ONE")
    (stages.directory(V2A) / "backward_new.py").write_text("X = 1\n")
    before = code()
    assert run("v1") == 2 and code() == before
    assert f"commit or undo your edit of stages/{V2A}/backward_new.py first" in capsys.readouterr().err


def test_every_later_stage_gets_an_edit_of_the_first_prepare_kernel(monkeypatch):
    """The real stages: a mend of the oldest `_prepare_kernel` of its kind reaches all copies, and changes nothing else."""
    monkeypatch.undo()
    line = "    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)\n"
    before = {name: carry.present(name) for name in stages.names()}
    have = [name for name in before if "def _prepare_kernel(" in before[name].get("backward_prepare.py", "")]
    source = have[0]
    mended = before | {name: edited(before[name], line, line.replace("*", "+")) for name in have}
    after = {source: mended[source]}
    assert len(list(carry.walk(source, before, after))) == len(carry.descendants(source)) >= len(have) - 1 > 20
    assert after == {name: mended[name] for name in after}
