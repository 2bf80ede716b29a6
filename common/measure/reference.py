"""Check a stage's results against attention in float64. The error bounds come from attention in plain PyTorch."""

import functools

import torch
from torch import Tensor

FACTORS = {"out": 2, "lse": 2, "dq": 3, "dk": 3, "dv": 3}  # a stage's error may be this many times the error of plain PyTorch

# A stage may always have this relative error, because a GPU's exp2 and log2 are accurate to 2**-22.
FLOAT32_LOSS = 2.0**-22

_SIZES = {"largest": lambda x: x.abs().max(), "rms": lambda x: x.square().mean().sqrt()}

# Maximum bytes of a matrix such as S [heads, query rows, keys]. Memory holds several such matrices at the same time.
BLOCK_BYTES = 2**30


def _scores(q, k, causal, scale, first, diagonal):
    """Return the scores of some query rows, starting with row `first`."""
    s = q @ k.mT * scale  # [heads, rows, Sk]
    if causal:
        s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(first + diagonal), float("-inf"))
    return s


def _rows(q, k, v, grad_out, *, first, causal, scale, diagonal, dtype):
    """Return the results of attention for some query rows and heads.

    The function computes in the precision of the arguments, but rounds P, O and dS to `dtype`.
    """
    s = _scores(q, k, causal, scale, first, diagonal)
    p = s.softmax(-1)  # [heads, rows, Sk]
    narrow_p = p.to(dtype).to(p.dtype)
    out = (narrow_p @ v).to(dtype)
    results = {"out": out, "lse": s.logsumexp(-1)}
    if grad_out is not None:
        delta = (grad_out * out).sum(-1, keepdim=True)  # = rowsum(P ∘ dP)
        ds = (p * (grad_out @ v.mT - delta)).to(dtype).to(p.dtype)
        results |= {"dq": ds @ k * scale, "dk": ds.mT @ q * scale, "dv": narrow_p.mT @ grad_out}
    return results


def _row_magnitudes(q, k, v, grad_out, *, first, causal, scale, diagonal):
    """Return the results of `_rows`, but with each term of a sum replaced by its absolute value.

    The rounding errors in float32 are proportional to these magnitudes, even if the terms themselves cancel.
    """
    s = _scores(q, k, causal, scale, first, diagonal)
    lse = s.logsumexp(-1, keepdim=True)
    q, k, v, size = abs(q), abs(k), abs(v), abs(scale)
    p = s.softmax(-1)
    s = _scores(q, k, causal, size, first, diagonal)  # from the absolute values of q and k
    magnitudes = {"lse": s.amax(-1) + lse.squeeze(-1).abs()}
    p *= s.clamp_(min=0).add_(1 + lse.abs())  # the relative error of P = exp(S - LSE) is the absolute error of S - LSE
    del s
    magnitudes["out"] = out = p @ v
    if grad_out is not None:
        grad_out = abs(grad_out)
        ds = p * (grad_out @ v.mT + (grad_out * out).sum(-1, keepdim=True))
        magnitudes |= {"dq": ds @ k * size, "dk": ds.mT @ q * size, "dv": p.mT @ grad_out}
    return magnitudes


def _together(above, below):
    """Combine the results of two blocks of query rows: add their dK and their dV, and concatenate the other results."""
    return {
        name: result + below[name] if name in ("dk", "dv") else torch.cat((result, below[name]), 1)
        for name, result in above.items()
    }


