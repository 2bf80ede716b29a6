"""Measure how busy a GPU's units are in each kernel, and why the kernel's warps wait, with Nsight Compute.

    python -m common.measure.units results/units-h200.json   # on a GPU with `ncu`
    make table FILE=results/units-h200.json

A unit that is busy nearly all the time limits the kernel's speed. Without such a unit, the warps wait for each other or for
memory.
"""

import argparse
import itertools
import sys

from common.measure import ncu, terminal, workloads
from common.measure.baselines import BASELINES, timed_call
from common.measure.options import add_implementations, add_list, json_path, write_json
from common.measure.workloads import Workload

TIME, CLOCK, REGISTERS = "gpu__time_duration.sum", "sm__cycles_elapsed.avg.per_second", "launch__registers_per_thread"
UNITS = {  # unit -> metric; its value is a percentage of the unit's peak, over the kernel's whole time
    "tensor cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "exponentials": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "issue slots": "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
    "shared memory": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "L2 cache": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "device memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
}
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"  # number of stalled warps per issued instruction
REASONS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "short_scoreboard", "sleeping",
    "tex_throttle", "wait",
)  # fmt: skip
FROM = (3, "")  # the default is the stages from v3 on


def launch(options):
    """Run one call of each case in the profiler."""
    cases = []
    shapes = itertools.product(options.head_dim, options.seq_len, (False, True), ("fwd", "bwd"), options.impl)
    for head_dim, seq_len, causal, pass_, impl in shapes:
        workload = Workload(pass_, *workloads.paper_shape(seq_len, head_dim), seq_len, head_dim, causal, "float16")
        ncu.show(f"{impl} {workload.label}", timed_call(impl, workload, workload.inputs()))
        cases.append({"impl": impl, **workload.record()})
    write_json(options.file, cases)


def measure(options):
    """Run all cases under `ncu` and save the metrics of each kernel."""
    selection = ncu.as_flags(options, "impl", "seq_len", "head_dim")
    stalls = [STALL.format(reason) for reason in REASONS]
    metrics = (TIME, CLOCK, REGISTERS, *UNITS.values())
    write_json(options.file, ncu.profile("common.measure.units", selection, metrics, stalls))


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    description = "Measure how busy the GPU's units are in each kernel. LIST is comma-separated."
    parser = argparse.ArgumentParser(prog="python -m common.measure.units", description=description)
    parser.add_argument(
        "what", nargs="?", choices=["measure", "launch"], default="measure", help="what to do; measure starts launch in ncu"
    )
    parser.add_argument("file", type=json_path, help="the JSON file to write")
    add_implementations(parser, BASELINES, FROM)
    add_list(parser, "--seq-len", "4096")
    add_list(parser, "--head-dim", "64,128")
    options = parser.parse_args(argv)
    {"measure": measure, "launch": launch}[options.what](options)


if __name__ == "__main__":
    main(sys.argv[1:])
