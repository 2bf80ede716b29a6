"""A copy of a kernel gets scopes for Triton's profiler Proton. The right part of Proton's record is kept."""

import pytest

import stages
from common.measure import scopes
from common.runtime import INTERPRETED

SOFTMAX = "forward_softmax.py"


@pytest.mark.parametrize("file", scopes.SCOPES)
def test_scopes_are_around_the_lines_that_they_name(file):
    text = stages.source(scopes.STAGE, file)
    lines = [line.strip() for line in scopes.with_scopes(file, text).split("\n")]
    for name, first, last, _ in scopes.SCOPES[file]:
        begin, end = (lines.index(f'pl.{what}_scope("{name}")') for what in ("enter", "exit"))
        assert lines[begin + 1].startswith(first) and lines[end - 1].startswith(last or first)
    shown = scopes.with_scopes(file, text).split("\n")
    assert "\n".join(line for line in shown if "pl." not in line and not line.endswith(" as pl")) == text


def test_a_line_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="wait"):
        scopes.with_scopes(SOFTMAX, stages.source(scopes.STAGE, SOFTMAX).replace("warpgroup_mma_wait(1, [s])", "something"))


def test_only_the_first_launch_is_recorded():
    assert stages.source(scopes.STAGE, "forward.py").count(scopes.LAUNCHES[0]) == 1


def test_the_kept_record_is_from_the_middle_and_begins_at_zero():
    spans = [{"who": "1: consumer", "what": "softmax", "start": 100.0 * n, "end": 100.0 * n + 50} for n in range(200)]
    kept = scopes.kept(spans)
    assert kept[0]["start"] >= 0 and kept[-1]["end"] <= scopes.CYCLES
    assert len(kept) == scopes.CYCLES / 100 and kept[1]["start"] - kept[0]["start"] == 100


@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs(tmp_path):
    with pytest.raises(SystemExit, match="needs a Hopper GPU"):
        scopes.main([f"--json={tmp_path / 'scopes.json'}"])
