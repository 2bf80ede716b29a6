"""What each stage moves and computes, as a table.

    python -m common.show.counts --stage v3 --pass bwd --seq-len 1024 --head-dim 128 --causal yes --gpu a100

What is counted, and with which tiles, `common.measure.traffic` says.
"""

import argparse
import itertools
import json
import os
import sys
from dataclasses import asdict

import stages
from common.measure import files, machine
from common.measure.options import json_path, list_of, one_of, positive
from common.measure.traffic import GPUS, costs, count_stage
from common.measure.workloads import Workload
from common.operator import HEAD_DIMS
from common.runtime import INTERPRETED
from common.show import tables


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The command line as lists of values; exits with status 2 on a value that is not allowed."""
    parser = argparse.ArgumentParser(
        prog="python -m common.show.counts",
        description="Count what stages move and compute, float16, a single head, and say how long that takes at a GPU's "
        "published peaks. Needs no GPU. LIST is comma-separated.",
    )
    passes = {"fwd": "fwd", "bwd": "bwd"}
    head_dims = {str(head_dim): head_dim for head_dim in HEAD_DIMS}
    causal = {"no": False, "yes": True}
    for flag, parse, default, help_text in (
        ("--stage", stages.resolve, ",".join(stages.names()), "such as v3 or v3_fa2_causal (default: all)"),
        ("--pass", one_of(passes), "fwd,bwd", "fwd, bwd (default: both)"),
        ("--seq-len", positive, "256,512", "any (default: %(default)s)"),
        ("--head-dim", one_of(head_dims), "64,128", f"{', '.join(head_dims)} (default: %(default)s)"),
        ("--causal", one_of(causal), "no,yes", "no, yes (default: both)"),
    ):
        parser.add_argument(flag, type=list_of(parse), default=default, metavar="LIST", help=help_text)
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="whose tiles and peaks (default: %(default)s)")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="also write the records, and each launch, there")
    return parser.parse_args(argv)


def main(argv: list[str]):
    """The command line."""
    if not INTERPRETED:  # only the interpreter's kernels can be watched: the same command, with it
        interpreted = os.environ | {"TRITON_INTERPRET": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "common.show.counts", *argv], interpreted)
    options = parse_options(argv)
    gpu = GPUS[options.gpu]
    reasons = {name: stages.unavailable(name) for name in options.stage}
    for name, reason in reasons.items():
        if reason:
            print(f"{name} is not counted: it {reason}", file=sys.stderr)
    countable = [name for name in options.stage if not reasons[name]]
    if not countable:
        raise SystemExit("there is nothing to count")
    shapes = list(itertools.product(vars(options)["pass"], options.head_dim, options.causal, options.seq_len, countable))
    records = []
    for done, (pass_, head_dim, causal, seq_len, name) in enumerate(shapes, start=1):
        print(f"\rcounting {done} of {len(shapes)}", end="", file=sys.stderr, flush=True)
        workload = Workload(pass_, 1, 1, seq_len, head_dim, causal, "float16")
        counted = count_stage(stages.load(name), workload, gpu)
        launches = [asdict(launch) for launch in counted.launches]
        records.append({"impl": name, **workload.record(), **costs(counted, gpu, workload.dtype), "launches": launches})
    print(file=sys.stderr)
    origin = machine.facts() | {"matmul_tflops": {}, "roofline": gpu.peaks}
    if options.json:
        files.replace(options.json, json.dumps({"records": records, "machine_info": origin}, indent=1))
    print(f"{tables.speed_table(records, origin)}\n\nPeaks: {gpu.source}")


if __name__ == "__main__":
    main(sys.argv[1:])
