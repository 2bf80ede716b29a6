"""`make story` and `make diff` describe each step correctly, and each step follows the rules for steps."""

import re

import pytest
from test_results import records
from test_results import run as run_of

import stages
from common.show import results, story, tracks

OLD, NEW = map(stages.resolve, ("v4", "v5"))
STEPS = [(stages.parent(name), name) for name in stages.names() if stages.parent(name)]


def write_stages(root, monkeypatch, **files):
    """Let the stages be those in a directory. Their forward.py has the given text, and their backward.py is empty."""
    monkeypatch.setattr(stages, "__path__", [str(root)])
    for stage, text in files.items():
        (root / stage).mkdir()
        (root / stage / "__init__.py").write_text(f'"""The idea of {stage}."""\n')
        (root / stage / "forward.py").write_text(text)
        (root / stage / "backward.py").write_text("")


def test_a_change_is_lines_and_the_functions_that_they_are_in(tmp_path, monkeypatch):
    old = "X = 1\n\n\n@cache\ndef a():\n    return 1\n\n\ndef b():\n    return 2\n\n\ndef c():\n    return 3\n"
    new = old.replace("@cache", "@other").replace("    return 3", "    x = 3\n    return x")
    write_stages(tmp_path, monkeypatch, v0_a=old, v1_b=new, v2_c=old.replace("X = 1", "X = 2"))
    assert story.change("v0_a", "v1_b") == story.Change(added=3, removed=2, functions=("a", "c"))
    assert story.change("v0_a", "v2_c") == story.Change(added=1, removed=1, functions=())
    assert story.change("v0_a", "v0_a") == story.Change(added=0, removed=0, functions=())


def test_what_moved_is_no_change(tmp_path, monkeypatch):
    moved = "# why\nX = 1\n\n\ndef a():\n    return 1\n\n\n"
    own = "def b():\n    # NOTE: v1 is faster\n    return 2\n"
    changed = "from .forward_part import a\n\n\n" + own.replace("v1", "v2")
    write_stages(tmp_path, monkeypatch, v0_a=moved + own, v1_b=changed)
    (tmp_path / "v1_b" / "forward_part.py").write_text(moved)
    assert story.change("v0_a", "v1_b") == story.Change(added=1, removed=0, functions=("b",))


def test_caching_delta_stays_a_small_change():
    """v5 changes few lines, because its idea is only to store delta."""
    change = story.change(OLD, NEW)
    assert 0 < change.added + change.removed <= 60
    assert "_forward_kernel" not in change.functions


def test_neighbours_define_what_they_share_in_the_same_order():
    """Functions keep their order. The diff would show a moved function as deleted and added."""
    for old, new in STEPS:
        for file in story.code_files(old, new):
            both = [list(story.functions(stages.source(stage, file))) for stage in (old, new)]
            kept = [[name for name in names if name in both[0] and name in both[1]] for names in both]
            assert kept[0] == kept[1], f"{new}/{file}"
        for pass_ in results.CODE.values():
            assert list(story.functions(stages.source(new, f"{pass_}.py")))[-1] == pass_, new


def told_in_one_line(text):
    """Return wrapped text as one line."""
    return " ".join(text.split())


def test_the_story_fits_on_a_screen(capsys):
    """It has a line for each stage of the trunk and for each track, and ends with a command."""
    story.main([])
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= story.WIDTH and len(shown) <= len(stages.line()) + len(stages.tracks()) + 10
    begins = [line.split()[0] for line in shown if line]
    assert [*map(stages.version, stages.line())] == [word for word in begins if re.fullmatch(r"v\d+", word)]
    assert {*stages.tracks()} <= {*begins} and shown[-1] == "next: make story STAGE=v1"
    words = story.idea("v1_online_softmax").rstrip(".")
    assert re.search(rf"^v1 +{re.escape(words)} +×[\d.]+†? █*[▏▎▍▌▋▊▉]? +×", "\n".join(shown), re.MULTILINE)


