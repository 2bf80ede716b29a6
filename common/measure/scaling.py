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
import dataclasses
import datetime
import functools
import itertools
import os
import statistics
import sys
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import stages
from common.entry import Unavailable
from common.measure import machine, reference
from common.measure.baselines import call_of
from common.measure.footprint import footprint
from common.measure.options import add_list, command, json_path, list_of, one_of, positive, single, write_json
from common.measure.timing import GpuTimer
from common.measure.workloads import DTYPES, Workload
from common.ring import Ring, ring_attention, shard, unshard
from common.runtime import DEVICE

ON_GPUS = DEVICE == "cuda"
# The backends of PyTorch's SDPA. On several GPUs, PyTorch's context parallelism calls them.
SDPA = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION} if ON_GPUS else {}
# Tokens per GPU, heads and head dimensions. Without GPUs, these are sizes that the interpreter runs in seconds.
TOKENS, HEADS, HEAD_DIMENSIONS = ("8192,32768", "16", "128") if ON_GPUS else ("16", "2", "16")
MILLION = 2**20  # number of tokens of the sequence with --million
PASSES = ("fwd", "fwd+bwd")

TIMEOUT = datetime.timedelta(minutes=4)  # a rank waits so long for another rank, which may compile and tune kernels meanwhile
CHECKED_ROWS = 8  # number of checked query rows in each chunk of the sequence


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


def bytes_sent_in(call: Callable) -> int:
    """Run `call` once, and return the bytes that this process sends to other ranks during the call."""
    sent, begin = [], dist.batch_isend_irecv

    def counting(operations):
        sent.extend(operation.tensor.nbytes for operation in operations if operation.op is dist.isend)
        return begin(operations)

    with mock.patch.object(dist, "batch_isend_irecv", counting):
        call()
    return sum(sent)


@contextlib.contextmanager
def attention_of(impl: str, group, causal: bool):
    """Enter a context, and yield a function `attend(q, k, v)` that computes this rank's part of the output.

    The arguments are this rank's parts of q, k and v, with the rows that `common.ring.shard` selects. PyTorch 2.11 to 2.13 have
    the interface of context parallelism that this function uses.
    """
    if impl not in SDPA:
        yield functools.partial(ring_attention, stages.load(impl), group=group, causal=causal)
        return
    size = dist.get_world_size(group)
    with contextlib.ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPA[impl]))
        if size > 1:
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.tensor.experimental import context_parallel
            from torch.distributed.tensor.experimental._attention import _cp_options

            _cp_options.enable_load_balance = causal  # with a causal mask, a rank gets the chunks that `shard` selects
            some = torch.zeros(2 * size if causal else size, device=DEVICE)  # context_parallel requires some tensor
            context = context_parallel(DeviceMesh.from_group(group, DEVICE), buffers=[some], buffer_seq_dims=[0])
            context.__enter__()
            stack.callback(context.__exit__, None, None, None)  # PyTorch 2.11 restores SDPA only if __exit__ gets no error
        # The context replaces the SDPA function in the module `F`, so each call must look the function up in `F`.
        yield lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, **({} if q.shape[1] == k.shape[1] else {"enable_gqa": True})
        )


def inputs(workload: Workload, group) -> tuple[torch.Tensor, ...]:
    """Return this rank's part of q, k, v and the output's gradient. Each rank draws its own."""
    torch.manual_seed(dist.get_rank(group))
    length = workload.seq_len // dist.get_world_size(group)
    return dataclasses.replace(workload, seq_len=length, kv_len=length).inputs()


def _plain(q, k, v, causal, scale, grad_out, diagonal, ranks: int) -> dict:
    """Return the results of `reference.plain`. With several ranks, dK and dV are sums of each rank's rounded terms.

    q and grad_out have equally many rows of each chunk of the sequence.
    """
    found = reference.plain(q, k, v, causal, scale, grad_out, diagonal)
    if ranks > 1 and grad_out is not None:
        places = torch.arange(len(diagonal), device=q.device)
        chunks, terms = places.chunk(2 * ranks), []
        for rank in range(ranks):
            rows = torch.cat([chunks[rank], chunks[-1 - rank]])
            of_rank = (diagonal + places)[rows] - places[: len(rows)]
            term = reference.plain(q[:, :, rows], k, v, causal, scale, grad_out[:, :, rows], of_rank)
            terms.append([term[name].to(k.dtype).float() for name in ("dk", "dv")])
        found["dk"], found["dv"] = map(sum, zip(*terms, strict=True))
    return found


