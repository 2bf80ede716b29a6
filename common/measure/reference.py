"""What a stage is compared with: attention in float64, what plain PyTorch makes of it, and the bound between them."""

import torch
from torch import Tensor

FACTORS = {"out": 2, "lse": 2, "dq": 3, "dk": 3, "dv": 3}  # how far from plain PyTorch's error a stage may be

# What float32 loses where plain PyTorch happens to lose nothing: a GPU's exp2 and log2 are good to 2**-22.
FLOAT32_LOSS = 2.0**-22


def _scores(q, k, causal, scale):
    s = q @ k.mT * scale  # [Sq, Sk]
    if causal:
        s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(), float("-inf"))
    return s


def _head(q, k, v, grad_out, *, causal, scale, dtype):
    """Attention and gradients of one head, in the precision of the arguments; P, O and dS are rounded to `dtype`."""
    s = _scores(q, k, causal, scale)
    p = s.softmax(-1)  # [Sq, Sk]
    narrow_p = p.to(dtype).to(p.dtype)
    out = (narrow_p @ v).to(dtype)
    results = {"out": out, "lse": s.logsumexp(-1)}
    if grad_out is not None:
        delta = (grad_out * out).sum(-1, keepdim=True)  # = rowsum(P ∘ dP)
        ds = (p * (grad_out @ v.mT - delta)).to(dtype).to(p.dtype)
        results |= {"dq": ds @ k * scale, "dk": ds.mT @ q * scale, "dv": narrow_p.mT @ grad_out}
    return results


def _head_magnitudes(q, k, v, grad_out, *, causal, scale):
    """What _head sums, summed without signs: float32 rounds in proportion to these, however much of them cancels."""
    s = _scores(q, k, causal, scale)
    lse = s.logsumexp(-1, keepdim=True)
    q, k, v, size = abs(q), abs(k), abs(v), abs(scale)
    p = s.softmax(-1) * (1 + lse.abs())  # an exponent of size x has an error in proportion to x, and so has its power
    out = p @ v
    magnitudes = {"out": out, "lse": _scores(q, k, causal, size).amax(-1) + lse.squeeze(-1).abs()}
    if grad_out is not None:
        grad_out = abs(grad_out)
        ds = p * (grad_out @ v.mT + (grad_out * out).sum(-1, keepdim=True))
        magnitudes |= {"dq": ds @ k * size, "dk": ds.mT @ q * size, "dv": p.mT @ grad_out}
    return magnitudes


def _each_head(function, precision, q, k, v, grad_out, **options):
    """`function` of each head in turn, which bounds the memory; its results stacked to [B, H, …]."""
    tensors = [None if t is None else t.detach().flatten(0, 1) for t in (q, k, v, grad_out)]
    heads = range(q.shape[0] * q.shape[1])
    results = [function(*(None if t is None else t[head].to(precision) for t in tensors), **options) for head in heads]
    return {name: torch.stack([result[name] for result in results]).unflatten(0, q.shape[:2]) for name in results[0]}


def truth(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, grad_out: Tensor | None = None) -> dict:
    """Attention in float64, on the inputs' device.

    Args:
        q: [B, H, Sq, D]; k, v: [B, H, Sk, D]; any dtype, any strides.
        grad_out: [B, H, Sq, D], the gradient of the output; None leaves the gradients out.

    Returns:
        "out" [B, H, Sq, D], "lse" [B, H, Sq] and, given `grad_out`, "dq", "dk", "dv" shaped like q, k, v, all float64; and
        "magnitudes", a dict with, for each of these, the sums of absolute values that `assert_close` takes.
    """
    results = _each_head(_head, torch.float64, q, k, v, grad_out, causal=causal, scale=scale, dtype=torch.float64)
    magnitudes = _each_head(_head_magnitudes, torch.float64, q, k, v, grad_out, causal=causal, scale=scale)
    return results | {"magnitudes": magnitudes}


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, grad_out: Tensor | None = None) -> dict:
    """The yardstick: unfused PyTorch with inputs, P, dS and results in q's dtype and everything between in float32.

    It is stricter than matmuls that return float16, whose scores and dP are rounded too and overflow past 65504.
    Arguments and results as in `truth`; "lse" is float32, the others have q's dtype.
    """
    results = _each_head(_head, torch.float32, q, k, v, grad_out, causal=causal, scale=scale, dtype=q.dtype)
    return {name: result if name == "lse" else result.to(q.dtype) for name, result in results.items()}


def assert_close(name: str, got: Tensor, truth: Tensor, plain: Tensor, factor: float, magnitude: Tensor | None = None):
    """Assert that `got` is about as near to `truth` as `plain` is, in its largest and in its root-mean-square error.

    Each error may be `factor` times that of `plain`, plus the roundings that `plain` may have been spared by chance:
    half a unit in the last place of got's dtype of the result (the last rounding of anyone's result), and
    `FLOAT32_LOSS` of `magnitude`, the sum without signs (where the truth is a difference of equal numbers, such as the
    gradient of a softmax over one key, float32 leaves something of their size, not of the difference).

    Raises:
        AssertionError: a shape that differs, an error past its bound, or a NaN or infinity anywhere.
    """
    assert got.shape == truth.shape == plain.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(truth.shape)}"
    error = (got.double() - truth).abs()
    plain_error = (plain.double() - truth).abs()
    sums = torch.zeros_like(truth) if magnitude is None else magnitude
    worst = torch.unravel_index(error.argmax(), error.shape)  # argmax takes NaN for the largest
    worst = tuple(index.item() for index in worst)
    half_ulp = torch.finfo(got.dtype).eps / 2
    for kind, size in (("largest", lambda x: x.abs().max()), ("rms", lambda x: x.square().mean().sqrt())):
        bound = factor * size(plain_error) + half_ulp * size(truth) + FLOAT32_LOSS * size(sums)
        assert size(error) <= bound, (  # NaN fails: it is not <= anything
            f"{name}: {kind} error {size(error):.3g} > {bound:.3g}, {factor} x the {size(plain_error):.3g} of plain PyTorch"
            f" + rounding; worst at {worst}: got {got[worst]:.8g}, truth {truth[worst]:.8g}"
        )


def assert_correct(got: dict, truth: dict, plain: dict):
    """`assert_close` for each result in `got` ("out", "lse", "dq", "dk", "dv"), with the factor that it is allowed.

    `truth` and `plain` are what the functions of these names return for the same inputs.
    """
    for name, result in got.items():
        assert_close(name, result, truth[name], plain[name], FACTORS[name], truth["magnitudes"][name])
