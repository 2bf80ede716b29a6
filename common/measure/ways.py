"""Measure random forwards and backwards in each way that a stage can compute them, and fit constants to the times.

    python -m common.measure.ways results/ways-h100.json --seed 1 --count 100   # on a Hopper GPU
    python -m common.measure.ways results/ways-h100.json --fit

A way is the forward or backward of a track's last stage, often with other tile sizes, plans or numbers of splits than the stage
would choose. `--fit` prints the constants with which `common.kernels.order.busiest` predicts times best, and how much longer
the newest stage's choices take than the fastest ways.
"""

import dataclasses
import functools
import math
import statistics
import sys
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import patch

import numpy

import stages
from common.kernels.order import busiest
from common.layout import cdiv
from common.measure import machine
from common.measure.baselines import BASELINES, refusal, timed_call
from common.measure.options import command, list_of, one_of, positive, read_json, require_hopper, single, write_json
from common.measure.progress import Progress
from common.measure.random_shapes import HEAD_DIMS, JUDGED, draw
from common.measure.timing import GpuTimer
from common.measure.traffic import GPUS, stage_call
from common.measure.workloads import Workload


def changed(function: Callable, **values) -> Callable:
    """Return a function that calls `function` while some global variables of its module have other values."""
    return patch.dict(function.__globals__, values)(function)


def _always(value) -> Callable:
    """Return a function that returns `value` for all arguments."""
    return lambda *_, **__: value


def _shared(ctas: int, _, heads_per_kv: int, *__) -> tuple[int, int]:
    """Return the shares and the splits with which this number of CTAs divide a key tile: as many shares as possible."""
    shares = math.gcd(ctas, heads_per_kv)
    return shares, ctas // shares


def ways(pass_: str, width: int) -> dict[str, tuple]:
    """Return all ways to compute a pass, by name. `width` is D and Dv.

    Each is a function, with the queries and keys of a tile if the fit applies: tiles come from a counter, and pack no heads.
    """
    if pass_ == "bwd":
        wide, own = map(stages.load("newest").backward.__globals__["BACKWARDS"].get, ("wide", "shortbwd"))
        if width == 256:  # the CTAs that share a key tile, or a query tile in the kernel of dQ
            counts = [(n, 1) for n in (1, 2, 4, 8, 16)] + [(1, n) for n in (2, 4, 8, 16)]
            found = {f"n{n}m{m}": changed(wide, splits_of=_always(n), query_splits_of=_always(m)) for n, m in counts}
            return {name: (function, None) for name, function in ({"wide": wide} | found).items()}
        parent = stages.parent(stages.line("shortbwd")[-1])
        found = {stages.version(parent): stages.load(parent).backward, "auto": own}
        found |= {f"n{n}": changed(own, splits_of=functools.partial(_shared, n)) for n in (1, 2, 4, 8)}
        return {name: (function, None) for name, function in found.items()}

    def counted(batch, heads, seq_q, keys, diagonal, causal, width, queries, programs):
        return min(cdiv(seq_q, queries) * batch * heads, programs), False, None  # for diagonal 0

    guess, short, decode = map(stages.load("newest").forward.__globals__["FORWARDS"].get, ("guess", "shortfwd", "decode"))
    tiles, fewer = guess.__globals__["TILES"], short.__globals__["FEWER_ROWS"]
    smaller, few_keys = fewer[128], short.__globals__["FEW_KEYS"]
    yes, no, one, full = map(_always, (True, False, 1, 256))
    usual = {"queries_of": full, "fewer_keys": no}
    found = {
        "guess": (changed(guess, is_short=no), tiles[width][:2]),
        "running": (changed(guess, is_short=yes), None),
        "shortfwd": (changed(short, **usual), None),
        "counter": (changed(short, **usual, plan=counted), short.__globals__["TILES"][width][:2]),
        "decode": (decode, None),
        "decode1": (changed(decode, splits_of=one), None),
    }
    if width <= 64:  # tiles of fewer queries, too
        for name, shape in {"guess128": smaller, "guess128s": smaller._replace(keys=64, kv_slots=6)}.items():
            both = dict.fromkeys(("TILES", "TILES_AGAIN"), tiles | {width: shape})
            found[name] = changed(guess, is_short=no, **both), shape[:2]
        found["running128"] = changed(guess, is_short=yes, TILES=tiles | {width: smaller}), None
        for queries, shape in fewer.items():
            found[f"counter{queries}"] = changed(short, queries_of=_always(queries), plan=counted), shape[:2]
        found["decode128"] = changed(decode, FEW_SQUARES=math.inf), None
        found["decode128n1"] = changed(decode, FEW_SQUARES=math.inf, splits_of=one), None
    if width == 256:
        found["shortfwd32"] = changed(short, fewer_keys=yes), None
        found["counter32"] = changed(short, fewer_keys=yes, plan=counted), few_keys[:2]
    return found


def call_of(function: Callable, work: Workload, inputs) -> Callable:
    """Return a call of a forward or backward. It goes past the operator, which would replay recorded launches."""
    forward = function if work.pass_ == "fwd" else stages.load("newest").forward
    return stage_call(SimpleNamespace(forward=forward, backward=function), work, inputs)


def measure(work: Workload, timer: GpuTimer) -> dict[str, float]:
    """Return the median µs of a workload in all ways, and in the libraries that support it, by name."""
    found, inputs, known = {}, work.inputs(), ways(work.pass_, work.head_dim)
    for name in [*(name for name in BASELINES if name != "sdpa-flash"), *known]:  # FlashAttention-2 is by far the slowest
        try:
            call = call_of(known[name][0], work, inputs) if name in known else timed_call(name, work, inputs)
            times, hidden = timer.measure(call)
            if hidden:  # otherwise the time includes CPU time
                found[name] = round(statistics.median(times) * 1e6, 2)
        except Exception as error:
            if not refusal(name, error):
                raise
    return found


