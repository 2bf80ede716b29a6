"""Check a stage's results against attention in float64. The error bounds come from attention in plain PyTorch.

The rule holds for each head of each result: the error before the last rounding is at most `FACTORS` times the error of plain
PyTorch, plus the loss of float32 arithmetic. It holds for the largest error and for the RMS of the errors.

- *Each head*: one head with an attention sink has much larger gradients than the others, and would hide their errors.
- *Before the last rounding*: where a single key dominates, O is a row of V. Plain PyTorch returns this row exactly, and so must
  a stage.
- *Plain PyTorch* is v0's arithmetic, which rounds P, O and dS to 16 bits. FlashAttention, too, takes delta from a rounded O. So
  its gradients are inexact where dP - delta cancels, and the rule allows this.
- *8 bits*: a stage that computes in 8 bits has a rule of its own. Its error is at most `EIGHT_BIT_FACTORS` times the error of
  plain PyTorch that rounds Q, K, V and P to e4m3 (`plain_in_eight_bits`). The largest error varies more than the RMS, because P
  is rounded beside another maximum.
- *Nearby problems*: equal scores have equal rounding errors, and then plain PyTorch may be exact by chance. So its error is the
  largest of several runs, whose scales differ by a few percent (`NEARBY`) or whose dO has its columns in another order. These
  runs happen only if a result needs them.
"""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

FACTORS = {"out": 2, "lse": 2, "dq": 3, "dk": 3, "dv": 3}  # a stage's error may be this many times the error of plain PyTorch
EIGHT_BIT_FACTORS = {"rms": 1.25, "largest": 2}
EIGHT_BIT_KEYS = 128  # keys that share a scale of K and one of V
E4M3_MAX = 448

# A stage may always have this relative error, because a GPU's exp2 and log2 are accurate to 2**-22.
FLOAT32_LOSS = 2.0**-22

NEARBY = [1 + sign * percent / 100 for percent in range(1, 7) for sign in (1, -1)]

_SIZES = {  # of each head's errors in a tensor [B, H, ...]
    "largest": lambda x: x.abs().flatten(2).amax(-1),
    "rms": lambda x: x.square().flatten(2).mean(-1).sqrt(),
}

# Maximum bytes of a matrix such as S [heads, query rows, keys]. Memory holds several such matrices at the same time.
BLOCK_BYTES = 2**30


def _scores(q, k, causal, scale, first, diagonal):
    """Return the scores of some query rows, starting with row `first`."""
    s = (q @ k.mT).mul_(scale)  # [heads, rows, Sk]
    if causal:
        rows, keys = (torch.arange(size, device=s.device) for size in s.shape[1:])
        rows += first
        last = rows + (diagonal[rows] if isinstance(diagonal, Tensor) else diagonal)  # each row's last visible key
        s.masked_fill_(keys > last[:, None], float("-inf"))
    return s


def _rows(q, k, v, grad_out, grad_lse, *, first, causal, scale, diagonal, dtype):
    """Return the results of attention for some query rows and heads, before their last rounding.

    The function computes in the precision of the arguments, but rounds P, the O that delta is made from, and dS to `dtype`.
    """
    s = _scores(q, k, causal, scale, first, diagonal)
    p = s.softmax(-1)  # [heads, rows, Sk]
    narrow_p = p.to(dtype).to(p.dtype)
    out = narrow_p @ v
    results = {"out": out, "lse": s.logsumexp(-1)}
    if grad_out is not None:
        delta = (grad_out * out.to(dtype)).sum(-1, keepdim=True)  # = rowsum(P ∘ dP)
        delta = delta if grad_lse is None else delta - grad_lse[..., None]  # d lse / d s = P
        ds = (narrow_p * (grad_out @ v.mT - delta)).to(dtype).to(p.dtype)
        results |= {"dq": ds @ k * scale, "dk": ds.mT @ q * scale, "dv": narrow_p.mT @ grad_out}
    return results