def check(attend: Callable, workload: Workload, group):
    """Raise AssertionError on each rank unless O, dQ, dK and dV are within the bounds of `common.measure.reference`.

    A forward's check has only O. The check compares only the first K/V head and its query heads, and dK and dV of all keys.
    The sequence has two chunks for each rank. In each chunk, the check compares O and dQ of some query rows, including the
    first and the last row.
    The gradient of the output is 0 in all other rows, so dK and dV depend only on the compared rows. Results that are not
    compared must be finite.
    """
    w, rank, size = workload, dist.get_rank(group), dist.get_world_size(group)
    chunk, heads = w.seq_len // (2 * size), w.heads // w.kv_heads
    some = torch.linspace(0, chunk - 1, CHECKED_ROWS).long().unique()
    rows = (torch.arange(0, w.seq_len, chunk)[:, None] + some).flatten().to(DEVICE)
    *leaves, grad_out = inputs(w, group)
    sparse = torch.zeros_like(grad_out)
    of_rank = shard(torch.zeros(w.seq_len, device=DEVICE, dtype=torch.bool).index_fill(0, rows, True), 0, group)
    sparse[:, :heads, of_rank] = grad_out[:, :heads, of_rank]
    parts = dict(zip(("q", "k", "v", "grad_out"), (*leaves, sparse), strict=True))
    if w.pass_ == "fwd":
        parts["out"] = attend(*leaves)
    else:
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        parts["out"] = (out := attend(*leaves)).detach()
        parts |= zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, sparse), strict=True)
    wrong = [name for name, part in parts.items() if not part.isfinite().all()]
    verdict = f"NaN or infinity in {', '.join(wrong)} of rank {rank}" if wrong else None
    keys = parts.keys() & {"k", "v", "dk", "dv"}
    whole = {name: unshard(part[:, : 1 if name in keys else heads], 2, group) for name, part in parts.items()}
    whole |= {name: whole[name][:, :, rows] for name in whole.keys() - keys}
    q, k, v, grad_out = (whole.pop(name) for name in ("q", "k", "v", "grad_out"))
    if rank == 0 and not wrong:
        problem = q, k, v, w.causal, w.head_dim**-0.5, None if w.pass_ == "fwd" else grad_out
        diagonal = rows - torch.arange(len(rows), device=DEVICE)
        try:
            reference.assert_correct(whole, reference.truth(*problem, diagonal), _plain(*problem, diagonal, size))
        except AssertionError as error:
            verdict = str(error)
    every = [None] * size
    dist.all_gather_object(every, verdict, group=group)
    assert not any(every), "; ".join(filter(None, every))


class _Together(GpuTimer):
    """A timer for the GPUs of a group. They begin each round together. The slowest rank's time counts.

    All ranks get the same times, so all ranks run equally many rounds.
    """

    def __init__(self, group):
        self.group = group
        super().__init__()

    def clear_cache(self):
        super().clear_cache()
        dist.all_reduce(self._cache_filler[:1], group=self.group)  # the GPUs wait for each other

    def _rounds(self, *options):
        seconds, exposed = super()._rounds(*options)
        slowest = torch.tensor([*seconds, exposed], device=DEVICE, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, self.group)
        *seconds, exposed = slowest.tolist()
        return seconds, bool(exposed)


_timer = functools.cache(_Together)


def timed(call: Callable, group) -> dict:
    """Measure a call's time until the last rank is done. Return the median and interquartile range of the rounds, in ms."""
    seconds, hidden = _timer(group).measure(call)
    lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return {"ms": 1e3 * median, "iqr_ms": 1e3 * (upper - lower), "rounds": len(seconds), "launch_hidden": hidden}


def measure(impl: str, workload: Workload, group) -> dict:
    """Check a case. On GPUs, measure its time and memory. For a stage, count the bytes that this rank sends."""
    size = dist.get_world_size(group)
    with attention_of(impl, group, workload.causal) as attend:
        check(attend, workload, group)
        call, found = call_of(attend, workload, inputs(workload, group)), {}
        if impl not in SDPA:
            found |= {"sent_bytes": bytes_sent_in(call), "sent_formula": sent_bytes(workload, size, dist.get_rank(group))}
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


def link(workload: Workload, tokens: int, group) -> dict:
    """Measure how fast each rank sends a workload's K and V of some tokens to the next rank while the GPUs do nothing else."""
    shape, dtype = (1, workload.kv_heads, tokens, workload.head_dim), DTYPES[workload.dtype]
    blocks = [[torch.randn(shape, device=DEVICE, dtype=dtype) for _ in "kv"] for _ in range(2)]
    ring = Ring(group)

    def call():
        for work in ring.pass_on(*blocks):
            work.wait()

    size = sum(tensor.nbytes for tensor in blocks[0])
    found = timed(call, group)
    return {"tokens": tokens, "ranks": ring.size, "bytes": size, **found, "gbps": size / found["ms"] / 1e6}


