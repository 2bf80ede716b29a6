"""The plots: every line has its label, and no two labels lie on each other."""

import pytest

import stages
from common.show import results


def test_lines_that_end_together_share_a_label():
    plots = pytest.importorskip("common.show.plots")
    heights = {"a": 0.5, "b": 0.1, "c": 0.501, "d": 0.1}
    assert plots.together(heights, 0.004) == [["a", "c"], ["b", "d"]]


@pytest.mark.parametrize("positions", [[0.5, 0.5, 0.5], [0.9, 1.0, 0.99], [0.0, 0.01, 0.6], [0.1, 0.5, 0.9]])
def test_labels_are_spread_in_order_and_stay_inside(positions):
    plots = pytest.importorskip("common.show.plots")
    moved = plots.spread(positions, 0.1)
    pairs = sorted(zip(positions, moved, strict=True))
    assert all(after[1] - before[1] >= 0.1 - 1e-6 for before, after in zip(pairs, pairs[1:], strict=False))
    assert all(-1e-6 <= place <= 1 + 1e-6 for place in moved)
    if positions == [0.1, 0.5, 0.9]:
        assert moved == positions


def test_plots_label_every_implementation(tmp_path, monkeypatch):
    plots = pytest.importorskip("common.show.plots")
    records, machine = results.load_run(results.RUN)
    labels = {}
    monkeypatch.setattr(plots.plt, "close", lambda figure: labels.update({
        text.get_text(): None for axes in figure.axes for text in axes.texts
    }))  # fmt: skip
    plots.draw(records, machine, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.png" for name in ("speed-forward", "speed-backward", "gain", "memory")
    }
    shown = {name for label in labels for name in label.replace("\n", " ").split(", ")}
    for name in results.implementations(records):
        assert stages.is_dead_end(name) or name.removeprefix("sdpa-").split("_")[0] in shown, name
