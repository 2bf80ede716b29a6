"""Measure how ring attention scales. `make bench-ring GPUS=4` starts this program once for each GPU.

A rank is a process with its own GPU. With n GPUs, each rank has an n-th of the sequence's tokens. Weak scaling compares
sequences with equally many tokens per GPU. Strong scaling compares different numbers of GPUs on one sequence. The program also
measures PyTorch's context parallelism, which uses scaled_dot_product_attention (SDPA). Before the program times a case, it
compares the results with attention in float64. `make table FILE=…` shows a run that was saved with `--json`.

Without GPUs, the program runs small cases on the CPU, where ranks communicate with PyTorch's backend gloo. The program then
measures no time. It counts the bytes that a rank sends, and compares them with the formula (`sent_bytes`).
"""

import argparse
import contextlib
import datetime
import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import stages
from common.entry import Unavailable
from common.measure import machine, reference, terminal
from common.measure.baselines import call_of
from common.measure.footprint import footprint
from common.measure.options import HEAD_DIM, add_list, json_path, list_of, one_of, positive, single, write_json
from common.measure.workloads import DTYPES, Workload
from common.ring import Ring, ring_attention, shard, unshard
from common.runtime import DEVICE

ON_GPUS = DEVICE == "cuda"
# The backends of PyTorch's SDPA. On several GPUs, PyTorch's context parallelism calls them.
SDPA = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION} if ON_GPUS else {}
if ON_GPUS:
    TOKENS, HEADS, HEAD_DIMENSION = "8192,32768", 16, 128
else:  # sizes that the interpreter runs in seconds
    TOKENS, HEADS, HEAD_DIMENSION = "16", 2, 16
GPUS = 2
MILLION, MILLION_HEADS = 2**20, 8  # with --million: number of tokens of the sequence, and number of heads
PASSES = ("fwd", "fwd+bwd")

TIMEOUT_S = 240  # a rank waits at most this long for another rank, which may compile and tune kernels meanwhile
LIMIT_S = 140  # a run starts no case after this many seconds
GPU_CASE_S, CASE_S = 1.5, 1.0  # approximate seconds of a case, including its check: on GPUs, and on the interpreter
SPIN_CYCLES = 10_000_000  # a GPU spins this many cycles (5 ms) before each round, while the CPU queues launches
CHECKED_ROWS = 8  # number of checked query rows in each chunk of the sequence
WARM_UP = 3  # number of untimed calls
ROUNDS_S, FEWEST_ROUNDS, MOST_ROUNDS = 0.3, 5, 30  # GPU seconds of all rounds together; minimum and maximum number of rounds
SLOW_S, SLOW_ROUNDS = 0.5, 3  # a call of more than SLOW_S seconds gets no warm-up and only SLOW_ROUNDS rounds


