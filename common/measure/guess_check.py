"""Measure what the check of guessed maxima cures, and what it costs.

    python -m common.measure.guess_check results/guess-check-h200.json --stage v29,v53   # on a Hopper GPU

Each stage is measured as it is, and without the check that few keys do not dominate a row (`_check` in its forward.py). Errors
are the largest of one head with an attention sink; the other heads have none. Times are medians of calls in turns.
"""

import argparse
import hashlib
import importlib
import itertools
import statistics
import sys
import tempfile
from pathlib import Path

import torch

import stages
from common.measure import machine, reference
from common.measure.inputs import Scores, Sink, draw
from common.measure.options import json_path, list_of, write_json
from common.measure.timing import GpuTimer

SHAPE, KEYS, NATS = (4, 16, 2048), (682, 20), (12, 16, 20, 24, 40)
LENGTHS, TURNS = (1024, 4096, 16384), 2


def without_check(name: str, folder: Path):
    """Return the forward of a stage without the check, from changed copies of the stage's files in `folder`.

    Raises:
        ValueError: the stage has no such check.
    """
    cuts = {
        "forward.py": "    fails = fails | gl.convert_layout(l >= LIMIT * l_capped, of_rows)\n",
        "forward_softmax.py": '        if MODE == "guess":\n            l_capped = l_capped + gl.minimum(sums, CAP)\n',
    }
    texts = {file: stages.source(name, file) for file in cuts}
    if missing := [file for file, cut in cuts.items() if cut not in texts[file]]:
        raise ValueError(f"{name} has no check in {', '.join(missing)}")
    texts = {file: texts[file].replace(cut, "") for file, cut in cuts.items()}
    with stages.changed(name, texts, folder) as package:
        return importlib.import_module(f"{package}.forward").forward


def errors(forwards: dict, head_dim: int, dtype: torch.dtype, causal: bool, key: int, nats: float) -> list[dict]:
    """Return for each forward, and for plain PyTorch, the largest errors of a head with a sink of `nats` at `key`."""
    batch, heads, seq_len = SHAPE
    shape, options = (batch, heads, seq_len, head_dim), {"causal": causal, "scale": head_dim**-0.5}
    torch.manual_seed(0)
    tensors = draw(shape, shape, shape, dtype, options["scale"], Scores(sinks=(Sink(key, nats, head=0),)))
    q, k, v, grad_out = (tensor[:1, :1] for tensor in tensors)
    truth = reference.truth(q, k, v, grad_out=grad_out, **options)
    plain = reference.plain(q, k, v, grad_out=grad_out, **options)
    found = {"plain": plain}
    for name, (stage, forward) in forwards.items():
        q, k, v, grad_out = tensors
        out, lse = forward(q, k, v, **options)
        dq, dk, dv = stages.load(stage).backward(grad_out, q, k, v, out, lse, **options)
        found[name] = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return [
        {"impl": impl, "head_dim": head_dim, "dtype": str(dtype)[6:], "causal": causal, "key": key, "nats": nats}
        | {name: (result[:1, :1].double() - truth[name]).abs().max().item() for name, result in results.items()}
        for impl, results in found.items()
    ]


def times(forwards: dict, timer: GpuTimer, head_dim: int, dtype: torch.dtype, causal: bool, seq_len: int) -> list[dict]:
    """Return the median milliseconds of each forward, for 16384 tokens and normally distributed inputs."""
    shape = 16384 // seq_len, 2048 // head_dim, seq_len, head_dim
    q, k, v, _ = draw(shape, shape, shape, dtype, head_dim**-0.5)
    seconds = {impl: [] for impl in forwards}
    for _, (impl, (_, forward)) in itertools.product(range(TURNS), forwards.items()):
        seconds[impl] += timer.measure(lambda forward=forward: forward(q, k, v, causal=causal, scale=head_dim**-0.5))[0]
    workload = {"head_dim": head_dim, "dtype": str(dtype)[6:], "causal": causal, "seq_len": seq_len}
    return [{"impl": impl, **workload, "ms": 1e3 * statistics.median(each)} for impl, each in seconds.items()]


def main(argv: list[str]):
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m common.measure.guess_check", description=__doc__.splitlines()[0])
    parser.add_argument("json", type=json_path, metavar="FILE", help="where to save the measurements")
    parser.add_argument("--stage", type=list_of(stages.resolve), required=True, metavar="LIST", help="such as v29,v53")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        forwards = {"v25": (stages.resolve("v25"), stages.load("v25").forward)}
        for name in options.stage:
            copy = Path(folder, name)
            copy.mkdir()
            forwards[name] = name, stages.load(name).forward
            forwards[f"{name} without the check"] = name, without_check(name, copy)
        sources = {
            name: hashlib.sha256(
                "".join(stages.source(name, file) for file in stages.files("forward", name)).encode()
            ).hexdigest()
            for name in {stage for stage, _ in forwards.values()}
        }
        record = {"machine_info": machine.facts(), "sources": sources, "errors": [], "times": []}
        dims, masks = (64, 128), (False, True)
        for head_dim, causal, key, nats in itertools.product(dims, masks, KEYS, NATS):
            record["errors"] += errors(forwards, head_dim, torch.bfloat16, causal, key, nats)
        timer, dtypes = GpuTimer(), (torch.bfloat16, torch.float16)
        for head_dim, dtype, causal, seq_len in itertools.product(dims, dtypes, masks, LENGTHS):
            record["times"] += times(forwards, timer, head_dim, dtype, causal, seq_len)
        write_json(options.json, record)
    for row in record["errors"] + record["times"]:
        print(*(f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}" for name, value in row.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
