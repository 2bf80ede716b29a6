"""The float64 results and the error bounds are right. Most other tests check results with them."""

import itertools
import math

import pytest
import torch
from cases import TILED, make_inputs
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from common.measure import reference
from common.measure.counter import count
from common.measure.inputs import Scores, Sink, draw
from common.measure.reference import assert_close, assert_correct, error_bounds, plain, truth
from common.operator import DTYPES
from common.runtime import DEVICE, INTERPRETED

SCALE = 0.2
NAMES = ("out", "lse", "dq", "dk", "dv")


# Arguments of `make_inputs`. One, two and three query heads share a K/V head. Dv is equal to D, larger, and smaller.
SIZES = [{}, {"heads": 4, "kv_heads": 2, "value_dim": 64}, {"kv_heads": 1, "value_dim": 16}]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("causal", [False, True])
def test_truth_is_what_pytorch_computes_in_float64(causal, sizes):
    """`truth` returns PyTorch's results in float64. For float32 inputs, `plain` nearly returns these results."""
    q, k, v, grad_out = make_inputs(*TILED, dtype=torch.float32, **sizes)
    got, yardstick = (make(q, k, v, causal, SCALE, grad_out) for make in (truth, plain))
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    out = scaled_dot_product_attention(*leaves, is_causal=causal, scale=SCALE, enable_gqa=True)
    gradients = torch.autograd.grad(out, leaves, grad_out.double())
    for name, expected in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        torch.testing.assert_close(got[name], expected)
        torch.testing.assert_close(yardstick[name], expected.float(), rtol=1e-4, atol=1e-5)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.double() @ k.double().mT * SCALE
    if causal:
        scores += torch.full_like(scores, float("-inf")).triu(1)
    torch.testing.assert_close(got["lse"], scores.logsumexp(-1))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("causal", [False, True])
def test_gradient_through_the_lse(causal, sizes):
    """The gradients through O and through the LSE equal autograd's."""
    q, k, v, grad_out = make_inputs(*TILED, dtype=torch.float32, **sizes)
    grad_lse = torch.randn(q.shape[:3], device=DEVICE)
    got, yardstick = (make(q, k, v, causal, SCALE, grad_out, grad_lse=grad_lse) for make in (truth, plain))
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    keys, values = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in leaves[1:])
    scores = leaves[0] @ keys.mT * SCALE
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
    results = scores.softmax(-1) @ values, scores.logsumexp(-1)
    gradients = torch.autograd.grad(results, leaves, (grad_out.double(), grad_lse.double()))
    for name, expected in zip(("dq", "dk", "dv"), gradients, strict=True):
        torch.testing.assert_close(got[name], expected)
        torch.testing.assert_close(yardstick[name], expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [7, 130])  # rows of a block: 7 of a head's 40 query rows, or two heads
