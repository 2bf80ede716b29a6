"""Find which stage to use on which GPU.

Compile the stages for each architecture, to see which stages run there. Compute how long the stages take at each GPU's peak
rates.

python -m common.show.choice results/choice.json   # needs no GPU
"""

import argparse
import dataclasses
import itertools
import sys

from tabulate import tabulate

import stages
from common.measure import machine, terminal
from common.measure.aot import HEADS, SHARED_LIMIT, compile_cases
from common.measure.options import json_path, write_json
from common.measure.traffic import GPUS, count_stage, roofline
from common.measure.workloads import Workload
from common.runtime import INTERPRETED, Device, architecture_as
from common.show.results import HEAD_DIMS

SEQ_LEN = 1024  # counted sequence length
PASSES = ("fwd", "bwd")
FAMILIES = {  # GPUs by architecture
    80: "A100, A30",
    86: "GeForce RTX 30, A10, A40, RTX A6000",
    89: "GeForce RTX 40, L4, L40S",
    90: "H100, H200, GH200",
    100: "B200, GB200",
    120: "GeForce RTX 50, RTX PRO 6000 Blackwell",
}


def compiled(names: list[str]) -> list[dict]:
    """Compile the stages, and return a record for each stage, architecture and head dimension.

    A record has stage, arch, head_dim, shared_bytes, spilled_bytes and problem. `shared_bytes` (per CTA) and `spilled_bytes`
    (per thread) are the largest among the stage's kernels. `problem` is the reason why the stage does not run on the
    architecture, or None if it runs.
    """
    shape = {"dtype": "float16", "causal": True, "kv_heads": HEADS, "value_dim": None}
    cases = [
        {"stage": name, "arch": arch, "head_dim": head_dim} | shape
        for name, arch, head_dim in itertools.product(names, SHARED_LIMIT, HEAD_DIMS)
    ]
    rows, errors, unavailable = compile_cases(cases, all_configs=False)
    records = []
    for case in cases:
        record = {name: case[name] for name in ("stage", "arch", "head_dim")}
        ours, *problems = (
            [entry for entry in found if record.items() <= entry.items()] for found in (rows, errors, unavailable)
        )
        for size in ("shared_bytes", "spilled_bytes"):
            record[size] = max((row[size] for row in ours), default=None)
        said = [entry.get("error") or entry["reason"] for entry in itertools.chain(*problems)]
        if ours and record["shared_bytes"] > SHARED_LIMIT[case["arch"]]:
            said.append(f"needs {record['shared_bytes']} bytes of shared memory, and there are {SHARED_LIMIT[case['arch']]}")
        records.append(record | {"problem": said[0] if said else None})
    return records


def counted(names: list[str]) -> list[dict]:
    """Return how many µs each pass takes at the published peak rates, for each GPU of `GPUS` and each stage that runs on it.

    The workload has one head. The count assumes a GPU with a single SM, so that no stage splits the keys.
    """
    records = []
    full = {key: dataclasses.replace(gpu, num_sms=1) for key, gpu in GPUS.items()}
    for (key, gpu), name, head_dim, pass_ in itertools.product(full.items(), names, HEAD_DIMS, PASSES):
        if gpu.unavailable(name):
            continue
        workload = Workload(pass_, 1, 1, SEQ_LEN, head_dim, True, "float16")
        seconds, bound = roofline(count_stage(stages.load(name), workload, gpu).launches, gpu)
        record = {"stage": name, "gpu": key, "head_dim": head_dim, "pass": pass_}
        records.append(record | {"us": seconds * 1e6, "bound": bound})
    return records


def choice_table(choice: dict) -> str:
    """Format a table with a row for each architecture: which stages run on its GPUs, and which stage to use.

    Args:
        choice: the content of the file that `main` writes.
    """
    gpus = {gpu.arch: key for key, gpu in GPUS.items()}
    tuned, fixed = recommended(100), recommended(80)  # the newest stages with tuned tiles and with fixed tiles
    us = {(r["stage"], r["gpu"], r["head_dim"], r["pass"]): r["us"] for r in choice["counted"]}
    rows = []
    for arch, family in FAMILIES.items():
        compiled_there = [record for record in choice["compiled"] if record["arch"] == arch]
        failed = {record["stage"] for record in compiled_there if record["problem"]}
        run = [name for name in dict.fromkeys(record["stage"] for record in compiled_there) if name not in failed]
        cells = []
        for pass_, head_dim in itertools.product(PASSES, HEAD_DIMS):
            times = [us.get((name, gpus.get(arch), head_dim, pass_)) for name in (tuned, fixed)]
            cells.append(f"{times[0] / times[1]:.2f}" if all(times) else "-")
        rows.append([f"sm_{arch}", family, " to ".join(stages.version(name) for name in (run[0], run[-1]))])
        use = recommended(arch) if recommended(arch) in run else run[-1]  # an old file may lack the recommended stage
        rows[-1] += [stages.version(use), f"{cells[0]}, {cells[1]}", f"{cells[2]}, {cells[3]}"]
    machine = choice["machine_info"]
    caption = (
        f"A stage runs on an architecture if all of its kernels compile and fit into shared memory. The last two columns show "
        f"{stages.version(tuned)}'s time divided by {stages.version(fixed)}'s time: first D = 64, then D = 128. Above 1, "
        f"{stages.version(fixed)} is faster. The times are computed from counted bytes and FLOPs (causal, float16, "
        f"S = {choice['seq_len']}) and the GPU's published peak rates. `-`: these rates are unknown. "
        f"Triton {machine['triton']}, commit {machine['commit'][:12]}, {machine['date']}."
    )
    headers = ["architecture", "GPUs", "stages that run", "use", "forward", "backward"]
    return f"{caption}\n\n{tabulate(rows, headers, tablefmt='pipe', disable_numparse=True)}"


def recommended(arch: int) -> str:
    """Return the stage that `stages.recommended()` gives on a GPU of architecture `arch`."""
    with architecture_as(Device(arch, SHARED_LIMIT[arch])):
        return stages.recommended()


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    description = "Compile and count the stages for GPUs that need not be there. This takes minutes."
    parser = argparse.ArgumentParser(prog="python -m common.show.choice", description=description)
    parser.add_argument("file", type=json_path, help="the JSON file to write")
    options = parser.parse_args(argv)
    if not INTERPRETED:
        raise SystemExit("counting needs the interpreter: set TRITON_INTERPRET=1")
    names = [name for name in stages.names()[1:] if not stages.is_dead_end(name)]  # v0 launches no Triton kernel
    counts = counted(names)  # count first, because compiling switches Triton's interpreter off
    found = {"machine_info": machine.facts(), "seq_len": SEQ_LEN, "counted": counts, "compiled": compiled(names)}
    write_json(options.file, found)


if __name__ == "__main__":
    main(sys.argv[1:])
