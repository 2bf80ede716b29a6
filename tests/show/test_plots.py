"""The plots show the numbers of the runs."""

import itertools

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


def test_evolution_leaves_out_a_stage_with_its_parent_s_code(tmp_path, monkeypatch):
    figure, _ = drawn(monkeypatch, plots.draw_evolution, results.runs(), tmp_path)
    assert "Left out: stages with their parent's code" in figure.legends[0].get_title().get_text()
    for axes, pass_ in zip(figure.axes, results.CODE, strict=True):
        names = {stages.version(name): name for name in stages.line()}
        shown = {names[label.get_text()] for label in axes.get_xticklabels()}
        assert shown > {V0, V1}
        assert not [name for name in shown if results.same_code(name, stages.parent(name) or "", pass_)]


def test_labels_of_evolution_cover_nothing(tmp_path, monkeypatch):
    """The box of a number touches no other text, and no line where the line can be seen, which is outside of the bars."""
    figure, _ = drawn(monkeypatch, plots.draw_evolution, results.runs(), tmp_path)
    figure.canvas.draw()
    for axes in figure.axes:
        bars = [bar.get_window_extent() for bar in axes.patches]
        labels = [label.get_window_extent() for label in (*axes.texts, *axes.get_xticklabels(), axes.title)]
        assert len(axes.texts) == len(bars) > 10
        assert not [(a, b) for a, b in itertools.combinations(labels, 2) if a.overlaps(b)]
        heights = [axes.transData.transform((0, line.get_ydata()[0]))[1] for line in axes.lines]
        for label, bar in zip(labels, bars, strict=False):
            inside = bar.y0 <= label.y0 and label.y1 <= bar.y1 and bar.x0 <= label.x0 and label.x1 <= bar.x1
            assert inside or not any(label.y0 <= height <= label.y1 for height in heights)


def test_biases_are_those_without_a_mask(tmp_path, monkeypatch):
    def record(seq_len, causal, **biases):
        return {"seq_len": seq_len, "causal": causal, "head_dim": 128, "bias": biases}

    measured = [record(2048, False, v1=0.5, other=-0.25), record(4096, True, v1=1), record(4096, False, v1=0.25, other=0.125)]
    machine = run_of("new", "2026-01-02", records(V1, 1.0)).machine
    found = {"records": [*measured, measured[0] | {"head_dim": 64}], "machine_info": machine}
    figure, legend = drawn(monkeypatch, plots.draw_biases, found, tmp_path)
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[50, 25], [-25, 12.5]]
    assert [list(line.get_xdata()) for line in figure.axes[0].lines] == [[2048, 4096]] * 2 and sorted(legend) == ["other", "v1"]
