"""The plots show the numbers of the runs. Each plot has one legend, or a name at the end of each line."""

import itertools

import pytest
from test_results import records
from test_results import run as run_of

import stages
from common.measure.workloads import Workload
from common.show import results
from common.show.scaling import Scaling, ring_files
from common.show.tables import kv_gbps

plots = pytest.importorskip("common.show.plots")


def drawn(draw, *arguments):
    """Call a function that draws, and return its figures."""
    figures = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots.plt, "close", figures.append)
        draw(*arguments)
    return figures


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """The figures of the committed runs, as {name: figure}, and the directory where they are saved."""
    directory = tmp_path_factory.mktemp("plots")
    names = ["evolution", "speed-forward", "speed-backward", "decoding"]
    names += [path.stem for path in ring_files() if Scaling(results.read(path)).is_drawn()]
    yield dict(zip(names, drawn(plots.draw_all, directory), strict=True)), directory
    plots.plt.close("all")


@pytest.mark.long
def test_drawing_writes_what_is_committed(committed):
    figures, directory = committed
    written = {path.name for path in directory.iterdir()}
    assert written == {f"{name}.png" for name in figures} == {path.name for path in results.PLOTS.glob("*.png")}


@pytest.mark.parametrize("pass_", results.CODE)
def test_speed_has_few_lines_with_their_own_looks_and_a_name_at_the_end_of_each(pass_, committed):
    figure, found = committed[0][f"speed-{results.CODE[pass_]}"], results.runs()
    chosen = plots.chosen(found, pass_)
    assert [results.spoken(name) for name in chosen if stages.position(name)][:-1] == [*plots.STORY]
    looks = {tuple(map(str, plots.style(name, chosen).values())) for name in chosen}
    assert len(looks) == len(chosen) and not figure.legends
    for axes in figure.axes:
        assert sorted(text.get_text() for text in axes.texts) == sorted(map(results.spoken, chosen))
        assert len(axes.lines) == len(chosen)
        heights = sorted(text.xy[1] for text in axes.texts)
        low, high = axes.get_ylim()
        assert all(above - below >= 0.03 * (high - low) for below, above in itertools.pairwise(heights))


def test_evolution_shows_the_run_with_the_most_stages(tmp_path):
    runs = [
        run_of("few", "2026-01-03", records("v1_b", 1.0), records("flash-4", 1.0)),
        run_of(
            "new", "2026-01-02", records("v0_a", 8.0), records("v1_b", 4.0), records("v1a_x", 9.0), records("sdpa-cudnn", 2.0)
        ),
        run_of("old", "2026-01-01", records("v0_a", 5.0), records("v1_b", 5.0)),
    ]
    (figure,) = drawn(plots.draw_evolution, runs, tmp_path)
    for axes in figure.axes:
        assert [bar.get_height() for bar in axes.patches] == pytest.approx([100 / 8, 100 / 4])
        assert [line.get_ydata()[0] for line in axes.lines] == pytest.approx([100 / 2])
    (legend,) = figure.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == ["cuDNN", "stages"]
    assert "commit new" in figure.get_suptitle() and "few" not in figure.get_suptitle()


def test_decoding_shows_the_rates_of_one_query_next_to_a_copys(tmp_path):
    rates = {("sdpa-cudnn", 1024): 500.0, ("v29_late", 1024): 100.0, ("v34_split", 1024): 700.0, ("v34_split", 4096): 900.0}
    found = []
    for (batch, heads, kv_heads), ((impl, kv_len), gbps) in itertools.product(plots.DECODED, rates.items()):
        work = Workload("fwd", batch, heads, 1, 128, False, "bfloat16", kv_heads=kv_heads, kv_len=kv_len)
        found.append({"impl": impl, **work.record(), "ms": kv_gbps(work.record() | {"ms": 1.0}) / gbps})
    found.append(found[0] | Workload("fwd", 1, 16, 16, 128, False, "bfloat16", kv_len=1024).record())  # 16 queries
    machine = {"gpu": "X", "torch": "1", "triton": "2", "commit": "abc", "date": "2026-01-02", "copy_gbps": 800.0}
    (figure,) = drawn(plots.draw_decoding, results.Run(found, machine), tmp_path)
    for axes in figure.axes:
        lines = [list(zip(*line.get_data(), strict=True)) for line in axes.lines]
        expected = [[(1024, 500)], [(1024, 100)], [(1024, 700), (4096, 900)]]
        assert [[(x, round(y)) for x, y in line] for line in lines[:-1]] == expected
        assert list(axes.lines[-1].get_ydata()) == [800, 800]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["cuDNN", "v29", "v34", "a copy, read and written"]
