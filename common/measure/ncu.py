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
from common.measure import machine, terminal
from common.measure.options import add_list, json_path, workloads_of, write_json
from common.measure.traffic import GPUS, count_stage, stage_call
from common.measure.workloads import Workload
from common.runtime import DEVICE

# Nsight Compute's metrics for the bytes between an SM's L1 cache and the L2 cache, including TMA's bytes.
READ, WRITTEN = "l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum"
SPILLED = "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum"  # sectors that spills write; WRITTEN includes their bytes
SECTOR = 32  # bytes in a sector
MEMORY = "dram__bytes_read.sum", "dram__bytes_write.sum"  # bytes between L2 cache and device memory; some GPUs lack them
HEADS = 2  # the default; every head moves equally many bytes


@triton.jit
def _case_begins_kernel(case):
    """Do nothing. The kernel's name marks where a case begins in the profile."""


def launch(options):
    """Run each case twice in the profiler. The first run compiles and tunes the kernels, and the second run is profiled."""
    cases = []
    for name, workload in itertools.product(options.stage, options.workloads):
        stage = stages.load(name)
        show(f"{name} {workload.label}", stage_call(stage, workload, workload.inputs()))
        configs = {kernel: getattr(tuner, "best_config", None) for kernel, tuner in tuners(stage).items()}
        tuned = {kernel: [config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"]] for kernel, config in configs.items() if config}
        cases.append({"impl": name, **workload.record(), "tuned": tuned})
    write_json(options.file, cases)


def show(label: str, call: Callable):
    """Call `call` twice, and profile the second call as one case."""
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


def profile(module: str, options: Sequence[str], metrics: Sequence[str], optional: Sequence[str] = ()) -> dict:
    """Profile `python -m module launch FILE options` with `ncu`. The profiled command writes the list of its cases to FILE.

    Args:
        metrics: the metrics to measure.
        optional: more metrics to measure, if the GPU has them.

    Returns:
        A dict with "machine_info" and "cases". The cases are those of FILE, each with its list of "kernels" from `parse`.

    Raises:
        SystemExit: the machine has no GPU or no `ncu`, or `ncu` failed.
    """
    if DEVICE != "cuda" or not shutil.which("ncu"):
        raise SystemExit("this command needs a GPU, and ncu on the PATH")
    listed = subprocess.run(["ncu", "--query-metrics"], capture_output=True, text=True, check=True).stdout
    available = {line.split()[0] for line in listed.splitlines() if line.strip()}
    metrics = [*metrics, *(metric for metric in optional if metric.split(".")[0] in available)]
    with tempfile.TemporaryDirectory() as directory:
        log, cases = Path(directory, "ncu.csv"), Path(directory, "cases.json")
        profiler = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        profiler += ["--profile-from-start", "off", "--clock-control", "none", "--metrics", ",".join(metrics)]
        run = subprocess.run([*profiler, sys.executable, "-m", module, "launch", str(cases), *options], check=False)
        text = log.read_text() if log.exists() else ""
        if run.returncode or not cases.exists():
            raise SystemExit(f"ncu failed:\n{text[-3000:]}")
        measured = json.loads(cases.read_text())
    for case, kernels in zip(measured, parse(text, metrics), strict=True):
        case["kernels"] = kernels
    version = subprocess.run(["ncu", "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[-2]
    return {"machine_info": machine.facts() | {"ncu": version}, "cases": measured}


def as_flags(options, *names: str) -> list[str]:
    """Return the options `names`, whose values are lists, as flags for the command line of another program."""
    lists = {name: getattr(options, name) for name in names if getattr(options, name) != [None]}
    return [f"--{name.replace('_', '-')}={','.join(map(str, values))}" for name, values in lists.items()]


def measure(options):
    """Run all cases under `ncu` and save the metrics of each kernel."""
    selection = as_flags(options, "stage", "seq_len", "head_dim", "heads", "kv_heads", "value_dim")
    write_json(options.file, profile("common.measure.ncu", selection, (READ, WRITTEN, SPILLED), MEMORY))


def add_counts(options):
    """Count each case of the file on the interpreter, with the measured kernels' tiles. Add the counts to the file."""
    if DEVICE != "cpu":
        raise SystemExit("count works only on the interpreter: set TRITON_INTERPRET=1")
    try:
        result = json.loads(options.file.read_text())
        cases = result["cases"]
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"{options.file} is not a file that measure has written: {error!r}") from None
    for done, case in enumerate(cases, start=1):
        print(f"\rcounting {done} of {len(cases)}", end="", file=sys.stderr, flush=True)
        counted = count_stage(stages.load(case["impl"]), Workload.of(case), GPUS[options.gpu], case["tuned"])
        case["counted"] = [asdict(launch) for launch in counted.launches]
    print(file=sys.stderr)
    write_json(options.file, result)


def pairs(case: dict) -> list[tuple[str, list[dict], list[dict]]]:
    """Return (label, counted launches, measured kernels) for each Triton kernel.

    The last entry is for all PyTorch operators of the case.
    """
    counted = {True: [], False: []}
    for launch_ in case["counted"]:
        counted[launch_["name"].startswith("aten.")].append(launch_)
    names = {launch_["name"] for launch_ in counted[False]}
    kernels = [kernel for kernel in case["kernels"] if kernel["name"] in names]
    pairs = []
    for launch_, kernel in zip(counted[False], kernels, strict=True):
        if launch_["name"] != kernel["name"]:
            raise ValueError(f"{case['impl']}: counted launch {launch_['name']} stands beside measured kernel {kernel['name']}")
        pairs.append((f"{launch_['name']} {'×'.join(map(str, launch_['tile'].values()))}", [launch_], [kernel]))
    if counted[True]:
        pairs.append(("PyTorch", counted[True], [kernel for kernel in case["kernels"] if kernel["name"] not in names]))
    return pairs


def comparison(counted: list[dict], measured: list[dict]) -> dict[str, int]:
    """Return the sums of the counted and of the measured bytes of some launches.

    The entry `spilled` says how many measured bytes are stores of spilled registers.
    """
    return {
        "read": sum(launch_["read"] for launch_ in counted),
        "written": sum(launch_["written"] for launch_ in counted),
        "read_measured": sum(kernel[READ] for kernel in measured),
        "written_measured": sum(kernel[WRITTEN] for kernel in measured),
        "spilled": sum(kernel[SPILLED] for kernel in measured) * SECTOR,
    }


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    parser = argparse.ArgumentParser(
        prog="python -m common.measure.ncu",
        description="Compare counted traffic with the traffic that Nsight Compute measures. LIST is comma-separated.",
    )
    parser.add_argument(
        "what", choices=["measure", "count", "launch"], help="what to do; measure starts launch in the profiler"
    )
    parser.add_argument("file", type=json_path, help="the JSON file that measure writes and count completes")
    parser.add_argument(
        "--gpu", choices=GPUS, default="h200", help="count uses the fixed tiles for this GPU (default: %(default)s)"
    )
    available = [name for name in stages.names() if not stages.unavailable(name)]
    for flag, default in (
        ("--stage", ",".join(available)), ("--seq-len", "2048"), ("--head-dim", "64,128"), ("--heads", str(HEADS)),
        ("--kv-heads", None), ("--value-dim", None),
    ):  # fmt: skip
        add_list(parser, flag, default)
    options = parser.parse_args(argv)
    shapes = {name: getattr(options, name) for name in ("seq_len", "heads", "kv_heads", "value_dim")}
    options.workloads = workloads_of(parser, pass_=("fwd", "bwd"), head_dim=options.head_dim, causal=(False, True), **shapes)
    {"measure": measure, "launch": launch, "count": add_counts}[options.what](options)


if __name__ == "__main__":
    main(sys.argv[1:])