@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[2]])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_query_rows_give_the_results_of_all_rows_at_once(causal, sizes, rows, monkeypatch):
    """Blocks may split a query group: one block holds two of the three heads that share K and V, the next block the third."""
    q, k, v, grad_out = make_inputs(*TILED, **sizes)
    gradients = {"grad_out": grad_out, "grad_lse": torch.randn(q.shape[:3], device=DEVICE)}
    whole = [make(q, k, v, causal, SCALE, **gradients) for make in (truth, plain)]
    monkeypatch.setattr(reference, "BLOCK_BYTES", 8 * 100 * rows)
    blocks = [make(q, k, v, causal, SCALE, **gradients) for make in (truth, plain)]
    for name, magnitude in whole[0]["magnitudes"].items():
        torch.testing.assert_close(blocks[0]["magnitudes"][name], magnitude, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(blocks[0][name], whole[0][name], rtol=1e-13, atol=1e-13)
        errors = [(yardstick[name].double() - exact[name]).square().mean().sqrt() for exact, yardstick in (whole, blocks)]
        if name == "lse":  # for blocks, a GPU adds in another order, so the errors may differ
            assert max(errors) < torch.finfo(torch.float32).eps * whole[0][name].square().mean().sqrt()
        else:
            torch.testing.assert_close(*errors, rtol=0.01, atol=0)  # most errors come from rounding to float16


@pytest.mark.skipif(not INTERPRETED, reason="what is allocated on the CPU is counted")
def test_memory_is_bounded_whatever_the_length(monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_BYTES", 2**16)
    for length in (256, 1024):
        q, k, v, grad_out = make_inputs(length, length, head_dim=16, batch=1, heads=1)
        results = 21 * 8 * length * 16  # bytes of the results, their magnitudes and copies
        for make in (truth, plain):
            peak = count(lambda make=make, q=q, k=k, v=v, g=grad_out: make(q, k, v, True, SCALE, g)).peak
            assert peak < 8 * 2**16 + results  # for 1024 rows, all scores in float64 would take 8 MiB


@pytest.fixture(params=DTYPES)
def results(request):
    """Return the results of `truth` and `plain` for a problem."""
    q, k, v, grad_out = make_inputs(*TILED, dtype=request.param)
    return truth(q, k, v, True, SCALE, grad_out), plain(q, k, v, True, SCALE, grad_out)


@pytest.mark.parametrize("name", NAMES)
def test_bound_has_room_for_rounding_only(results, name):
    """The rounded truth passes. Results that are 3 % too large fail, and results with one wrong element fail."""
    exact, yardstick = results
    rounded = exact[name].float()
    assert_correct({name: rounded}, exact, yardstick)
    one_wrong = rounded.clone()
    one_wrong[-1, -1, -1] += 0.1
    for wrong in (rounded * 1.03, one_wrong):
        with pytest.raises(AssertionError, match=f"{name}: .* worst at"):
            assert_correct({name: wrong}, exact, yardstick)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_one_element_that_is_not_finite_fails(results, name, bad):
    """NaN fails. A check that raises if `error > bound` would accept NaN, because a comparison with NaN is False."""
    exact, yardstick = results
    broken = yardstick[name].clone()
    broken[1, 2, 3] = bad
    with pytest.raises(AssertionError, match=r"worst at \(1, 2, 3"):
        assert_correct({name: broken}, exact, yardstick)


@pytest.mark.parametrize("name", NAMES)
def test_tensorfloat32_fails_the_bound_of_float32(name):
    """Matmuls in TF32, with ten bits of mantissa, exceed the bounds for float32. `tl.dot` uses TF32 by default."""
    q, k, v, grad_out = make_inputs(*TILED, dtype=torch.float32)
    coarse = [(tensor.view(torch.int32) + (1 << 12) & -(1 << 13)).view(torch.float32) for tensor in (q, k, v, grad_out)]
    got = plain(*coarse[:3], True, SCALE, coarse[3])[name]
    with pytest.raises(AssertionError, match=name):
        assert_correct({name: got}, truth(q, k, v, True, SCALE, grad_out), plain(q, k, v, True, SCALE, grad_out))


def test_the_diagonal_agrees_with_pytorch_s_lower_right():
    q, k, v, _ = make_inputs(5, 9, 16, torch.float32)
    expected = scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=causal_lower_right(5, 9), scale=0.3)
    torch.testing.assert_close(truth(q, k, v, True, 0.3, diagonal=4)["out"], expected)


# --- the error bounds, for numbers that a reader can check by hand


FACTORS = {"out": 2, "lse": 2, "dq": 3, "dk": 3, "dv": 3}
HALF_ULPS = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-24}  # half a unit in the last place of 1
ANY = math.inf


def of_one_head(values, dtype=torch.float64):
    return torch.tensor([[values]], dtype=dtype)  # [1, 1, ...]


def invented(results, magnitudes):
    return {name: of_one_head(values) for name, values in results.items()} | {
        "magnitudes": {name: of_one_head(values) for name, values in magnitudes.items()}
    }


def passes(name, got, exact, bounds):
    try:
        assert_close(name, got, exact, bounds)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_bounds_are_a_multiple_of_plain_pytorch_s_error_and_the_loss_of_float32(name):
    """Errors are computed in float64. In float16, the dtype of the results here, the error 1 + 2**-20 would round to 1."""
    exact = invented({name: [3.0, -4.0 + 2**-20]}, {name: [6 * 2.0**22, -8 * 2.0**22]})
    bounds = error_bounds(exact, {name: of_one_head([3.5, -5.0], torch.float16)})[name]
    error = 1 + 2**-20  # the second element has the larger error, and it is negative
    assert bounds["largest"].item() == pytest.approx(FACTORS[name] * error + 8, rel=1e-12)
    assert bounds["rms"].item() == pytest.approx(FACTORS[name] * math.sqrt((0.25 + error**2) / 2) + math.sqrt(50), rel=1e-12)


