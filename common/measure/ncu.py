"""Compare counted traffic with the traffic that Nsight Compute measures between the L2 cache and the SMs.

    python -m common.measure.ncu measure results/traffic-h200-d64.json --head-dim 64   # on a GPU with `ncu`
    python -m common.measure.ncu count results/traffic-h200-d64.json   # on any machine: adds the counts to the file
    make table FILE=results/traffic-h200-d64.json

Three effects make counted and measured traffic differ:

- The L1 cache may serve a load with pointers. The counter counts such a load, but the L2 cache does not see it. Asynchronous
  copies and TMA bypass the L1 cache.
- The hardware moves whole sectors of 32 bytes, even where a row ends inside a sector.
- Spilled registers move between the SM and the L2 cache too.

With GQA, fewer bytes of K and V come from device memory. To see this, measure with `--heads 16 --kv-heads 16,2`.
"""

import argparse
import csv
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import triton

import stages
from common.kernels.tuning import tuners
from common.measure.options import add_list, command, json_path, read_json, workloads_of, write_cases, write_json
from common.measure.traffic import GPUS, count_stage, stage_call
from common.measure.workloads import Workload
from common.runtime import DEVICE

# Nsight Compute's metrics for the bytes between an SM's L1 cache and the L2 cache, including TMA's bytes.
READ, WRITTEN = "l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum"
SPILLED = "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum"  # sectors that spills write; WRITTEN includes their bytes
SECTOR = 32  # bytes in a sector
MEMORY = "dram__bytes_read.sum", "dram__bytes_write.sum"  # bytes between L2 cache and device memory; some GPUs lack them
COUNTED_FOR = GPUS["h200"]  # kernels with fixed tiles are counted with their tiles for this GPU


@triton.jit
def _case_begins_kernel(case):
    """Do nothing. The kernel's name marks where a case begins in the profile."""


