"""The plots of a benchmark run: speed and memory against sequence length, and the gain of each step."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws into files; needs no display

import matplotlib.pyplot as plt  # noqa: E402
import numpy  # noqa: E402

import stages  # noqa: E402
from common.show.results import COLUMNS, PLOTS, RUN, implementations, load_run, origin, speedup  # noqa: E402
from common.show.tables import PASS_NAMES  # noqa: E402

BASELINES = ("--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))  # line styles, in the order of the run
LABEL_GAP = 0.055  # least distance of two labels, as a share of the height of the axes
SAME = 0.004  # in the plot of memory, lines that end no further apart than this, of that height, share one


def _style(name: str, names: list[str]) -> dict:
    """Colour and line of an implementation, the same in every plot: stages from dark to bright, baselines grey."""
    if not stages.position(name):
        baselines = [other for other in names if not stages.position(other)]
        return {"color": "0.45", "linestyle": BASELINES[baselines.index(name) % len(BASELINES)]}
    numbers = {other: stages.position(other)[0] for other in names if stages.position(other)}
    return {"color": plt.colormaps["plasma"](0.88 * numbers[name] / max(1, *numbers.values())), "linestyle": "-"}


def spread(positions: list[float], gap: float) -> list[float]:
    """The positions moved apart, as little as their order allows, until neighbours are `gap` apart and all are in [0, 1]."""
    order = numpy.argsort(positions, kind="stable")
    moved = numpy.array(positions, dtype=float)[order]
    for _ in range(1000):
        overlap = gap - numpy.diff(moved)
        if (overlap <= 1e-9).all():
            break
        for index in numpy.flatnonzero(overlap > 0):
            push = (gap - (moved[index + 1] - moved[index])) / 2
            moved[index] -= push
            moved[index + 1] += push
        moved = numpy.clip(moved, 0, 1) if len(moved) * gap < 1 else moved
    result = numpy.empty_like(moved)
    result[order] = moved
    return result.tolist()


def together(heights: dict[str, float], same: float) -> list[list[str]]:
    """The names in groups whose heights differ by less than `same` from the first one's, each in the order given."""
    groups = []
    for name, height in heights.items():
        for group in groups:
            if abs(heights[group[0]] - height) < same:
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def _lines(axes, records: list[dict], names: list[str], value: str, same: float = 0):
    """One line an implementation against sequence length, labelled at its right end in its own colour.

    Args:
        same: as in `together`; 0 is a label for each.
    """
    ends = {}
    for name in names:
        points = sorted((r["seq_len"], r[value]) for r in records if r["impl"] == name and "failure" not in r)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.6, **_style(name, names))
            ends[name] = points[-1]
    lengths = sorted({record["seq_len"] for record in records})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xlabel("sequence length")
    axes.grid(alpha=0.25)
    to_axes = axes.transData + axes.transAxes.inverted()
    groups = together({name: to_axes.transform(end)[1] for name, end in ends.items()}, same)
    heights = [to_axes.transform(ends[group[0]])[1] for group in groups]
    for group, height in zip(groups, spread(heights, LABEL_GAP), strict=True):
        colors = {_style(name, names)["color"] for name in group}
        color = colors.pop() if len(colors) == 1 else "0.2"
        names_shown = [name.split("_")[0] if stages.position(name) else name.removeprefix("sdpa-") for name in group]
        axes.annotate(
            ", ".join(names_shown),
            xy=ends[group[0]], xytext=(1.03, height), textcoords=axes.transAxes, va="center", fontsize=9, annotation_clip=False,
            color=color, arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": color, "shrinkA": 0, "shrinkB": 2},
        )  # fmt: skip


def _selected(records, pass_, head_dim, causal):
    return [record for record in records if (record["pass"], record["head_dim"], record["causal"]) == (pass_, head_dim, causal)]


