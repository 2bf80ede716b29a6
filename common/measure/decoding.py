"""Measure a decoding loop: every step, each sequence has one more key in its cache, and one query attends to all of them.

    python -m common.measure.decoding results/decoding-loop-h200.json   # on a Hopper GPU
    python -m common.measure.decoding --stage lengths5,lengths3 steps.json   # two stages

The lengths stay on the device, and a step adds 1 to them there. Steps are timed one after the other, launched one by one and as
a CUDA graph that was captured once. A step writes nothing to the cache, since all implementations would do so alike.

All sequences of a case are equally long. Then a step is timed in a graph with lengths drawn log-uniform, and with equal lengths
that have as many keys together. At last, full caches lie in pages of `PAGES` keys, in random order.
"""

import functools
import inspect
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import stages
from common.checks import EIGHT_BITS
from common.eight_bits import quantized
from common.measure import machine
from common.measure.baselines import BASELINES
from common.measure.options import add_list, command, list_of, one_of, require_hopper, write_json
from common.measure.progress import Progress
from common.measure.timing import GpuTimer, copy_gbps, host_seconds, seconds_of_row

BATCHES, CAPACITIES = (1, 8, 64), (1024, 8192, 32768, 131072)
HEADS, KV_HEADS, HEAD_DIM = (32, 64), 8, 128
STEPS = 1000
SHORTEST = 64  # keys, where lengths differ
PAGES = (16, 256)
LOOP_S = 0.3  # a loop takes about this many seconds at most, with fewer steps if they are slow
ROUNDS = 3  # loops of each implementation
FEWER = 100  # steps of a loop, at most, with pages


def implementations(q, k, v, lengths, table=None, names: Sequence[str] = ()) -> dict[str, Callable]:
    """Return a function for each implementation that attends to the caches k and v [B, S, Hkv, D], up to `lengths`.

    With a `table`, they lie in pages, [pages, page size, Hkv, D]. SDPA takes no lengths on the device, and no pages. It attends
    to the whole caches, which it would have to slice on the host. `names` are those of stages; without any, the newest. A stage
    that takes 8 bits has a second function, with caches that are rounded here.
    """
    heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    keys = heads_first[1:] if table is None else (k, v)
    options = {"cache_seqlens": lengths, "page_table": table}
    found = {
        name: functools.partial(stages.load(name).attention, heads_first[0], *keys, **options)
        for name in names or [stages.newest()]
        if table is None or getattr(stages.load(name), "PAGES", False)
    }
    for name in [*found]:
        stage = stages.load(name)
        if "descales" in inspect.signature(stage.forward).parameters:
            factors = {}
            if table is None:
                (k8, factors["k_descale"]), (v8, factors["v_descale"]) = map(in_eight_bits, keys)
            else:  # a head's factor belongs to a sequence, not to a page; here it is 1
                k8, v8 = (tensor.to(EIGHT_BITS) for tensor in keys)
            found[f"{name}, 8 bits"] = functools.partial(stage.attention, heads_first[0], k8, v8, **options, **factors)
    if "flash-3" in BASELINES:
        flash = functools.partial(torch.ops.flash_attn_3.fwd, seqused_k=lengths, page_table=table, num_splits=0)
        found["flash-3"] = functools.partial(flash, q, k, v)
    if table is None:
        found["sdpa, whole"] = functools.partial(scaled_dot_product_attention, *heads_first, enable_gqa=True)
    return found


