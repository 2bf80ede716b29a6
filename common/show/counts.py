"""Print a table of the traffic and FLOPs of each stage.

    python -m common.show.counts --stage v3 --pass bwd --seq-len 1024 --head-dim 128 --causal yes --gpu a100

`common.measure.traffic` explains what is counted, and with which tiles.
"""

import argparse
import os
import sys
from dataclasses import asdict

import stages
from common.measure import machine, terminal
from common.measure.options import add_list, json_path, list_of, one_of, workloads_of, write_json
from common.measure.progress import Progress
from common.measure.traffic import GPUS, costs, count_stage
from common.runtime import INTERPRETED
from common.show import counted
from common.show.results import spoken


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    if not INTERPRETED:  # restart Python with Triton's interpreter, which counting needs
        interpreted = os.environ | {"TRITON_INTERPRET": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "common.show.counts", *argv], interpreted)
    parser = argparse.ArgumentParser(
        prog="python -m common.show.counts",
        description="Count the bytes and FLOPs of stages, in float16 with batch 1. Needs no GPU. LIST is comma-separated.",
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
    reasons = {name: gpu.unavailable(name) for name in options.stage}
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
            bar.begin(f"{number} of {len(cases)}, {spoken(name)}, {workload.label}")
            count = count_stage(stages.load(name), workload, gpu)
            launches = [asdict(launch) for launch in count.launches]
            records.append({"impl": name, **workload.record(), **costs(count, gpu, workload.dtype), "launches": launches})
            bar.update(workload.flops)
    origin = machine.facts() | {"tiles": gpu.name}
    print(counted.tables(records, origin, options.wide), flush=True)
    if options.json:
        write_json(options.json, {"records": records, "machine_info": origin})


if __name__ == "__main__":
    main(sys.argv[1:])
