"""Draw the plots of plots/: the speed of all stages, speed against sequence length, and the speed of decoding and of several
GPUs."""

import itertools
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws into files; needs no display

import matplotlib.pyplot as plt  # noqa: E402

import stages  # noqa: E402
from common.show.results import (  # noqa: E402
    CODE,
    HEAD_DIMS,
    LENGTHS,
    PLOTS,
    Run,
    load_run,
    mean_over,
    newest,
    origin,
    paper,
    read,
    run_file,
    runs,
    sources,
    spoken,
)
from common.show.scaling import Scaling, ring_files  # noqa: E402
from common.show.tables import PASS_NAMES, kv_gbps, mask  # noqa: E402

# Libraries have dashed or dotted lines and hollow markers. Color-blind readers can tell the libraries' colors apart.
PEER_STYLES = (
    {"color": "0.55", "linestyle": "--", "marker": "o"},
    {"color": "0.15", "linestyle": ":", "marker": "s"},
    {"color": "#0072B2", "linestyle": "-.", "marker": "^"},
    {"color": "#009E73", "linestyle": (0, (6, 1, 1, 1, 1, 1)), "marker": "D"},
)
STAGE_MARKERS = "osv^DPX*<>pHdh8"
BARS = "#f4a582"
DECODED = ((1, 16, 16), (8, 32, 8))  # batch size, heads and K/V heads of each panel in decoding.png
STORY = ("v0", "v1", "v3", "v5")  # the speed plots show these stages and the newest stage
LABEL_GAP = 0.035  # least distance between the names of two lines, as a share of the vertical axis


def style(name: str, names: list[str]) -> dict:
    """Return the color, line and marker of an implementation among `names`. Stages have solid lines, from dark to bright."""
    peers = [other for other in names if not stages.position(other)]
    if name in peers:
        return {**PEER_STYLES[peers.index(name) % len(PEER_STYLES)], "markerfacecolor": "white"}
    line = [other for other in names if other not in peers]
    place = line.index(name)
    color = plt.colormaps["plasma"](0.88 * place / max(1, len(line) - 1))
    return {"color": color, "linestyle": "-", "marker": STAGE_MARKERS[place % len(STAGE_MARKERS)]}


def _save(figure, path: Path, title: str):
    """Write a figure with a title in small letters."""
    figure.suptitle(title, fontsize=8, color="0.4")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_line(axes, points: list[tuple], label: str | None, look: dict):
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


def chosen(found: list[Run], pass_: str) -> list[str]:
    """Return what a speed plot shows: the libraries, the stages of `STORY` and the newest measured stage."""
    names = list(dict.fromkeys(name for run in reversed(found) for name in run.libraries))
    line = [name for name in stages.names() if not stages.is_dead_end(name)]
    last = [name for name in line if newest(found, pass_, max(HEAD_DIMS), name)][-1:]
    return names + [name for name in line if stages.version(name) in STORY or name in last]


def draw_speed(found: list[Run], pass_: str, directory: Path):
    """Plot TFLOP/s against the sequence length: a line for each of `chosen`, from its newest run, with its name at its end."""
    names, used = chosen(found, pass_), []
    figure, grid = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for axes, (head_dim, causal) in zip(grid.flat, itertools.product(HEAD_DIMS, (False, True)), strict=True):
        axes.set_title(f"{PASS_NAMES[pass_]}, D={head_dim}, {mask(causal)}", fontsize=10)
        axes.set_ylabel("TFLOP/s")
        lines = {}
        for name in names:
            if run := newest(found, pass_, head_dim, name):
                works = run.times(name, [paper(pass_, head_dim, causal, s) for s in LENGTHS])
                lines[name] = [(work.seq_len, run.record(name, work)["tflops"]) for work in works]
                used.append(run)
                _draw_line(axes, lines[name], spoken(name), style(name, names))
        _length_axis(axes, {length for points in lines.values() for length, _ in points}, "sequence length")
        axes.set_ylim(0)
        axes.spines[["top", "right"]].set_visible(False)
        _label_ends(axes, lines, names)
    measured = sources(used, used).replace("; [", "\n[")
    title = f"{measured}\nfloat16, 16k tokens, hidden size 2048"
    _save(figure, directory / f"speed-{PASS_NAMES[pass_]}.png", title)


def _mark_tracks(axes, names):
    """Draw a line where the main ladder ends and the tracks begin, if `names` has both."""
    places = [place for place, name in enumerate(names) if stages.track(name)]
    if places and places[0]:
        top = axes.get_xaxis_transform()  # y runs from 0 to 1
        axes.vlines(places[0] - 0.5, 0, 1, "0.5", (0, (4, 3)), transform=top, linewidth=0.8)
        axes.text(places[0] - 0.4, 0.99, "tracks: other workloads", transform=top, va="top", fontsize=8, color="0.4")