def in_eight_bits(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return `quantized(cache)`, [B, Hkv, S, D], in the memory order of the cache; a sequence at a time, to save memory."""
    eight, factors = torch.empty_like(cache, dtype=EIGHT_BITS), cache.new_empty(cache.shape[:2], dtype=torch.float32)
    for number in range(len(cache)):
        found, factor = quantized(cache[number : number + 1])
        eight[number].copy_(found[0])
        factors[number].copy_(factor[0])
    return eight, factors


def spread(batch: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Return lengths drawn log-uniform up to `capacity`, and equal lengths with as many keys together, except for rounding."""
    drawn = SHORTEST * (capacity / SHORTEST) ** torch.rand(batch, generator=torch.Generator().manual_seed(0))
    return drawn.int(), torch.full((batch,), round(drawn.mean().item()), dtype=torch.int32)


def graph_of(step: Callable) -> Callable:
    """Return a function that replays a CUDA graph of `step`."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure(batch: int, heads: int, capacity: int, copy_rate: float, names: Sequence[str] = ()) -> dict:
    """Return the record of a case: for each implementation, the µs of a step, in a graph and one by one, and of the host.

    A copy moves `copy_rate` bytes per second, read and written. `copy_us` is how long that takes for a step's bytes.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(batch, 1, heads), (batch, capacity, KV_HEADS), (batch, capacity, KV_HEADS)]
    q, k, v = (torch.randn(*shape, HEAD_DIM, generator=generator, device="cuda").bfloat16() for shape in shapes)
    lengths = torch.full((batch,), capacity, dtype=torch.int32, device="cuda")
    key_bytes = 2 * KV_HEADS * HEAD_DIM * k.itemsize  # of K and V
    steps = min(STEPS, capacity, max(10, int(LOOP_S * copy_rate / (batch * capacity * key_bytes))))
    keys = capacity - (steps - 1) / 2  # of a sequence, on average
    record = {"batch": batch, "heads": heads, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "capacity": capacity, "steps": steps}
    record |= {"dtype": "bfloat16", "copy_us": round(batch * keys * key_bytes / copy_rate * 1e6, 2), "us": {}}
    for name, attend in implementations(q, k, v, lengths, names=names).items():

        def step(attend=attend):
            lengths.add_(1)
            return attend()

        def loop(call):
            lengths.fill_(capacity - steps)
            return seconds_of_row(call, steps)

        for _ in range(3):  # compile, then record
            loop(step)
        alone = statistics.median(loop(step) for _ in range(ROUNDS))
        host = statistics.median(host_seconds(attend, alone))
        replay = graph_of(step)
        in_graph = statistics.median(loop(replay) for _ in range(ROUNDS))
        times = {"graph": in_graph, "alone": alone, "host": host}
        if name != "sdpa, whole":
            for key, each in zip(("different", "equal"), spread(batch, capacity), strict=True):
                lengths.copy_(each)
                replay = graph_of(attend)
                times[key] = statistics.median(seconds_of_row(replay, steps) for _ in range(ROUNDS))
        record["us"][name] = {key: round(seconds * 1e6, 2) for key, seconds in times.items()}
    lengths.fill_(capacity)
    for page in PAGES:
        table = torch.randperm(batch * capacity // page, generator=generator, device="cuda").int().view(batch, -1)
        paged = [tensor.view(-1, page, *tensor.shape[2:]) for tensor in (k, v)]
        for name, attend in implementations(q, *paged, lengths, table, names).items():
            for _ in range(3):
                attend()
            replay = graph_of(attend)
            seconds = statistics.median(seconds_of_row(replay, min(steps, FEWER)) for _ in range(ROUNDS))
            record["us"][name][f"pages of {page}"] = round(seconds * 1e6, 2)
    return record


def table(records: list[dict]) -> str:
    """Return a table of the cases."""
    names = list(records[0]["us"])
    beside = next((name for name in names[1:] if any(key.startswith("pages") for key in records[0]["us"][name])), names[1])
    rows = []
    for record in records:
        own, *others = (record["us"][name] for name in names)
        row = [record["batch"], f"{record['heads']}/{record['kv_heads']}", record["capacity"], own["graph"]]
        row += [f"{record['copy_us'] / own['graph']:.2f}", *(f"{other['graph'] / own['graph']:.2f}" for other in others)]
        row.append(f"{own['different'] / own['equal']:.2f}")
        paged = [key for key in own if key.startswith("pages") and key in record["us"][beside]]
        row += [f"{record['us'][beside][key] / own[key]:.2f}" for key in paged]
        rows.append([*row, own["alone"], own["host"], *(other["host"] for other in others)])
    headers = [
        "B",
        "heads",
        "capacity",
        f"{names[0]}, µs",
        "of copy rate",
        *(f"× {name}" for name in names[1:]),
        "different / equal",
        *(f"{key}, × {beside}" for key in paged),
    ]
    return tabulate(rows, [*headers, "no graph, µs", *(f"host, {name}" for name in names)], disable_numparse=True)


def main(argv: list[str]):
    """Run the command line."""
    parser = command("common.measure.decoding", __doc__, "the JSON file to write")
    add_list(parser, "--stage", "newest")
    parser.add_argument(
        "--heads", type=list_of(one_of(HEADS)), default="32,64", metavar="LIST", help="query heads (default: all)"
    )
    options = parser.parse_args(argv)
    require_hopper("common.measure.decoding")
    copy_rate = copy_gbps(GpuTimer()) * 1e9
    cases = list(itertools.product(BATCHES, options.heads, CAPACITIES))
    facts, records = machine.facts(), []
    with Progress(len(cases)) as bar:
        for number, (batch, heads, capacity) in enumerate(cases, start=1):
            bar.begin(f"{number} of {len(cases)}, B={batch}, {heads} heads, {capacity} keys")
            records.append(measure(batch, heads, capacity, copy_rate, options.stage))
            write_json(options.file, {"machine_info": facts, "records": records})
            torch.cuda.empty_cache()
            bar.update(1)
    print(table(records))


if __name__ == "__main__":
    main(sys.argv[1:])
