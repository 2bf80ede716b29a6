"""Run every stage under NVIDIA's compute-sanitizer, which finds invalid accesses, uninitialized reads and races.

    python -m common.measure.sanitize                                    # all tools and stages; needs a GPU
    python -m common.measure.sanitize --tool racecheck --stage v4,newest

The tools do not understand every barrier and instruction, so some of their reports are false. `KNOWN` lists the false reports.
The run fails if a tool gives a report that is not in `KNOWN`.
"""

import collections
import itertools
import linecache
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from triton.runtime.autotuner import Autotuner

import stages
from common.measure.aot import first_that_survives
from common.measure.options import add_list, command, list_of, one_of
from common.measure.workloads import DTYPES
from common.runtime import DEVICE

ROOT = Path(stages.__path__[0]).parent
OUR_KERNELS = "^_[a-z]"  # matches names of the stages' kernels; names of PyTorch's kernels begin with _Z or a letter
TOOLS = {  # tool -> its options
    "memcheck": ["--report-api-errors", "no"],  # PyTorch itself handles the errors of missing driver functions
    # initcheck watches all kernels, because it must also see what PyTorch's kernels write. `sanitize` drops initcheck's reports
    # on PyTorch's kernels.
    "initcheck": ["--check-api-memory-access", "no"],
    "racecheck": ["--kernel-name", f"regex={OUR_KERNELS}"],
}
LENGTHS = (200, 257), (257, 130)  # (number of queries, number of keys); none is a multiple of a tile size
PROBLEMS = list(itertools.product(("float16", "bfloat16"), (64, 128), (False, True), LENGTHS))
MOST_REPORTS = 500_000  # maximum number of printed reports per stage; v4b's descriptors cause 100 000 reports


class Report(NamedTuple):
    """A report of a tool: its kind, the kernel, and the source lines of the reported accesses, as far as known."""

    kind: str
    kernel: str = ""
    lines: tuple[tuple[str, int], ...] = ()

    def __str__(self):
        places = (
            f"{file.removeprefix(f'{ROOT}/')}:{line}: {linecache.getline(file, line).strip()}" for file, line in self.lines
        )
        return "\n    ".join([self.kind + (f" in {self.kernel}" if self.kernel else ""), *places])


class Known(NamedTuple):
    """A false report of a tool on a kernel: its file has the text `needs`, and all reported lines match the pattern `lines`."""

    tool: str
    kernel: str
    lines: str
    reason: str
    needs: str = ""

    def explains(self, report: Report) -> bool:
        """Return whether a report of this tool is this false report."""
        lines = [linecache.getline(*place) for place in report.lines]
        needed = all(self.needs in "".join(linecache.getlines(file)) for file, _ in report.lines)
        return needed and report.kernel == self.kernel and lines != [] and all(re.search(self.lines, line) for line in lines)


TILE = "the mbarriers next_tiles.full and queries.empty separate the store of a tile's number from its loads"
STATE = "the compiler's own barriers separate the writes and reads of the arguments that it passes to the other warps"
COPIED = "the compiler's own mbarriers separate the copies of Q from the reads of its rows"
DESCRIBED = "a program writes its descriptor with tensormap.cp_fenceproxy, which initcheck does not count as a write"
SPLIT = " warp_specialize="  # of COPIED and DESCRIBED: an argument of a loop
KNOWN = (
    Known("racecheck", "_forward_kernel", r"next_tiles\.number\.index\(.*\)\.(store|load)\(", TILE),
    # The reports with the reason STATE name the kernel's first line, and the line that splits the warps into roles. Some
    # forwards split the warps inside an `if`. Then the report may name the `if` instead.
    Known("racecheck", "_forward_kernel", r"^def _forward_kernel\(|if CONSUMERS == 2:|gl\.warp_specialize\(", STATE),
    Known("racecheck", "_backward_kernel", r"^def _backward_kernel\(|gl\.warp_specialize\(", STATE),
    Known("racecheck", "_forward_kernel", r"^def _forward_kernel\(|q_desc\.load\(|tl\.store\(lse_ptrs", COPIED, SPLIT),
    Known("initcheck", "_forward_kernel", r"tl\.make_tensor_descriptor\(", DESCRIBED, SPLIT),
)


