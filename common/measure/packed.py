"""Measure attention of packed sequences: the newest stage, libraries, and the same sequences padded.

    python -m common.measure.packed results/packed-h200.json   # on a Hopper GPU

Lengths are drawn as in a text corpus: log-normal, from 50 to 8192 tokens. The cases are in bfloat16, with 32 query heads.
"""

import functools
import itertools
import math
import random
import statistics
import sys
from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor

import stages
from common.measure import machine
from common.measure.baselines import BASELINES, refusal
from common.measure.options import command, list_of, one_of, require_hopper, write_json
from common.measure.progress import Progress
from common.measure.timing import GpuTimer, host_seconds
from common.runtime import DEVICE

SHORTEST, LONGEST = 50, 8192  # tokens of a sequence
MEDIAN, SPREAD = 800, 1.0  # of the lengths, and the standard deviation of their logarithms
TOKENS = (16384, 65536)
HEADS, KV_HEADS = 32, (8, 32)
HEAD_DIMS = (64, 128, 256)
MOST_PADDING = 16  # a padded batch is measured only up to this many times the tokens


def draw(tokens: int, seed: int) -> list[int]:
    """Return the lengths of sequences that have `tokens` tokens together. The last one gets what is left."""
    rng, lengths = random.Random(seed), []
    while left := tokens - sum(lengths):
        length = int(rng.lognormvariate(math.log(MEDIAN), SPREAD))
        lengths.append(min(max(length, SHORTEST), LONGEST, left))
    return lengths


def starts_of(lengths: list[int], device: str = DEVICE) -> Tensor:
    """Return `cu_seqlens`: where each sequence starts, and the end of the last one."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


class _Flash3(torch.autograd.Function):
    """FlashAttention-3 of packed sequences."""

    @staticmethod
    def forward(ctx, q, k, v, starts, longest, causal):
        ctx.options = {"is_causal": causal, "max_seqlen_q": longest, "max_seqlen_k": longest}
        ctx.options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, **ctx.options)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        dq, dk, dv, *_ = torch.ops.flash_attn_3.bwd(grad_out, *ctx.saved_tensors, **ctx.options)
        return dq, dk, dv, None, None, None


def _flash2(q, k, v, starts, longest, causal):
    """FlashAttention-2 of packed sequences, as PyTorch has it."""
    out, *_ = torch.ops.aten._flash_attention_forward(q, k, v, starts, starts, longest, longest, 0.0, causal, False)
    return out


def padded(tensor: Tensor, lengths: list[int]) -> Tensor:
    """Return packed sequences as a batch [B, H, longest, D], with zeros behind short ones."""
    parts = tensor.detach().transpose(0, 1).split(lengths, dim=1)
    return torch.nn.utils.rnn.pad_sequence([part.transpose(0, 1) for part in parts], batch_first=True).transpose(1, 2)


def calls(lengths: list[int], pass_: str, tensors: list[Tensor], grad_out: Tensor, causal: bool) -> dict[str, Callable]:
    """Return for each implementation, by name, a function that returns a call of the pass. It first runs the forward if the
    pass is the backward."""
    newest, starts, longest = stages.load("newest"), starts_of(lengths), max(lengths)
    found = {
        stages.newest(): (lambda q, k, v: newest.attention_varlen(q, k, v, starts, starts, causal=causal), tensors, grad_out)
    }
    if "flash-3" in BASELINES:
        found["flash-3"] = (lambda q, k, v: _Flash3.apply(q, k, v, starts, longest, causal), tensors, grad_out)
    found["flash-2"] = (lambda q, k, v: _flash2(q, k, v, starts, longest, causal), tensors, grad_out)
    if longest * len(lengths) <= MOST_PADDING * sum(lengths):
        batch = [padded(tensor, lengths).requires_grad_(pass_ == "bwd") for tensor in tensors]
        found["padded"] = (lambda q, k, v: newest.attention(q, k, v, causal=causal), batch, padded(grad_out, lengths))

    def call(attention, tensors, grad_out):
        if pass_ == "fwd":
            return lambda: attention(*tensors)
        out = attention(*tensors)
        return lambda: torch.autograd.grad(out, tensors, grad_out, retain_graph=True)

    return {name: functools.partial(call, *case) for name, case in found.items()}


def measure(lengths: list[int], pass_: str, head_dim: int, kv_heads: int, causal: bool, timer: GpuTimer) -> dict:
    """Return the record of a case: median µs on the GPU of each implementation, and of the newest stage on the host."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(sum(lengths), heads, head_dim) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    *tensors, grad_out = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes)
    tensors = [tensor.requires_grad_(pass_ == "bwd") for tensor in tensors]
    record = {"pass": pass_, "tokens": sum(lengths), "sequences": len(lengths), "longest": max(lengths), "heads": HEADS}
    record |= {"kv_heads": kv_heads, "head_dim": head_dim, "causal": causal, "dtype": "bfloat16", "us": {}}
    for name, prepare in calls(lengths, pass_, tensors, grad_out, causal).items():
        try:
            times, hidden = timer.measure(call := prepare())
        except Exception as error:
            if not refusal(name, error):
                raise
            continue
        if hidden:
            record["us"][name] = round(statistics.median(times) * 1e6, 1)
        if name == stages.newest():
            record["host_us"] = round(statistics.median(host_seconds(call, statistics.median(times))) * 1e6, 1)
    return record


def table(records: list[dict]) -> str:
    """Return a table of the cases: TFLOP/s are not shown, because they depend on the lengths."""
    names = list(dict.fromkeys(name for record in records for name in record["us"]))
    rows = []
    for record in records:
        mask = "causal" if record["causal"] else "full"
        shape = [record["pass"], record["tokens"], record["sequences"], record["kv_heads"], record["head_dim"], mask]
        ours = record["us"].get(names[0])
        times = [record["us"].get(name) for name in names]
        ratios = [f"{time / ours:.2f}" if time and ours else "-" for time in times[1:]]
        rows.append([*shape, ours, *ratios, record["host_us"]])
    headers = ["pass", "tokens", "sequences", "K/V heads", "D", "mask", f"{names[0]}, µs", *(f"× {name}" for name in names[1:])]
    return tabulate(rows, [*headers, "host µs"], disable_numparse=True)


def main(argv: list[str]):
    """Run the command line."""
    parser = command("common.measure.packed", __doc__, "the JSON file to write")
    parser.add_argument("--pass", dest="pass_", type=list_of(one_of(("fwd", "bwd"))), default="fwd,bwd", help="a list: fwd,bwd")
    parser.add_argument(
        "--head-dim",
        type=list_of(one_of(HEAD_DIMS)),
        default="64,128,256",
        metavar="LIST",
        help="head dimensions (default: all)",
    )
    options = parser.parse_args(argv)
    require_hopper("common.measure.packed")
    cases = list(itertools.product(options.pass_, TOKENS, KV_HEADS, options.head_dim, (True, False)))
    facts, timer, records = machine.facts(), GpuTimer(), []
    with Progress(len(cases)) as bar:
        for number, (pass_, tokens, kv_heads, head_dim, causal) in enumerate(cases, start=1):
            bar.begin(f"{number} of {len(cases)}, {pass_}, {tokens} tokens, D={head_dim}")
            records.append(measure(draw(tokens, number), pass_, head_dim, kv_heads, causal, timer))
            write_json(options.file, {"machine_info": facts, "records": records})
            bar.update(1)
    print(table(records))


if __name__ == "__main__":
    main(sys.argv[1:])