def start_ranks(module: str, argv: list[str], gpus: int):
    """Replace this process by torchrun, which starts `python -m module` with the options `argv` once for each GPU."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={gpus}"]
    os.execv(sys.executable, [*run, "-m", module, *argv])


def parse_options(argv: list[str]) -> argparse.Namespace:
    """Parse the command line. Exit with status 2 on an invalid value."""
    parser = command("common.measure.scaling", __doc__)
    parser.add_argument("--gpus", type=single(positive), default=2, help="GPUs that share a sequence (default: %(default)s)")
    tokens_help = "even numbers of tokens per GPU (default: %(default)s)"
    parser.add_argument("--tokens", type=list_of(positive), default=TOKENS, metavar="LIST", help=tokens_help)
    parser.add_argument("--pass", type=list_of(one_of(PASSES)), default=",".join(PASSES), metavar="LIST", help="of %(default)s")
    for flag, default in (
        ("--stage", stages.version(stages.recommended())), ("--heads", HEADS), ("--kv-heads", None),
        ("--head-dim", HEAD_DIMENSIONS), ("--causal", "yes"), ("--dtype", "bfloat16"),
    ):  # fmt: skip
        add_list(parser, flag, default)
    parser.add_argument("--million", action="store_true", help=f"only stages, only on all GPUs, with {MILLION} tokens")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="also write the run to FILE")
    options = parser.parse_args(argv)
    options.gpus = int(os.environ.get("WORLD_SIZE", options.gpus))  # torchrun sets WORLD_SIZE
    options.tokens = [MILLION // options.gpus] if options.million else options.tokens
    if any(tokens % 2 for tokens in options.tokens):
        parser.error("argument --tokens: each entry must be an even number, because each GPU gets two chunks of the sequence")
    try:
        options.cases = cases(options)
    except ValueError as error:
        parser.error(f"argument --kv-heads: {error}")
    return options


def cases(options) -> list[tuple[str, Workload, int]]:
    """Return (implementation, workload, number of ranks) of each case, on 1, 2, 4, … and all ranks.

    Cases for weak scaling have equally many tokens per rank. Cases for strong scaling have equally long sequences.
    """
    world, impls = options.gpus, [*([] if options.million else SDPA), *options.stage]
    sizes = [world] if options.million else sorted({*(2**power for power in range(world.bit_length())), world})
    points = {}  # the distinct pairs (number of ranks, sequence length), in order
    for tokens, size in itertools.product(options.tokens, sizes):
        points |= {(size, size * tokens): None} | ({(size, world * tokens): None} if world * tokens % (2 * size) == 0 else {})
    names = "dtype", "causal", "heads", "kv_heads", "head_dim"
    shapes = itertools.product(*(getattr(options, name) for name in names), points, vars(options)["pass"], impls)
    return [
        (impl, Workload(pass_, batch=1, seq_len=seq_len, **dict(zip(names, shape, strict=True))), ranks)
        for *shape, (ranks, seq_len), pass_, impl in shapes
    ]


def main(argv: list[str]) -> int:
    """Run one rank. Return the exit status, which is 1 if a result was wrong or a stage failed."""
    options = parse_options(argv)
    if "WORLD_SIZE" not in os.environ:
        start_ranks("common.measure.scaling", argv, options.gpus)
    if ON_GPUS:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # NCCL's stream has a high priority, so that NCCL's CTAs start before the stage's waiting CTAs.
    os.environ["TORCH_NCCL_HIGH_PRIORITY"] = "1"
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPUS else "gloo", timeout=TIMEOUT)
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = {size: dist.new_group(list(range(size)), timeout=TIMEOUT) for size in range(1, world + 1)}
    run = {"machine_info": machine.facts(), "records": [], "links": []}
    for impl, workload, size in options.cases:
        case = [{}]
        if rank < size:
            try:
                case = [measure(impl, workload, groups[size])]
            except Exception as error:  # continue with the other cases
                case = [_failure(error)]
        dist.broadcast_object_list(case, src=0)  # only the CPUs of other ranks wait for rank 0, not the GPUs
        run["records"].append({"impl": impl, **workload.record(), "ranks": size, **case[0]})
        if rank == 0:
            print(f"{workload.label} {impl} on {size}:", *(f"{name}={value}" for name, value in case[0].items()), flush=True)
        if ON_GPUS:
            torch.cuda.empty_cache()
    if ON_GPUS:
        run["links"] = [link(workload, tokens, groups[world]) for tokens in options.tokens if world > 1]
        run["machine_info"]["gpus"] = f"{world} × {torch.cuda.get_device_name()}"
        run["machine_info"]["environment"] = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
        run["machine_info"]["nccl"] = "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    elif rank == 0:
        print("No GPU is in use. The run has no times, because the interpreter's times mean nothing.")
    if rank == 0 and options.json:
        write_json(options.json, run)
    dist.destroy_process_group()
    return int(any(r.get("failure") in ("WRONG", "ERROR") and r["impl"] not in SDPA for r in run["records"]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
