"""The plots show the numbers of the runs."""

import pytest
from test_results import V0, V1, records
from test_results import run as run_of

import stages
from common.show import results

plots = pytest.importorskip("common.show.plots")


def drawn(monkeypatch, draw, *arguments):
    """Call a function that draws, and return its figure."""
    figures = []
    monkeypatch.setattr(plots.plt, "close", figures.append)
    draw(*arguments)
    (figure,) = figures
    return figure, [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.long
def test_drawing_writes_what_is_committed(tmp_path):
    plots.draw_all(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in results.PLOTS.glob("*.png")}


def test_evolution_shows_the_run_with_the_most_stages(tmp_path, monkeypatch):
    found = [records(V0, 8.0), records(V1, 4.0), records(stages.resolve("v4a"), 9.0), records("sdpa-cudnn", 2.0)]
    runs = [
        run_of("few", "2026-01-03", records(V1, 1.0), records("flash-4", 1.0)),
        run_of("new", "2026-01-02", *found),
        run_of("old", "2026-01-01", records(V0, 5.0), records(V1, 5.0)),
    ]
    figure, legend = drawn(monkeypatch, plots.draw_evolution, runs, tmp_path)
    for axes in figure.axes:
        assert [bar.get_height() for bar in axes.patches] == pytest.approx([100 / 8, 100 / 4])
        assert [line.get_ydata()[0] for line in axes.lines] == pytest.approx([100 / 2])
    assert sorted(legend) == ["cuDNN", "stages"]
    assert "commit new" in figure.get_suptitle() and "few" not in figure.get_suptitle()


def test_biases_are_those_without_a_mask(tmp_path, monkeypatch):
    def record(seq_len, causal, **biases):
        return {"seq_len": seq_len, "causal": causal, "head_dim": 128, "bias": biases}

    measured = [record(2048, False, v1=0.5, other=-0.25), record(4096, True, v1=1), record(4096, False, v1=0.25, other=0.125)]
    machine = run_of("new", "2026-01-02", records(V1, 1.0)).machine
    found = {"records": [*measured, measured[0] | {"head_dim": 64}], "machine_info": machine}
    figure, legend = drawn(monkeypatch, plots.draw_biases, found, tmp_path)
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[50, 25], [-25, 12.5]]
    assert [list(line.get_xdata()) for line in figure.axes[0].lines] == [[2048, 4096]] * 2 and sorted(legend) == ["other", "v1"]
