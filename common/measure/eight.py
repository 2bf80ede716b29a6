"""Measure forwards in 8 bits: their time, their error beside that of 16 bits, and the bias of O where V has a mean.

    python -m common.measure.eight results/eight-matmuls-h200.json   # on a Hopper GPU, about a minute for each stage
    python -m common.measure.eight --stage eight2,eight1 two.json   # two stages, the last of the track first
    python -m common.measure.eight --inputs "wide scores,late sink" wide.json
    python -m common.measure.eight --computed                # the errors alone, computed in PyTorch, without a GPU

Inputs are bfloat16, and 8 query heads share a K/V head. An error is the RMS error over the RMS of O. If the package
nvidia-cudnn-frontend is installed, cuDNN's forward in 8 bits is measured, too. It takes tensors that are rounded already.
"""

import functools
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
from tabulate import tabulate
from torch import Tensor

import stages
from common.measure import machine
from common.measure.baselines import BASELINES, refusal
from common.measure.options import add_list, command, json_path, list_of, one_of, require_hopper, write_json
from common.measure.progress import Progress
from common.measure.reference import (
    E4M3_MAX,
    EIGHT_BIT_KEYS,
    e4m3,
    plain,
    plain_in_eight_bits,
    rounded_to_eight_bits,
    truth,
)
from common.measure.timing import GpuTimer
from common.measure.workloads import HIDDEN, TOKENS

try:
    import cudnn  # the package nvidia-cudnn-frontend
except ImportError:
    cudnn = None

CUDNN = "cudnn-e4m3"  # cuDNN's forward in 8 bits, among the implementations
LENGTHS, HEAD_DIMS, GROUP = (2048, 4096, 8192, 16384, 32768), (64, 128), 8
PRE_PASS = "pre-pass"  # its entry among the times: the kernel that rounds K and V
CHECKED = 128  # the last queries of a head, whose error is measured
PRODUCTS, BITS = 32, 13  # a tensor core adds so many products at a time, with so many bits below the largest addend's first


def cut_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply float32 matrices of 8-bit numbers, and add the products as Hopper's tensor cores seem to.

    They shift 32 products and the accumulator to the exponent of the largest of them, and cut off what then lies more than 13
    bits below its first bit. The two numbers were chosen so that one accumulator for all keys gives O about the bias that an
    early kernel had on an H200 (not in results/): -2.4, -10.1 and -18.5 % with 2048, 8192 and 16384 keys and V of mean 1.
    """
    total = a.new_zeros(a.shape[0], b.shape[1])
    for first in range(0, a.shape[1], PRODUCTS):
        products = a[:, first : first + PRODUCTS, None] * b[None, first : first + PRODUCTS]
        largest = torch.maximum(products.abs().amax(1), total.abs()).clamp(min=torch.finfo(torch.float32).tiny)
        unit = torch.exp2(largest.log2().floor() - BITS)
        total = ((products / unit[:, None]).trunc().sum(1) + (total / unit).trunc()) * unit
    return total


def biases(keys: int, queries: int = 32, head_dim: int = 128) -> dict[str, float]:
    """Return the mean relative error of O, for V of mean 1, by the way in which P V is added up."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, rows, head_dim) for rows in (queries, keys, keys))
    v += 1
    scale = head_dim**-0.5
    exact = truth(q, k, v, False, scale)["out"][0, 0]
    s = (q @ k.mT)[0, 0] * scale
    p = (s - s.amax(-1, keepdim=True)).exp() * 2**8
    v_scale = v.abs().max() / E4M3_MAX
    p8, v8 = e4m3(p), e4m3(v / v_scale)[0, 0]
    tiles = zip(p8.split(128, 1), v8.split(128), strict=True)
    found = {"one accumulator": cut_matmul(p8, v8), "one for each 128 keys": sum(itertools.starmap(cut_matmul, tiles))}
    found["float32 sums"] = p8 @ v8
    return {name: (out * v_scale / p.sum(-1, keepdim=True) / exact).mean().item() - 1 for name, out in found.items()}


def with_outliers(q, k, v):
    """Let four channels of K be 20 times as large, and one of Q."""
    k[..., [1, 5, 9, 33]] *= 20
    q[..., 7] *= 20


