"""Show counted bytes and FLOPs, and the gains that earlier runs measured on a GPU.

    python -m common.show.counts --stage v3 --pass bwd --seq-len 1024 --head-dim 128 --causal yes --gpu a100

`common.measure.traffic` explains what is counted, and with which tiles.
"""

import os
import sys
from dataclasses import asdict

import stages
from common.measure import machine, terminal
from common.measure.footprint import MIB_IN_MB
from common.measure.options import add_list, json_path, list_of, one_of, workloads_of, write_json
from common.measure.progress import COLUMNS, Progress
from common.measure.traffic import GPUS, costs, count_stage
from common.measure.workloads import HIDDEN, TOKENS, Workload
from common.runtime import INTERPRETED
from common.show import results
from common.show.results import stage_order
from common.show.tables import PASS_NAMES, grouped

HEADERS = ["MB read", "MB written", "MFLOP", "launches", "peak extra MB", "tiles"]


def _total(records, impl, pass_, *fields) -> int:
    return sum(r[name] for r in records for name in fields if (r["impl"], r["pass"]) == (impl, pass_) and "failure" not in r)


def summary(records: list[dict], about: str | None = None) -> str:
    """Compare a stage with its parent, one line for each pass. Return "" if the run does not have both.

    Args:
        records: all records of a run without a GPU, including failures.
        about: the stage; None means the newest stage, or the last one of a run without it.
    """
    impls = sorted({record["impl"] for record in records}, key=stage_order)
    about = about or (stages.newest() if stages.newest() in impls else impls[-1])
    parent = stages.parent(about) if stages.position(about) else None
    if not {about, parent} <= {*impls}:
        return ""
    lines = [f"{about} compared with its parent, {parent}:"]
    head_dims = sorted({record["head_dim"] for record in records})
    for pass_, name in PASS_NAMES.items():
        moved, flops = (
            [_total(records, impl, pass_, *fields) for impl in (parent, about)]
            for fields in (("bytes_read", "bytes_written"), ("flops_executed",))
        )
        if all(moved):
            lines.append(f"  {name}: {results.bytes_in_words(*moved)}, {results.bytes_in_words(*flops, 'FLOPs')}")
            for head_dim in head_dims:
                if found := results.gain(results.runs(), about, parent, pass_, head_dim):
                    lines.append(f"    measured at D={head_dim}: {found[0]} as fast ({results.places(found[1:])})")
    return "\n".join(lines)


def _cells(record, _) -> dict:
    """Return a record's cells by header."""
    return {
        "MB read": f"{record['bytes_read'] / 1e6:,.3f}",
        "MB written": f"{record['bytes_written'] / 1e6:,.3f}",
        "MFLOP": f"{record['flops_executed'] / 1e6:,.1f}",
        "launches": record["kernel_launches"],
        "peak extra MB": f"{record['peak_extra_mib'] * MIB_IN_MB:,.3f}",
        "tiles": record["tiles"] or "-",
    }


def tables(records: list[dict], machine: dict, wide: bool) -> str:
    """Format the tables of `common.show.tables.grouped`.

    Args:
        records: all records of a run without a GPU, including failures; or those of this module's command.
        machine: the versions, the commit, the date, and `tiles`, the GPU whose tiles the kernels had.
        wide: whether to show all columns and the full names of stages.
    """
    parts = [
        f"CPU, interpreted, tiles of the {machine['tiles']}, torch {machine['torch']}, triton {machine['triton']}, "
        f"commit {results.short_commit(machine['commit'])}, {machine['date']}",
        "MB are the bytes that the kernels request. PyTorch's operators count arguments and results once.\n"
        "MFLOP are the FLOPs that run, those of masked scores included where a kernel computes them.\n",
    ]
    return "\n\n".join([*parts, *grouped(records, HEADERS, _cells, None if wide else COLUMNS)])


def _saved(launch) -> dict:
    """Return a launch's fields for a results file, without those of its operands."""
    return {name: value for name, value in asdict(launch).items() if name != "operands"}


def heads_at_once(workload: Workload) -> int:
    """Return how many times the papers' batch has the heads of a workload of their length and head dimension."""
    heads = TOKENS // workload.seq_len * (HIDDEN // workload.head_dim)
    return max(1, heads // (workload.batch * workload.heads))


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    if not INTERPRETED:  # restart Python with Triton's interpreter, which counting needs
        interpreted = os.environ | {"TRITON_INTERPRET": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "common.show.counts", *argv], interpreted)
    parser = terminal.Parser(
        prog="python -m common.show.counts",
        description="Count the bytes and FLOPs of stages, in float16 with batch 1. Kernels get a GPU's tiles, and the share "
        "of its SMs and of its L2 cache that these heads have in the papers' batches. Needs no GPU. LIST is comma-separated.",
    )
    passes = list_of(one_of({"fwd": "fwd", "bwd": "bwd"}))
    add_list(parser, "--stage", ",".join(stages.names()))
    parser.add_argument("--pass", dest="pass_", type=passes, default="fwd,bwd", metavar="LIST", help="fwd, bwd (default: both)")
    shape = {"head_dim": "64,128", "causal": "no,yes", "seq_len": "256,512", "heads": "1", "kv_heads": None, "value_dim": None}
    for name, default in shape.items():
        add_list(parser, f"--{name.replace('_', '-')}", default)
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="GPU to count for (default: %(default)s)")
    parser.add_argument("--wide", action="store_true", help="show all columns and the full names of stages")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="also write the records with all launches to FILE")
    options = parser.parse_args(argv)
    workloads = workloads_of(parser, **{name: getattr(options, name) for name in ("pass_", *shape)})
    gpu = GPUS[options.gpu]
    with gpu.interpreted():
        reasons = {name: stages.unavailable(name) for name in options.stage}
    for name, reason in reasons.items():
        if reason:
            print(f"{name} is not counted: it {reason}", file=sys.stderr)
    countable = [name for name in options.stage if not reasons[name]]
    if not countable:
        raise SystemExit("there is nothing to count")
    cases = [(name, workload) for workload in workloads for name in countable]
    records = []
    with Progress(sum(workload.flops for _, workload in cases)) as bar:
        for number, (name, workload) in enumerate(cases, start=1):
            bar.begin(f"{number} of {len(cases)}, {results.spoken(name)}, {workload.label}")
            heads = heads_at_once(workload)
            count = count_stage(stages.load(name), workload, gpu.share(heads))
            record = {"impl": name, **workload.record(), **costs(count), "heads_at_once": heads}
            records.append(record | {"launches": [_saved(launch) for launch in count.launches]})
            bar.update(workload.flops)
    origin = machine.facts() | {"tiles": gpu.name}
    print(tables(records, origin, options.wide), flush=True)
    if options.json:
        write_json(options.json, {"records": records, "machine_info": origin})


if __name__ == "__main__":
    main(sys.argv[1:])