def run_stage(name: str):
    """Run a stage's forward and backward on small problems. `sanitize` runs this function in a new process, under a tool."""
    Autotuner.prune_configs = first_that_survives  # timing all configurations under a tool would take minutes
    stage = stages.load(name)
    for dtype, head_dim, causal, (seq_q, seq_k) in PROBLEMS:
        shapes = [(2, 3, length, head_dim) for length in (seq_q, seq_k, seq_k, seq_q)]
        q, k, v, grad_out = (torch.randn(shape, dtype=DTYPES[dtype]).to(DEVICE) for shape in shapes)
        options = {"causal": causal, "scale": head_dim**-0.5}
        stage.backward(grad_out, q, k, v, *stage.forward(q, k, v, **options), **options)
    torch.cuda.synchronize()


PLACE = re.compile(
    r"(?P<what>at |(and )?\w+ access at |Device Frame: ?)"
    r"(?P<kernel>.+?)(\+0x\w+)?( in (?P<file>.+):(?P<line>\d+))?( \[\d+ hazards?\])?"
)


def parse(log: str) -> tuple[list[Report], int | None]:
    """Return the reports in a tool's log in the log's order, and the total number of reports.

    The total is larger if the tool has not printed all reports. It is None if the log has no summary at its end, because the
    tool has not finished. A report is an unindented line, followed by indented lines with accesses, threads and stack frames.
    """
    total = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards? displayed)", log)
    found = []
    for text in re.findall(r"^========= (.+)$", log, re.MULTILINE):
        found += [] if text.startswith(" ") else [[]]
        found[-1].append(text.strip())
    reports = [_report(*texts) for texts in found if texts[0] != "COMPUTE-SANITIZER" and "SUMMARY:" not in texts[0]]
    return reports, total and int(total[1])


def _report(kind: str, *others: str) -> Report:
    """Parse the lines of one report."""
    if race := re.fullmatch(r"(?:Error|Warning): Race reported between (.*)", kind):
        kind, others = "race", (race[1], *others)
    places = [place for place in map(PLACE.fullmatch, others) if place]
    kernel = places[-1]["kernel"].split("(")[0] if places else ""  # the last stack frame is the kernel
    accesses = (place for place in places if place["file"] and not place["what"].startswith("Device Frame"))
    lines = dict.fromkeys((place["file"], int(place["line"])) for place in accesses)
    return Report(re.sub(r" of size [\d,]+ bytes?", "", kind), kernel, tuple(lines))


def sanitize(tool: str, stage: str) -> collections.Counter:
    """Run a tool on a stage. Return each report of the tool with the number of its occurrences."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "log")
        command = ["compute-sanitizer", "--tool", tool, "--log-file", str(path), "--print-limit", str(MOST_REPORTS)]
        command += ["--strip-paths", "no", "--show-backtrace", "device", "--target-processes", "application-only", *TOOLS[tool]]
        program = f"from common.measure import sanitize; sanitize.run_stage({stage!r})"
        run = subprocess.run(
            [*command, sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False,
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # one allocation per tensor, to find accesses outside it
        )  # fmt: skip
        log = path.read_text() if path.exists() else ""
    last = (run.stderr.strip() or run.stdout.strip() or "no output").splitlines()[-1]
    reports, total = parse(log)
    if total is None:
        reports.append(Report(f"{tool} did not finish: {last}"))
    elif total > len(reports):
        reports.append(Report(f"{total - len(reports)} reports that were not printed"))
    if run.returncode and not reports:
        reports.append(Report(f"the program failed: {last}"))
    if tool == "initcheck":
        reports = [report for report in reports if not report.kernel or re.search(OUR_KERNELS, report.kernel)]
    return collections.Counter(reports)


def main(argv: list[str]) -> int:
    """Run the command line, and return the exit status: 1 if a report is new."""
    parser = command("common.measure.sanitize", __doc__)
    tools = ",".join(TOOLS)
    parser.add_argument("--tool", type=list_of(one_of(TOOLS.keys())), default=tools, metavar="LIST", help=f"any of {tools}")
    add_list(parser, "--stage", ",".join(stages.names()))
    options = parser.parse_args(argv)
    if DEVICE != "cuda" or not shutil.which("compute-sanitizer"):
        raise SystemExit("this command needs a GPU, and compute-sanitizer on the PATH")

    failed = False
    for stage, tool in itertools.product(options.stage, options.tool):
        if reason := stages.unavailable(stage):
            print(f"{tool} {stage}: n/a, it {reason}")
            continue
        lines = []
        for report, times in sanitize(tool, stage).items():
            known = next((entry for entry in KNOWN if entry.tool == tool and entry.explains(report)), None)
            lines.append(f"known, {times} x {known.kernel}: {known.reason}" if known else f"NEW, {times} x {report}")
        new = any(line.startswith("NEW") for line in lines)
        failed |= new
        print(f"{tool} {stage}: {'FAILED' if new else 'passed'}", *lines, sep="\n  ", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