def with_shared_outliers(q, k, v):
    """Let a channel of Q be 20 times as large, and the same channel of K, and three others of K."""
    k[..., [1, 5, 9, 33]] *= 20
    q[..., 5] *= 20


def with_mean(q, k, v):
    """Let V have the mean 1."""
    v += 1


def with_drift(q, k, v):
    """Let V's mean go from -3 to 3, and its size from 1/8 to 8."""
    along = torch.linspace(-3, 3, v.shape[2], device=v.device)[:, None]
    v.copy_((v + along) * 2.0**along)


def with_sink(q, k, v):
    """Give the first key most of the attention."""
    q += 0.5
    k[:, :, 0] = 4.0


def with_late_sink(q, k, v):
    """Give a key in the middle most of the attention."""
    q += 0.5
    k[:, :, k.shape[2] // 2] = 4.0


def with_wide_scores(q, k, v):
    """Let the scores have a standard deviation of 4."""
    q *= 4


INPUTS = {
    "normal": lambda q, k, v: None, "outlier channels": with_outliers, "Q's outliers among K's": with_shared_outliers,
    "V of mean 1": with_mean, "V drifts": with_drift, "sink": with_sink, "late sink": with_late_sink,
    "wide scores": with_wide_scores,
}  # fmt: skip


def relative(found: Tensor, exact: Tensor) -> float:
    """Return the RMS error over the RMS of `exact`."""
    return ((found.double() - exact).square().mean() / exact.square().mean()).sqrt().item()


def half_from_bits(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return O as `plain_in_eight_bits` computes it, but with a row's largest P 448, and odd keys' P from a float's bits."""
    q, k, v = (
        rounded_to_eight_bits(each, rows) for each, rows in zip((q, k, v), (1, EIGHT_BIT_KEYS, EIGHT_BIT_KEYS), strict=True)
    )
    x = (q @ k.mT) * (scale * math.log2(math.e))
    x -= x.amax(-1, keepdim=True)
    p = x.exp2() * E4M3_MAX
    bits = ((x + 135.75) * 2**15).round().clamp(min=0).int() << 8  # 448 = 2^8 * 1.75 has the bits 8 + 127, and then 0.75
    p[..., 1::2] = bits.view(torch.float32)[..., 1::2]
    return e4m3(p) @ v / p.sum(-1, keepdim=True)


def rotated(x: Tensor) -> Tensor:
    """Multiply rows by a Hadamard matrix over the root of its size. Q Kᵀ stays the same if both are rotated."""
    matrix = torch.ones(1, 1)
    while len(matrix) < x.shape[-1]:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return x.float() @ matrix / len(matrix) ** 0.5


def computed() -> str:
    """Return tables of what PyTorch computes: the errors of 8 bits by kind of inputs, and the biases of sums."""
    rows = []
    for kind, change in INPUTS.items():
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, length, 128) for length in (CHECKED, 2048, 2048))
        change(q, k, v)
        q, k, v = (each.half() for each in (q, k, v))
        exact = truth(q, k, v, False, 128**-0.5)["out"]
        of8, of16 = (relative(make(q, k, v, False, 128**-0.5)["out"].half(), exact) for make in (plain_in_eight_bits, plain))
        others = [half_from_bits(q, k, v, 128**-0.5)]
        others.append(plain_in_eight_bits(rotated(q), rotated(k), v, False, 128**-0.5)["out"])
        rows.append([kind, f"{of8:.4f}", f"{of8 / of16:.0f}", *(f"{relative(out.half(), exact) / of8:.3f}" for out in others)])
    headers = ["inputs", "error in 8 bits", "× float16", "half of P from bits, × the error", "Q and K rotated, × the error"]
    errors = tabulate(rows, headers, disable_numparse=True)
    lengths = {keys: biases(keys) for keys in LENGTHS[:-1]}
    rows = [[keys, *(f"{100 * bias:.2f} %" for bias in of_keys.values())] for keys, of_keys in lengths.items()]
    return f"{errors}\n\n{tabulate(rows, ['keys', *lengths[LENGTHS[0]]], disable_numparse=True)}"


def eight_bit_stages() -> list[str]:
    """Return the stages that compute in 8 bits."""
    return [name for name in stages.names() if hasattr(stages.load(name), "eight_bits")]


