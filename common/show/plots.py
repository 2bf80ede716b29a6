"""Draw the plots of plots/: the speed of all stages, speed and memory against sequence length, and the speed of decoding and
of several GPUs."""

import itertools
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws into files; needs no display

import matplotlib.pyplot as plt  # noqa: E402

import stages  # noqa: E402
from common.measure.footprint import MIB_IN_MB  # noqa: E402
from common.show.decoding import kv_gbps  # noqa: E402
from common.show.results import (  # noqa: E402
    HEAD_DIMS,
    PLOTS,
    Run,
    implementations,
    load_run,
    newest,
    number,
    origin,
    rate,
    run_file,
    runs,
    sources,
    spoken,
)
from common.show.scaling import Scaling, load_ring, ring_files  # noqa: E402
from common.show.tables import PASS_NAMES  # noqa: E402

# Libraries have dashed or dotted lines and hollow markers. Color-blind readers can tell the libraries' colors apart.
PEER_STYLES = (
    {"color": "0.55", "linestyle": "--", "marker": "o"},
    {"color": "0.15", "linestyle": ":", "marker": "s"},
    {"color": "#0072B2", "linestyle": "-.", "marker": "^"},
    {"color": "#009E73", "linestyle": (0, (6, 1, 1, 1, 1, 1)), "marker": "D"},
)
STAGE_MARKERS = "osv^DPX*<>pHdh8"
RUN_COLORS = ("#f4a582", "#fdbe85", "#d94801")  # colors of bars, by run number
DECODING = run_file("decode-d128")
WORKLOADS = "16k tokens, hidden size 2048"
DECODED = ((1, 16, 16), (8, 32, 8))  # batch size, heads and K/V heads of each panel in decoding.png
STORY = ("v0", "v1", "v3", "v5")  # the speed plots show these stages and the newest stage
LABEL_GAP = 0.035  # least distance between the names of two lines, as a share of the vertical axis
SAME = 1.02  # two lines overlap if they differ by less than this factor at each point


def style(name: str, names: list[str]) -> dict:
    """Return the color, line and marker of an implementation. The implementation looks the same in all plots with these
    `names`. Stages have solid lines, from dark to bright. If there are more stages than markers, the markers repeat, hollow or
    with dotted lines."""
    if not stages.position(name):
        baselines = [other for other in names if not stages.position(other)]
        return {**PEER_STYLES[baselines.index(name) % len(PEER_STYLES)], "markerfacecolor": "white"}
    line = [other for other in names if stages.position(other)]
    place = line.index(name)
    color = plt.colormaps["plasma"](0.88 * place / max(1, len(line) - 1))
    uses = place // len(STAGE_MARKERS)
    face = "white" if uses % 2 else color
    return {
        "color": color,
        "linestyle": "-" if uses < 2 else (0, (1, 2)),
        "marker": STAGE_MARKERS[place % len(STAGE_MARKERS)],
        "markerfacecolor": face,
    }


def together(lines: dict[str, list[tuple]]) -> list[list[str]]:
    """Group the names whose lines overlap. Names keep their order. A line is a list of (x, y) with y > 0."""
    groups = []
    for name, points in lines.items():
        for group in groups:
            pairs = zip(lines[group[0]], points, strict=False)
            if all(x == other_x and y / SAME < other_y < y * SAME for (other_x, other_y), (x, y) in pairs):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def in_short(group: list[str], names: list[str]) -> str:
    """Return the short names of a group, separated by commas. Three or more consecutive stages become a range: "v4 to v7"."""
    runs = []
    for name in group:
        if runs and stages.position(runs[-1][-1]) and names.index(name) == names.index(runs[-1][-1]) + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(
        f"{spoken(run[0])} to {spoken(run[-1])}" if len(run) > 2 else ", ".join(map(spoken, run)) for run in runs
    )  # fmt: skip


def _points(records: list[dict], names: list[str], value: str, unit: float = 1.0) -> dict[str, list[tuple]]:
    """Return each implementation's points: sequence length and `value` · `unit`."""
    lines = {
        name: sorted((r["seq_len"], r[value] * unit) for r in records if r["impl"] == name and "failure" not in r)
        for name in names
    }
    return {name: points for name, points in lines.items() if points}