def profiled_cases(options) -> list[dict]:
    """Run each case in the profiler, and return the cases."""
    cases = []
    for name, workload in itertools.product(options.stage, options.workloads):
        stage = stages.load(name)
        show(f"{name} {workload.label}", stage_call(stage, workload, workload.inputs()))
        configs = {kernel: getattr(tuner, "best_config", None) for kernel, tuner in tuners(stage).items()}
        tuned = {kernel: [config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"]] for kernel, config in configs.items() if config}
        cases.append({"impl": name, **workload.record(), "tuned": tuned})
    return cases


def show(label: str, call: Callable):
    """Call `call` twice. The first call compiles and tunes the kernels, and the second call is profiled as one case."""
    print(label, file=sys.stderr, flush=True)
    call()
    _case_begins_kernel[(1,)](0)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    _case_begins_kernel[(1,)](1)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def parse(log: str, metrics: Sequence[str]) -> list[list[dict]]:
    """Parse the output of `ncu --csv --page raw`, and return a list of kernels for each case.

    A kernel is a dict with its "name" and its metrics.
    """
    header, _, *rows = csv.reader(line for line in log.splitlines() if line.startswith('"'))
    cases = []
    for row in rows:
        values = dict(zip(header, row, strict=True))
        if values["Kernel Name"].startswith("_case_begins_kernel"):
            cases.append([])
            continue
        found = {metric: float(values[metric].replace(",", "")) for metric in metrics if metric in values}
        cases[-1].append({"name": values["Kernel Name"]} | found)
    return cases


def add_in_profiler(parser: argparse.ArgumentParser):
    """Add the option with which `profile` starts a command again: in the profiler, the command writes its cases to a file."""
    parser.add_argument("--in-profiler", type=Path, help=argparse.SUPPRESS)


def profile(module: str, argv: list[str], options, cases: Callable, metrics: Sequence[str], optional: Sequence[str] = ()):
    """Profile a command with `ncu`, and write its cases to `options.file`, each with its list of "kernels" from `parse`.

    Args:
        module: the command is `python -m module argv`, which calls this function.
        options: the parsed options, with those of `add_in_profiler`.
        cases: runs all cases in the profiler, and returns them.
        metrics: the metrics to measure.
        optional: more metrics to measure, if the GPU has them.

    Raises:
        SystemExit: the machine has no GPU or no `ncu`, or `ncu` failed.
    """
    if options.in_profiler:
        return write_json(options.in_profiler, cases(options))
    if DEVICE != "cuda" or not shutil.which("ncu"):
        raise SystemExit("this command needs a GPU, and ncu on the PATH")
    listed = subprocess.run(["ncu", "--query-metrics"], capture_output=True, text=True, check=True).stdout
    available = {line.split()[0] for line in listed.splitlines() if line.strip()}
    metrics = [*metrics, *(metric for metric in optional if metric.split(".")[0] in available)]
    with tempfile.TemporaryDirectory() as directory:
        log, found = Path(directory, "ncu.csv"), Path(directory, "cases.json")
        profiler = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        profiler += ["--profile-from-start", "off", "--clock-control", "none", "--metrics", ",".join(metrics)]
        run = subprocess.run([*profiler, sys.executable, "-m", module, *argv, f"--in-profiler={found}"], check=False)
        text = log.read_text() if log.exists() else ""
        if run.returncode or not found.exists():
            raise SystemExit(f"ncu failed:\n{text[-3000:]}")
        measured = json.loads(found.read_text())
    for case, kernels in zip(measured, parse(text, metrics), strict=True):
        case["kernels"] = kernels
    version = subprocess.run(["ncu", "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[-2]
    write_cases(options.file, measured, ncu=version)


def add_counts(options):
    """Count each case of the file on the interpreter, with the measured kernels' tiles. Add the counts to the file."""
    if DEVICE != "cpu":
        raise SystemExit("count works only on the interpreter: set TRITON_INTERPRET=1")
    result = read_json(options.file, "cases")
    for case in result["cases"]:
        workload = Workload.of(case)
        print(f"{case['impl']} {workload.label}", file=sys.stderr, flush=True)
        counted = count_stage(stages.load(case["impl"]), workload, COUNTED_FOR, case["tuned"])
        case["counted"] = [asdict(launch) for launch in counted.launches]
    write_json(options.file, result)


def comparisons(case: dict) -> list[tuple[str, dict[str, float]]]:
    """Return (label, sums) for each Triton kernel of a case. The last entry is for all PyTorch operators of the case.

    The sums have the counted bytes "read" and "written", and the measured metrics. A metric that the GPU lacks is 0.

    Raises:
        ValueError: other kernels were measured than counted.
    """
    operators = [launch for launch in case["counted"] if launch["name"].startswith("aten.")]
    launches = [launch for launch in case["counted"] if not launch["name"].startswith("aten.")]
    names = {launch["name"] for launch in launches}
    kernels = [kernel for kernel in case["kernels"] if kernel["name"] in names]
    others = [kernel for kernel in case["kernels"] if kernel["name"] not in names]
    counted, measured = ([each["name"] for each in part] for part in (launches, kernels))
    if counted != measured:
        raise ValueError(f"{case['impl']}: the kernels {counted} were counted, but {measured} were measured")
    labels = (f"{launch['name']} {'×'.join(map(str, launch['tile'].values()))}" for launch in launches)
    parts = [(label, [launch], [kernel]) for label, launch, kernel in zip(labels, launches, kernels, strict=True)]
    parts += [("PyTorch", operators, others)] if operators else []
    metrics = READ, WRITTEN, SPILLED, *MEMORY
    return [
        (label, {name: sum(launch[name] for launch in counted) for name in ("read", "written")}
         | {metric: sum(kernel.get(metric, 0) for kernel in measured) for metric in metrics})
        for label, counted, measured in parts
    ]  # fmt: skip


def main(argv: list[str]):
    """Run the command line."""
    parser = command("common.measure.ncu", __doc__)
    parser.add_argument("what", choices=["measure", "count"], help="what to do")
    parser.add_argument("file", type=json_path, help="the JSON file that measure writes and count completes")
    add_in_profiler(parser)
    available = ",".join(name for name in stages.names() if not stages.unavailable(name))
    add_list(parser, "--stage", available)
    shape = {"head_dim": "64,128", "seq_len": "2048", "heads": "2", "kv_heads": None, "value_dim": None}
    for name, default in shape.items():
        add_list(parser, f"--{name.replace('_', '-')}", default)
    options = parser.parse_args(argv)
    shapes = {name: getattr(options, name) for name in shape}
    options.workloads = workloads_of(parser, pass_=("fwd", "bwd"), causal=(False, True), **shapes)
    if options.what == "count":
        add_counts(options)
    else:
        profile("common.measure.ncu", argv, options, profiled_cases, (READ, WRITTEN, SPILLED), MEMORY)


if __name__ == "__main__":
    main(sys.argv[1:])