def error_of(attention, q, k, v, causal: bool) -> tuple[float, float]:
    """Return the error of O, and the mean of O over the exact O minus 1, for the last queries of a K/V head."""
    rows = slice(-CHECKED, None)
    out = attention(q, k, v, causal=causal)[:1, :GROUP, rows]
    diagonal = max(0, q.shape[2] - CHECKED) if causal else 0
    exact = truth(q[:1, :GROUP, rows], k[:1, :1], v[:1, :1], causal, q.shape[3] ** -0.5, diagonal=diagonal)["out"]
    return relative(out, exact), (out.double().mean() / exact.mean() - 1).item()


def cudnn_calls(q: Tensor, k: Tensor, v: Tensor, causal: bool, largest_out: float) -> tuple[Callable, Callable]:
    """Return a function that runs cuDNN's forward in 8 bits, and a function that returns the O of its last run in float32.

    cuDNN takes e4m3, one factor for each tensor, and writes O in e4m3, too. Rounding is not part of the first function.
    """
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    kinds = cudnn.data_type
    graph = cudnn.pygraph(intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=handle)

    def declared(tensor: Tensor, kind):
        return graph.tensor(dim=list(tensor.shape), stride=list(tensor.stride()), data_type=kind)

    def factor(value: float):
        return torch.full((1, 1, 1, 1), value, dtype=torch.float32, device="cuda")

    largest = [each.abs().max().item() for each in (q, k, v)]
    rounded = [(each.float() * (E4M3_MAX / top)).to(torch.float8_e4m3fn) for each, top in zip((q, k, v), largest, strict=True)]
    out, amax_s, amax_o = torch.empty_like(rounded[0]), factor(0), factor(0)
    factors = [factor(top / E4M3_MAX) for top in largest]
    factors += [factor(1 / E4M3_MAX), factor(E4M3_MAX), factor(E4M3_MAX / largest_out)]  # P's two, then O's
    nodes = [declared(each, kinds.FP8_E4M3) for each in rounded] + [declared(each, kinds.FLOAT) for each in factors]
    results = graph.sdpa_fp8(*nodes, generate_stats=False, attn_scale=q.shape[3] ** -0.5, use_causal_mask=causal)
    buffers = dict(zip(nodes, (*rounded, *factors), strict=True))
    written = ((results[0], out, kinds.FP8_E4M3), (results[2], amax_s, kinds.FLOAT), (results[3], amax_o, kinds.FLOAT))
    for node, tensor, kind in written:
        node.set_output(True).set_dim(list(tensor.shape)).set_stride(list(tensor.stride())).set_data_type(kind)
        buffers[node] = tensor
    graph.build([cudnn.heur_mode.A])
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")
    return (
        functools.partial(graph.execute, buffers, workspace, handle=handle),
        lambda: out.float() * (largest_out / E4M3_MAX),
    )


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Return the O of cuDNN's forward in 8 bits."""
    largest_out = stages.load(stages.newest()).attention(q, k, v, causal=causal).abs().max().item()
    launch, result = cudnn_calls(q, k, v, causal, largest_out)
    launch()
    return result()


