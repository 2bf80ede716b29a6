"""Measure stages and baselines.

This file is a command (`python bench.py --help`) and a pytest-benchmark module. Before the benchmark times an implementation,
it compares the implementation's result with attention in float64. If the result is wrong, the benchmark reports an error and
measures no time. If a workload has very many scores, the benchmark compares only some heads. Results of the other heads must
only be finite.
"""

import argparse
import contextlib
import functools
import gc
import inspect
import itertools
import json
import math
import signal
import statistics
import sys
from collections import Counter
from dataclasses import astuple, fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

import stages
from common import checks
from common.measure import files, machine, reference, terminal, timing, traffic, workloads
from common.measure.baselines import BASELINES, attention_of, refusal, timed_call
from common.measure.counter import Count, count
from common.measure.footprint import footprint
from common.measure.options import json_path, list_of, one_of, positive, single, sink, unwritable
from common.measure.progress import COLUMNS, Progress, say
from common.measure.random_shapes import JUDGED, draw
from common.measure.workloads import Workload
from common.runtime import DEVICE, INTERPRETED
from common.show import counts, results, shapes, tracks
from common.show.results import AGAIN, CODE, HEAD_DIMS, MEAN_OVER, source, spoken
from common.show.summary import summary
from common.show.tables import markdown, speed_table

SAVED = Path(".benchmarks")  # pytest-benchmark saves runs here

# Calls that take less GPU time than this are also timed back to back. This measurement shows whether launches take longer than
# kernels.
SHORT_S = 1e-3

# Approximate seconds of a case on an H200, without tuning and compilation: the mean over the cases of a `--reference` run.
GPU_CASE_S = 0.75
# Approximate seconds of a case on the interpreter: a constant, plus a forward's time for each query-key pair. For each pair, a
# backward takes 2.5 times as long.
INTERPRETER_CASE_S, INTERPRETER_PAIR_S = 0.1, 6e-7

SEED, SHAPES = next(iter(JUDGED.items()))  # the seed of the reference run's random shapes, and their number
NEW_LENGTHS = 20  # lengths of each workload for the host's time of new lengths

CHECKED_SCORES = 2**33  # the check computes at most this many float64 scores: those of 32 heads with 16384 queries and keys

# A library's errors may be this many times a stage's. SDPA's float16 gradients on a CPU are 3 % above the bounds of a stage.
LIBRARY_SLACK = 4

GPU = traffic.GPUS["h200"]  # without a GPU, the kernels have their tiles for this GPU


# pytest-benchmark's options that cannot work, and why. All others go to pytest.
ROUNDS = "common.measure.timing chooses rounds and warm-up, and times them on the GPU"
ALWAYS = "this command runs benchmarks and nothing else"
REFUSED = {
    **dict.fromkeys(
        ("min-time", "max-time", "min-rounds", "precision", "confidence", "timer", "calibration-precision"), ROUNDS
    ),
    **dict.fromkeys(("warmup", "warmup-iterations", "disable-gc"), ROUNDS),
    **dict.fromkeys(("skip", "disable", "enable", "only"), ALWAYS),
    **dict.fromkeys(("cprofile", "cprofile-loops", "cprofile-top", "cprofile-dump"), "it would profile no call"),
    "autosave": "each run is saved already",
    "quiet": "pytest-benchmark's table appears only if an option such as --benchmark-columns asks for it",
    "json": "--json FILE saves the run in a file",
}
SILENT = "save", "save-data", "storage", "netrc"  # with other options, pytest-benchmark shows its own table too