def _speed(records, names, pass_):
    figure, grid = plt.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
    for axes, (head_dim, causal) in zip(grid.flat, [(64, False), (64, True), (128, False), (128, True)], strict=True):
        axes.set_title(f"{PASS_NAMES[pass_]}, D={head_dim}, {'causal' if causal else 'full'}", fontsize=10)
        axes.set_ylabel("TFLOP/s")
        chosen = _selected(records, pass_, head_dim, causal)
        axes.set_ylim(0, 1.08 * max(record["tflops"] for record in chosen if "failure" not in record))
        axes.set_xlim(460, 16384 * 1.1)
        _lines(axes, chosen, names, "tflops")
    return figure


def _memory(records, names):
    figure, grid = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for axes, pass_ in zip(grid, ("fwd", "bwd"), strict=True):
        chosen = _selected(records, pass_, 128, True)
        axes.set_title(f"{PASS_NAMES[pass_]}, D=128, causal", fontsize=10)
        axes.set_ylabel("peak extra memory (MiB)")
        axes.set_yscale("log")
        values = [record["peak_extra_mib"] for record in chosen if "failure" not in record]
        axes.set_ylim(min(values) / 1.6, max(values) * 1.6)
        axes.set_xlim(460, 16384 * 1.1)
        _lines(axes, chosen, names, "peak_extra_mib", SAME)
    return figure


def _gain(records, names):
    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    steps = [(old, new) for old, new in zip(names, names[1:], strict=False) if stages.position(old)]
    width = 0.8 / len(COLUMNS)
    for index, (pass_, head_dim) in enumerate(COLUMNS):
        for place, (old, new) in enumerate(steps):
            gain = speedup(records, new, old, (pass_,), head_dim)
            if gain is None:  # never measured both
                continue
            x = place + (index - (len(COLUMNS) - 1) / 2) * width
            shade = {"color": _style(new, names)["color"], "alpha": (1.0, 0.75, 0.5, 0.3)[index % 4]}
            axes.bar(x, gain - 1, width * 0.92, bottom=1, **shade)
            above = gain >= 1
            axes.text(
                x, gain * (1.03 if above else 0.97), f"{gain:.2f}", ha="center", va="bottom" if above else "top", fontsize=8
            )
    axes.axhline(1, color="0.3", linewidth=0.8)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.25, high * 1.25)
    axes.set_yticks([0.5, 1, 2, 5, 10], ["×0.5", "×1", "×2", "×5", "×10"])
    axes.minorticks_off()
    labels = [f"{old.split('_')[0]} → {new.split('_')[0]}\n{new.partition('_')[2]}" for old, new in steps]
    axes.set_xticks(range(len(steps)), labels, fontsize=9)
    order = ", ".join(f"{PASS_NAMES[pass_]} D={head_dim}" for pass_, head_dim in COLUMNS)
    axes.set_title(f"times as fast as the stage before; bars, left to right: {order}", fontsize=10)
    axes.grid(axis="y", alpha=0.25)
    return figure


def draw(records: list[dict], machine: dict, directory: Path):
    """Write speed-forward.png, speed-backward.png, gain.png and memory.png into `directory`; dead ends are left out.

    Args:
        records, machine: of a run, as `common.show.results.load_run` gives them.
    """
    records = [record for record in records if record["dtype"] == "float16"]
    names = [name for name in implementations(records) if not stages.is_dead_end(name)]
    directory.mkdir(exist_ok=True)
    figures = {
        "speed-forward": _speed(records, names, "fwd"),
        "speed-backward": _speed(records, names, "bwd"),
        "gain": _gain(records, names),
        "memory": _memory(records, names),
    }
    for name, figure in figures.items():
        figure.supxlabel(f"{origin(machine)}; float16, 16k tokens, hidden size 2048", fontsize=8, color="0.4")
        figure.savefig(directory / f"{name}.png", dpi=120)
        plt.close(figure)


if __name__ == "__main__":
    draw(*load_run(RUN), PLOTS)