def sent_bytes(workload: Workload, ranks: int, rank: int = 0) -> int:
    """Return the bytes that a rank sends in a pass.

    With n ranks, a rank sends n - 1 blocks of K and V. A block has B · Hkv · S / n · (D + Dv) elements of e bytes. A backward
    also sends the gradients of these blocks. A gradient's element has e bytes in the first transfer, and 4 bytes in later
    transfers. With a causal mask, rank r sends the gradients of only half of a block's keys in its first r transfers. So rank 0
    sends the most.
    """
    w, size = workload, DTYPES[workload.dtype].itemsize
    numbers = w.batch * w.kv_heads * (w.kv_len // ranks) * (w.head_dim + w.value_dim)
    forward = (ranks - 1) * numbers * size
    gradients = sum(numbers // (2 if w.causal and step <= rank else 1) * (size if step == 1 else 4) for step in range(1, ranks))
    return {"fwd": forward, "bwd": forward + gradients, "fwd+bwd": 2 * forward + gradients}[w.pass_]


@contextlib.contextmanager
def counted_sends():
    """Count the bytes that this process sends to other ranks in this context. Yield a list whose only element is the count."""
    sent, begin = [0], dist.batch_isend_irecv

    def counting(operations):
        sent[0] += sum(operation.tensor.nbytes for operation in operations if operation.op is dist.isend)
        return begin(operations)

    with mock.patch.object(dist, "batch_isend_irecv", counting):
        yield sent


@contextlib.contextmanager
def attention_of(impl: str, group, causal: bool):
    """Enter a context, and yield a function `attend(q, k, v)` that computes this rank's part of the output.

    The arguments are this rank's parts of q, k and v, with the rows that `common.ring.shard` selects.

    Raises:
        Unavailable: PyTorch has no context parallelism, or its interface differs from the one in PyTorch 2.11 to 2.13.
    """
    if impl not in SDPA:
        yield functools.partial(ring_attention, stages.load(impl), group=group, causal=causal)
        return
    size = dist.get_world_size(group)
    with contextlib.ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPA[impl]))
        if size > 1:
            try:
                from torch.distributed.device_mesh import DeviceMesh
                from torch.distributed.tensor.experimental import context_parallel
                from torch.distributed.tensor.experimental._attention import _cp_options
            except ImportError as error:
                raise Unavailable(f"this PyTorch has no context parallelism as in 2.11: {error}") from None
            _cp_options.enable_load_balance = causal  # with a causal mask, a rank gets the chunks that `shard` selects
            some = torch.zeros(2 * size if causal else size, device=DEVICE)  # context_parallel requires some tensor
            mesh = DeviceMesh.from_group(group, DEVICE)
            context = context_parallel(mesh, buffers=[some], buffer_seq_dims=[0])
            context.__enter__()
            stack.callback(context.__exit__, None, None, None)  # PyTorch 2.11 restores SDPA only if __exit__ gets no error
        # The context replaces the SDPA function in the module `F`, so each call must look the function up in `F`.
        yield lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, **({} if q.shape[1] == k.shape[1] else {"enable_gqa": True})
        )


def inputs(workload: Workload, group) -> tuple[Tensor, ...]:
    """Return this rank's part of q, k, v and the output's gradient.

    The elements are normally distributed, and differ on each rank.
    """
    w, size = workload, dist.get_world_size(group)
    generator = torch.Generator(DEVICE).manual_seed(dist.get_rank(group))
    shapes = [(w.heads, w.head_dim), (w.kv_heads, w.head_dim), (w.kv_heads, w.value_dim), (w.heads, w.value_dim)]
    return tuple(
        torch.randn(
            w.batch, heads, w.seq_len // size, columns, generator=generator, device=DEVICE, dtype=DTYPES[w.dtype]
        )
        for heads, columns in shapes
    )  # fmt: skip


def _of_rows(function: Callable, q, k, v, causal, scale, grad_out, positions) -> dict:
    """Call `truth` or `plain` of `common.measure.reference` for the queries at `positions`, with all keys that they see."""
    if not causal:
        return function(q, k, v, False, scale, grad_out)

    def together(above, below):
        joined = {}
        for name, result in above.items():
            if name == "magnitudes":
                joined[name] = together(result, below[name])
            else:
                joined[name] = result + below[name] if name in ("dk", "dv") else torch.cat((result, below[name]), 2)
        return joined

    def of_row(at, position):
        gradient = None if grad_out is None else grad_out[:, :, at : at + 1]
        return function(q[:, :, at : at + 1], k, v, True, scale, gradient, diagonal=position)

    return functools.reduce(together, itertools.starmap(of_row, enumerate(positions)))


