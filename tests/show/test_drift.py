"""No function differs from the parent's in comments alone. Toy stages show that `make drift` would find one."""

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
    worded, _ = drift.drift()
    assert worded == []


@pytest.mark.parametrize(("second", "third", "worded", "returned"), [
    (F, F.replace("# why", "# because"), "from v1_second", None),
    (F, F.replace('    """Add."""\n', ""), "from v1_second", None),
    (F, F.replace("x + 1", "(\n        x + 1\n    )"), "from v1_second", None),
    (f"{F}# NOTE: v2 is better\n", F.replace("why", "because").replace("1", "2"), None, None),
    (F.replace("1", "2"), F, None, "as in v0_first"),
    ("", F, None, "as in v0_first"),
])  # fmt: skip
def test_a_function_that_drifts_is_found(second, third, worded, returned, write, capsys):
    write(F, second, third)
    lines = [[f"{NAMES[2]}: f in forward.py, {found}"] if found else [] for found in (worded, returned)]
    assert list(drift.drift()) == lines
    if worded:
        with pytest.raises(SystemExit):
            drift.main()
    else:
        drift.main()
    shown = capsys.readouterr().out
    assert all(f"  {line}\n" in shown for line in sum(lines, []))
