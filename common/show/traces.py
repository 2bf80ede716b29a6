"""Draw which tiles a stage reads and writes, and when.

    make trace STAGE=v2,v3   # needs no GPU; writes plots/traces/v2-v3-fwd-d32-causal-s1024.png
    make trace STAGE=lengths1,lengths2 ARGS="--lengths 10,70,200"   # a batch, padded and packed
    make trace STAGE=lengths4,lengths5 ARGS="--lengths 64,1024,640 --queries 1 --sms 4"   # caches, shared out among four CTAs

`common.measure.trace` records the accesses.
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch, Rectangle

import stages
from common.measure.options import add_list, command, list_of, one_of, positive, workloads_of
from common.measure.trace import ONE_SM, Trace, trace
from common.measure.workloads import Workload
from common.show.results import PLOTS
from common.show.tables import PASS_NAMES, mask

TRACES = PLOTS / "traces"
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")  # colors of programs; the colors repeat
WRITES = {"write": "black", "add": "#B22222"}
FEW = 2  # a tensor with fewer rows has no lane
LEAST = 1 / 300  # an access is drawn at least this wide, as a share of the time axis
FIRST = "Q", "K", "V", "O", "LSE", "dO", "dQ", "dK", "dV"  # each panel shows these lanes first, in this order
WIDTH, LANE, GAP = 9.0, 0.42, 0.25  # in inches: the picture's width, a lane's height, the gap above a stage


@dataclass
class Mark:
    """A rectangle in a lane. A lane is a row of the picture, for one tensor or one unit.

    Attributes:
        kind: "read", "write" or "add" for an access; "busy" for a unit of the SM.
        color: the number of a color, which stands for a program or a partition.
        start, end: the positions of the left and right edge on the time axis.
        top, bottom: the positions of the upper and lower edge, as shares of the lane's height.
        words: what the rectangle stands for.
    """

    kind: str
    color: int
    start: float
    end: float
    top: float
    bottom: float
    words: str


@dataclass
class Panel:
    """Lanes with one time axis.

    Attributes:
        unit: the unit of the time axis: cycles or, if the model of an SM timed no launch, the MB moved so far.
        end: the end of the time axis.
        lanes: the marks of each lane, by the lane's name.
        keys: the partition of each color, if colors stand for partitions.
        busy: the share of the time in which each unit is busy, by lane.
        borders: the positions in a lane at which sequences of different lengths start, as shares of the lane's height.
    """

    stage: str
    unit: str
    end: float
    accesses: int
    megabytes: float
    lanes: dict[str, list[Mark]]
    keys: dict[int, str] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    borders: dict[str, list[float]] = field(default_factory=dict)


def _times(recorded: Trace) -> list[tuple[float, float]]:
    """Return the start and the end of each access on the time axis. In launches without times, accesses take no cycles."""
    if not any(recorded.spans.values()):
        ends = list(itertools.accumulate(access.nbytes / 1e6 for access in recorded.accesses))
        return list(zip([0.0, *ends], ends, strict=False))
    spans = (recorded.spans.get(launch, []) for launch in range(len(recorded.launches)))
    before = list(itertools.accumulate((max((span.end for span in each), default=0.0) for each in spans), initial=0))
    return [(before[a.launch] + (a.start or 0), before[a.launch] + max(a.end or 0, a.start or 0)) for a in recorded.accesses]


def accesses(stage: str, recorded: Trace) -> Panel:
    """Return the panel of a stage's accesses, with a lane for each tensor. All tensors without a name share a lane."""
    times, found = _times(recorded), {}
    end = max((end for _, end in times), default=0.0)
    for access, (start, stop) in zip(recorded.accesses, times, strict=True):
        heads, rows, _ = recorded.tensors[access.tensor]
        if rows < FEW:
            continue
        first, last = (head * rows + row for head, row in zip(access.heads, access.rows, strict=True))
        who = f"{access.partition.lstrip('_')} of CTA" if access.partition else "program"
        does = {"read": "reads", "write": "writes", "add": "adds to"}[access.kind]
        where = f"rows {access.rows[0]} to {access.rows[1]}"
        words = f"{who} {access.program} {does} {access.tensor}, {where}: {access.nbytes:,} bytes"
        edges = start, max(stop, start + end * LEAST), first / (heads * rows), (last + 1) / (heads * rows)
        lane = "temporary" if access.tensor.startswith("temporary") else access.tensor
        found.setdefault(lane, []).append(Mark(access.kind, access.program % len(COLORS), *edges, words))
    found = {lane: found[lane] for lane in (*FIRST, *found) if lane in found}
    unit = "cycles of the model of an SM" if any(recorded.spans.values()) else "MB moved so far"
    moved = sum(access.nbytes for access in recorded.accesses) / 1e6
    borders = {}
    for lane in found.keys() & set(FIRST):
        heads, rows, _ = recorded.tensors[lane]
        borders[lane] = [(head + start / rows) / heads for head in range(heads) for start in recorded.starts]
    return Panel(stage, unit, end, len(recorded.accesses), moved, found, borders=borders)


