"""Counted traffic next to what Nsight Compute measures between the L2 cache and the SMs, for the same launches.

    python -m common.measure.ncu measure results/traffic-h200.json   # where there are a GPU and `ncu`
    python -m common.measure.ncu count results/traffic-h200.json     # anywhere: adds the counts, for the tiles tuned there
    make readme                                              # writes results/traffic-h200.md

What can make the two differ: an L1 cache serves a pointer load whose line it still holds (copies that go past it to shared
memory, and TMA, always ask the L2 cache); memory moves in sectors of 32 bytes, of which the end of a row may use a
part; registers that spill go through the same ports.

Where query heads share K/V heads their programs ask for as many bytes of K and V as with heads of their own, but for fewer
distinct ones. What the L2 cache makes of that is seen in the bytes it takes from device memory (`--heads 16 --kv-heads 16,2`).
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

# Bytes between an SM's L1 cache and the crossbar to the L2 cache, TMA's included.
READ, WRITTEN = "l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum"
SPILLED = "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum"  # registers without room: these stores are in WRITTEN too
SECTOR = 32  # bytes
MEMORY = "dram__bytes_read.sum", "dram__bytes_write.sum"  # between the L2 cache and device memory
FURTHER = (  # to explain a difference; what this GPU does not have is left out
    "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum",  # of these TMA's
    "l1tex__m_l1tex2xbar_write_bytes_mem_global_op_tma_st.sum",
    "lts__t_sectors_srcunit_tex_op_read.sum",  # the same traffic at the L2 cache's end, in sectors of 32 bytes
    "lts__t_sectors_srcunit_tex_op_write.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",  # what pointer loads ask of the L1 cache …
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum",  # … and what it has
    "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",  # spilled registers come back, mostly from the L1 cache
    *MEMORY,
)
HEADS = 2  # unless asked: bytes are the same for each head, and the interpreter has to count them all


@triton.jit
def _case_begins_kernel(case):
    """Nothing; its name separates what the profiler saw of one case from the next."""


def launch(options):
    """Inside the profiler: run each case once within its sight, after once without, which tunes and compiles."""
    cases = []
    for name, workload in itertools.product(options.stage, options.workloads):
        stage = stages.load(name)
        show(f"{name} {workload.label}", stage_call(stage, workload, workload.inputs()))
        configs = {kernel: getattr(tuner, "best_config", None) for kernel, tuner in tuners(stage).items()}
        tuned = {kernel: [config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"]] for kernel, config in configs.items() if config}
        cases.append({"impl": name, **workload.record(), "tuned": tuned})
    write_json(options.file, cases)


def show(label: str, call: Callable):
    """Let the profiler see a call as one case, after one that it does not see."""
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
    """The kernels of each case, in order, from `ncu --csv --page raw`: {"name", and the value of each metric that is there}."""
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
    """What `ncu` says of the kernels that `python -m module launch FILE options` shows it; FILE gets the list of cases.

    Args:
        metrics: what to measure.
        optional: what to measure where this GPU has it.

    Returns:
        machine_info, and cases as `launch` wrote them, each with its kernels.

    Raises:
        SystemExit: there is no GPU or no `ncu`, or it failed.
    """
    if DEVICE != "cuda" or not shutil.which("ncu"):
        raise SystemExit("this needs a GPU, and ncu on the PATH")
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
    """These lists of a command line, for another one; without those that were not given."""
    lists = {name: getattr(options, name) for name in names if getattr(options, name) != [None]}
    return [f"--{name.replace('_', '-')}={','.join(map(str, values))}" for name, values in lists.items()]


def measure(options):
    """Run all cases under `ncu` and save what it says of each of their kernels."""
    selection = as_flags(options, "stage", "seq_len", "head_dim", "heads", "kv_heads", "value_dim")
    write_json(options.file, profile("common.measure.ncu", selection, (READ, WRITTEN, SPILLED), FURTHER))


def add_counts(options):
    """Count each saved case on the interpreter, with the tiles that it was measured with, and save that too."""
    if DEVICE != "cpu":
        raise SystemExit("count needs the interpreter: set TRITON_INTERPRET=1")
    try:
        result = json.loads(options.file.read_text())
        cases = result["cases"]
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"{options.file} is not what measure writes: {error!r}") from None
    for done, case in enumerate(cases, start=1):
        print(f"\rcounting {done} of {len(cases)}", end="", file=sys.stderr, flush=True)
        counted = count_stage(stages.load(case["impl"]), Workload.of(case), GPUS[options.gpu], case["tuned"])
        case["counted"] = [asdict(launch) for launch in counted.launches]
    print(file=sys.stderr)
    write_json(options.file, result)


def pairs(case: dict) -> list[tuple[str, list[dict], list[dict]]]:
    """(label, counted launches, measured kernels) of each Triton kernel, and of all of PyTorch's operators together."""
    counted = {True: [], False: []}
    for launch_ in case["counted"]:
        counted[launch_["name"].startswith("aten.")].append(launch_)
    names = {launch_["name"] for launch_ in counted[False]}
    kernels = [kernel for kernel in case["kernels"] if kernel["name"] in names]
    pairs = []
    for launch_, kernel in zip(counted[False], kernels, strict=True):
        if launch_["name"] != kernel["name"]:
            raise ValueError(f"{case['impl']}: counted {launch_['name']} where {kernel['name']} was measured")
        pairs.append((f"{launch_['name']} {'×'.join(map(str, launch_['tile'].values()))}", [launch_], [kernel]))
    if counted[True]:
        pairs.append(("PyTorch", counted[True], [kernel for kernel in case["kernels"] if kernel["name"] not in names]))
    return pairs


def comparison(counted: list[dict], measured: list[dict]) -> dict[str, int]:
    """Bytes of launches together, counted and measured; `spilled` are those written that no program asks for."""
    return {
        "read": sum(launch_["read"] for launch_ in counted),
        "written": sum(launch_["written"] for launch_ in counted),
        "read_measured": sum(kernel[READ] for kernel in measured),
        "written_measured": sum(kernel[WRITTEN] for kernel in measured),
        "spilled": sum(kernel[SPILLED] for kernel in measured) * SECTOR,
    }


def main(argv: list[str]):
    """The command line."""
    terminal.prepare()
    parser = argparse.ArgumentParser(
        prog="python -m common.measure.ncu",
        description="Compare counted traffic with Nsight Compute's. LIST is comma-separated.",
    )
    parser.add_argument("what", choices=["measure", "count", "launch"], help="launch is what measure runs in the profiler")
    parser.add_argument("file", type=json_path, help="the JSON file that measure writes and count completes")
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="whose fixed tiles count takes (default: %(default)s)")
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