def _each_head(function, precision, q, k, v, grad_out, **options):
    """Apply `function` to parts of the tensors that fit into memory: several heads, or some query rows of one head.

    Return tensors [B, H, …]. The gradients of k and v are [B, Hkv, …], summed over the query heads that share a K/V head.
    """
    batch, kv_heads = k.shape[:2]
    tensors = [None if t is None else t.detach().flatten(0, 1) for t in (q, k, v, grad_out)]
    shared = torch.arange(len(tensors[0]), device=q.device) // (q.shape[1] // kv_heads)  # the K/V head of each query head
    rows = max(1, BLOCK_BYTES // (k.shape[2] * precision.itemsize))
    heads = max(1, rows // max(q.shape[2], k.shape[3] + v.shape[3]))

    def of_heads(first_head):
        some = slice(first_head, first_head + heads)
        q, grad_out = (None if t is None else t[some].to(precision) for t in tensors[::3])
        k, v = (t[shared[some]].to(precision) for t in tensors[1:3])

        def of_rows(first):
            gradient = None if grad_out is None else grad_out[:, first:][:, :rows]
            return function(q[:, first:][:, :rows], k, v, gradient, first=first, **options)

        return functools.reduce(_together, map(of_rows, range(0, q.shape[1], rows)))

    results = [of_heads(first) for first in range(0, len(tensors[0]), heads)]
    whole = {name: torch.cat([result[name] for result in results]) for name in results[0]}
    for name in whole.keys() & {"dk", "dv"}:
        whole[name] = whole[name].unflatten(0, (batch * kv_heads, -1)).sum(1)
    return {name: result.unflatten(0, (batch, -1)) for name, result in whole.items()}


def truth(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, grad_out: Tensor | None = None, diagonal: int = 0
) -> dict:  # fmt: skip
    """Compute attention in float64, on the inputs' device.

    Args:
        q: [B, H, Sq, D], any dtype, any strides.
        k: [B, Hkv, Sk, D]. H must be a multiple of Hkv.
        v: [B, Hkv, Sk, Dv].
        grad_out: [B, H, Sq, Dv], the gradient of the output. None leaves the gradients out.
        diagonal: if causal, query i sees the keys j <= i + diagonal.

    Returns:
        A dict of float64 tensors: "out" [B, H, Sq, Dv] and "lse" [B, H, Sq]. With `grad_out`, it also has "dq", "dk" and "dv",
        shaped like q, k and v. The entry "magnitudes" is a dict with a tensor for each of these names, from `_row_magnitudes`.
    """
    options = {"causal": causal, "scale": scale, "diagonal": diagonal}
    results = _each_head(_rows, torch.float64, q, k, v, grad_out, **options, dtype=torch.float64)
    magnitudes = _each_head(_row_magnitudes, torch.float64, q, k, v, grad_out, **options)
    return results | {"magnitudes": magnitudes}


def plain(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, grad_out: Tensor | None = None, diagonal: int = 0
) -> dict:  # fmt: skip
    """Compute attention in plain PyTorch, to find how large an error is normal.

    Inputs, P, dS and results are in q's dtype, and everything else is in float32. The arguments and results are those of
    `truth`, without "magnitudes". "lse" is float32, and the other results have q's dtype.
    """
    options = {"causal": causal, "scale": scale, "diagonal": diagonal}
    results = _each_head(_rows, torch.float32, q, k, v, grad_out, **options, dtype=q.dtype)
    return {name: result if name == "lse" else result.to(q.dtype) for name, result in results.items()}


def error_bounds(truth: dict, plain: dict) -> dict[str, dict[str, Tensor]]:
    """Return, for each result's name, bounds of its "largest" and "rms" error. They exclude the result's last rounding.

    A bound is `FACTORS` times the error of `plain`, plus `FLOAT32_LOSS` times the magnitude from `truth`. The second term is
    needed because `plain` may be exact by chance.

    Args:
        truth: the result of the function `truth`.
        plain: the result of the function `plain` for the same inputs.
    """
    bounds = {}
    for name, yardstick in plain.items():
        plain_error, magnitude = yardstick.double() - truth[name], truth["magnitudes"][name]
        bounds[name] = {
            kind: FACTORS[name] * size(plain_error) + FLOAT32_LOSS * size(magnitude) for kind, size in _SIZES.items()
        }
    return bounds


def assert_close(name: str, got: Tensor, truth: Tensor, bounds: dict[str, Tensor]):
    """Assert that the errors of `got` are within `bounds`, which come from `error_bounds`.

    The last rounding of a result, to got's dtype, adds an error of up to half a unit in the last place. So each bound grows by
    this error.

    Raises:
        AssertionError: the shape differs, an error exceeds its bound, or an element is NaN or infinite.
    """
    assert got.shape == truth.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(truth.shape)}"
    error = (got.double() - truth).abs()
    half_ulp = torch.finfo(got.dtype).eps / 2
    errors = torch.stack([size(error) for size in _SIZES.values()])
    allowed = torch.stack([bounds[kind] + half_ulp * size(truth) for kind, size in _SIZES.items()])
    allowed = allowed.clamp(max=torch.finfo(allowed.dtype).max)  # an infinite error fails even if plain PyTorch overflows too
    if (errors <= allowed).all():  # false for NaN; the CPU waits for the GPU only here
        return
    worst = torch.unravel_index(error.argmax(), error.shape)  # argmax treats NaN as the largest
    worst = tuple(index.item() for index in worst)
    measured = zip(_SIZES, errors.tolist(), allowed.tolist(), strict=True)
    kind, size, bound = next(each for each in measured if not each[1] <= each[2])
    raise AssertionError(
        f"{name}: {kind} error {size:.3g} exceeds {bound:.3g}, the bound from plain PyTorch's error and from rounding;"
        f" worst at {worst}: got {got[worst]:.8g}, truth {truth[worst]:.8g}"
    )


def assert_correct(got: dict, truth: dict, plain: dict):
    """Call `assert_close` for each result in `got` ("out", "lse", "dq", "dk", "dv").

    `truth` and `plain` are the results of the functions `truth` and `plain` for the inputs of `got`.
    """
    bounds = error_bounds(truth, plain)
    for name, result in got.items():
        assert_close(name, result, truth[name], bounds[name])
