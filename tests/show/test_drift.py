"""No function differs from the parent's in comments alone. Toy stages show that `make drift` would find one."""

import contextlib

import pytest

import stages
from common.show import drift

F = 'def f(x):\n    """Add."""\n    # why\n    return x + 1\n'
NAMES = ["v0_first", "v1_second", "v2_third"]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes the three stages, each with the given forward.py."""
    monkeypatch.setattr(stages, "__path__", [str(tmp_path)])

    def write(*texts):
        for name, text in zip(NAMES, texts, strict=True):
            (tmp_path / name).mkdir()
            for file, content in {"__init__": "", "backward": "", "forward": text}.items():
                (tmp_path / name / f"{file}.py").write_text(content)

    return write


def test_no_function_differs_from_the_parent_s_in_comments_alone():
    assert drift.drift() == []


@pytest.mark.parametrize(("second", "third", "drifts"), [
    (F, F.replace("# why", "# because"), True),
    (F, F.replace('    """Add."""\n', ""), True),
    (F, F.replace("x + 1", "(\n        x + 1\n    )"), True),
    (f"{F}# NOTE: v2 is better\n", F.replace("why", "because").replace("1", "2"), False),
    ("", F, False),
])  # fmt: skip
def test_a_function_that_drifts_is_found(second, third, drifts, write, capsys):
    write(F, second, third)
    with pytest.raises(SystemExit) if drifts else contextlib.nullcontext():
        drift.main()
    assert (f"  {NAMES[2]}: f in forward.py, from {NAMES[1]}\n" in capsys.readouterr().out) == drifts