def _draw_line(axes, points: list[tuple], label: str, look: dict):
    axes.plot(*zip(*points, strict=True), markersize=5, linewidth=1.5, label=label, **look)


def _length_axis(axes, lengths: set[int], label: str):
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(lengths), [str(length) for length in sorted(lengths)])
    axes.set_xlabel(label)
    axes.grid(alpha=0.25)


def _legend(figure, columns: int):
    """Draw one legend for all axes, and place it below the axes."""
    shown = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=columns, fontsize=9, frameon=False)


def _selected(found, names, pass_, head_dim, causal):
    """Return each implementation's records from its newest run. The runs may be from different GPUs."""
    wanted = pass_, head_dim, causal
    of_runs = {name: newest(found, pass_, head_dim, name) for name in names}
    return [
        record
        for name, run in of_runs.items()
        for record in (run.records if run else [])
        if (record["impl"], record["pass"], record["head_dim"], record["causal"]) == (name, *wanted)
    ]


def _label_ends(axes, lines: dict[str, list[tuple]], names: list[str]):
    """Write each line's name to the right of its last point, in the line's color. Names keep a distance of at least
    `LABEL_GAP`."""
    low, high = axes.get_ylim()
    gap, below = LABEL_GAP * (high - low), low - (high - low)
    for name, points in sorted(lines.items(), key=lambda line: line[1][-1][1]):
        below = max(points[-1][1], below + gap)
        axes.annotate(
            spoken(name), xy=(1, below), xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=8, color=style(name, names)["color"], annotation_clip=False,
        )  # fmt: skip


def _in_speed(found, names, pass_):
    """Return what `_speed` plots of `names`: the libraries, the stages of `STORY` and the newest measured stage."""
    stage_names = [name for name in names if stages.position(name)]
    last = next((name for name in reversed(stage_names) if newest(found, pass_, 128, name)), None)
    return [name for name in names if name not in stage_names or stages.version(name) in STORY or name == last]


def _speed(found, names, pass_):
    """Plot a line for each implementation of `_in_speed`, with its name at its end."""
    chosen = _in_speed(found, names, pass_)
    figure, grid = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for axes, (head_dim, causal) in zip(grid.flat, [(64, False), (64, True), (128, False), (128, True)], strict=True):
        axes.set_title(f"{PASS_NAMES[pass_]}, D={head_dim}, {'causal' if causal else 'full'}", fontsize=10)
        axes.set_ylabel("TFLOP/s")
        lines = _points(_selected(found, chosen, pass_, head_dim, causal), chosen, "tflops")
        for name, points in lines.items():
            _draw_line(axes, points, spoken(name), style(name, chosen))
        _length_axis(axes, {length for points in lines.values() for length, _ in points}, "sequence length")
        axes.set_ylim(0)
        axes.spines[["top", "right"]].set_visible(False)
        _label_ends(axes, lines, chosen)
    return figure


def _memory(found, names):
    """Plot one line for all implementations that allocate the same memory. Each panel has a legend of its own."""
    figure, grid = plt.subplots(1, 2, figsize=(11, 5), layout="constrained", sharey=True)
    for axes, pass_ in zip(grid, ("fwd", "bwd"), strict=True):
        axes.set_title(f"{PASS_NAMES[pass_]}, D=128, causal", fontsize=10)
        lines = _points(_selected(found, names, pass_, 128, True), names, "peak_extra_mib", MIB_IN_MB)
        for group in together(lines):
            longest = max((lines[name] for name in group), key=len)
            _draw_line(axes, longest, textwrap.fill(in_short(group, names), 60), style(group[0], names))
        _length_axis(axes, {length for points in lines.values() for length, _ in points}, "sequence length")
        axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), fontsize=9, frameon=False)
    grid[0].set_ylabel("peak extra memory (MB)")
    return figure


def _mark_tracks(axes, names):
    """Draw a line where the main ladder ends and the tracks begin, if `names` has both."""
    places = [place for place, name in enumerate(names) if stages.track(name)]
    if places and places[0]:
        top = axes.get_xaxis_transform()  # y runs from 0 to 1
        axes.vlines(places[0] - 0.5, 0, 1, "0.5", (0, (4, 3)), transform=top, linewidth=0.8)
        axes.text(places[0] - 0.4, 0.99, "tracks: other workloads", transform=top, va="top", fontsize=8, color="0.4")