def draw_evolution(found: list[Run], directory: Path):
    """Plot the mean TFLOP/s for the largest head dimension: bars for the stages, lines for the libraries. All bars and lines of
    a pass are from one run: the one with the most stages, or the newest of several."""
    figure, grid = plt.subplots(2, 1, figsize=(13, 7.5), layout="constrained", sharey=True)
    used = []
    for axes, pass_ in zip(grid, CODE, strict=True):
        works = mean_over(pass_, max(HEAD_DIMS))
        held = {run: [name for name in run.names if run.holds(name, works) and not stages.is_dead_end(name)] for run in found}
        run = max(held, key=lambda run: sum(map(bool, map(stages.position, held[run]))))
        used.append(run)
        rates = {name: run.rate(name, works) for name in held[run]}
        line = [name for name in rates if stages.position(name)]
        axes.set_title(f"{PASS_NAMES[pass_]}, D={max(HEAD_DIMS)}", fontsize=11)
        _mark_tracks(axes, line)
        bars = axes.bar([spoken(name) for name in line], [rates[name] for name in line], color=BARS, label="stages")
        axes.margins(x=0.01, y=0.12)
        axes.bar_label(bars, fmt="%.0f", fontsize=7.5, padding=1, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3})
        for name in (name for name in rates if name not in line):
            look = {key: style(name, run.libraries)[key] for key in ("color", "linestyle")}
            axes.axhline(rates[name], linewidth=1.4, label=spoken(name), zorder=0, **look)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel("TFLOP/s")
    _legend(figure, 6)
    measured = "\n".join(dict.fromkeys(origin(run.machine) for run in used))
    _save(figure, directory / "evolution.png", f"{measured}\nfloat16, means over the ladder's workloads")


def draw_decoding(run: Run, directory: Path):
    """Plot the rate at which K and V are read for one query, against the number of keys."""
    figure, grid = plt.subplots(1, len(DECODED), figsize=(10, 4.5), layout="constrained", sharey=True)
    for axes, model in zip(grid, DECODED, strict=True):
        axes.set_title("forward, D=128, one query, B={}, H/Hkv={}/{}".format(*model), fontsize=10)
        works = [work for work in run.works if (work.batch, work.heads, work.kv_heads, work.seq_len) == (*model, 1)]
        for name in run.names:
            if points := sorted((work.kv_len, kv_gbps(run.record(name, work))) for work in run.times(name, works)):
                _draw_line(axes, points, spoken(name), style(name, run.names))
        axes.axhline(run.machine["copy_gbps"], color="#D55E00", linestyle="--", label="a copy, read and written", zorder=0)
        _length_axis(axes, {work.kv_len for work in works}, "keys")
        axes.set_ylim(0)
    grid[0].set_ylabel("GB/s of K and V")
    _legend(figure, 6)
    _save(figure, directory / "decoding.png", f"{origin(run.machine)}; bfloat16, no mask")


def draw_scaling(name: str, saved: dict, directory: Path):
    """Plot a `make bench-ring` run: the rate per GPU against the number of GPUs. Along a solid line, the number of tokens per
    GPU does not change. Along a dotted line, the sequence length does not change."""
    found, facts = Scaling(saved), saved["machine_info"]
    tokens = sorted({r["seq_len"] // r["ranks"] for r in found.records if r["ranks"] == found.ranks})
    passes = [pass_ for pass_ in PASS_NAMES if any(r["pass"] == pass_ for r in found.records)]
    figure, grid = plt.subplots(len(passes), len(tokens), figsize=(10, 3.6 * len(passes)), layout="constrained", squeeze=False)
    for axes, (pass_, each) in zip(grid.flat, itertools.product(passes, tokens), strict=True):
        axes.set_title(f"{PASS_NAMES[pass_]}; {each:,} tokens a GPU, or {each * found.ranks:,} in all", fontsize=10)
        for impl, line in itertools.product(found.names, ("-", ":")):
            lengths = {ranks: each * (ranks if line == "-" else found.ranks) for ranks in range(1, found.ranks + 1)}
            mine = [r for r in found.records if (r["impl"], r["pass"], r["seq_len"]) == (impl, pass_, lengths[r["ranks"]])]
            points = sorted((r["ranks"], r["tflops"]) for r in mine)
            if points:
                _draw_line(axes, points, spoken(impl) if line == "-" else None, style(impl, found.names) | {"linestyle": line})
        _length_axis(axes, {r["ranks"] for r in found.records}, "GPUs")
        axes.set_ylabel("TFLOP/s a GPU")
        axes.set_ylim(0)
    _legend(figure, 4)
    first = found.records[0]
    model = f"H={first['heads']}, D={first['head_dim']}, {mask(first['causal'])}, {first['dtype']}"
    note = f"{origin(facts | {'gpu': facts['gpus']})}; {model}; solid: the same tokens a GPU, dotted: the same sequence"
    _save(figure, directory / f"{name}.png", note)


def draw_all(directory: Path):
    """Draw all plots of results/ into a directory."""
    found = runs()
    draw_evolution(found, directory)
    for pass_ in CODE:
        draw_speed(found, pass_, directory)
    draw_decoding(load_run(run_file("decode-d128")), directory)
    for path in ring_files():
        if Scaling(read(path)).is_drawn():
            draw_scaling(path.stem, read(path), directory)


if __name__ == "__main__":
    draw_all(PLOTS)