def check(attend: Callable, workload: Workload, group):
    """Raise AssertionError on each rank unless the results are within the bounds of `common.measure.reference`.

    The check compares only the first K/V head and its query heads. It compares dK and dV of all keys. The sequence has two
    chunks for each rank. In each chunk, the check compares O and dQ of some query rows, including the first and the last row.
    The gradient of the output is 0 in all other rows, so dK and dV depend only on the compared rows. Results that are not
    compared must be finite.
    """
    w, rank, size = workload, dist.get_rank(group), dist.get_world_size(group)
    q, k, v, grad_out = inputs(w, group)
    chunk = w.seq_len // (2 * size)
    some = {(chunk - 1) * at // (CHECKED_ROWS - 1) for at in range(CHECKED_ROWS)}
    positions = [first + row for first in range(0, w.seq_len, chunk) for row in sorted(some)]
    heads = slice(w.heads // w.kv_heads)
    if w.pass_ == "fwd":
        parts = {"out": attend(q, k, v)}
    else:
        sparse = torch.zeros_like(grad_out)
        rows = shard(torch.zeros(w.seq_len, dtype=torch.bool).index_fill(0, torch.tensor(positions), True), 0, group)
        sparse[:, heads, rows] = grad_out[:, heads, rows]
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        out = attend(*leaves)
        gradients = torch.autograd.grad(out, leaves, sparse)
        parts = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
    wrong = [name for name, part in parts.items() if not part.isfinite().all()]
    of_queries = {"q": q.detach(), "grad_out": grad_out} | {name: parts[name] for name in ("out", "dq") if name in parts}
    of_keys = {"k": k.detach(), "v": v.detach()} | {name: parts[name] for name in ("dk", "dv") if name in parts}
    del parts
    whole = {name: unshard(part[:, heads], 2, group)[:, :, positions] for name, part in of_queries.items()}
    whole |= {name: unshard(part[:, :1], 2, group) for name, part in of_keys.items()}
    verdict = f"NaN or infinity in {', '.join(wrong)} of rank {rank}" if wrong else None
    if rank == 0 and not wrong:
        few_q, all_k, all_v, few_grad = (whole.pop(name) for name in ("q", "k", "v", "grad_out"))
        options = w.causal, w.head_dim**-0.5, None if w.pass_ == "fwd" else few_grad, positions
        truth, plain = (_of_rows(each, few_q, all_k, all_v, *options) for each in (reference.truth, reference.plain))
        try:
            reference.assert_correct(whole, truth, plain)
        except AssertionError as error:
            verdict = str(error)
    every = [None] * size
    dist.all_gather_object(every, verdict, group=group)
    assert not any(every), "; ".join(filter(None, every))


def _rounds(call: Callable, group, count: int) -> tuple[list[float], bool]:
    """Return each round's seconds on this rank's GPU, and whether the CPU was ahead of the GPU in at least half of the rounds.

    In a round, the GPU spins, waits for the other GPUs, records an event, runs the call, and records another event. During the
    spin, the CPU queues the launches. The GPUs wait for each other in a reduction, so that all GPUs begin the call together.
    """
    token, events, exposed = torch.ones(1, device=DEVICE), [], 0
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SPIN_CYCLES)
        dist.all_reduce(token, group=group)
        start.record()
        call()
        exposed += start.query()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events], 2 * exposed <= count


def timed(call: Callable, group) -> dict:
    """Measure a call's time until the last rank is done. Return the median and interquartile range of the rounds, in ms."""

    def slowest(count):
        """Return the time of the slowest rank in each round, and whether this rank's CPU was ahead of the GPU."""
        seconds, hidden = _rounds(call, group, count)
        times = torch.tensor(seconds, device=DEVICE, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX, group)
        return times.tolist(), hidden

    call()
    ((estimate,), _), count = slowest(1), SLOW_ROUNDS
    if estimate < SLOW_S:
        _rounds(call, group, WARM_UP)
        count = max(FEWEST_ROUNDS, min(int(ROUNDS_S / estimate), MOST_ROUNDS))
    times, hidden = slowest(count)
    lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
    return {"ms": 1e3 * median, "iqr_ms": 1e3 * (upper - lower), "rounds": count, "launch_hidden": hidden}


def measure(impl: str, workload: Workload, group) -> dict:
    """Check a case. On GPUs, measure its time and memory. For a stage, count the bytes that this rank sends."""
    size = dist.get_world_size(group)
    with attention_of(impl, group, workload.causal) as attend:
        check(attend, workload, group)
        call, found = call_of(attend, workload, inputs(workload, group)), {}
        if impl not in SDPA:
            with counted_sends() as sent:
                call()
            found |= {"sent_bytes": sent[0], "sent_formula": sent_bytes(workload, size, dist.get_rank(group))}
        if ON_GPUS:
            every = [None] * size
            dist.all_gather_object(every, footprint(call)["peak_extra_mib"], group=group)
            found |= timed(call, group) | {"peak_extra_mib": max(every)}
            found["tflops"] = workload.flops / size / found["ms"] / 1e9  # per GPU
        return found


