"""Measure how busy a GPU's units are in each kernel, and why the kernel's warps wait, with Nsight Compute.

    python -m common.measure.units results/units-h200.json   # on a GPU with `ncu`
    make table FILE=results/units-h200.json

A unit that is busy nearly all the time limits the kernel's speed. Without such a unit, the warps wait for each other or for
memory.
"""

import itertools
import sys

from common.measure import ncu, workloads
from common.measure.baselines import BASELINES, timed_call
from common.measure.options import add_implementations, add_list, command
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


def profiled_cases(options) -> list[dict]:
    """Run each case in the profiler, and return the cases."""
    cases = []
    shapes = itertools.product(options.head_dim, options.seq_len, (False, True), ("fwd", "bwd"), options.impl)
    for head_dim, seq_len, causal, pass_, impl in shapes:
        workload = Workload(pass_, *workloads.paper_shape(seq_len, head_dim), seq_len, head_dim, causal, "float16")
        ncu.show(f"{impl} {workload.label}", timed_call(impl, workload, workload.inputs()))
        cases.append({"impl": impl, **workload.record()})
    return cases


def main(argv: list[str]):
    """Run the command line."""
    parser = command("common.measure.units", __doc__, "the JSON file to write")
    ncu.add_in_profiler(parser)
    add_implementations(parser, BASELINES)
    add_list(parser, "--seq-len", "4096")
    add_list(parser, "--head-dim", "64,128")
    metrics, stalls = (TIME, CLOCK, REGISTERS, *UNITS.values()), [STALL.format(reason) for reason in REASONS]
    ncu.profile("common.measure.units", argv, parser.parse_args(argv), profiled_cases, metrics, stalls)


if __name__ == "__main__":
    main(sys.argv[1:])