@pytest.mark.parametrize("track", [stages.TRUNK, *stages.tracks()])
def test_the_story_of_a_track_has_its_steps(track, capsys):
    line = stages.line(track)
    if track == stages.TRUNK:
        shown = [*story._rows(track)]
    else:
        story.main([f"--track={track}"])
        shown = capsys.readouterr().out.splitlines()
        start = stages.version(stages.parent(line[0]))
        assert shown[-1] == f"next: make diff A={start} B={stages.version(line[0])}"
    assert max(map(len, shown)) <= story.WIDTH
    assert [row.split()[0] for row in shown[1 : 1 + len(line)]] == [*map(stages.version, line)]


def test_the_story_of_a_step_has_all_that_is_known(capsys):
    story.main(["--stage=v4a,v5"])
    shown = capsys.readouterr().out
    told = told_in_one_line(shown)
    assert max(map(len, shown.splitlines())) <= story.WIDTH and "speed: ×" in told
    for name in (stages.resolve("v4a"), NEW):
        assert f"{name} {story.idea(name)} from {OLD}: {story.change(OLD, name)}" in told
        assert all(line in told for lines in story.result(OLD, name).values() for line in lines)
    assert told.endswith("next: make diff A=v4 B=v5")


def test_a_gain_is_that_of_the_stage_s_own_workloads(monkeypatch):
    monkeypatch.setattr(results, "same_code", lambda *_: False)
    monkeypatch.setattr(results, "gain", lambda _, new, old, *where: ((new, old, *where), "run"))
    assert story.gains(NEW)["bwd"] == ((NEW, OLD, "bwd", 128), (NEW, results.FASTEST, "bwd", 128))
    about = tracks.Track("Title", "fwd", "words", "short", {})
    monkeypatch.setattr(stages, "track", lambda name: "one")
    monkeypatch.setattr(tracks, "read", lambda key: about)
    monkeypatch.setattr(tracks, "gain", lambda *each: each)
    assert story.gains(NEW) == {"fwd": (("one", NEW, OLD), ("one", NEW, results.FASTEST))}
    assert story.gains(NEW, "v1_online_softmax")["fwd"][0] == ("one", NEW, "v1_online_softmax")


def test_bars():
    assert [story.bar(share) for share in (0, 1 / 48, 0.5, 1, 1.2)] == [" " * 7, "▏      ", "███    ", "█" * 6 + " ", "█" * 7]


def test_speed_names_its_run_or_says_that_there_is_none():
    both = records(OLD, 4.0, passes=["fwd"]) + records(NEW, 2.0, passes=["fwd"])
    runs = [run_of("new", "2026-01-02", [r for r in both if r["head_dim"] == 64]), run_of("old", "2026-01-01", both)]
    d64, d128 = "×2.00 (D=64, 2.00–2.00)", "×2.00 (D=128, 2.00–2.00)"
    assert story.speed_line(runs[1:], OLD, NEW, "fwd") == f"speed: {d64}, {d128} [X, old]"
    assert story.speed_line(runs, OLD, NEW, "fwd") == f"speed: {d64} [X, new]; {d128} [X, old]"
    assert story.speed_line(runs[:1], OLD, NEW, "fwd") == f"speed: {d64} [X, new]; D=128: no run has both stages"


def test_signs_of_noise_and_changed_code_are_explained_where_they_are(monkeypatch):
    times = [(OLD, 4.0), (f"{OLD} (again)", 4.2), (NEW, 4.1)]
    measured = run_of("x", "2026-01-01", *(records(name, ms, source="0" * 12) for name, ms in times))
    monkeypatch.setattr(results, "runs", lambda: [measured])
    lines = story.step_lines(OLD, NEW)
    assert "        speed: =† (D=64, 0.98–0.98), =† (D=128, 0.98–0.98) [X, x]" in lines
    assert set(results.LEGEND.values()) <= set(story.sources(lines))
    assert not set(results.LEGEND.values()) & set(story.sources(lines[:1]))


def test_diff_asks_what_the_step_gains(capsys):
    story.main(["diff", "v4", "v5"])
    shown = capsys.readouterr().out
    assert "speed" not in shown.partition(f"\n{NEW}\n")[2]
    assert shown.endswith("\n\nWhat does this gain? make diff A=v4 B=v5 GAIN=yes shows it.\n")


