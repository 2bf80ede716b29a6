"""Draw the speed of all stages into plots/."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws into files; needs no display

import matplotlib.pyplot as plt  # noqa: E402

import stages  # noqa: E402
from common.show import results  # noqa: E402
from common.show.tables import PASS_NAMES  # noqa: E402

# Lines of libraries. Color-blind readers can tell the colors apart.
STYLES = (
    {"color": "0.55", "linestyle": "--"}, {"color": "0.15", "linestyle": ":"}, {"color": "#0072B2", "linestyle": "-."},
    {"color": "#009E73", "linestyle": (0, (6, 1, 1, 1, 1, 1))},
)  # fmt: skip
BARS = "#f4a582"
LOW = 0.15  # a bar lower than this share of the highest bar has no room for its number


def _save(figure, path: Path, title: str, note: str | None = None):
    """Write a figure with a title in small letters. Below all axes are a note and one legend."""
    shown = {}
    for axes in figure.axes:
        shown |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    look = {"loc": "outside lower center", "ncols": 6, "fontsize": 9, "frameon": False}
    figure.legend(shown.values(), shown.keys(), title=note, title_fontsize=9, **look)
    figure.suptitle(title, fontsize=8, color="0.4")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _label(axes, bars):
    """Write each bar's height into its top, where no library's line shows. A low bar has its number above."""
    for bar in bars:
        inside = bar.get_height() > LOW * max(each.get_height() for each in bars)
        look = {"xytext": (0, -2), "va": "top"} if inside else {"xytext": (0, 2), "va": "bottom"}
        place = bar.get_x() + bar.get_width() / 2, bar.get_height()
        axes.annotate(f"{bar.get_height():.0f}", place, textcoords="offset points", ha="center", fontsize=8.5, **look)


def draw_evolution(found: list[results.Run], directory: Path):
    """Plot the mean TFLOP/s for the largest head dimension: bars for the trunk's stages, lines for the libraries.

    All bars and lines of a pass are from one run: the one with the most stages, or the newest of several. A stage with its
    parent's code for a pass has no bar, if its parent was measured.
    """
    figure, grid = plt.subplots(2, 1, figsize=(13, 7.5), layout="constrained", sharey=True)
    used, shown = [], stages.line()
    for axes, pass_ in zip(grid, results.CODE, strict=True):
        works = results.mean_over(pass_, max(results.HEAD_DIMS))
        held = {run: [name for name in shown if run.holds(name, works)] for run in found}
        run = max(held, key=lambda run: len(held[run]))
        used.append(run)
        parents = {name: stages.parent(name) for name in held[run]}
        line = [name for name, of in parents.items() if not (of in parents and results.same_code(name, of, pass_))]
        libraries = [name for name in run.libraries if run.holds(name, works)]
        rates = {name: run.rate(name, works) for name in (*line, *libraries)}
        axes.set_title(f"{PASS_NAMES[pass_]}, D={max(results.HEAD_DIMS)}", fontsize=11)
        bars = axes.bar([results.spoken(name) for name in line], [rates[name] for name in line], color=BARS, label="stages")
        axes.margins(x=0.01, y=0.12)
        _label(axes, bars)
        for name in libraries:
            look = STYLES[run.libraries.index(name) % len(STYLES)]
            axes.axhline(rates[name], linewidth=1.4, label=results.spoken(name), zorder=0, **look)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel("TFLOP/s")
    measured = "\n".join(results.origins(used))
    title = f"{measured}\nfloat16, means over the ladder's workloads"
    left_out = "Left out: stages with their parent's code for the pass, so with the same speed."
    _save(figure, directory / "evolution.png", title, left_out)


def draw_biases(measured: dict, directory: Path):
    """Plot the mean error of O for V of mean 1 by the number of keys, of what a file of `common.measure.eight` measured at the
    largest head dimension without a mask."""
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    head_dim = max(results.HEAD_DIMS)
    records = [record for record in measured["records"] if record["head_dim"] == head_dim and not record["causal"]]
    for name, look in zip(records[0]["bias"], STYLES, strict=False):
        keys, percent = zip(*((record["seq_len"], 100 * record["bias"][name]) for record in records), strict=True)
        axes.plot(keys, percent, marker="o", markersize=3, label=results.spoken(name), **look)
    axes.set_xscale("log", base=2)
    axes.set_xticks(keys, keys)
    axes.set_xlabel("keys")
    axes.set_ylabel("mean error of O, %")
    axes.spines[["top", "right"]].set_visible(False)
    title = f"{results.origin(measured['machine_info'])}\nV of mean 1, D={head_dim}, no mask"
    _save(figure, directory / "eight-biases.png", title)


def draw_all(directory: Path):
    """Draw all plots of results/ into a directory."""
    draw_evolution(results.runs(), directory)
    draw_biases(results.read(results.ROOT / "results" / "eight-matmuls-h200.json"), directory)


if __name__ == "__main__":
    draw_all(results.PLOTS)