def measure(seq_len: int, head_dim: int, causal: bool, kind: str, timer: GpuTimer, names: Sequence[str]) -> dict:
    """Return the record of a case: median µs of each implementation and of the first stage's pre-pass, errors, and biases.

    `kind` is one of INPUTS. `names` are those of stages that compute in 8 bits.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    batch, heads = max(1, TOKENS // seq_len), HIDDEN // head_dim
    shapes = [(batch, number, seq_len, head_dim) for number in (heads, heads // GROUP, heads // GROUP)]
    q, k, v = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes)
    INPUTS[kind](q, k, v)
    functions = {name: stages.load(name).attention for name in (*names, stages.newest())}
    if "flash-3" in BASELINES:
        functions["flash-3"] = BASELINES["flash-3"]
    calls = {name: functools.partial(function, q, k, v, causal=causal) for name, function in functions.items()}
    known = stages.load(names[0]).forward.__globals__
    compared = list(names)
    if cudnn:
        functions[CUDNN] = cudnn_attention
        calls[CUDNN], _ = cudnn_calls(q, k, v, causal, calls[stages.newest()]().abs().max().item())
        compared.append(CUDNN)
    calls[PRE_PASS] = functools.partial(known["quantized"], k, v, known["TILES"][head_dim].keys)
    record = {"batch": batch, "seq_len": seq_len, "heads": heads, "kv_heads": heads // GROUP, "head_dim": head_dim}
    record |= {"inputs": kind, "causal": causal, "dtype": "bfloat16", "us": {}}
    for each, call in calls.items():
        try:
            times, hidden = timer.measure(call)
        except Exception as error:
            if not refusal(each, error):
                raise
            continue
        if hidden:
            record["us"][each] = round(statistics.median(times) * 1e6, 1)
    record["error"] = {name: error_of(functions[name], q, k, v, causal)[0] for name in compared}
    half = [each.half() for each in (q, k, v)]
    record["error_float16"], _ = error_of(functions[stages.newest()], *half, causal)
    record["bias"] = {name: error_of(functions[name], q, k, v + 1, causal)[1] for name in compared}
    return record


def table(records: list[dict]) -> str:
    """Return a table of the cases. Masked scores have no FLOPs."""
    names = list(records[0]["error"])
    name, *others = dict.fromkeys([*names, *(each for record in records for each in record["us"] if each != PRE_PASS)])
    rows = []
    for record in records:
        us = record["us"]
        pairs = record["batch"] * record["heads"] * record["seq_len"] ** 2 / (2 if record["causal"] else 1)
        ours = us.get(name)
        mask = "causal" if record["causal"] else "full"
        row = [record.get("inputs", "normal"), record["seq_len"], record["head_dim"], mask]
        row += [us.get(name, "-"), us.get(PRE_PASS, "-")]
        row.append(f"{4 * pairs * record['head_dim'] / ours / 1e6:.0f}" if ours else "-")
        row += [f"{us[each] / ours:.2f}" if ours and each in us else "-" for each in others]
        for each in names:
            error = record["error"][each]
            row += [f"{error:.4f}", f"{error / record['error_float16']:.0f}", f"{100 * record['bias'][each]:.2f} %"]
        rows.append(row)
    headers = ["inputs", "S", "D", "mask", f"{name}, µs", f"{PRE_PASS}, µs", "TFLOP/s", *(f"× {each}" for each in others)]
    headers += [header for each in names for header in (f"error, {each}", "× float16", "bias, V of mean 1")]
    return tabulate(rows, headers, disable_numparse=True)


def main(argv: list[str]):
    """Run the command line."""
    parser = command("common.measure.eight", __doc__)
    parser.add_argument("file", type=json_path, nargs="?", help="the JSON file to write")
    add_list(parser, "--stage", [name for name in eight_bit_stages() if not stages.is_dead_end(name)][-1])
    add_list(parser, "--seq-len", ",".join(map(str, LENGTHS)))
    dims = ",".join(map(str, HEAD_DIMS))
    parser.add_argument("--head-dim", type=list_of(one_of(HEAD_DIMS)), default=dims, metavar="LIST", help=f"default: {dims}")
    parser.add_argument(
        "--inputs", type=list_of(one_of(INPUTS.keys())), default="normal", metavar="LIST", help=", ".join(INPUTS)
    )
    parser.add_argument("--computed", action="store_true", help="print errors that PyTorch computes, and measure nothing")
    options = parser.parse_args(argv)
    if options.computed:
        return print(computed())
    if not options.file:
        parser.error("name the JSON file to write")
    if others := set(options.stage) - set(eight_bit_stages()):
        parser.error(f"{', '.join(sorted(others))}: not in 8 bits")
    require_hopper("common.measure.eight")
    cases = list(itertools.product(options.inputs, options.seq_len, options.head_dim, (False, True)))
    facts, timer, records = machine.facts(), GpuTimer(), []
    with Progress(len(cases)) as bar:
        for number, (kind, seq_len, head_dim, causal) in enumerate(cases, start=1):
            bar.begin(f"{number} of {len(cases)}, {kind}, {seq_len} tokens, D={head_dim}")
            records.append(measure(seq_len, head_dim, causal, kind, timer, options.stage))
            write_json(options.file, {"machine_info": facts, "records": records})
            bar.update(1)
    print(table(records))


if __name__ == "__main__":
    main(sys.argv[1:])
