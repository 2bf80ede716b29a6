"""The float64 results and the error bounds are right. Most other tests check results with them."""

import math

import pytest
import torch
from cases import TILED, make_inputs
from torch.nn.functional import scaled_dot_product_attention

from common.checks import DTYPES
from common.measure import reference
from common.measure.reference import assert_close, assert_correct, error_bounds, plain, truth
from common.runtime import DEVICE

SCALE = 0.2
NAMES = ("out", "lse", "dq", "dk", "dv")


# Arguments of `make_inputs`. One, two and three query heads share a K/V head. Dv is equal to D, larger, and smaller.
SIZES = [{}, {"heads": 4, "kv_heads": 2, "value_dim": 64}, {"kv_heads": 1, "value_dim": 16}]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("through_lse", [False, True])
def test_truth_is_what_pytorch_computes_in_float64(causal, sizes, through_lse):
    """For float32 inputs, `plain` nearly returns these results too."""
    q, k, v, grad_out = make_inputs(*TILED, dtype=torch.float32, **sizes)
    grad_lse = torch.randn(q.shape[:3], device=DEVICE) if through_lse else None
    got, yardstick = (make(q, k, v, causal, SCALE, grad_out, grad_lse=grad_lse) for make in (truth, plain))
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    out = scaled_dot_product_attention(*leaves, is_causal=causal, scale=SCALE, enable_gqa=True)
    scores = leaves[0] @ leaves[1].repeat_interleave(q.shape[1] // k.shape[1], 1).mT * SCALE
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
    lse = scores.logsumexp(-1)
    gradients = torch.autograd.grad(
        (out, lse) if through_lse else out, leaves, (grad_out, grad_lse) if through_lse else grad_out
    )
    for name, expected in zip(NAMES, (out, lse, *gradients), strict=True):
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_bound_has_room_for_rounding_only(dtype):
    """The rounded truth passes. Results that are 3 % too large fail, and results with one wrong element fail.

    NaN fails. A check that raises if `error > bound` would accept NaN, because a comparison with NaN is False.
    """
    q, k, v, grad_out = make_inputs(*TILED, dtype=dtype)
    exact, yardstick = (make(q, k, v, True, SCALE, grad_out) for make in (truth, plain))
    bounds = error_bounds(exact, yardstick)
    for name in NAMES:
        rounded = exact[name].float()
        assert_close(name, rounded, exact[name], bounds[name])
        for added in (0.1, math.nan, math.inf):
            broken = rounded.clone()
            broken[1, 2, 3] += added
            with pytest.raises(AssertionError, match=rf"{name}: .* worst at \(1, 2, 3"):
                assert_close(name, broken, exact[name], bounds[name])
        with pytest.raises(AssertionError, match=f"{name}: .* worst at"):
            assert_close(name, 1.03 * rounded, exact[name], bounds[name])


def test_tensorfloat32_fails_the_bounds_of_float32():
    """Matmuls in TF32, with ten bits of mantissa, exceed the bounds for float32. `tl.dot` uses TF32 by default."""
    q, k, v, grad_out = make_inputs(*TILED, dtype=torch.float32)
    coarse = [(tensor.view(torch.int32) + (1 << 12) & -(1 << 13)).view(torch.float32) for tensor in (q, k, v, grad_out)]
    got, exact, yardstick = (
        make(*tensors[:3], True, SCALE, tensors[3])
        for make, tensors in ((plain, coarse), (truth, (q, k, v, grad_out)), (plain, (q, k, v, grad_out)))
    )
    for name in NAMES:
        with pytest.raises(AssertionError, match=name):
            assert_correct({name: got[name]}, exact, yardstick)


@pytest.mark.parametrize("each", [False, True], ids=["one", "one for each query"])
def test_the_diagonal_agrees_with_pytorch_s_lower_right(each, monkeypatch):
    from torch.nn.attention.bias import causal_lower_right  # loads the compiler of PyTorch, which takes a second

    diagonal = torch.full((5,), 4, device=DEVICE) if each else 4
    monkeypatch.setattr(reference, "BLOCK_BYTES", 8 * 9 * 2)  # two rows
    q, k, v, _ = make_inputs(5, 9, 16, torch.float32)
    expected = scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=causal_lower_right(5, 9), scale=0.3)
    torch.testing.assert_close(truth(q, k, v, True, 0.3, diagonal=diagonal)["out"], expected)


# --- the error bounds, for numbers that a reader can check by hand


FACTORS = {"out": 2, "lse": 2, "dq": 3, "dk": 3, "dv": 3}


def of_one_head(values, dtype=torch.float64):
    return torch.tensor([[values]], dtype=dtype)  # [1, 1, ...]


def invented(results, magnitudes):
    return {name: of_one_head(values) for name, values in results.items()} | {
        "magnitudes": {name: of_one_head(values) for name, values in magnitudes.items()}
    }


@pytest.mark.parametrize("name", NAMES)
def test_bounds_are_a_multiple_of_plain_pytorch_s_error_and_the_loss_of_float32(name):
    """Errors are computed in float64. In float16, the dtype of the results here, the error 1 + 2**-20 would round to 1."""
    exact = invented({name: [3.0, -4.0 + 2**-20]}, {name: [6 * 2.0**22, -8 * 2.0**22]})
    bounds = error_bounds(exact, {name: of_one_head([3.5, -5.0], torch.float16)})[name]
    error = 1 + 2**-20  # the second element has the larger error, and it is negative
    assert bounds["largest"].item() == pytest.approx(FACTORS[name] * error + 8, rel=1e-12)
    assert bounds["rms"].item() == pytest.approx(FACTORS[name] * math.sqrt((0.25 + error**2) / 2) + math.sqrt(50), rel=1e-12)


@pytest.mark.parametrize(("kind", "bound"), [("largest", 3.0), ("rms", 1.5)])
def test_each_kind_of_error_has_its_bound_and_leaves_rounding_out(kind, bound):
    """The second of four elements should be 8. A bfloat16 that is 4 units of the last place off had an error of 3.5 units.

    The RMS of this error and of three zeros is 1.75 units.
    """
    unit, exact = 2**-4, of_one_head([-8.0, 8.0, 0.0, 1.0])
    bounds = {each: of_one_head(bound * unit if each == kind else math.inf) for each in ("largest", "rms")}
    assert_close("out", of_one_head([-8.0, 8 + 3 * unit, 0.0, 1.0], torch.bfloat16), exact, bounds)
    with pytest.raises(AssertionError, match=rf"out: {kind} error .* worst at \(0, 0, 1\)"):
        assert_close("out", of_one_head([-8.0, 8 + 4 * unit, 0.0, 1.0], torch.bfloat16), exact, bounds)


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


@pytest.mark.parametrize("bound", [1.0, math.inf, math.nan])
def test_an_infinity_never_passes_and_a_bound_of_nan_refuses(bound):
    """An infinity fails even if plain PyTorch overflows too."""
    bounds = {kind: of_one_head(bound) for kind in ("largest", "rms")}
    for got in [1.0, math.inf], [1.0, 1.0 if math.isnan(bound) else math.nan]:
        with pytest.raises(AssertionError, match="worst at"):
            assert_close("out", of_one_head(got, torch.float16), of_one_head([1.0, 1.0]), bounds)


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
