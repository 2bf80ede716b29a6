"""No function differs from the parent's in comments alone. Toy stages show that `make drift` would find one."""

import pytest

import stages
from common.show import drift

F = 'def f(x):\n    """Add."""\n    # why\n    return x + 1\n'
NAMES = ["v0_first", "v1_second", "v2_third"]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes the three stages, each with the given forward.py and other files."""
    monkeypatch.setattr(stages, "__path__", [str(tmp_path)])

    def write(*texts, **parts):
        for name, text in zip(NAMES, texts, strict=True):
            (tmp_path / name).mkdir()
            for file, content in {"__init__": "", "backward": "", "forward": text, **parts.get(name, {})}.items():
                (tmp_path / name / f"{file}.py").write_text(content)

    return write


def test_no_function_differs_from_the_parent_s_in_comments_alone():
    worded, _ = drift.drift()
    assert worded == []


@pytest.mark.parametrize(("old", "new"), [
    ("# why", "# because"), ("Add.", "Add one."), ('    """Add."""\n', ""), ("    # why\n", ""),
    ("x + 1", "(\n        x + 1\n    )"),
])  # fmt: skip
def test_a_difference_in_comments_docstrings_or_layout_alone_is_found(old, new, write, capsys):
    write(F, F, F.replace(old, new))
    assert drift.drift() == ([f"{NAMES[2]}: f in forward.py, from {NAMES[1]}"], [])
    with pytest.raises(SystemExit) as end:
        drift.main()
    assert end.value.code == 1
    assert capsys.readouterr().out.endswith(f" alone. Make them equal:\n  {NAMES[2]}: f in forward.py, from {NAMES[1]}\n")


def test_notes_and_statements_and_other_functions_may_differ(write, capsys):
    write(
        F,
        F.replace("    # why", "    # NOTE: v2 is better\n    # why"),
        F.replace("# why", "# because").replace("1", "2") + "# end\n",
    )
    assert drift.drift() == ([], [])
    drift.main()
    assert capsys.readouterr().out.endswith("\n  none\n")


@pytest.mark.parametrize("between", [F.replace("1", "2"), ""])
def test_a_return_to_an_older_function_is_listed(between, write, capsys):
    write(F, between, F)
    assert drift.drift() == ([], [f"{NAMES[2]}: f in forward.py, as in {NAMES[0]}"])
    drift.main()  # does not fail
    assert f"  {NAMES[2]}: f in forward.py, as in {NAMES[0]}\n" in capsys.readouterr().out