def _row_magnitudes(q, k, v, grad_out, grad_lse, *, first, causal, scale, diagonal):
    """Return the results of `_rows`, but with each term of a sum replaced by its absolute value.

    The rounding errors in float32 are proportional to these magnitudes, even if the terms themselves cancel.
    """
    s = _scores(q, k, causal, scale, first, diagonal)
    p, lse = s.softmax(-1), s.logsumexp(-1, keepdim=True)
    del s
    if grad_out is not None:  # dP - delta, and the terms that this difference is made from
        out = p @ v
        of_lse = 0 if grad_lse is None else grad_lse[..., None]
        difference = (grad_out @ v.mT).sub_((grad_out * out).sum(-1, keepdim=True) - of_lse).abs_()
        terms = (abs(grad_out) @ abs(v).mT).add_((grad_out * out).abs_().sum(-1, keepdim=True) + abs(of_lse))
        del out
    q, k, v, size = abs(q), abs(k), abs(v), abs(scale)
    s = _scores(q, k, causal, size, first, diagonal).clamp_(min=0)  # from the absolute values of q and k
    magnitudes = {"lse": (p * s).sum(-1) + lse.squeeze(-1).abs()}
    loss = s.add_(1 + lse.abs()).mul_(p)  # the relative error of P = exp(S - LSE) is the absolute error of S - LSE
    magnitudes["out"] = loss @ v
    if grad_out is not None:
        ds = difference.mul_(loss).add_(p.mul_(terms))
        magnitudes |= {"dq": ds @ k * size, "dk": ds.mT @ q * size, "dv": loss.mT @ abs(grad_out)}
    return magnitudes


def _together(above, below):
    """Combine the results of two blocks of query rows: add their dK and their dV, and concatenate the other results."""
    return {
        name: result + below[name] if name in ("dk", "dv") else torch.cat((result, below[name]), 1)
        for name, result in above.items()
    }