def _draw(axes, panel: Panel):
    """Draw the lanes. The first row of a tensor is at the top of its lane."""
    patches, colors, edges = [], [], []
    for place, (lane, marks) in enumerate(panel.lanes.items()):
        axes.axhspan(place + 0.06, place + 0.94, color="0.95", zorder=0)
        for border in panel.borders.get(lane, []):
            axes.axhline(place + 0.06 + 0.88 * border, color="0.5", linewidth=0.5)
        for mark in sorted(marks, key=lambda mark: mark.kind != "read"):
            height = max(0.88 * (mark.bottom - mark.top), 0.02)
            patches.append(Rectangle((mark.start, place + 0.06 + 0.88 * mark.top), mark.end - mark.start, height))
            colors.append(WRITES.get(mark.kind, COLORS[mark.color]))
            edges.append(0.6 if mark.kind in WRITES else 0)
    axes.add_collection(PatchCollection(patches, facecolors=colors, edgecolors=colors, linewidths=edges))
    axes.set_yticks([place + 0.5 for place in range(len(panel.lanes))], panel.lanes, fontsize=8)
    axes.set_ylim(len(panel.lanes), 0)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(f"{panel.stage}: {panel.accesses} accesses, {panel.megabytes:.2f} MB", fontsize=9, loc="left")
    axes.set_xlabel(panel.unit, fontsize=8)


def draw(
    names: list[str], workload: Workload, path: Path, lengths: Sequence[int] = (), queries: int | None = None, sms: int = 1
):
    """Write a picture with a panel for each stage. Panels with the same unit have the same scale.

    `trace` explains `lengths` and `queries`. Persistent kernels have `sms` CTAs.
    """
    gpu = replace(ONE_SM, num_sms=sms)
    panels = [accesses(name, trace(stages.load(name), workload, gpu, lengths, queries)) for name in names]
    heights = [max(1, len(panel.lanes)) * LANE + GAP for panel in panels]
    figure = Figure(figsize=(WIDTH, sum(heights) + 1.2 + 0.5 * len(names)), layout="constrained")
    grid = figure.subplots(len(names), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, panel in zip(grid[:, 0], panels, strict=True):
        _draw(axes, panel)
        axes.set_xlim(0, max(other.end for other in panels if other.unit == panel.unit))
    figure.legend(
        [tuple(Patch(color=color) for color in COLORS[:3]), *(Patch(color=color) for color in WRITES.values())],
        ["read, by program", "write", "add in memory"],
        handler_map={tuple: HandlerTuple(ndivide=None)},
        loc="outside lower center", ncols=3, fontsize=8, frameon=False,
    )  # fmt: skip
    tokens = ", ".join(map(str, lengths or [workload.seq_len])) + (f", queries={queries}" if queries else "")
    figure.suptitle(
        f"{PASS_NAMES[workload.pass_]}, D={workload.head_dim}, {mask(workload.causal)}, S={tokens}, "
        f"H={workload.heads}, {workload.dtype}; recorded from the kernels; rows downwards",
        fontsize=8, color="0.4",
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main(argv: list[str]):
    """Run the command line."""
    parser = command("common.show.traces", __doc__)
    add_list(parser, "--stage", "v2,v3")
    passes = list_of(one_of(("fwd", "bwd")))
    parser.add_argument("--pass", dest="pass_", type=passes, default="fwd", metavar="LIST", help="fwd, bwd (default: fwd)")
    shape = {"head_dim": "32", "causal": "yes", "seq_len": "1024", "heads": "1", "kv_heads": None}
    for name, default in shape.items():
        add_list(parser, f"--{name.replace('_', '-')}", default)
    lengths_help = "lengths of a batch's sequences, instead of --seq-len; lines show where sequences start"
    parser.add_argument("--lengths", type=list_of(positive), default=[], metavar="LIST", help=lengths_help)
    queries_help = "with --lengths: each sequence is a cache, and has this many queries"
    parser.add_argument("--queries", type=positive, metavar="N", help=queries_help)
    sms_help = "number of SMs, each with one CTA of a persistent kernel; the model runs them one after another (default: 1)"
    parser.add_argument("--sms", type=positive, default=1, metavar="N", help=sms_help)
    options = parser.parse_args(argv)
    if options.queries and not options.lengths:
        parser.error("--queries needs --lengths")
    caches = f"-q{options.queries}" if options.queries else ""
    versions = "-".join(stages.version(name) for name in options.stage)
    for work in workloads_of(parser, **{name: getattr(options, name) for name in ("pass_", *shape)}):
        tokens = "-".join(map(str, options.lengths or [work.seq_len]))
        path = TRACES / f"{versions}-{work.pass_}-d{work.head_dim}-{mask(work.causal)}-s{tokens}{caches}.png"
        draw(options.stage, work, path, options.lengths, options.queries, options.sms)
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