def _used(found, names, passes, head_dims):
    """Return the runs from which `_selected` takes records, newest first."""
    wanted = list(itertools.product(passes, head_dims, names))
    return [run for run in found if any(newest(found, *which) is run for which in wanted)]


def _runs_of_bars(found, names):
    """Return the runs from which `_evolution` takes the bars, newest first."""
    of_stages = itertools.product(filter(stages.position, names), ("fwd", "bwd"))
    rates = [rate(found, name, pass_, max(HEAD_DIMS)) for name, pass_ in of_stages]
    return [run for run in found if any(measured and measured[1] is run for measured in rates)]


def _evolution(found, names):
    """Plot the mean TFLOP/s for the largest head dimension: bars for the stages, lines for the libraries.

    Each mean is from the implementation's newest run. The colors of bars and the labels of lines show the run. A library has a
    line only if a bar is from the same run, because times from different GPUs cannot be compared.
    """
    figure, grid = plt.subplots(2, 1, figsize=(13, 7.5), layout="constrained", sharey=True)
    for axes, pass_ in zip(grid, ("fwd", "bwd"), strict=True):
        axes.set_title(f"{PASS_NAMES[pass_]}, D={max(HEAD_DIMS)}", fontsize=11)
        rates = {name: measured for name in names if (measured := rate(found, name, pass_, max(HEAD_DIMS)))}
        line = [name for name in rates if stages.position(name)]
        of_bars = [number(found, rates[name][1]) for name in line]
        colors = [RUN_COLORS[key % len(RUN_COLORS)] for key in of_bars]
        several = len(set(of_bars)) > 1
        said = {key: f", run [{key}]" if several else "" for key in of_bars}
        labels = ["_" if key in of_bars[:place] else f"stages{said[key]}" for place, key in enumerate(of_bars)]
        _mark_tracks(axes, line)
        bars = axes.bar([spoken(name) for name in line], [rates[name][0] for name in line], color=colors, label=labels)
        axes.margins(x=0.01, y=0.12)
        axes.bar_label(bars, fmt="%.0f", fontsize=7.5, padding=1, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3})
        for name, (mean, run) in rates.items():
            if not stages.position(name) and number(found, run) in of_bars:
                peer = {"color": style(name, names)["color"], "linestyle": style(name, names)["linestyle"]}
                axes.axhline(mean, linewidth=1.4, label=f"{spoken(name)}{said[number(found, run)]}", zorder=0, **peer)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel("TFLOP/s")
    _legend(figure, 6)
    return figure


def _decoding(records, copy_gbps):
    """Plot the rate at which K and V are read for one query, against the number of keys."""
    names = implementations(records)
    figure, grid = plt.subplots(1, len(DECODED), figsize=(10, 4.5), layout="constrained", sharey=True)
    for axes, model in zip(grid, DECODED, strict=True):
        axes.set_title("forward, D=128, one query, B={}, H/Hkv={}/{}".format(*model), fontsize=10)
        chosen = [r for r in records if (r["batch"], r["heads"], r["kv_heads"], r["seq_len"]) == (*model, 1)]
        for name in names:
            points = sorted((r["kv_len"], kv_gbps(r)) for r in chosen if r["impl"] == name and "ms" in r)
            if points:
                axes.plot(*zip(*points, strict=True), markersize=5, linewidth=1.5, label=spoken(name), **style(name, names))
        axes.axhline(copy_gbps, color="#D55E00", linestyle="--", linewidth=1, label="a copy, read and written", zorder=0)
        _length_axis(axes, {record["kv_len"] for record in chosen}, "keys")
        axes.set_ylim(0)
    grid[0].set_ylabel("GB/s of K and V")
    _legend(figure, 6)
    return figure


def draw_decoding(records: list[dict], machine: dict, directory: Path):
    """Write decoding.png.

    Args:
        records, machine: from `common.show.results.load_run(DECODING)`.
        directory: the output directory.
    """
    figure = _decoding(records, machine["copy_gbps"])
    figure.suptitle(f"{origin(machine)}; bfloat16, no mask", fontsize=8, color="0.4")
    figure.savefig(directory / "decoding.png", dpi=110)
    plt.close(figure)


