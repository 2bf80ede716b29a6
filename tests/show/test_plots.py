"""Each implementation has the same look in every plot, and each plot has one legend."""

import itertools

import pytest
from test_results import records
from test_results import run as run_of

import stages
from common.measure.workloads import Workload
from common.show import results
from common.show.decoding import kv_bytes
from common.show.scaling import Scaling, load_ring, ring_files

plots = pytest.importorskip("common.show.plots")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The figures of the committed runs, as {name: figure}, and the directory where they are saved."""
    directory = tmp_path_factory.mktemp("plots")
    figures = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots.plt, "close", figures.append)
        plots.draw_all(directory)
    names = ["evolution", "speed-forward", "speed-backward", "memory", "decoding"]
    names += [path.stem for path in ring_files() if Scaling(load_ring(path)).is_drawn()]
    yield dict(zip(names, figures, strict=True)), directory
    plots.plt.close("all")


def main_line():
    records = [record for run in reversed(results.runs()) for record in run.records]
    return [name for name in results.implementations(records) if not stages.is_dead_end(name)]


def test_lines_that_lie_on_each_other_share_a_label():
    lines = {"a": [(1, 64.0), (2, 64.0)], "b": [(1, 64.0), (2, 99.0)], "c": [(1, 65.0), (2, 65.0)], "d": [(1, 64.0)]}
    assert plots.together(lines) == [["a", "c", "d"], ["b"]]


def test_stages_that_follow_each_other_are_named_in_short():
    names = ["sdpa-cudnn", "flash-3", "flash-4", *(f"v{number}_x" for number in range(12))]
    assert plots.in_short([*names[:3], "v2_x", "v4_x", "v5_x", "v6_x", "v11_x"], names) == (
        "cuDNN, FlashAttention-3, FlashAttention-4, v2, v4 to v6, v11"
    )
    assert plots.in_short(["v3_x", "v4_x"], names) == "v3, v4"


def test_drawing_writes_what_is_committed(drawn):
    figures, directory = drawn
    written = {path.name for path in directory.iterdir()}
    assert written == {f"{name}.png" for name in figures} == {path.name for path in results.PLOTS.glob("*.png")}


def test_no_two_implementations_look_the_same():
    names = main_line()
    styles = [plots.style(name, names) for name in names]
    assert len({style["color"] for style in styles}) == len(names)
    looks = {(str(style["linestyle"]), style["marker"], style["markerfacecolor"] == "white") for style in styles}
    assert len(looks) == len(names), "without colors"


def test_evolution_has_one_legend_of_all_that_it_draws(drawn):
    figure = drawn[0]["evolution"]
    (legend,) = figure.legends
    assert not any(axes.get_legend() for axes in figure.axes)
    runs = results.runs()
    rates = [(other, results.rate(runs, other, pass_, 128)) for other in main_line() for pass_ in ("fwd", "bwd")]
    keys = {(other, results.number(runs, rate[1])) for other, rate in rates if rate}
    of_stages = {key for other, key in keys if stages.position(other)}
    assert len(of_stages) == 1  # test_evolution_numbers_the_runs_of_its_bars has two runs
    libraries = {results.spoken(other) for other, key in keys if key in of_stages and not stages.position(other)}
    shown = [text.get_text() for text in legend.get_texts()]
    assert sorted(shown) == sorted(["stages", *libraries])  # sorted, because matplotlib chooses the order


def test_memory_has_a_line_for_each_amount_and_names_everything_on_it(drawn):
    for axes, pass_ in zip(drawn[0]["memory"].axes, ("fwd", "bwd"), strict=True):
        records = plots._selected(results.runs(), main_line(), pass_, 128, True)
        points = plots._points(records, main_line(), "peak_extra_mib", plots.MIB_IN_MB)
        groups = plots.together(points)
        names = [text.get_text().replace("\n", " ") for text in axes.get_legend().get_texts()]
        assert names == [plots.in_short(group, main_line()) for group in groups]
        assert {name for group in groups for name in group} == {*points} and len(axes.lines) == len(groups) < 10


@pytest.mark.parametrize("name", ["speed-forward", "speed-backward"])
def test_speed_has_few_lines_and_a_name_at_the_end_of_each(drawn, name):
    figure = drawn[0][name]
    peers = [results.spoken(other) for other in main_line() if not stages.position(other)]
    pass_ = "fwd" if name == "speed-forward" else "bwd"
    measured = [name for name in main_line() if results.rate(results.runs(), name, pass_, 128)]
    assert not figure.legends
    for axes in figure.axes:
        labels = [text.get_text() for text in axes.texts]
        assert sorted(labels) == sorted([*peers, "v0", "v1", "v3", "v5", results.spoken(measured[-1])])
        assert len(axes.lines) == len(labels)
        heights = sorted(text.xy[1] for text in axes.texts)
        low, high = axes.get_ylim()
        assert all(above - below >= 0.03 * (high - low) for below, above in itertools.pairwise(heights))


def decoding(impl, gbps, batch, heads, kv_heads, seq_len, kv_len):
    workload = Workload("fwd", batch, heads, seq_len, 128, False, "bfloat16", kv_heads=kv_heads, kv_len=kv_len)
    return {"impl": impl, **workload.record(), "ms": kv_bytes(workload) / gbps / 1e6}


def test_decoding_shows_the_rates_of_one_query_next_to_a_copys(tmp_path, monkeypatch):
    models = (1, 16, 16), (8, 32, 8)
    rates = {("sdpa-cudnn", 1024): 500.0, ("v29_late", 1024): 100.0, ("v34_split", 1024): 700.0, ("v34_split", 4096): 900.0}
    records = [decoding(impl, gbps, *model, 1, kv_len) for model in models for (impl, kv_len), gbps in rates.items()]
    records += [decoding("v34_split", 1.0, *models[0], 16, 1024), decoding("v34_split", 1.0, 64, 32, 8, 1, 1024)]
    records.append({**decoding("sdpa-cudnn", 1.0, *models[0], 1, 4096), "failure": "OOM"})
    del records[-1]["ms"]
    figures = []
    monkeypatch.setattr(plots.plt, "close", figures.append)
    machine = {"gpu": "X", "torch": "1", "triton": "2", "commit": "abc", "copy_gbps": 800.0}
    plots.draw_decoding(records, machine, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["decoding.png"]
    (figure,) = figures
    for axes in figure.axes:
        lines = [list(zip(*line.get_data(), strict=True)) for line in axes.lines]
        expected = [[(1024, 500)], [(1024, 100)], [(1024, 700), (4096, 900)]]
        assert [[(x, round(y)) for x, y in line] for line in lines[:-1]] == expected
        assert list(axes.lines[-1].get_ydata()) == [800, 800]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["cuDNN", "v29", "v34", "a copy, read and written"]
    monkeypatch.undo()
    plots.plt.close(figure)


def test_axes_take_most_of_the_width(drawn):
    for name, figure in drawn[0].items():
        figure.draw_without_rendering()
        room_for_names = 0.15 if name.startswith("speed") else 0
        assert sum(axes.get_position().width for axes in figure.axes[:2]) > 0.8 - room_for_names, name


def test_evolution_shows_the_means_of_the_summary(drawn):
    runs, names = results.runs(), main_line()
    assert names[-1] == [name for name in stages.names() if not stages.is_dead_end(name)][-1]
    for axes, pass_ in zip(drawn[0]["evolution"].axes, ("fwd", "bwd"), strict=True):
        rates = {name: measured for name in names if (measured := results.rate(runs, name, pass_, 128))}
        bars = {name: measured for name, measured in rates.items() if stages.position(name)}
        assert [bar.get_height() for bar in axes.patches] == [mean for mean, _ in bars.values()]
        beside = {results.number(runs, run) for _, run in bars.values()}
        of_libraries = [rates[name] for name in rates if name not in bars]
        lines = [mean for mean, run in of_libraries if results.number(runs, run) in beside]
        assert lines and [line.get_ydata()[0] for line in axes.lines] == lines


def test_evolution_numbers_the_runs_of_its_bars(tmp_path, monkeypatch):
    """The plot numbers only the runs whose stages it shows as bars. The oldest run has only a library, so it gets no number."""
    figures = []
    monkeypatch.setattr(plots.plt, "close", figures.append)
    runs = [
        run_of("new", "2026-01-03", records("v1_b", 4.0), records("sdpa-cudnn", 2.0)),
        run_of("middle", "2026-01-02", records("v0_a", 8.0), records("flash-3", 1.0)),
        run_of("old", "2026-01-01", records("flash-4", 1.0)),
    ]
    plots.draw(runs, tmp_path)
    legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert sorted(legend) == ["FlashAttention-3, run [1]", "cuDNN, run [2]", "stages, run [1]", "stages, run [2]"]
    title = figures[0].get_suptitle()
    assert "[1] " in title and "[2] " in title and "[3]" not in title


def test_plots_of_speed_name_only_the_runs_that_they_draw(tmp_path, monkeypatch):
    """They draw v1, which is in `STORY`, and the newest stage, but not v6."""
    figures = []
    monkeypatch.setattr(plots.plt, "close", figures.append)
    runs = [
        run_of("new", "2026-01-03", records("v7_c", 1.0)),
        run_of("middle", "2026-01-02", records("v6_b", 2.0)),
        run_of("old", "2026-01-01", records("v1_a", 4.0), records("v7_c", 1.0)),
    ]
    plots.draw(runs, tmp_path)
    dates = [[run.ended for run in runs if run.ended in figure.get_suptitle()] for figure in figures]
    everything, drawn_ones = [run.ended for run in runs], [runs[0].ended, runs[2].ended]
    assert dates == [everything, drawn_ones, drawn_ones, everything]