def _each_head(function, precision, q, k, v, grad_out, grad_lse, **options):
    """Apply `function` to parts of the tensors that fit into memory: several heads, or some query rows of one head.

    Return tensors [B, H, …]. The gradients of k and v are [B, Hkv, …], summed over the query heads that share a K/V head.
    """
    batch, kv_heads = k.shape[:2]
    tensors = [None if t is None else t.detach().flatten(0, 1) for t in (q, k, v, grad_out, grad_lse)]
    shared = torch.arange(len(tensors[0]), device=q.device) // (q.shape[1] // kv_heads)  # the K/V head of each query head
    rows = max(1, BLOCK_BYTES // (k.shape[2] * precision.itemsize))
    heads = max(1, rows // max(q.shape[2], k.shape[3] + v.shape[3]))

    def of_heads(first_head):
        some = slice(first_head, first_head + heads)
        q, grad_out, grad_lse = (None if t is None else t[some].to(precision) for t in (tensors[0], *tensors[3:]))
        k, v = (t[shared[some]].to(precision) for t in tensors[1:3])

        def of_rows(first):
            q_rows, *gradients = (None if t is None else t[:, first:][:, :rows] for t in (q, grad_out, grad_lse))
            return function(q_rows, k, v, *gradients, first=first, **options)

        return functools.reduce(_together, map(of_rows, range(0, q.shape[1], rows)))

    results = [of_heads(first) for first in range(0, len(tensors[0]), heads)]
    whole = {name: torch.cat([result[name] for result in results]) for name in results[0]}
    for name in whole.keys() & {"dk", "dv"}:
        whole[name] = whole[name].unflatten(0, (batch * kv_heads, -1)).sum(1)
    return {name: result.unflatten(0, (batch, -1)) for name, result in whole.items()}


def truth(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, grad_out: Tensor | None = None, diagonal: int | Tensor = 0,
    grad_lse: Tensor | None = None,
) -> dict:  # fmt: skip
    """Compute attention in float64, on the inputs' device.

    Args:
        q: [B, H, Sq, D], any dtype, any strides.
        k: [B, Hkv, Sk, D]. H must be a multiple of Hkv.
        v: [B, Hkv, Sk, Dv].
        grad_out: [B, H, Sq, Dv], the gradient of the output. None leaves the gradients out.
        diagonal: if causal, query i sees the keys j <= i + diagonal. A tensor [Sq] gives each query a diagonal of its own.
        grad_lse: [B, H, Sq], the gradient of the LSE. It needs `grad_out`. None means zeros.

    Returns:
        A dict of float64 tensors: "out" [B, H, Sq, Dv] and "lse" [B, H, Sq]. With `grad_out`, it also has "dq", "dk" and "dv",
        shaped like q, k and v. The entry "magnitudes" is a dict with a tensor for each of these names, from `_row_magnitudes`.
    """
    options = {"causal": causal, "scale": scale, "diagonal": diagonal}
    results = _each_head(_rows, torch.float64, q, k, v, grad_out, grad_lse, **options, dtype=torch.float64)
    magnitudes = _each_head(_row_magnitudes, torch.float64, q, k, v, grad_out, grad_lse, **options)
    return results | {"magnitudes": magnitudes}


def plain(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, grad_out: Tensor | None = None, diagonal: int | Tensor = 0,
    grad_lse: Tensor | None = None,
) -> dict:  # fmt: skip
    """Compute attention in plain PyTorch, to find how large an error is normal.

    P, dS and the O that delta is made from are rounded to q's dtype. Everything else is in float32. The arguments and results
    are those of `truth`, without "magnitudes", and the results are float32: their last rounding is left out. The dict also has
    the attribute `nearby`, a function that yields the results of `truth` and `plain` for nearby problems.
    """

    def run(precision, dtype, scale, grad_out):
        options = {"causal": causal, "scale": scale, "diagonal": diagonal, "dtype": dtype}
        return _each_head(_rows, precision, q, k, v, grad_out, grad_lse, **options)

    def nearby():
        for turn, factor in enumerate(NEARBY, start=1):
            for columns in {0, 0 if grad_out is None else turn}:
                other = scale * factor, grad_out if columns == 0 else grad_out.roll(columns, -1)
                yield run(torch.float64, torch.float64, *other), run(torch.float32, q.dtype, *other)

    return _WithNearby(run(torch.float32, q.dtype, scale, grad_out), nearby)


def rounded_to_eight_bits(tensor: Tensor, rows: int) -> Tensor:
    """Round [B, H, S, D] to e4m3, and return the result in float32. `rows` rows share a scale: their largest element is 448."""
    blocks = torch.nn.functional.pad(tensor.float(), (0, 0, 0, -tensor.shape[2] % rows)).unflatten(2, (-1, rows))
    scale = (blocks.abs().amax((3, 4), keepdim=True) / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (e4m3(blocks / scale) * scale).flatten(2, 3)[:, :, : tensor.shape[2]]


def e4m3(x: Tensor) -> Tensor:
    """Round to e4m3, and return float32. Numbers beyond ±448 become ±448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def _rows_in_eight_bits(q, k, v, grad_out, grad_lse, *, first, causal, scale, diagonal):
    """Return O and LSE for some query rows, with P rounded to e4m3. A row's largest P becomes 2^8."""
    s = _scores(q, k, causal, scale, first, diagonal)
    lse = s.logsumexp(-1)
    p = s.sub_(s.amax(-1, keepdim=True)).exp_()
    return {"out": e4m3(p * 2**8) @ v / (p.sum(-1, keepdim=True) * 2**8), "lse": lse}


def plain_in_eight_bits(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, grad_out: None = None, diagonal: int | Tensor = 0,
) -> dict:  # fmt: skip
    """Compute attention in plain PyTorch with Q, K, V and P in e4m3, to find how large an error is normal in 8 bits.

    Each query has a scale, and so have each `EIGHT_BIT_KEYS` keys of K, and of V. All sums are in float32. The arguments and
    results are those of `plain`, without gradients: `grad_out` is not used.
    """
    q, k, v = (
        rounded_to_eight_bits(each, rows) for each, rows in zip((q, k, v), (1, EIGHT_BIT_KEYS, EIGHT_BIT_KEYS), strict=True)
    )
    options = {"causal": causal, "scale": scale, "diagonal": diagonal}
    return _each_head(_rows_in_eight_bits, torch.float32, q, k, v, None, None, **options)


class _WithNearby(dict):
    def __init__(self, entries: dict, nearby: Callable[[], Iterator]):
        super().__init__(entries)
        self.nearby = nearby


def error_bounds(truth: dict, plain: dict, factors: dict[str, float] = FACTORS) -> dict[str, dict[str, Tensor]]:
    """Return, for each result's name, the bounds [B, H] of each head's "largest" and "rms" error before the last rounding.

    A bound is `factors` times the error of `plain`, plus `FLOAT32_LOSS` times the magnitude from `truth`.

    Args:
        truth: the result of the function `truth`.
        factors: by the names of results, or by the kinds of errors.
        plain: the result of the function `plain` for the same inputs. If it has the attribute `nearby`, so have the bounds of
            each result: a function that yields further bounds, of which one may be larger.
    """
    losses = {name: {kind: FLOAT32_LOSS * size(truth["magnitudes"][name]) for kind, size in _SIZES.items()} for name in plain}

    def bounds(name, exact, yardstick):
        error = yardstick[name].double() - exact[name]
        return {kind: factors.get(kind, factors.get(name)) * size(error) + losses[name][kind] for kind, size in _SIZES.items()}

    found = {name: bounds(name, truth, plain) for name in plain}
    if (nearby := getattr(plain, "nearby", None)) is None:
        return found
    # Only the bounds are kept, because the results of all nearby problems may not fit into memory.
    others = functools.cache(lambda: [{name: bounds(name, *pair) for name in found} for pair in nearby()])
    return {name: _WithNearby(found[name], lambda name=name: (other[name] for other in others())) for name in found}


def error_before_rounding(got: Tensor, truth: Tensor) -> Tensor:
    """Return the least error that a number in float64 may have had before it was rounded to `got`; infinity for infinity."""
    above, below = (torch.nextafter(got, torch.full_like(got, way)).double() for way in (torch.inf, -torch.inf))
    got = got.double()  # the numbers from (below + got) / 2 to (got + above) / 2 are rounded to got
    error = torch.maximum((below + got) / 2 - truth, truth - (got + above) / 2).clamp(min=0)
    return torch.where(got.isfinite(), error, (got - truth).abs())


def assert_close(name: str, got: Tensor, truth: Tensor, bounds: dict[str, Tensor], slack: float = 1):
    """Assert that the errors of `got` are within `bounds`, which come from `error_bounds`.

    Args:
        got, truth: [B, H, ...].
        slack: the bounds are multiplied by this number.

    Raises:
        AssertionError: the shape differs, an error exceeds its bound, or an element is NaN or infinite.
    """
    __tracebackhide__ = True  # pytest shows the caller's line and the message
    assert got.shape == truth.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(truth.shape)}"
    error = error_before_rounding(got, truth)
    errors = torch.stack([size(error) for size in _SIZES.values()])  # [2, B, H]

    def stacked(bounds):  # an infinite error fails even if plain PyTorch overflows too
        allowed = slack * torch.stack([bounds[kind] for kind in _SIZES])
        return allowed.clamp(max=torch.finfo(allowed.dtype).max)

    allowed = stacked(bounds)
    if (errors <= allowed).all():  # false for NaN; the CPU waits for the GPU only here
        return
    if hasattr(bounds, "nearby"):
        allowed = functools.reduce(torch.fmax, map(stacked, bounds.nearby()), allowed)
        if (errors <= allowed).all():
            return
    kind, *head = torch.unravel_index((errors / allowed).nan_to_num(torch.inf).argmax(), errors.shape)
    of_head = error[tuple(head)]
    element = torch.unravel_index(of_head.argmax(), of_head.shape)  # argmax treats NaN as the largest
    worst = tuple(index.item() for index in (*head, *element))
    size, bound = (of_heads[kind, *head] for of_heads in (errors, allowed))
    raise AssertionError(
        f"{name}: {list(_SIZES)[kind]} error {size:.3g} of a head exceeds {bound:.3g}, the bound from plain PyTorch's error;"
        f" worst at {worst}: got {got[worst]:.8g}, truth {truth[worst]:.8g}"
    )


def assert_correct(got: dict, truth: dict, plain: dict, factors: dict[str, float] = FACTORS):
    """Call `assert_close` for each result in `got` ("out", "lse", "dq", "dk", "dv").

    `truth` and `plain` are the results of the functions `truth` and `plain` for the inputs of `got`; or of
    `plain_in_eight_bits`, with `EIGHT_BIT_FACTORS`.
    """
    bounds = error_bounds(truth, plain, factors)
    for name, result in got.items():
        assert_close(name, result, truth[name], bounds[name])