def _scaling(found):
    """Plot the rate per GPU against the number of GPUs. Along a solid line, the number of tokens per GPU does not change. Along
    a dotted line, the sequence length does not change."""
    tokens = sorted({r["seq_len"] // r["ranks"] for r in found.records if r["ranks"] == found.ranks})
    passes = [pass_ for pass_ in PASS_NAMES if any(r["pass"] == pass_ for r in found.records)]
    figure, grid = plt.subplots(len(passes), len(tokens), figsize=(10, 3.6 * len(passes)), layout="constrained", squeeze=False)
    for axes, (pass_, each) in zip(grid.flat, itertools.product(passes, tokens), strict=True):
        axes.set_title(f"{PASS_NAMES[pass_]}; {each:,} tokens a GPU, or {each * found.ranks:,} in all", fontsize=10)
        for name, line in itertools.product(found.names, ("-", ":")):
            lengths = {ranks: each * (ranks if line == "-" else found.ranks) for ranks in range(1, found.ranks + 1)}
            mine = [r for r in found.records if (r["impl"], r["pass"], r["seq_len"]) == (name, pass_, lengths[r["ranks"]])]
            points = sorted((r["ranks"], r["tflops"]) for r in mine)
            if points:
                looks = style(name, found.names) | {"linestyle": line, "label": spoken(name) if line == "-" else None}
                axes.plot(*zip(*points, strict=True), markersize=5, **looks)
        _length_axis(axes, {r["ranks"] for r in found.records}, "GPUs")
        axes.set_ylabel("TFLOP/s a GPU")
        axes.set_ylim(0)
    _legend(figure, 4)
    return figure


def draw_scaling(name: str, run: dict, directory: Path):
    """Plot a `make bench-ring` run with several numbers of GPUs. The file is `name`.png."""
    found, facts = Scaling(run), run["machine_info"]
    figure, first = _scaling(found), found.records[0]
    model = f"H={first['heads']}, D={first['head_dim']}, {'causal' if first['causal'] else 'full'}, {first['dtype']}"
    note = f"{facts['gpus']}; {origin(facts)}; {model}; solid: the same tokens a GPU, dotted: the same sequence"
    figure.suptitle(note, fontsize=8, color="0.4")
    figure.savefig(directory / f"{name}.png", dpi=110)
    plt.close(figure)


def draw(found: list[Run], directory: Path):
    """Write evolution.png, speed-forward.png, speed-backward.png and memory.png, without dead ends.

    Args:
        found: the runs, from `common.show.results.runs`.
        directory: the output directory. It is created if missing.
    """
    names = implementations([record for run in reversed(found) for record in run.records])
    names = [name for name in names if not stages.is_dead_end(name)]
    directory.mkdir(exist_ok=True)
    of_bars = _runs_of_bars(found, names)
    figures = {
        "evolution": (_evolution(of_bars, names), of_bars, "means over the ladder's workloads"),
        **{
            f"speed-{PASS_NAMES[pass_]}": (
                _speed(found, names, pass_), _used(found, _in_speed(found, names, pass_), (pass_,), HEAD_DIMS), WORKLOADS,
            )
            for pass_ in ("fwd", "bwd")
        },
        "memory": (_memory(found, names), _used(found, names, ("fwd", "bwd"), (128,)), WORKLOADS),
    }  # fmt: skip
    for name, (figure, used, words) in figures.items():
        measured = sources(used, used).replace("; [", "\n[")
        measured = measured if "\n" in measured else measured.removeprefix("[1] ")
        figure.suptitle(f"{measured}\nfloat16, {words}", fontsize=8, color="0.4")
        figure.savefig(directory / f"{name}.png", dpi=110)
        plt.close(figure)


def draw_all(directory: Path):
    """Draw all plots of results/ into a directory."""
    draw(runs(), directory)
    draw_decoding(*load_run(DECODING), directory)
    for path in ring_files():
        if Scaling(run := load_ring(path)).is_drawn():
            draw_scaling(path.stem, run, directory)


if __name__ == "__main__":
    draw_all(PLOTS)
