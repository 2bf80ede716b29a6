"""Draw which tiles a stage reads and writes, and when.

    make trace STAGE=v2,v3   # needs no GPU; writes plots/traces/v2-v3-fwd-d32-causal-s1024.png

`common.measure.trace` records the accesses.
"""

import argparse
import itertools
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws into files; needs no display

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.collections import PatchCollection  # noqa: E402
from matplotlib.legend_handler import HandlerTuple  # noqa: E402
from matplotlib.patches import Patch, Rectangle  # noqa: E402

import stages  # noqa: E402
from common.measure import terminal  # noqa: E402
from common.measure.options import add_list, list_of, one_of, workloads_of  # noqa: E402
from common.measure.trace import Trace, trace  # noqa: E402
from common.measure.workloads import Workload  # noqa: E402
from common.show.results import PLOTS  # noqa: E402
from common.show.tables import PASS_NAMES, mask  # noqa: E402

TRACES = PLOTS / "traces"
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")  # colors of programs; the colors repeat
WRITES = {"write": "black", "add": "#B22222"}
FEW = 2  # a tensor with fewer rows has no lane
WIDTH, LANE, GAP = 9.0, 0.42, 0.25  # in inches: the picture's width, a lane's height, the gap above a stage


def lanes(recorded: Trace) -> list[str]:
    """Return the tensors that get a lane, in the order of their first access."""
    return [name for name, (_, rows, _) in recorded.tensors.items() if rows >= FEW]


def has_cycles(recorded: Trace) -> bool:
    """Return whether the model of an SM timed any launch. If so, accesses in other launches, such as PyTorch's, take no time on
    the axis."""
    return any(recorded.spans.values())


def unit(recorded: Trace) -> str:
    """Return the unit of the time axis."""
    return "cycles of the model of an SM" if has_cycles(recorded) else "MB moved so far"


def moments(recorded: Trace) -> list[tuple[float, float]]:
    """Return the start and the end of each access on the time axis. The unit is cycles or, if no launch was timed, the MB moved
    so far."""
    if has_cycles(recorded):
        before = list(itertools.accumulate((_cycles(recorded, launch) for launch in range(len(recorded.launches))), initial=0))
        return [
            (before[a.launch] + (a.start or 0), before[a.launch] + max(a.end or 0, a.start or 0)) for a in recorded.accesses
        ]
    ends = list(itertools.accumulate(access.nbytes / 1e6 for access in recorded.accesses))
    return list(zip([0.0, *ends], ends, strict=False))


def _cycles(recorded, launch):
    """Return the cycles of a launch, or 0 if the launch was not timed."""
    return max((span.end for span in recorded.spans.get(launch, [])), default=0.0)


def _draw(axes, name: str, recorded: Trace):
    """Draw a lane for each tensor. The first row of a tensor is at the top of its lane."""
    shown, times = lanes(recorded), moments(recorded)
    least = max((end for _, end in times), default=0) / 900  # a pixel
    patches, colors, edges = [], [], []
    for access, (begin, end) in sorted(zip(recorded.accesses, times, strict=True), key=lambda each: each[0].kind != "read"):
        if access.tensor in shown:
            heads, rows, _ = recorded.tensors[access.tensor]
            first, last = (head * rows + row for head, row in zip(access.heads, access.rows, strict=True))
            top, height = (0.88 * part / (heads * rows) for part in (first, last + 1 - first))
            place = begin, shown.index(access.tensor) + 0.06 + top
            patches.append(Rectangle(place, max(end - begin, least), max(height, 0.02)))
            colors.append(WRITES.get(access.kind, COLORS[access.program % len(COLORS)]))
            edges.append(0.6 if access.kind in WRITES else 0)
    axes.add_collection(PatchCollection(patches, facecolors=colors, edgecolors=colors, linewidths=edges))
    for place in range(len(shown)):
        axes.axhspan(place + 0.06, place + 0.94, color="0.95", zorder=0)
    axes.set_yticks([place + 0.5 for place in range(len(shown))], shown, fontsize=8)
    axes.set_ylim(len(shown), 0)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    moved = sum(access.nbytes for access in recorded.accesses) / 1e6
    axes.set_title(f"{name}: {len(recorded.accesses)} accesses, {moved:.2f} MB", fontsize=9, loc="left")
    axes.set_xlabel(unit(recorded), fontsize=8)


def draw(names: list[str], workload: Workload, path: Path):
    """Write a picture with a panel for each stage. Panels with the same unit have the same scale."""
    recorded = [trace(stages.load(name), workload) for name in names]
    heights = [max(1, len(lanes(each))) * LANE + GAP for each in recorded]
    figure, grid = plt.subplots(
        len(names), 1, figsize=(WIDTH, sum(heights) + 1.2 + 0.5 * len(names)), layout="constrained", squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    ends = {}  # unit of a time axis -> the latest time
    for axes, name, each in zip(grid[:, 0], names, recorded, strict=True):
        _draw(axes, name, each)
        ends[unit(each)] = max([ends.get(unit(each), 0.0), *(end for _, end in moments(each))])
    for axes, each in zip(grid[:, 0], recorded, strict=True):
        axes.set_xlim(0, ends[unit(each)])
    figure.legend(
        [tuple(Patch(color=color) for color in COLORS[:3]), *(Patch(color=color) for color in WRITES.values())],
        ["read, by program", "write", "add in memory"],
        handler_map={tuple: HandlerTuple(ndivide=None)},
        loc="outside lower center", ncols=3, fontsize=8, frameon=False,
    )  # fmt: skip
    figure.suptitle(
        f"{PASS_NAMES[workload.pass_]}, D={workload.head_dim}, {mask(workload.causal)}, S={workload.seq_len}, "
        f"H={workload.heads}, {workload.dtype}; recorded from the kernels; rows downwards",
        fontsize=8, color="0.4",
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    parser = argparse.ArgumentParser(
        prog="python -m common.show.traces",
        description="Draw which tiles of which tensors a stage reads and writes, in order. LIST is comma-separated.",
    )
    add_list(parser, "--stage", "v2,v3")
    passes = list_of(one_of({"fwd": "fwd", "bwd": "bwd"}))
    parser.add_argument("--pass", dest="pass_", type=passes, default="fwd", metavar="LIST", help="fwd, bwd (default: fwd)")
    shape = {"head_dim": "32", "causal": "yes", "seq_len": "1024", "heads": "1", "kv_heads": None}
    for name, default in shape.items():
        add_list(parser, f"--{name.replace('_', '-')}", default)
    options = parser.parse_args(argv)
    versions = "-".join(stages.version(name) for name in options.stage)
    for work in workloads_of(parser, **{name: getattr(options, name) for name in ("pass_", *shape)}):
        path = TRACES / f"{versions}-{work.pass_}-d{work.head_dim}-{mask(work.causal)}-s{work.seq_len}.png"
        draw(options.stage, work, path)
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
