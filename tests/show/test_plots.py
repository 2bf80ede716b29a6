"""The plots: every implementation can be told from the others, in every figure, by one legend."""

import pytest

import stages
from common.show import results

plots = pytest.importorskip("common.show.plots")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The figures of the committed runs, by name, and the directory that holds them."""
    directory = tmp_path_factory.mktemp("plots")
    figures = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots.plt, "close", figures.append)
        plots.draw(*results.load_runs(results.FLOAT16), directory)
    names = ("evolution", "speed-forward", "speed-backward", "gain", "memory")
    yield dict(zip(names, figures, strict=True)), directory
    plots.plt.close("all")


def main_line():
    records, _ = results.load_runs(results.FLOAT16)
    return [name for name in results.implementations(records) if not stages.is_dead_end(name)]


def test_lines_that_lie_on_each_other_share_a_label():
    lines = {"a": [(1, 64.0), (2, 64.0)], "b": [(1, 64.0), (2, 99.0)], "c": [(1, 65.0), (2, 65.0)], "d": [(1, 64.0)]}
    assert plots.together(lines) == [["a", "c", "d"], ["b"]]


def test_stages_that_follow_each_other_are_named_in_short():
    names = ["sdpa-cudnn", "flash-3", "flash-4", *(f"v{number}_x" for number in range(9))]
    assert plots.in_short([*names[:3], "v2_x", "v4_x", "v5_x", "v6_x", "v8_x"], names) == (
        "cuDNN, FlashAttention-3, FlashAttention-4, v2, v4 to v6, v8"
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
    assert len(looks) == len(names), "without colours"


@pytest.mark.parametrize("name", ["evolution", "speed-forward", "speed-backward", "gain", "memory"])
def test_a_figure_has_one_legend_of_all_that_it_draws(drawn, name):
    figure = drawn[0][name]
    (legend,) = figure.legends
    assert not any(axes.get_legend() for axes in figure.axes)
    shown = [text.get_text() for text in legend.get_texts()]
    stages_of_line = [results.spoken(other) for other in main_line() if stages.position(other)]
    peers = [results.spoken(other) for other in main_line() if not stages.position(other)]
    bars = [f"{pass_}, D={head_dim}" for pass_ in ("forward", "backward") for head_dim in (64, 128)]
    assert shown == {"gain": bars, "evolution": peers}.get(name, peers + stages_of_line)


def test_axes_take_most_of_the_width(drawn):
    for name, figure in drawn[0].items():
        figure.draw_without_rendering()
        assert sum(axes.get_position().width for axes in figure.axes[:2]) > 0.8, name


def test_evolution_shows_the_means_of_the_summary(drawn):
    records, _ = results.load_runs(results.FLOAT16)
    for axes, pass_ in zip(drawn[0]["evolution"].axes, ("fwd", "bwd"), strict=True):
        rates = {name: results.mean_rate(records, name, pass_, 128) for name in main_line()}
        assert [bar.get_height() for bar in axes.patches] == [rates[name] for name in rates if stages.position(name)]
        assert [line.get_ydata()[0] for line in axes.lines] == [rates[name] for name in rates if not stages.position(name)]