def _for_pytest(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Return the words that this command does not know, which are pytest-benchmark's options and their values.

    Exit with status 2 if one is no such option, or if pytest-benchmark cannot do here what it asks for.
    """
    for place, word in enumerate(words):
        flag = word.partition("=")[0].removeprefix("--benchmark-")
        if word.startswith("--benchmark-") and flag in REFUSED:
            parser.error(f"argument --benchmark-{flag}: {REFUSED[flag]}")
        if not word.startswith("--benchmark-") and (place == 0 or word.startswith("-")):
            parser.error(f"unrecognized arguments: {word}")
    return words


def _above_0(text: str) -> float:
    """Parse a finite number above 0. Raise ValueError for other texts."""
    if not 0 < float(text) < math.inf:
        raise ValueError(f"{text!r} is not a number above 0")
    return float(text)


def parse_options(argv: list[str]) -> argparse.Namespace:
    """Parse the command line: each LIST becomes a list of distinct values. Exit with status 2 on an invalid value."""
    parser = terminal.Parser(
        prog="bench.py",
        description="Measure the forward and backward of stages and baselines. LIST is comma-separated, and you can repeat a "
        "flag. Each run is saved in .benchmarks. Options of pytest-benchmark work too, such as --benchmark-compare, "
        "--benchmark-columns=median,iqr and --benchmark-save=NAME.",
    )

    defaults = {}

    def add_list(name, parse, default, help):
        flag = "--" + name.rstrip("_").replace("_", "-")
        parser.add_argument(flag, dest=name, action="extend", type=list_of(parse), metavar="LIST", help=help)
        defaults[name] = default

    def joined(values):
        return ",".join(map(str, values))

    passes, dtypes = ({name: name for name in names} for names in (workloads.PASSES, workloads.DTYPES))
    head_dims = {str(head_dim): head_dim for head_dim in checks.HEAD_DIMS}
    stage_help = (
        f"any of {joined(stages.names())}, or short names such as v3; a single stage adds its parent and v0; default: all"
    )
    add_list("stage", stages.resolve, stages.names(), stage_help)
    add_list("pass_", one_of(passes), ["fwd", "bwd"], f"any of {joined(passes)}; default: fwd,bwd")
    head_dim_help = f"any of {joined(head_dims)}; default: {joined(workloads.HEAD_DIMS)}"
    add_list("head_dim", one_of(head_dims), workloads.HEAD_DIMS, head_dim_help)
    add_list("seq_len", positive, workloads.SEQ_LENS, f"sequence lengths; default: {joined(workloads.SEQ_LENS)}")
    add_list("causal", one_of({"no": False, "yes": True}), [False, True], "any of no,yes; default: no,yes")
    add_list("dtype", one_of(dtypes), ["float16"], f"any of {joined(dtypes)}; default: float16")
    add_list("batch", positive, [None], "batch sizes; default: such that a batch has 16384 tokens (without a GPU: 1)")
    add_list(
        "heads", positive, [None], "numbers of query heads; default: 2048 divided by the head dimension (without a GPU: 2)"
    )
    add_list("kv_heads", positive, [None], "numbers of K/V heads, divisors of the number of query heads; default: equal")
    add_list("kv_len", positive, [None], "numbers of keys, without a causal mask; default: as many as queries")
    add_list(
        "value_dim", one_of(head_dims), [None], f"head dimension of V, any of {joined(head_dims)}; default: as for Q and K"
    )
    add_list("score_std", _above_0, [1.0], "standard deviations of the scores; default: 1")
    add_list(
        "sink",
        sink,
        [(0.0, 0, None)],
        "attention sinks, NATS or NATS@KEY or NATS@KEY/HEAD: the score of a key (default: 0) with every query, in one K/V head "
        "(default: in all); default: 0, which is no attention sink",
    )
    parser.add_argument(
        "--again", type=single(stages.resolve), metavar="STAGE", help="measure one of the stages twice, to see the noise"
    )
    parser.add_argument("--json", type=json_path, metavar="FILE", help="also save the run in FILE")
    of_tracks = " ".join(f"{', '.join(track.runs)}: {track.title}." for track in tracks.known().values())
    parser.add_argument("--stale", action="store_true", help="print which parts of results/ to measure again, and why")
    parser.add_argument(
        "--choice", action="store_true", help="print whose passes the newest stage chooses, and measure nothing"
    )
    parser.add_argument(
        "--random",
        type=single(positive),
        nargs="?",
        const=SEED,
        metavar="SEED",
        help=f"measure random shapes, the same for the same SEED (default: {SEED}), by default with the newest stage and the "
        "fastest libraries",
    )
    parser.add_argument("--shapes", type=single(positive), help=f"the number of random shapes; default: {SHAPES}")
    parser.add_argument(
        "--check",
        choices=("yes", "no", "only"),
        default="yes",
        help="compare each result with float64 before the measurement (yes), not at all (no), or measure no time (only)",
    )
    parser.add_argument("--wide", action="store_true", help="show all columns of the tables, in lines of any length")
    parser.add_argument(
        "--reference",
        choices=GRIDS,
        help="measure one part of results/. forward-, backward-: all stages in float16. newest-, bfloat16-: the last two "
        "stages of the trunk, at more lengths. models: shapes of real models, and odd lengths. random: random shapes. "
        f"{of_tracks}",
    )

    options, words = parser.parse_known_args(argv)
    options.for_pytest = _for_pytest(parser, words)
    if options.reference and (options.again or any(getattr(options, name) for name in defaults)):
        parser.error("--reference selects all cases itself, so only --json and --check can be added")
    if options.check == "only" and options.json:
        parser.error("argument --json: --check=only measures nothing that could be saved")
    if options.random is None and options.shapes:
        parser.error("argument --shapes: only --random draws shapes")
    if options.random is not None:
        given = [name for name in defaults if name != "stage" and getattr(options, name)]
        if given or options.reference:
            parser.error("--random draws all shapes itself, so it takes no other options for shapes, and no --reference")
        defaults["stage"] = [stages.newest()]
    options.about = options.stage[-1] if options.stage else None
    for name, default in defaults.items():
        values = getattr(options, name) or default
        setattr(options, name, list(dict.fromkeys(values)))
    measured = chosen_stages(options.stage) if options.random is None else options.stage
    if options.again and options.again not in measured:
        parser.error(f"argument --again: {spoken(options.again)} is not one of the stages to measure")
    lengths = itertools.product(options.seq_len, options.kv_len)
    if True in options.causal and any(kv_len not in (None, seq_len) for seq_len, kv_len in lengths):
        parser.error("argument --kv-len: a causal workload has as many keys as queries; add --causal=no")
    try:
        drawn = options.random is not None
        options.workloads = draw(options.random, options.shapes or SHAPES) if drawn else _workloads(options)
    except ValueError as error:
        parser.error(f"argument --{'sink' if 'sink' in str(error) else 'kv-heads'}: {error}")
    return options


def _workloads(options) -> list[Workload]:
    """Return all workloads. Workloads that differ only in the pass are adjacent.

    Raises:
        ValueError: the number of heads is not a multiple of the number of K/V heads, or a sink's key or head does not exist.
    """
    names = ("head_dim", "causal", "dtype", "score_std", "sink", "seq_len", "kv_len", "batch", "heads", "kv_heads", "value_dim")
    found = []
    for shape in itertools.product(*(getattr(options, name) for name in names)):
        values = dict(zip(names, shape, strict=True))
        batch, heads = workloads.paper_shape(values["seq_len"], values["head_dim"])
        values |= {"batch": values["batch"] or batch, "heads": values["heads"] or heads}
        values |= zip(("sink", "sink_key", "sink_head"), values["sink"], strict=True)
        found += [Workload(pass_, **values) for pass_ in options.pass_]
    return found


def chosen_stages(chosen: list[str]) -> list[str]:
    """Return the chosen stages in stage order. If a single stage is chosen, add its parent and v0."""
    wanted = {*chosen, stages.names()[0], stages.parent(chosen[0])} if len(chosen) == 1 else set(chosen)
    return [name for name in stages.names() if name in wanted]


EVERYTHING = [*BASELINES, *(name for name in stages.names() if not stages.is_experiment(name))]
NEWEST = [*BASELINES, *stages.line()[-2:]]  # the newest stage chooses; the stage before it is the trunk's last without a choice
SEQ_LENS = f"--seq-len={','.join(map(str, MEAN_OVER))}"  # for all stages; NEWEST is measured at more lengths
# FlashAttention-2 is not in this list, because it is by far the slowest and would take a third of a run's time.
LIBRARIES = [name for name in BASELINES if name != "sdpa-flash"]
FASTEST = [*LIBRARIES, stages.newest()]
# Each reference run also measures these, three times in turns. So one sees whether the GPUs of two runs were alike.
ANCHORS = ["sdpa-cudnn", *stages.line()[-2:]]
ANCHOR_WORKS = [results.paper(pass_, head_dim=128, causal=False, seq_len=4096) for pass_ in CODE]


def _track_runs() -> dict[str, list[tuple[list[str], list[str]]]]:
    """Return the runs of all tracks, as in `GRIDS`. A run measures libraries, the stage from which the track starts, the
    track's stages and the newest stage."""
    found = {}
    for key, track in tracks.known().items():
        ours = [name for name in stages.names() if stages.track(name) == key and not stages.is_experiment(name)]
        names = [name for name in BASELINES if name not in track.without]
        names = [*dict.fromkeys([*names, stages.parent(ours[0]), *ours, stages.newest()])]
        for run, lines in track.runs.items():
            if run in found:
                raise SystemExit(f"two tracks have a run {run!r} in benchmark.toml; {key} is the second")
            found[run] = [(line.split(), names) for line in lines]
    return found


GRIDS = {  # value of --reference -> the command lines of its run, each with the implementations to measure
    **{
        f"{CODE[pass_]}-d{dim}": [([f"--pass={pass_}", f"--head-dim={dim}", "--dtype=float16", SEQ_LENS], EVERYTHING)]
        for pass_, dim in itertools.product(CODE, HEAD_DIMS)
    },
    **{f"newest-d{dim}": [([f"--head-dim={dim}", "--dtype=float16"], NEWEST)] for dim in HEAD_DIMS},
    **{f"bfloat16-d{dim}": [([f"--head-dim={dim}", "--dtype=bfloat16"], NEWEST)] for dim in HEAD_DIMS},
    "models": [(["--dtype=bfloat16", *argv], FASTEST) for argv in (
        # Llama 3 with 8 and with 70 billion parameters, BERT, and ViT-L, whose 196 patches and class token make 197 tokens
        ["--head-dim=128", "--heads=32,64", "--kv-heads=8", "--causal=yes", "--seq-len=4096,8192,32768"],
        ["--head-dim=64", "--heads=12", "--causal=no", "--seq-len=512", "--batch=32"],
        ["--head-dim=64", "--heads=16", "--causal=no", "--seq-len=197", "--batch=64"],
        ["--head-dim=128", "--seq-len=1023,3001,5000"],
    )],
    "random": [(["--random"], FASTEST)],
    **_track_runs(),
}  # fmt: skip


def repeats(impl: str, pass_: str) -> bool:
    """Return whether a stage and its parent have the same code for a pass."""
    parent = None if impl in BASELINES else stages.parent(impl)
    return pass_ in CODE and parent is not None and source(impl, pass_) == source(parent, pass_)


def cases(options: argparse.Namespace) -> list[tuple[str, Workload]]:
    """Return all cases to measure, as (implementation, workload).

    Cases of one workload are adjacent, so that the GPU's clock is similar for all of them. A reference run leaves out a stage's
    pass if the parent's pass has the same code and is measured too. A stage that is measured twice comes first and at its own
    place, so that the two times are as far apart as any others. In a reference run, this is the newest stage, unless shapes are
    random: then ten minutes suffice for no case more.
    """
    if not options.reference:
        names = [*BASELINES, *chosen_stages(options.stage)] if options.random is None else [*LIBRARIES, *options.stage]
        chosen = [(options.workloads, names)]
        again = options.again
    else:
        chosen = [(parse_options(argv).workloads, names) for argv, names in GRIDS[options.reference]]
        again = None if options.reference.startswith("random") else stages.newest()
    found = []
    for workload, names in ((workload, names) for selected, names in chosen for workload in selected):
        kept = [
            impl for impl in names if not (options.reference and repeats(impl, workload.pass_) and stages.parent(impl) in names)
        ]
        found += [(impl, workload) for impl in ([again + AGAIN] if again in kept else []) + kept]
    return found


def stale(name: str, path: Path) -> list[str]:
    """Return which passes of which stages a part of results/ lacks, or has measured with other code than today's.

    Args:
        name: a key of `GRIDS`.
        path: the results file, which need not exist.
    """
    known = {}
    for record in results.load_run(path).records if path.exists() else []:
        known.setdefault((record["impl"], record["pass"]), set()).add(record.get("source"))
    wanted = dict.fromkeys((impl, work.pass_) for impl, work in cases(parse_options(["--reference", name])))
    return [
        f"{spoken(impl)} {pass_}"
        for impl, pass_ in wanted
        if impl not in BASELINES and not impl.endswith(AGAIN) and known.get((impl, pass_)) != {source(impl, pass_)}
    ]


def show_stale():
    """Print the command for each results file of a reference run that lacks rows or has stale ones, and these rows.

    A table compares the rows of one run. So the command measures all rows again, also those whose code is the same.
    """
    for name, gpu in itertools.product(GRIDS, results.GPUS):
        path = results.ROOT / "results" / f"{name}-{gpu}.json"
        if path.exists() and (rows := stale(name, path)):
            print(f"make reference GRID={name} FILE=results/{path.name}  # {', '.join(rows)}")


def chosen(name: str, work: Workload) -> str:
    """Return the stages whose passes the stage `name` chooses for a workload, with the words of its function `choice` about the
    division of the work. Return "-" if it has no such function."""
    if not (choose := getattr(stages.load(name), "choice", None)):
        return "-"
    taken = inspect.signature(choose).parameters
    given = {each: getattr(work, each) for each in ("batch", "heads", "kv_heads", "head_dim", "value_dim", "causal")}
    given |= {"seq_q": work.seq_len, "seq_k": work.kv_len, "diagonal": 0, "dtype": workloads.DTYPES[work.dtype]}
    found = choose(**{each: value for each, value in given.items() if each in taken})
    passes = [CODE[part] for part in work.pass_.split("+")]
    return "; ".join(": ".join(filter(None, [getattr(found, each), getattr(found, f"{each}_work", "")])) for each in passes)


def choices(name: str, works: list[Workload]) -> str:
    """Return a table of the stages whose passes the stage `name` chooses, one row for each workload.

    Raises:
        SystemExit: the stage has no function `choice`.
    """
    if not hasattr(stages.load(name), "choice"):
        raise SystemExit(f"{name} chooses nothing, because it has no function `choice`")
    rows = [[work.label, chosen(name, work)] for work in works]
    return markdown(rows, ["workload", f"{spoken(name)} chooses"], ("workload", f"{spoken(name)} chooses"))


def expected_seconds(impl: str, workload: Workload) -> float:
    """Return about how many seconds a case takes."""
    if DEVICE == "cuda":
        return GPU_CASE_S
    interpreted = impl not in BASELINES and not stages.unavailable(impl.removesuffix(AGAIN))
    pairs = workload.flops / (2 * (workload.head_dim + workload.value_dim))
    return INTERPRETER_CASE_S + interpreted * INTERPRETER_PAIR_S * pairs


def duration(seconds: float) -> str:
    """Format a number of seconds as a text such as 40 s, 12 min or 3.5 h."""
    for unit, size, digits in (("h", 3600, 1), ("min", 60, 0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds:.0f} s"


def _count(impl: str, workload: Workload) -> Count:
    """Count the traffic and FLOPs of an implementation. A stage uses its tile sizes for `GPU`."""
    if impl in BASELINES:
        return count(timed_call(impl, workload, workload.inputs()))
    return traffic.count_stage(stages.load(impl), workload, GPU)


def _checked(tensor: Tensor, workload: Workload) -> Tensor:
    """Select the heads to check from a tensor [B, H or Hkv, …].

    If all heads together have at most `CHECKED_SCORES` scores, return `tensor`. Otherwise select every n-th K/V head, counted
    through the whole batch, and the query heads that share it. Then the result is [selected K/V heads, heads of `tensor` per
    K/V head, …]. With an even n, all batch elements could have the same heads selected, so n is odd.
    """
    w = workload
    rows = max(w.seq_len, w.head_dim + w.value_dim)  # per key: its scores, or its K and V if these are larger
    step = math.ceil(w.batch * w.heads * w.kv_len * rows / CHECKED_SCORES)
    if step == 1:
        return tensor
    step |= 1
    heads = tensor.unflatten(1, (w.kv_heads, -1)).flatten(0, 1)
    return heads[(len(heads) - 1) % step :: step]


@functools.lru_cache(maxsize=1)  # the cases of a workload are adjacent
def _inputs(workload: Workload):
    _problem.cache_clear()  # free the previous workload's inputs, which may be as large as the new ones
    _inputs.cache_clear()
    return workload.inputs()


@functools.lru_cache(maxsize=1)
def _problem(workload: Workload):
    """Return a workload's inputs, the float64 results of the checked heads, and the error bounds."""
    inputs = _inputs(workload)
    *qkv, grad_out = (_checked(tensor, workload) for tensor in inputs)
    options = {"causal": workload.causal, "scale": workload.head_dim**-0.5}
    options["grad_out"] = None if workload.pass_ == "fwd" else grad_out
    truth = reference.truth(*qkv, **options)
    bounds = reference.error_bounds(truth, reference.plain(*qkv, **options))
    del truth["magnitudes"]  # free this memory for the implementations
    return inputs, truth, bounds


@functools.lru_cache(maxsize=1)
def _bounds_in_eight_bits(workload: Workload):
    """Return the error bounds of a forward in 8 bits, for the heads that `_problem` checks."""
    *qkv, _ = (_checked(tensor, workload) for tensor in _inputs(workload))
    options = {"causal": workload.causal, "scale": workload.head_dim**-0.5}
    truth, plain = (make(*qkv, **options) for make in (reference.truth, reference.plain_in_eight_bits))
    return reference.error_bounds(truth, plain, reference.EIGHT_BIT_FACTORS)


def _host_of_new_lengths(impl: str, workload: Workload) -> list[float]:
    """Return the CPU seconds of calls whose lengths no call had before. The kernels are compiled."""
    w, found = workload, []
    tensors = list(zip(w.inputs(), (w.seq_len, w.kv_len, w.kv_len, w.seq_len), strict=True))
    for fewer in range(1, NEW_LENGTHS + 1):  # fewer and not more: the tuner's choices hold up to the next power of two
        shorter = [tensor[:, :, : max(1, length - fewer)].contiguous() for tensor, length in tensors]
        found += timing.host_seconds_of_each([timed_call(impl, w, shorter)])
    return found[len(found) // 4 :]  # an early length may compile a kernel of its own, such as that of odd lengths


class WrongResult(Exception):
    """A result has a larger error than allowed. The message contains the error and its bound."""


def check(impl: str, result, workload: Workload):
    """Raise WrongResult unless the result of a `timed_call` is right."""
    names = ("out",) if workload.pass_ == "fwd" else ("dq", "dk", "dv")
    _compare(impl, dict(zip(names, (result,) if workload.pass_ == "fwd" else result, strict=True)), workload)


def check_forward(impl: str, workload: Workload):
    """Call the forward once, and raise WrongResult unless its output and a stage's LSE are right.

    A `timed_call` returns no LSE, and a backward returns no output.
    """
    *qkv, _ = _problem(workload)[0]
    attention = attention_of(impl)
    if impl in BASELINES:
        _compare(impl, {"out": attention(*qkv, causal=workload.causal)}, workload)
    else:
        out, lse = attention(*qkv, causal=workload.causal, return_lse=True)
        _compare(impl, {"out": out, "lse": lse}, workload)


def _compare(impl: str, results: dict[str, Tensor], workload: Workload):
    """Raise WrongResult unless the checked heads of the results are right, and the other heads are finite."""
    (*qkv, _), truth, bounds = _problem(workload)
    slack = LIBRARY_SLACK if impl in BASELINES else 1
    stage = None if impl in BASELINES else stages.load(impl)
    if "out" in results and hasattr(stage, "eight_bits") and stage.eight_bits(*qkv, workload.causal):
        bounds = bounds | _bounds_in_eight_bits(workload)
    try:
        for name, tensor in results.items():
            reference.assert_close(name, _checked(tensor, workload), truth[name], bounds[name], slack)
            assert tensor.isfinite().all(), f"{name}: NaN or infinity in a head that is not compared with float64"
    except AssertionError as error:
        raise WrongResult(str(error)) from None


def _failure(impl: str, error: BaseException) -> dict:
    """Return what the table shows for a case that could not be measured: the failure and a note."""
    if isinstance(error, torch.OutOfMemoryError):
        return {"failure": "OOM"}
    if isinstance(error, WrongResult):
        return {"failure": "WRONG", "note": str(error)}
    if said := refusal(impl, error):
        return {"failure": "n/a", "note": said}
    return {"failure": "ERROR", "note": f"{type(error).__name__}, see above"}


@functools.cache
def _gpu_timer() -> timing.GpuTimer:
    return timing.GpuTimer()


TIMER = timing.Replay()
# In a saved run, this text ends the names of benchmark groups. Without a GPU, it explains what the "times" are.
GROUP = "" if DEVICE == "cuda" else " (no GPU: 1 s stands for 1 GB that the kernels request)"


class Bench:
    """The pytest plugin of one run. It keeps the cases and the measurements, and prints the tables at the end."""

    def __init__(self, options: argparse.Namespace):
        self.cases = cases(options)
        self.json = options.json
        self.anchors = bool(options.reference) and options.check != "only"
        self.wide = options.wide
        self.check = options.check
        self.random = options.random is not None or (options.reference or "").startswith("random")
        self.keep_rounds = "--benchmark-save-data" in options.for_pytest
        self.about = options.about
        self.begun = 0
        self.records = []
        self.machine = machine.facts() | {"matmul_tflops": {}}
        if DEVICE == "cpu":
            self.machine["tiles"] = GPU.name
        if self.check == "no":
            self.machine["checked"] = False

    def pytest_collection_finish(self, session):
        every = [dict(item.callspec.params) for item in session.items]
        self.expected = [expected_seconds(params.pop("impl"), Workload(**params)) for params in every]
        first_use = "; longer if kernels have to be compiled and tuned first" if DEVICE == "cuda" else ""
        print(f"{len(every)} cases, about {duration(sum(self.expected))}{first_use}.")
        self.progress = Progress(sum(self.expected))
        gc.collect()
        gc.freeze()  # later garbage collections skip the objects that exist now

    def pytest_report_teststatus(self, report):
        if report.when == "call":
            return report.outcome, "", ""  # the progress bar replaces pytest's letters

    def pytest_benchmark_update_machine_info(self, machine_info):
        for name in ("node", "release"):  # leave out private names
            machine_info.pop(name)
        machine_info.update(self.machine)

    def pytest_benchmark_update_json(self, output_json):
        output_json["commit_info"].pop("project", None)  # leave out the name of the directory
        for benchmark in output_json["benchmarks"]:
            if not self.keep_rounds:  # keep the statistics, and leave out the time of each round
                benchmark["stats"].pop("data", None)
        output_json["failures"] = [record for record in self.records if "failure" in record]
        if self.json:  # pytest-benchmark would write in place, and an error would leave half a file
            files.replace(self.json, json.dumps(output_json, indent=4))

    def pytest_terminal_summary(self, terminalreporter):
        self.progress.close()
        if self.check == "only":
            failed = Counter(f"{record['impl']} {record['failure']}" for record in self.records if "failure" in record)
            right = f"{len(self.records) - failed.total()} of {len(self.records)} cases are right"
            terminalreporter.write_line(", ".join([right, *(f"{what} ({number})" for what, number in failed.items())]))
        elif self.records:
            if DEVICE == "cuda" and self.random:
                name = self.about or stages.newest()
                parts = [shapes.report(self.records, self.machine, name, functools.partial(chosen, name))]
            elif DEVICE == "cuda":
                tables = speed_table(self.records, self.machine, None if self.wide else COLUMNS)
                parts = [summary(self.records, self.machine, self.about), tables]
            else:
                parts = [counts.summary(self.records, self.about), counts.tables(self.records, self.machine, self.wide)]
            terminalreporter.write_line("\n\n".join(filter(None, parts)))

    def measure(self, benchmark, impl: str, workload: Workload):
        """Measure one case, and record the measurement or the failure."""
        self.progress.begin(f"{self.begun + 1} of {len(self.expected)}, {spoken(impl)}, {workload.label}")
        try:
            self._record(benchmark, impl, workload)
        finally:
            self.progress.update(self.expected[self.begun])
            self.begun += 1

    def _record(self, benchmark, impl, workload):
        benchmark.name = impl  # the benchmark's group names the workload
        record = {"impl": impl, **workload.record()}
        if code := source(impl, workload.pass_):
            record["source"] = code
        self.records.append(record)
        try:
            measured = self._measured(benchmark, impl.removesuffix(AGAIN), workload)
        except KeyboardInterrupt:
            self.records.pop()  # the run still shows and saves the earlier records
            raise
        except BaseException as error:
            record |= _failure(impl, error)
            say(f"{workload.label}, {impl}: {record['failure']}")
            if record["failure"] == "WRONG":
                pytest.fail(f"{workload.label} {impl}: {error}", pytrace=False)
            if record["failure"] == "ERROR":
                raise
        else:
            record |= measured
            benchmark.extra_info |= record
            return
        gc.collect()  # free memory here and not in `except`, where the traceback still holds the case's tensors
        torch.cuda.empty_cache()
        pytest.skip(record["failure"])

    def _measured(self, benchmark, impl, workload) -> dict:
        if DEVICE == "cuda":
            self._measure_ceilings(workload)
            if self.anchors and "anchors" not in self.machine:
                self._measure_anchors()
        inputs = _inputs(workload)
        call = timed_call(impl, workload, inputs)
        result = call()  # tunes and compiles the kernels; so `footprint` does not measure the memory that tuning takes
        if self.check != "no":
            check(impl, result, workload)
            check_forward(impl, workload)
        del result
        if self.check == "only":
            return {}
        if DEVICE == "cpu":
            costs = traffic.costs(_count(impl, workload))
            TIMER.load([(costs["bytes_read"] + costs["bytes_written"]) / 1e9])  # see GROUP
            benchmark.pedantic(lambda: None)
            return {"flops": workload.flops, **costs}
        costs = footprint(call)
        times, launch_hidden = _gpu_timer().measure(call)
        TIMER.load(times)
        benchmark.pedantic(lambda: None, rounds=len(times))
        gpu_s = statistics.median(times)
        lower, median, upper = statistics.quantiles(timing.host_seconds(call, gpu_s), n=4)
        costs |= {"host_us": median * 1e6, "host_iqr_us": (upper - lower) * 1e6}
        if gpu_s < SHORT_S:
            costs["in_a_row_us"] = statistics.median(timing.seconds_in_a_row(call, gpu_s)) * 1e6
            if impl not in BASELINES:
                costs["host_new_us"] = statistics.median(_host_of_new_lengths(impl, workload)) * 1e6
        stats = benchmark.stats.stats
        return {
            "flops": workload.flops,
            "ms": stats.median * 1e3,
            "iqr_ms": stats.iqr * 1e3,
            "tflops": workload.flops / stats.median / 1e12,
            "launch_hidden": launch_hidden,
            **costs,
        }

    def _measure_ceilings(self, workload):
        """Measure the TFLOP/s of PyTorch's matmul once for each dtype. If Sk != Sq, measure a copy's GB/s once per run."""
        if workload.dtype not in self.machine["matmul_tflops"]:
            self.machine["matmul_tflops"][workload.dtype] = timing.matmul_tflops(_gpu_timer(), workloads.DTYPES[workload.dtype])
        if workload.kv_len != workload.seq_len and "copy_gbps" not in self.machine:
            self.machine["copy_gbps"] = timing.copy_gbps(_gpu_timer())

    def _measure_anchors(self):
        """Measure the milliseconds of `ANCHORS`, by pass, without those that do not support the GPU."""
        self.machine["anchors"] = {}
        for workload in ANCHOR_WORKS:
            inputs, calls = workload.inputs(), {}
            for impl in ANCHORS:
                try:
                    call = timed_call(impl, workload, inputs)
                    call()
                except Exception as error:
                    if not refusal(impl, error):
                        raise
                else:
                    calls[impl] = call
            turns = [[statistics.median(_gpu_timer().measure(call)[0]) for call in calls.values()] for _ in range(3)]
            medians = (statistics.median(seconds) * 1e3 for seconds in zip(*turns, strict=True))
            self.machine["anchors"][workload.pass_] = dict(zip(calls, medians, strict=True))


def _bench(config) -> Bench:
    """Return the plugin that `main` has registered.

    Under `pytest bench.py`, `main` does not run: register a plugin with the default options.
    """
    for plugin in config.pluginmanager.get_plugins():
        if isinstance(plugin, Bench):
            return plugin
    plugin = Bench(parse_options([]))
    config.pluginmanager.register(plugin)
    return plugin


def pytest_generate_tests(metafunc):
    params = [
        pytest.param(
            impl,
            *astuple(workload),
            id=f"{workload.label.replace('=', '').replace(' ', '-')}-{impl}",
            marks=pytest.mark.benchmark(group=workload.label + GROUP, timer=TIMER, disable_gc=True),
        )
        for impl, workload in _bench(metafunc.config).cases
    ]
    metafunc.parametrize(["impl", *(field.name for field in fields(Workload))], params)


def test_speed(
    benchmark, pytestconfig, impl,
    pass_, batch, heads, seq_len, head_dim, causal, dtype, score_std, kv_heads, value_dim, kv_len, sink, sink_key, sink_head,
):  # fmt: skip
    workload = Workload(
        pass_, batch, heads, seq_len, head_dim, causal, dtype, score_std, kv_heads, value_dim, kv_len, sink, sink_key, sink_head
    )
    _bench(pytestconfig).measure(benchmark, impl, workload)


def main(argv: list[str]) -> int:
    """Run the benchmark that `argv` describes, and return pytest's exit status.

    The status is 1 if a result was wrong or a case failed. If a signal stops the run, the run still shows and saves the
    finished cases, and the status is 2.
    """
    terminal.prepare()
    options = parse_options(argv)
    if found := stages.syntax_errors(*options.stage):
        raise SystemExit("\n".join(found))
    if options.stale:
        show_stale()
        return 0
    if options.choice:
        with GPU.interpreted() if INTERPRETED else contextlib.nullcontext():
            print(choices(options.about or stages.newest(), list(dict.fromkeys(work for _, work in cases(options)))))
        if INTERPRETED:
            print(f"These are the choices on an {GPU.name}, because no GPU is in use.")
        return 0
    if not INTERPRETED and not torch.cuda.is_available():
        raise SystemExit("no GPU is here; with TRITON_INTERPRET=1, as in `make bench`, bytes and FLOPs are counted on the CPU")
    if options.reference and DEVICE == "cpu":
        raise SystemExit("--reference needs a GPU, and no GPU is in use here")
    if options.reference and options.json and options.json.exists():
        same_gpu = results.load_run(options.json).machine["gpu"] == machine.facts()["gpu"]
        if same_gpu and not stale(options.reference, options.json):
            print(f"{options.json.name} has all rows of {options.reference}, and their code is today's. Nothing was measured.")
            return 0
    if reason := unwritable(SAVED if SAVED.exists() else Path()):
        raise SystemExit(f"cannot save the run in {SAVED}: {reason}")
    # SIGTERM, which a time limit sends, stops the run like SIGINT. Set SIGINT's handler too: a background job without a handler
    # ignores SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    arguments = [__file__, "-qq", "--capture=no", "--no-header", "--disable-warnings", "-p", "no:cacheprovider"]
    given = {word.partition("=")[0].removeprefix("--benchmark-") for word in options.for_pytest if word.startswith("-")}
    arguments += ["--override-ini=addopts=", *options.for_pytest]
    arguments += [] if "save" in given or options.check == "only" else ["--benchmark-autosave"]
    arguments += [] if given - {*SILENT} else ["--benchmark-quiet"]
    return int(pytest.main(arguments, plugins=[Bench(options)]))


if __name__ == "__main__":
    import bench  # pytest also imports this file as `bench`; run the imported module, so that there is only one TIMER

    sys.exit(bench.main(sys.argv[1:]))