def choice(work: Workload, programs: int) -> str:
    """Return the way that the newest stage chooses on a GPU with `programs` SMs."""
    if work.pass_ == "bwd":
        return "wide" if work.head_dim == 256 else "auto"
    known = stages.load("newest").forward.__globals__
    sizes = work.batch, work.heads, work.kv_heads, work.seq_len, work.kv_len, work.head_dim, work.value_dim
    track, queries, *_ = changed(known["chosen_forward"], num_sms=lambda: programs)(*sizes, work.causal, 0)
    plan, sizes_of = map(known["FORWARDS"]["shortfwd"].__globals__.get, ("plan", "sizes_of"))
    short = plan(*sizes[:2], *sizes[3:5], 0, work.causal, work.head_dim, queries, programs).short
    # CTAs of shortfwd take tiles from a counter, unless work is short. No way has short work in FEWER_ROWS.
    own = f"counter{queries}" if queries < 256 and work.head_dim <= 64 else "shortfwd" if short else "counter"
    if sizes_of(work.batch * work.heads, *sizes[3:5], 0, work.causal, *sizes[5:], programs).keys == 32:
        own = "shortfwd32"
    return own if track == "shortfwd" else track


def fit(works: list[Workload], times: list[float], tile: tuple[int, int], programs: int) -> tuple[numpy.ndarray, float]:
    """Return the µs of launches, a query tile and a key tile that predict `times` best, and the relative standard deviation."""

    def errors(logs):
        launches, *of_tiles = numpy.exp(logs)
        sizes = [(work.batch * work.heads, work.seq_len, work.kv_len, 0, work.causal, *tile, programs) for work in works]
        return numpy.log([launches + busiest(*size, *of_tiles) for size in sizes]) - numpy.log(times)

    logs = numpy.log((5.0, 1.0, 0.5))  # logarithms, because times are positive
    for _ in range(30):  # Gauss-Newton; about 10 steps suffice
        slopes = [(errors(logs + step) - errors(logs)) / 1e-4 for step in 1e-4 * numpy.eye(3)]
        step = numpy.linalg.lstsq(numpy.transpose(slopes), errors(logs))[0].clip(-1, 1)
        logs = min((logs - share * step for share in (1, 0.3, 0.1, 0.03, 0)), key=lambda each: sum(errors(each) ** 2))
    return numpy.exp(logs), errors(logs).std()


def _dtypeless(work: Workload) -> Workload:
    return dataclasses.replace(work, dtype="float16")


def show_fit(run: dict):
    """Print the constants of each way, and how much longer the newest stage's choices take than the fastest ways.

    Constants are fitted without the shapes of `JUDGED`.
    """
    programs = next(gpu.num_sms for gpu in GPUS.values() if gpu.name in run["machine_info"]["gpu"])
    judged = {_dtypeless(work) for seed, count in JUDGED.items() for work in draw(seed, count)}
    groups = {}
    for record in run["records"]:
        groups.setdefault((record["pass"], record["head_dim"]), []).append((Workload.of(record), record["us"]))
    for (pass_, width), cases in sorted(groups.items()):
        known, ratios = ways(pass_, width), {}
        for name, (_, tile) in known.items():
            fitted = [(work, us[name]) for work, us in cases if name in us and _dtypeless(work) not in judged]
            if tile and fitted:
                constants, deviation = fit(*zip(*fitted, strict=True), tile, programs)
                print(f"{pass_} D={width} {name}: {constants.round(3)} µs (launches, tile, key tile), ±{deviation:.1%}")
        for work, us in cases:
            if (chosen := choice(work, programs)) in us:  # an old file lacks new ways
                ratios[work.label] = us[chosen] / min(us[name] for name in known if name in us)
        mean, worst = statistics.geometric_mean(ratios.values()), max(ratios, key=ratios.get)
        found = f"{len(ratios)} of {len(cases)} choices" if len(ratios) < len(cases) else "choices"
        print(f"{pass_} D={width}: {found} take ×{mean:.3f} of the fastest way's time, and ×{ratios[worst]:.3f} for {worst}")


def main(argv: list[str]):
    """Run the command line."""
    parser = command("common.measure.ways", __doc__, "the JSON file to write, or to read with --fit")
    parser.add_argument("--fit", action="store_true", help="fit constants to the file's times, and measure nothing")
    parser.add_argument("--seed", type=single(positive), default=1, help="of the shapes (default: %(default)s)")
    parser.add_argument("--count", type=single(positive), default=100, help="number of shapes (default: %(default)s)")
    parser.add_argument("--pass", dest="pass_", type=list_of(one_of(("fwd", "bwd"))), default="fwd,bwd", help="a list: fwd,bwd")
    parser.add_argument("--head-dim", type=list_of(one_of(HEAD_DIMS)), default="64,128,256", help="a list: 64,128,256")
    options = parser.parse_args(argv)
    if options.fit:
        return show_fit(read_json(options.file, "machine_info", "records"))
    require_hopper("common.measure.ways")
    works = [
        work for work in draw(options.seed, options.count) if work.pass_ in options.pass_ and work.head_dim in options.head_dim
    ]
    facts, timer, records = machine.facts(), GpuTimer(), []
    with Progress(len(works)) as bar:
        for number, work in enumerate(works, start=1):
            bar.begin(f"{number} of {len(works)}, {work.label}")
            records.append({**work.record(), "drawn": True, "us": measure(work, timer)})
            write_json(options.file, {"machine_info": facts, "records": records})
            bar.update(1)


if __name__ == "__main__":
    main(sys.argv[1:])
