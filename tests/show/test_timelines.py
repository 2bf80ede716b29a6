"""The pictures of an SM's timeline show the right stages."""

import pytest

import stages
from common.runtime import INTERPRETED

timelines = pytest.importorskip("common.show.timelines")

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the model runs in the interpreter")


def test_a_picture_has_a_lane_for_each_unit_and_a_colour_for_each_partition(tmp_path, monkeypatch, capsys):
    figures = []
    monkeypatch.setattr(timelines, "TIMELINES", tmp_path / "plots")
    monkeypatch.setattr(timelines.plt, "close", figures.append)
    timelines.main(["--stage=v28", "--seq-len=512", "--pass=bwd"])
    (path,) = (tmp_path / "plots").iterdir()
    assert path.name == "v28-bwd-d64-full-s512.png" and str(path) in capsys.readouterr().out
    (axes,) = figures[0].axes
    lanes = [label.get_text() for label in axes.get_yticklabels()]
    assert [lane.split("\n")[0] for lane in lanes] == list(timelines.UNITS)
    assert all(lane.endswith(" % busy") for lane in lanes)
    partitions = [text.get_text() for text in axes.get_legend().get_texts()]
    assert partitions == ["1: consumer", "2: consumer", "3: dq_consumer", "4: producer"]
    assert "cycles for 16384 scores" in axes.get_title(loc="left")
    timelines.plt.close("all")


def test_committed_pictures_are_of_gluon_stages():
    drawn = {path.stem for path in timelines.TIMELINES.glob("*.png") if "-" not in path.stem}  # users' pictures have "-"
    assert drawn and drawn - {"recorded"} <= {name.split("_")[0] for name in timelines.GLUON}


def test_a_stage_without_gluon_is_refused():
    with pytest.raises(SystemExit, match="v3_fa2_causal does not have Gluon kernels for both passes"):
        timelines.main(["--stage=v3"])


def test_help_names_a_stage_that_the_command_takes(capsys):
    with pytest.raises(SystemExit):
        timelines.main(["--help"])
    example = capsys.readouterr().out.split("such as ")[1].split()[0]
    assert stages.resolve(example) in timelines.GLUON
