"""Measure the constants by which a forward's plan divides the work.

    python -m common.measure.constants results/constants-h100.json   # on a Hopper GPU
    make table FILE=results/constants-h100.json

The host decides from constants, such as `SHORT` in a stage's `forward_plan.py`. For each decision, this program forces every
choice and times forwards of the last stage that decides. The table compares the host's own choice with the fastest choice.
"""

import contextlib
import importlib
import itertools
import statistics
import sys
from dataclasses import dataclass
from unittest import mock

import stages
from common import recording
from common.measure.baselines import timed_call
from common.measure.options import command, list_of, one_of, write_cases
from common.measure.timing import GpuTimer
from common.measure.workloads import Workload, paper_shape
from common.runtime import DEVICE


@dataclass(frozen=True)
class Decision:
    """A decision of the host, with the choices to measure."""

    about: str
    function: str  # the function of a stage's forward that decides; its value is the choice
    choices: tuple[int, ...]
    workloads: list[Workload]


DECISIONS = {
    "splits": Decision(
        "into how many splits to divide the keys of one query", "splits_of", (1, 2, 4, 8, 16, 32, 64, 128),
        [
            Workload("fwd", batch, heads, 1, head_dim, False, "bfloat16", kv_heads=kv_heads, kv_len=kv_len)
            for head_dim, batch, (heads, kv_heads), kv_len in itertools.product(
                (64, 128), (1, 8), ((16, 16), (32, 8)), (1024, 4096, 16384, 65536)
            )
        ],
    ),
    "running": Decision(
        "whether to keep a running maximum instead of guessing it", "is_short", (0, 1),
        [  # a batch of None has as many sequences as the papers' workloads
            Workload("fwd", batch or paper_shape(seq_len, head_dim)[0], 2048 // head_dim, seq_len, head_dim, causal, "float16")
            for head_dim, seq_len, causal, batch in itertools.product(
                (64, 128, 256), (256, 512, 1024, 2048), (False, True), (1, 4, None)
            )
        ],
    ),
}  # fmt: skip


def stage_of(key: str) -> str:
    """Return the last stage whose forward has a decision. Raise SystemExit if no stage has it."""
    function = DECISIONS[key].function
    for name in reversed([name for track in (stages.TRUNK, *stages.tracks()) for name in stages.line(track)]):
        if any(f"def {function}(" in stages.source(name, file) for file in stages.files("forward", name)):
            return name
    raise SystemExit(f"{key} cannot be measured, because no stage's forward has a function {function!r}")


@contextlib.contextmanager
def forced(key: str, choice: int | None):
    """Enter a context in which `stage_of(key)` makes a choice. With None, the host decides. Yield the list of all choices."""
    name, function = stage_of(key), DECISIONS[key].function
    modules = [
        importlib.import_module(f"stages.{stages.home(name, 'forward')}.{file.removesuffix('.py')}")
        for file in stages.files("forward", name)
    ]
    modules = [module for module in modules if hasattr(module, function)]
    own, found = getattr(modules[0], function), []

    def chosen(*args):
        found.append(own(*args) if choice is None else choice)
        return found[-1]

    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, function, chosen))
        # A replay would repeat an earlier choice.
        stack.enter_context(mock.patch.object(recording, "is_watched", lambda: True))
        yield found


def measure(key: str, workload: Workload, timer: GpuTimer) -> dict:
    """Return the microseconds of a forward for each choice, and the host's own choice."""
    inputs, decision, name, times = workload.inputs(), DECISIONS[key], stage_of(key), {}
    with forced(key, None) as found:
        timed_call(name, workload, inputs)()
    own = int(found[0])
    for choice in sorted({*decision.choices, own}):
        with forced(key, choice):
            call = timed_call(name, workload, inputs)
            call()
            seconds, _ = timer.measure(call)
        times[choice] = round(statistics.median(seconds) * 1e6, 2)
    return {"decision": key, "impl": name, **workload.record(), "own": own, "us": times}


def main(argv: list[str]):
    """Run the command line."""
    parser = command("common.measure.constants", __doc__, "the JSON file to write")
    decisions = ",".join(DECISIONS)
    parser.add_argument("--decision", type=list_of(one_of(DECISIONS.keys())), default=decisions, metavar="LIST", help=decisions)
    options = parser.parse_args(argv)
    if DEVICE != "cuda":
        raise SystemExit("measuring the constants needs a GPU, and there is none")
    for name in map(stage_of, options.decision):
        if reason := stages.unavailable(name):
            raise SystemExit(f"{name} {reason}")
    timer, cases = GpuTimer(), []
    for key in options.decision:
        for workload in DECISIONS[key].workloads:
            cases.append(measure(key, workload, timer))
            print(f"{key}, {workload.label}: {cases[-1]['own']} of {cases[-1]['us']}", flush=True)
            write_cases(options.file, cases)  # now, so that an error loses little


if __name__ == "__main__":
    main(sys.argv[1:])