def bounds_of(kind, bound):
    """Return bounds of one head: `bound` for this kind of error, and no limit for the other kind."""
    return {each: torch.tensor([[bound if each == kind else ANY]], dtype=torch.float64) for each in ("largest", "rms")}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("kind", "bound"), [("largest", 3.0), ("rms", 1.5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_no_part_of_an_error(dtype, kind, bound, sign):
    """The second of four elements should be 8, and one unit in its last place is 16 half units of 1.

    Numbers up to 2.5 units away are rounded to 2 units. So an element that is 2 units off had an error of at least 1.5 units.
    The RMS of this error and of three zeros is 0.75 units.
    """
    unit = 16 * HALF_ULPS[dtype]
    exact = of_one_head([-8.0, 8.0, 0.0, 1.0])
    for units, allowed in ((0, True), (3, True), (4, False)):  # errors before rounding: 0, 2.5 and 3.5 units
        got = of_one_head([-8.0, sign * (8 + units * unit), 0.0, 1.0], dtype)
        assert got[0, 0, 1].item() == sign * (8 + units * unit)  # no rounding on the way
        assert passes("out", got, exact * torch.tensor([1, sign, 1, 1]), bounds_of(kind, bound * unit)) == allowed
    with pytest.raises(AssertionError, match=rf"out: {kind} error .* worst at \(0, 0, 1\)"):
        assert_close("out", got, exact * torch.tensor([1, sign, 1, 1]), bounds_of(kind, bound * unit))


def test_numbers_that_round_to_the_result_have_no_error():
    """1 + 2**-9 is between the bfloat16 numbers 1 and 1 + 2**-7, and nearer to 1. Next to 1, the spacing below is half."""
    one = of_one_head([1.0], torch.bfloat16)
    for truth_, error in ((1 + 2**-9, 0), (1 + 2**-8, 0), (1 + 2**-7, 2**-8), (1 - 2**-9, 0), (1 - 2**-8, 2**-9)):
        assert reference.error_before_rounding(one, of_one_head([truth_])).item() == error


def test_each_head_has_bounds_of_its_own():
    """Plain PyTorch is off by 100 in the first head and by 1 in the second. The second head's error may not be 3."""
    exact = {"out": torch.zeros(1, 2, 4, dtype=torch.float64)}
    exact["magnitudes"] = {"out": exact["out"]}
    yardstick = {"out": torch.tensor([[[100.0] * 4, [1.0] * 4]])}
    assert_correct({"out": torch.tensor([[[150.0] * 4, [1.5] * 4]])}, exact, yardstick)
    with pytest.raises(AssertionError, match=r"worst at \(0, 1, 2\)"):
        assert_correct({"out": torch.tensor([[[150.0] * 4, [0.0, 0.0, 3.0, 0.0]]])}, exact, yardstick)


def test_nearby_scales_help_where_plain_pytorch_is_exact_by_chance():
    """Here P is 1/4 and 3/4, which is exact. At nearby scales, P is rounded. A wrong result fails all the same."""
    q = torch.ones(1, 1, 1, 16, device=DEVICE, dtype=torch.bfloat16)
    k = torch.tensor([[1.0], [2.0]], device=DEVICE, dtype=torch.bfloat16).expand(1, 1, 2, 16)
    v = torch.tensor([[1.0], [3.0]], device=DEVICE, dtype=torch.bfloat16).expand(1, 1, 2, 16)
    scale = math.log(3) / 16  # the second key has three times the first key's weight, and O is 2.5
    exact, yardstick = (make(q, k, v, False, scale) for make in (truth, plain))
    assert exact["out"].flatten()[0].item() == pytest.approx(2.5) and (yardstick["out"] - 2.5).abs().max() < 1e-6
    assert_correct({"out": torch.full_like(yardstick["out"], 2.5 * (1 + 2**-10))}, exact, yardstick)
    with pytest.raises(AssertionError):
        assert_correct({"out": torch.full_like(yardstick["out"], 2.5 * (1 + 2**-6))}, exact, yardstick)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_spoiled_element_of_one_head_fails(dtype, name):
    """One head has a sink, and one has none. Each element is spoiled by four bounds, beyond what rounding hides."""
    shape = (1, 2, 70, 16)
    q, k, v, grad_out = draw(shape, shape, shape, dtype, 0.25, Scores(sinks=(Sink(33, 18.0, head=0),)))
    exact, yardstick = (make(q, k, v, False, 0.25, grad_out) for make in (truth, plain))
    bounds = error_bounds(exact, yardstick)[name]
    right = exact[name].to(torch.float32 if name == "lse" else dtype)
    assert_close(name, right, exact[name], bounds)
    for head, row in itertools.product(range(2), (0, 33, 69)):
        element = (0, head, row) if name == "lse" else (0, head, row, 7)
        wrong = right.clone()
        wrong[element] += 4 * (bounds["largest"][0, head] + torch.finfo(right.dtype).eps * right[element].abs())
        with pytest.raises(AssertionError, match=rf"{name}: .* worst at \(0, {head}, {row}"):
            assert_close(name, wrong, exact[name], bounds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_never_pass(dtype, bad):
    """An infinity fails even if plain PyTorch overflows too."""
    got, exact = of_one_head([1.0, bad], dtype), of_one_head([1.0, 1.0])
    for bound in (1.0, math.inf, math.nan):
        bounds = {kind: of_one_head(bound) for kind in ("largest", "rms")}
        with pytest.raises(AssertionError, match=r"worst at \(0, 0, 1\)"):
            assert_close("out", got, exact, bounds)
    for kind in ("largest", "rms"):  # a bound of NaN refuses even a right result
        assert not passes("out", torch.ones_like(got), exact, bounds | {kind: of_one_head(0.0)})


@pytest.mark.parametrize("scale", [0.5, -0.5])
def test_magnitudes_are_sums_without_signs(scale):
    """One query has two keys that score 0, so each P is 1/2. With absolute values of q and k, the keys would score 1 and 2."""
    q, k, v = torch.tensor([[1.0, -1]]), torch.tensor([[1.0, 1], [-2, -2]]), torch.tensor([[-1.0], [3]])
    tensors = (tensor[None, None].to(DEVICE) for tensor in (q, k, v))
    found = truth(*tensors, False, scale, torch.full((1, 1, 1, 1), -2.0, device=DEVICE))["magnitudes"]
    log = math.log(2)
    first, second = (2 + log) / 2, (3 + log) / 2  # P · (1 + score + LSE), from absolute values
    # dP is 2 and -6, and delta is -2. So dP - delta is 4 and -4, made from 2 + 2 and 6 + 2.
    ds = first * 4 + (2 + 2) / 2, second * 4 + (6 + 2) / 2
    expected = {
        "lse": [(1 + 2) / 2 + log], "out": [first * 1 + second * 3], "dq": [(ds[0] + 2 * ds[1]) / 2] * 2,
        "dk": [ds[0] / 2] * 2 + [ds[1] / 2] * 2, "dv": [2 * first, 2 * second],
    }  # fmt: skip
    assert {name: magnitude.flatten().tolist() for name, magnitude in found.items()} == {
        name: pytest.approx(values, rel=1e-12) for name, values in expected.items()
    }


def test_yardstick_rounds_p_out_and_ds_and_nothing_else():
    """`plain` rounds P, the output for delta, and dS, and nothing else. Three queries see one, two and three keys that score 0.

    In bfloat16, 1/3 is 171/512. The three values of V add up to 3 + 3/256 + 2**-12. With P = 1/3, the third query's output
    would round to 1. With P = 171/512, it rounds to 1 + 1/128.
    """
    q, k = torch.tensor([[1.0, 0]] * 3), torch.tensor([[0.0, 1]] * 3)
    v, grad_out = torch.tensor([[3], [3 / 256], [2**-12]]), torch.tensor([[0.0], [-2], [3]])
    q, k, v, grad_out = (tensor[None, None].to(DEVICE, torch.bfloat16) for tensor in (q, k, v, grad_out))
    found = plain(q, k, v, True, 1.0, grad_out)
    assert found["out"].flatten()[2].item() == (3 + 3 / 256 + 2**-12) * 171 / 512  # 1.0059, which delta rounds to 1 + 1/128
    assert found["dv"].flatten()[0].item() == 3 * 171 / 512 - 1
    # The last query's dP - delta is 6 - 3/128, and about -3 + 1.5/128 and -3 - 2.25/128. P times it is rounded to dS.
    ds = [(torch.tensor(171 / 512 * (3 * value - 3 - 3 / 128)).bfloat16().item()) for value in (3, 3 / 256, 2**-12)]
    assert found["dq"][0, 0, 2].tolist() == [0, sum(ds)]
    assert found["lse"].dtype == torch.float32 and found["lse"].flatten()[2].item() == pytest.approx(math.log(3), rel=1e-6)
