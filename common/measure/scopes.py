"""Record what one program of a Gluon forward does on a GPU, and when.

    python -m common.measure.scopes --json results/scopes-h200.json   # on a Hopper GPU

A scope is a named part of a kernel's source. This program inserts scopes into a copy of v29's forward, around its waits,
matmuls and exponentials. Triton's profiler Proton records when warps enter and leave each scope. The record shows in which
order the warps work, and which work overlaps. Scopes make the kernel a little slower.
"""

import argparse
import importlib
import json
import re
import sys
import tempfile
from pathlib import Path

import torch

import stages
from common.measure import machine, terminal
from common.measure.options import json_path, write_json
from common.measure.workloads import Workload
from common.runtime import DEVICE

STAGE = "v29_short_tiles"
WORKLOAD = Workload("fwd", 8, 16, 2048, 128, False, "float16")
CYCLES = 6000  # the file keeps the spans of this many cycles
WARPS = {"warp 0": "1: consumer", "warp 4": "2: consumer"}  # the first warp of a partition -> the partition's name
LOOP = "# Issue both matmuls at once"
# file -> scopes, the last scope first. A scope is (name, first line, last line, earlier line). Each line is given by its
# beginning, without indentation. The search for the first line starts at the earlier line. If the last line is None, the scope
# has only one line.
SCOPES = {
    "forward.py": (
        ("last matmul", "acc = warpgroup_mma_wait(0, [acc])", None, "normalize = "),
        ("store O", "queries.o.index(own).reshape(", "tma.async_copy_shared_to_global(", "def _store_out"),
    ),
    "forward_softmax.py": (
        ("convert", "p = gl.convert_layout(p.to(ring.k.dtype), p_layout)", None, "acc = acc * gl.convert_layout(rescale"),
        ("wait for O", "acc = warpgroup_mma_wait(0, [acc])", None, LOOP),
        ("softmax", "p = gl.exp2(s * scale_log2", "l = l + sums", LOOP),
        ("wait for S", "s = warpgroup_mma_wait(1, [s])", None, LOOP),
        ("issue matmuls", "s = _scores(q", "acc = warpgroup_mma(p", LOOP),
        ("wait for K, V", "mbarrier.wait(ring.full", None, "def _scores"),  # inside the scope "issue matmuls"
    ),
}
LAUNCHES = 'for mode in ("guess", "again"):', 'for mode in ("guess",):'  # no second launch, because no tile fails here


def with_scopes(file: str, text: str) -> str:
    """Insert the scopes that SCOPES lists for a file into the file's text.

    Raises:
        ValueError: a line that SCOPES names is missing.
    """
    lines = text.split("\n")

    def find(beginning, start):
        for index in range(start, len(lines)):
            if lines[index].strip().startswith(beginning):
                return index
        raise ValueError(f"no line begins with {beginning!r} after line {start}")

    for name, first, last, before in SCOPES[file]:
        begin = find(first, find(before, 0))
        end = find(last, begin) if last else begin
        indent = re.match(r"\s*", lines[begin])[0]
        lines.insert(end + 1, f'{indent}pl.exit_scope("{name}")')
        lines.insert(begin, f'{indent}pl.enter_scope("{name}")')
    lines.insert(find("from triton", 0), "import triton.profiler.language as pl")
    return "\n".join(lines)


def record() -> list[dict]:
    """Run the copy of the forward, and return the spans of one program in the order of their starts.

    A span is one execution of a scope: `who` is the partition, `what` is the scope, and `start` and `end` are in cycles.
    """
    import triton.profiler as proton
    from triton.profiler.mode import Default

    texts = {file: with_scopes(file, stages.source(STAGE, file).replace(*LAUNCHES)) for file in SCOPES}
    with tempfile.TemporaryDirectory() as directory, stages.changed(STAGE, texts, Path(directory)) as package:
        module = importlib.import_module(f"{package}.forward")
        q, k, v, _ = WORKLOAD.inputs()
        mode = Default(optimizations="clock32,time_shift", sampling_strategy="selective", sampling_options="0,4")
        session = proton.start(str(Path(directory, "trace")), data="trace", backend="instrumentation", mode=mode)
        module.forward(q, k, v, causal=WORKLOAD.causal, scale=WORKLOAD.head_dim**-0.5)
        torch.cuda.synchronize()
        proton.finalize(session)
        events = json.loads(next(Path(directory).glob("trace*chrome_trace")).read_text())["traceEvents"]
    program = min(event["pid"] for event in events)
    spans = []
    for event in events:
        if event["pid"] == program:
            # Proton's trace counts in units of 1000 cycles.
            start, duration = (1000 * event[name] for name in ("ts", "dur"))
            who = next(name for warp, name in WARPS.items() if event["tid"].startswith(warp))
            spans.append({"who": who, "what": event["name"], "start": start, "end": start + duration})
    return sorted(spans, key=lambda span: span["start"])


def kept(spans: list[dict]) -> list[dict]:
    """Keep the spans within CYCLES cycles after the middle of the record. Count their cycles from this middle."""
    first = (spans[0]["start"] + spans[-1]["end"]) / 2
    inside = [span for span in spans if first <= span["start"] and span["end"] <= first + CYCLES]
    return [{**span, "start": round(span["start"] - first), "end": round(span["end"] - first)} for span in inside]


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    parser = argparse.ArgumentParser(
        prog="python -m common.measure.scopes", description=f"Record what a program of {STAGE}'s forward does, and when."
    )
    parser.add_argument("--json", type=json_path, required=True, metavar="FILE", help="the file to write")
    options = parser.parse_args(argv)
    if DEVICE != "cuda" or (reason := stages.unavailable(STAGE)):
        raise SystemExit(f"common.measure.scopes {reason if DEVICE == 'cuda' else 'needs a Hopper GPU (sm_90)'}")
    spans = kept(record())
    write_json(options.json, {"impl": STAGE, **WORKLOAD.record(), "spans": spans, "machine_info": machine.facts()})


if __name__ == "__main__":
    main(sys.argv[1:])
