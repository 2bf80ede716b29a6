"""The plots show the numbers of the runs."""

import itertools

import pytest
from test_results import machine, records
from test_results import run as run_of

from common.measure.workloads import Workload
from common.show import results
from common.show.tables import kv_gbps

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
    found = [records("v0_a", 8.0), records("v1_b", 4.0), records("v1a_x", 9.0), records("sdpa-cudnn", 2.0)]
    runs = [
        run_of("few", "2026-01-03", records("v1_b", 1.0), records("flash-4", 1.0)),
        run_of("new", "2026-01-02", *found),
        run_of("old", "2026-01-01", records("v0_a", 5.0), records("v1_b", 5.0)),
    ]
    figure, legend = drawn(monkeypatch, plots.draw_evolution, runs, tmp_path)
    for axes in figure.axes:
        assert [bar.get_height() for bar in axes.patches] == pytest.approx([100 / 8, 100 / 4])
        assert [line.get_ydata()[0] for line in axes.lines] == pytest.approx([100 / 2])
    assert sorted(legend) == ["cuDNN", "stages"]
    assert "commit new" in figure.get_suptitle() and "few" not in figure.get_suptitle()


def test_decoding_shows_the_rates_of_one_query_next_to_a_copys(tmp_path, monkeypatch):
    rates = {("sdpa-cudnn", 1024): 500.0, ("v29_late", 1024): 100.0, ("v34_split", 1024): 700.0, ("v34_split", 4096): 900.0}
    found = []
    for (batch, heads, kv_heads), ((impl, kv_len), gbps) in itertools.product(plots.DECODED, rates.items()):
        work = Workload("fwd", batch, heads, 1, 128, False, "bfloat16", kv_heads=kv_heads, kv_len=kv_len)
        found.append({"impl": impl, **work.record(), "ms": kv_gbps(work.record() | {"ms": 1.0}) / gbps})
    found.append(found[0] | Workload("fwd", 1, 16, 16, 128, False, "bfloat16", kv_len=1024).record())  # 16 queries
    run = results.Run(found, machine("abc") | {"copy_gbps": 800.0})
    figure, legend = drawn(monkeypatch, plots.draw_decoding, run, tmp_path)
    for axes in figure.axes:
        lines = [[(x, round(y)) for x, y in zip(*line.get_data(), strict=True)] for line in axes.lines[:-1]]
        assert lines == [[(1024, 500)], [(1024, 100)], [(1024, 700), (4096, 900)]]
        assert list(axes.lines[-1].get_ydata()) == [800, 800]
    assert legend == ["cuDNN", "v29", "v34", "a copy, read and written"]