def test_diff_shows_the_code_first_and_then_what_it_gained(capsys):
    story.main(["diff", "v4", "v5", "--gain=yes"])
    shown = capsys.readouterr().out
    files = re.findall(r"^\+\+\+ stages/\w+/(\S+)", shown, re.MULTILINE)
    changed = [file for file in story.code_files(OLD, NEW) if stages.source(OLD, file) != stages.source(NEW, file)]
    assert files == [*changed, "__init__.py"]
    lines = story.step_lines(OLD, NEW)
    code, told, end = shown.partition("\n".join(["", NEW, *lines, "", ""]))
    end, following = end.split("next: ")
    assert told and told_in_one_line(end) == told_in_one_line(" ".join(story.sources(lines))) and code.startswith("diff ")
    assert following == "make story STAGE=v6\n"


def test_diff_ends_with_helpers_that_the_parent_does_not_use(tmp_path, monkeypatch):
    """Among them are functions that these helpers call. A file that does not change brings no helpers."""
    imports = "from common.layout import b\nfrom common.kernels.some import {}\nfrom common.operator import c\n\nX = a()\n"
    write_stages(tmp_path, monkeypatch, v0_a=imports.format("a"), v1_b=imports.format("a, d"))
    (tmp_path / "common" / "kernels").mkdir(parents=True)
    bodies = {"a": "return 1", "d": "return e() + a()", "e": "return 2", "f": "return 3"}
    code = "\n\n".join(f"def {name}():\n    {body}\n" for name, body in bodies.items())
    for file in ("layout", "operator", "kernels/some"):
        (tmp_path / "common" / f"{file}.py").write_text(code)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    added = ["+", "+def d():", "+    return e() + a()", "+", "+def e():", "+    return 2"]
    heading = "common/kernels/some.py has what v1 uses and v0 does not:"
    assert story._new_helpers("v0_a", "v1_b").splitlines() == ["", heading, *added]
    assert story._new_helpers("v1_b", "v1_b") == ""


def test_a_file_with_helpers_is_named_once():
    """v2's forward uses functions of two files, and one of them calls another function of the first file."""
    headings = re.findall("^(\\S+) has what", story._new_helpers("v1_online_softmax", "v2_fa1_tiling"), re.MULTILINE)
    assert len(set(headings)) == len(headings) > 1


def test_diff_leaves_out_notes_and_white_space_without_meaning(tmp_path, monkeypatch):
    """The indentation of a statement has a meaning, and that of a line inside brackets or a string has none."""
    old = "def a(x):\n    # NOTE: v1 asks\n    return (1,\n    2)\n\n\ndef b():\n    y =  1\n    return 2\n"
    new = old.replace("    # NOTE: v1 asks\n    return", "    if x:\n        return").replace("    2)", "        2)")
    new = new.replace("y =  1", "y = 1").replace("return 2", "return 3")
    write_stages(tmp_path, monkeypatch, v0_a=old, v1_b=new)

    def changed(exact):
        shown = story._git_diff("v0_a", "v1_b", ["forward.py"], exact).splitlines()
        return [line for line in shown if re.match(r"[-+] ", line)]

    asks, ends = ["+    if x:", "+        return (1,"], ["-    return 2", "+    return 3"]
    assert changed(exact=False) == ["-    return (1,", *asks, *ends]
    noted = ["-    # NOTE: v1 asks", "-    return (1,", "-    2)", *asks, "+        2)"]
    assert changed(exact=True) == [*noted, "-    y =  1", "-    return 2", "+    y = 1", "+    return 3"]


@pytest.mark.parametrize(("given", "said"), [("v4", "v4 and v4 are the same stage"), ("v99", "'v99'")])
def test_diff_of_no_two_stages_fails(given, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        story.main(["diff", "v4", given])
    assert said in f"{stopped.value}{capsys.readouterr().err}"


def test_without_results_the_story_says_so(monkeypatch):
    monkeypatch.setattr(results, "TRAFFIC", results.ROOT / "results" / "not-there.json")
    monkeypatch.setattr(results, "runs", lambda: [])
    monkeypatch.setattr(tracks, "gain", lambda *_: None)
    lines = story.step_lines(OLD, NEW)
    assert lines[-1].strip() == "speed: D=64, D=128: no run has both stages"
    assert story.sources(lines) == ["No run in results/ has speeds."]