def _failure(error: Exception) -> dict:
    """Return the failure and the note that the table shows for a case that could not be measured."""
    if isinstance(error, torch.OutOfMemoryError):
        return {"failure": "OOM"}
    kind = "n/a" if isinstance(error, Unavailable) else "WRONG" if isinstance(error, AssertionError) else "ERROR"
    return {"failure": kind, "note": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def link(tokens: int, heads: int, kv_heads: int | None, head_dim: int, dtype: str, group) -> dict:
    """Measure how fast each rank sends a block of K and V to the next rank while the GPUs do nothing else."""
    shape = 1, kv_heads or heads, tokens, head_dim
    blocks = [[torch.randn(shape, device=DEVICE, dtype=DTYPES[dtype]) for _ in "kv"] for _ in range(2)]
    ring = Ring(group)

    def call():
        for work in ring.pass_on(*blocks):
            work.wait()

    size = sum(tensor.nbytes for tensor in blocks[0])
    found = timed(call, group)
    return {"tokens": tokens, "ranks": ring.size, "bytes": size, **found, "gbps": size / found["ms"] / 1e6}


def spoken(record: dict) -> str:
    """Return what a record says of its case: the reason why it was not measured, its time, or its bytes."""
    if "failure" in record:
        return f"{record['failure']} {record.get('note', '')}".rstrip()
    if "ms" not in record:
        return f"{record['sent_bytes']} bytes sent, {record['sent_formula']} by the formula"
    exposed = "" if record["launch_hidden"] else ", with time of the CPU"
    return f"{record['ms']:.3f} ± {record['iqr_ms']:.3f} ms, {record['tflops']:.0f} TFLOP/s a GPU{exposed}"


def add_gpus(parser: argparse.ArgumentParser):
    """Add --gpus, the number of ranks that `start_ranks` starts."""
    parser.add_argument(
        "--gpus", type=single(positive), default=GPUS, help="number of GPUs that share a sequence (default: %(default)s)"
    )


def start_ranks(module: str, argv: list[str], parse: Callable):
    """Replace this process by torchrun, which starts `module` once for each GPU.

    Args:
        parse: a function that parses the options for a number of GPUs. If the options are wrong, the function ends this process
            before any rank starts.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add_gpus(parser)
    gpus = parser.parse_known_args(argv)[0].gpus
    parse(gpus)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={gpus}"]
    os.execv(sys.executable, [*run, "-m", module, *argv])


def parse_options(argv: list[str] | None, world: int) -> argparse.Namespace:
    """Parse the command line. Exit with status 2 on an invalid value."""
    parser = argparse.ArgumentParser(prog="make bench-ring ARGS=…", description=__doc__.partition("\n")[0])
    add_gpus(parser)
    add_list(parser, "--stage", stages.version(stages.recommended()))
    passes = list_of(one_of({name: name for name in PASSES}))
    parser.add_argument("--pass", dest="passes", type=passes, default=list(PASSES), metavar="LIST", help="of fwd,fwd+bwd")
    tokens_help = "even numbers of tokens per GPU (default: %(default)s)"
    parser.add_argument("--tokens", type=list_of(positive), default=TOKENS, metavar="LIST", help=tokens_help)
    parser.add_argument("--heads", type=single(positive), default=HEADS, help="(default: %(default)s)")
    parser.add_argument("--kv-heads", type=single(positive), help="K/V heads (default: as many as heads)")
    parser.add_argument("--head-dim", type=single(HEAD_DIM), default=HEAD_DIMENSION, help="(default: %(default)s)")
    for flag, default in (("--causal", "yes"), ("--dtype", "bfloat16")):
        add_list(parser, flag, default)
    million_help = f"only stages, with {MILLION} tokens over all GPUs and {MILLION_HEADS} heads"
    parser.add_argument("--million", action="store_true", help=million_help)
    limit_help = "start no case after this many seconds (default: %(default)s)"
    parser.add_argument("--limit", type=single(positive), default=LIMIT_S, metavar="SECONDS", help=limit_help)
    parser.add_argument("--json", type=json_path, metavar="FILE", help="also write the run to FILE")
    chosen = parser.parse_args(argv)
    if chosen.million:
        chosen.tokens, chosen.heads, chosen.kv_heads = [MILLION // world], MILLION_HEADS, None
    if any(tokens % 2 for tokens in chosen.tokens):
        parser.error("argument --tokens: each entry must be an even number, because each GPU gets two chunks of the sequence")
    if chosen.heads % (chosen.kv_heads or 1):
        parser.error(f"argument --kv-heads: {chosen.kv_heads} K/V heads do not divide {chosen.heads} heads")
    return chosen


def cases(options, world: int) -> list[tuple[str, Workload, int]]:
    """Return (implementation, workload, number of ranks) of each case, on 1, 2, 4, … and all ranks.

    Cases for weak scaling have equally many tokens per rank. Cases for strong scaling have equally long sequences.
    """
    sizes = sorted({2**power for power in range(world.bit_length()) if 2**power <= world} | {world})
    points = {}  # the distinct pairs (number of ranks, sequence length), in order
    for tokens, size in itertools.product(options.tokens, sizes):
        points |= {(size, size * tokens): None} | ({(size, world * tokens): None} if world * tokens % (2 * size) == 0 else {})
    impls = [*SDPA, *options.stage]
    if options.million:
        points, impls = {(world, world * options.tokens[0]): None}, options.stage
    shape = {"heads": options.heads, "kv_heads": options.kv_heads, "head_dim": options.head_dim}
    return [
        (impl, Workload(pass_, batch=1, seq_len=seq_len, causal=causal, dtype=dtype, **shape), ranks)
        for dtype, causal, (ranks, seq_len), pass_ in itertools.product(options.dtype, options.causal, points, options.passes)
        for impl in impls
    ]


def begin() -> dict:
    """Join the group of all ranks that torchrun's environment describes.

    Return a dict: number n -> group of the first n ranks. NCCL's stream has a high priority, so that NCCL's CTAs start before
    the stage's waiting CTAs.
    """
    timeout = datetime.timedelta(seconds=TIMEOUT_S)

    def settings():
        if not ON_GPUS:
            return {"timeout": timeout}
        chosen = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        chosen._timeout = timeout
        return {"timeout": timeout, "pg_options": chosen}

    if ON_GPUS:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPUS else "gloo", **settings())
    return {size: dist.new_group(list(range(size)), **settings()) for size in range(1, dist.get_world_size() + 1)}


def _facts(world: int) -> dict:
    facts = machine.facts()
    if ON_GPUS:
        names = [torch.cuda.get_device_name(device) for device in range(world)]
        facts["gpus"] = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
        facts["nccl"] = "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
        facts["environment"] = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}
    return facts


def _of_rank_0(value):
    """Return rank 0's value on all ranks. Only the CPUs wait for this value, not the GPUs."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def main(argv: list[str] | None = None) -> int:
    """Run one rank. Return the exit status, which is 1 if a result was wrong or a stage failed."""
    terminal.prepare()
    begun = time.perf_counter()
    if "WORLD_SIZE" not in os.environ:
        start_ranks("common.measure.scaling", sys.argv[1:] if argv is None else argv, lambda gpus: parse_options(argv, gpus))
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    options = parse_options(argv, world)
    groups = begin()
    to_do, run = cases(options, world), {"machine_info": _facts(world), "records": [], "links": []}

    def say(text, end="\n"):
        if rank == 0:
            print(text, end=end, flush=True)

    each = GPU_CASE_S if ON_GPUS else CASE_S
    say(f"{world} ranks, {len(to_do)} cases, about {each * len(to_do):.0f} s; longer if kernels are compiled and tuned first.")
    for impl, workload, size in to_do:
        record = {"impl": impl, **workload.record(), "ranks": size}
        say(f"[{time.perf_counter() - begun:.0f} s] {workload.label} {impl} on {size}: ", end="")
        if _of_rank_0(time.perf_counter() - begun > options.limit):
            record |= {"failure": "left out", "note": f"the run's limit of {options.limit} s had passed"}
        elif rank < size:
            try:
                found = measure(impl, workload, groups[size])
            except Exception as error:  # continue with the other cases
                found = _failure(error)
            record |= found
            if ON_GPUS:
                torch.cuda.empty_cache()
        record = _of_rank_0(record)
        run["records"].append(record)
        say(spoken(record))
    if ON_GPUS and world > 1:
        shape = options.heads, options.kv_heads, options.head_dim, options.dtype[0]
        run["links"] = [link(tokens, *shape, groups[world]) for tokens in options.tokens]
    failed = any(record.get("failure") in ("WRONG", "ERROR") and record["impl"] not in SDPA for record in run["records"])
    if rank == 0:
        if not ON_GPUS:
            print("No GPU is in use. The run has no times, because the interpreter's times mean nothing.")
        if options.json:
            write_json(options.json, run)
    _of_rank_0(None)
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
