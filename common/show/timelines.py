"""Draw when each unit of an SM works for a stage's Gluon kernel.

Each unit has a lane, and the color shows the partition for which the unit works.

    make timeline STAGE=v29 ARGS="--pass bwd --head-dim 128"   # needs no GPU; writes to plots/timelines

`make plots` draws both passes with D = 64, for each stage whose README shows the picture. `common.measure.timeline` has the
model of an SM.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws into files; needs no display

import matplotlib.pyplot as plt  # noqa: E402

import stages  # noqa: E402
from common.interpreter.timing import COPIES, UNITS  # noqa: E402
from common.measure import terminal  # noqa: E402
from common.measure.options import add_list, list_of, one_of  # noqa: E402
from common.measure.timeline import SCORES, has_gluon, measured_rates, record, require_timed, simulate  # noqa: E402
from common.measure.workloads import Workload  # noqa: E402
from common.show.results import PLOTS, SCOPES, spoken  # noqa: E402
from common.show.tables import PASS_NAMES  # noqa: E402

GLUON = [name for name in stages.names() if has_gluon(name)]
TIMELINES = PLOTS / "timelines"
CYCLES = 5000  # drawn cycles
FROM = 15 / 32  # the picture begins at this share of the kernel's time
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")  # color-blind readers can tell these apart
NARROW = 0.04  # a span has a label if it is wider than this share of the picture


def _draw(axes, name: str, workload: Workload):
    """Draw a lane for each unit. The label of the lane says how busy the unit is."""
    timings = simulate(stages.load(name), workload, measured_rates())
    facts = record(name, workload, timings)
    longest = max(timings, key=lambda timing: timing.end)
    first = min(FROM * longest.end, max(0.0, longest.end - CYCLES))
    shown = [span for span in longest.spans if span.end > first and span.start < first + CYCLES]
    partitions = sorted({partition_of(span) for span in shown})
    for span in shown:
        lane, color = -UNITS.index(span.unit), COLORS[partitions.index(partition_of(span)) % len(COLORS)]
        begin, end = max(span.start - first, 0), min(span.end - first, CYCLES)
        axes.barh(lane, end - begin, left=begin, height=0.8, color=color, edgecolor="white", linewidth=0.4)
        if end - begin > NARROW * CYCLES:
            axes.text((begin + end) / 2, lane, span.what, ha="center", va="center", fontsize=6, color="white")
    labels = [f"{unit}\n{100 * facts['busy'][unit]:.0f} % busy" for unit in UNITS]
    axes.set_yticks([-lane for lane in range(len(UNITS))], labels, fontsize=8)
    axes.set_xlim(0, CYCLES)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    mask = "causal" if workload.causal else "full"
    axes.set_title(
        f"{spoken(name)}, {PASS_NAMES[workload.pass_]}, D={workload.head_dim}, {mask}, S={workload.seq_len}: "
        f"{facts['cycles_a_tile']:.0f} cycles for {SCORES} scores",
        fontsize=10, loc="left",
    )  # fmt: skip
    for partition, color in zip(partitions, itertools.cycle(COLORS), strict=False):
        axes.bar(0, 0, color=color, label=partition)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7, frameon=False)


def partition_of(span) -> str:
    """Return the number of a span's partition, and the name of the partition's function."""
    return str(span.who).split(", partition ")[-1].replace(": _", ": ")


def draw(name: str, workloads: list[Workload], path: Path):
    """Write a plot of a stage with a panel for each workload."""
    figure, grid = plt.subplots(len(workloads), 1, figsize=(11, 3.2 * len(workloads)), layout="constrained", squeeze=False)
    for axes, workload in zip(grid[:, 0], workloads, strict=True):
        _draw(axes, name, workload)
    grid[-1, 0].set_xlabel("cycles of the SM, in the middle of the kernel")
    model = "a model of one H200 SM, at measured rates of its units (results/rates-h200.json)"
    figure.suptitle(model, fontsize=8, color="0.4")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_recorded(recorded: dict, path: Path):
    """Plot what the partitions did on a GPU, and below, what they do in the model of an SM. Each partition has a lane."""
    names = ("batch", "heads", "seq_len", "head_dim", "causal", "dtype")
    workload = Workload(recorded["pass"], **{name: recorded[name] for name in names} | {"batch": 1, "heads": 1})
    longest = max(simulate(stages.load(recorded["impl"]), workload, measured_rates()), key=lambda timing: timing.end)
    first = FROM * longest.end
    model = [
        {"who": partition_of(span), "what": span.what, "start": span.start - first, "end": span.end - first}
        for span in longest.spans
        if first < span.end and span.start < first + CYCLES and span.unit != COPIES
    ]
    figure, grid = plt.subplots(2, 1, figsize=(11, 4.4), layout="constrained", sharex=True)
    titles = (f"recorded on an {recorded['machine_info']['gpu']}, by Proton", "the model")
    for axes, title, spans in zip(grid, titles, (recorded["spans"], model), strict=True):
        partitions, kinds = (sorted({span[name] for span in spans}) for name in ("who", "what"))
        for span in spans:
            lane, color = -partitions.index(span["who"]), COLORS[kinds.index(span["what"]) % len(COLORS)]
            begin, end = max(span["start"], 0), min(span["end"], CYCLES)
            axes.barh(lane, end - begin, left=begin, height=0.8, color=color, edgecolor="white", linewidth=0.4)
        for kind, color in zip(kinds, itertools.cycle(COLORS), strict=False):
            axes.bar(0, 0, color=color, label=kind)
        axes.set_yticks([-lane for lane in range(len(partitions))], partitions, fontsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_title(f"{spoken(recorded['impl'])}, {title}", fontsize=9, loc="left")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7, frameon=False)
    grid[-1].set_xlim(0, CYCLES)
    grid[-1].set_xlabel("cycles of the SM")
    mask = "causal" if workload.causal else "full"
    figure.suptitle(
        f"{PASS_NAMES[workload.pass_]}, D={workload.head_dim}, {mask}, S={workload.seq_len}", fontsize=8, color="0.4"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_all(directory: Path):
    """Draw both passes of each stage whose README shows the picture. Also draw the stage that was recorded on a GPU."""
    workloads = [Workload(pass_, 1, 1, 2048, 64, False, "float16") for pass_ in ("fwd", "bwd")]
    for name in GLUON:
        picture = f"{stages.version(name)}.png"
        if f"plots/timelines/{picture}" in stages.source(name, "README.md"):
            draw(name, workloads, directory / picture)
    if SCOPES.exists():
        draw_recorded(json.loads(SCOPES.read_text()), directory / "recorded.png")


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    parser = argparse.ArgumentParser(
        prog="python -m common.show.timelines",
        description="Draw what the units of an SM do in a Gluon stage's kernel. LIST is comma-separated.",
    )
    add_list(parser, "--stage", ",".join(GLUON))
    passes = list_of(one_of({"fwd": "fwd", "bwd": "bwd"}))
    parser.add_argument("--pass", type=passes, default="fwd", metavar="LIST", help="fwd, bwd (default: %(default)s)")
    for flag, default in (("--seq-len", "2048"), ("--head-dim", "64"), ("--causal", "no")):
        add_list(parser, flag, default)
    parser.add_argument("--committed", action="store_true", help="ignore the other options, and draw all of plots/timelines")
    options = parser.parse_args(argv)
    if options.committed:
        draw_all(TIMELINES)
        return
    require_timed(options.stage, vars(options)["pass"], options.head_dim)
    shapes = itertools.product(options.stage, vars(options)["pass"], options.head_dim, options.causal, options.seq_len)
    for name, pass_, head_dim, causal, seq_len in shapes:
        mask = "causal" if causal else "full"
        path = TIMELINES / f"{name.split('_')[0]}-{pass_}-d{head_dim}-{mask}-s{seq_len}.png"
        draw(name, [Workload(pass_, 1, 1, seq_len, head_dim, causal, "float16")], path)
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
