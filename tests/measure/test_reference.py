"""The float64 truth and the error bound that every other test rests on."""

import pytest
import torch
from cases import TILED, make_inputs
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from common.measure import reference
from common.measure.counter import count
from common.measure.reference import assert_correct, plain, truth
from common.operator import DTYPES
from common.runtime import INTERPRETED

SCALE = 0.2
NAMES = ("out", "lse", "dq", "dk", "dv")


# For `make_inputs`: each query head with K and V of its own; two that share them, and larger values; three, and smaller ones.
SIZES = [{}, {"heads": 4, "kv_heads": 2, "value_dim": 64}, {"kv_heads": 1, "value_dim": 16}]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("causal", [False, True])
def test_truth_is_what_pytorch_computes_in_float64(causal, sizes):
    """And so is the yardstick, of float32 inputs, but for their rounding."""
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


@pytest.mark.parametrize("rows", [7, 130])  # of the truth at a time, not 40 = 5 x 7 + 5; or two heads, of six
@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[2]])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_query_rows_make_what_all_rows_make_at_once(causal, sizes, rows, monkeypatch):
    """Two of the three heads that share K and V too, and the third with the first of the next three."""
    q, k, v, grad_out = make_inputs(*TILED, **sizes)
    whole = [make(q, k, v, causal, SCALE, grad_out) for make in (truth, plain)]
    monkeypatch.setattr(reference, "BLOCK_BYTES", 8 * 100 * rows)
    blocks = [make(q, k, v, causal, SCALE, grad_out) for make in (truth, plain)]
    for name, magnitude in whole[0]["magnitudes"].items():
        torch.testing.assert_close(blocks[0]["magnitudes"][name], magnitude, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(blocks[0][name], whole[0][name], rtol=1e-13, atol=1e-13)
        errors = [(yardstick[name].double() - exact[name]).square().mean().sqrt() for exact, yardstick in (whole, blocks)]
        if name == "lse":  # float32, and on a GPU summed in another order: what is left is a rounding, either way
            assert max(errors) < torch.finfo(torch.float32).eps * whole[0][name].square().mean().sqrt()
        else:
            torch.testing.assert_close(*errors, rtol=0.01, atol=0)  # the yardstick is no other: it rounds to float16 as before


@pytest.mark.skipif(not INTERPRETED, reason="what is allocated on the CPU is counted")
def test_memory_is_bounded_whatever_the_length(monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_BYTES", 2**16)
    for length in (256, 1024):
        q, k, v, grad_out = make_inputs(length, length, head_dim=16, batch=1, heads=1)
        results = 20 * 8 * length * 16  # bytes: of these there are so many, and copies
        for make in (truth, plain):
            peak = count(lambda make=make, q=q, k=k, v=v, g=grad_out: make(q, k, v, True, SCALE, g)).peak
            assert peak < 8 * 2**16 + results  # a matrix of all scores in float64 takes 8 MiB


@pytest.mark.skipif(not INTERPRETED, reason="what is allocated on the CPU is counted")
def test_memory_is_bounded_whatever_the_number_of_heads(monkeypatch):
    """Of which many fit where queries are few, but for their K and V."""
    monkeypatch.setattr(reference, "BLOCK_BYTES", 2**18)
    q, k, v, _ = make_inputs(1, 512, head_dim=32, batch=8, heads=8)  # K and V: 16 MiB in float64
    for make in (truth, plain):
        assert count(lambda make=make: make(q, k, v, False, SCALE)).peak < 8 * 2**18


@pytest.fixture(params=DTYPES)
def results(request):
    """Truth and yardstick of a problem."""
    q, k, v, grad_out = make_inputs(*TILED, dtype=request.param)
    return truth(q, k, v, True, SCALE, grad_out), plain(q, k, v, True, SCALE, grad_out)


@pytest.mark.parametrize("name", NAMES)
def test_bound_has_room_for_rounding_only(results, name):
    """The truth itself, rounded, passes; three percent too much of everything does not, nor does one wrong element."""
    exact, yardstick = results
    rounded = exact[name].to(yardstick[name].dtype)
    assert_correct({name: rounded}, exact, yardstick)
    one_wrong = rounded.clone()
    one_wrong[-1, -1, -1] += 0.1
    for wrong in (rounded * 1.03, one_wrong):
        with pytest.raises(AssertionError, match=f"{name}: .* worst at"):
            assert_correct({name: wrong}, exact, yardstick)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_one_element_that_is_not_finite_fails(results, name, bad):
    """err > bound is False for NaN: a check written that way lets it pass."""
    exact, yardstick = results
    broken = yardstick[name].clone()
    broken[1, 2, 3] = bad
    with pytest.raises(AssertionError, match=r"worst at \(1, 2, 3"):
        assert_correct({name: broken}, exact, yardstick)


def test_a_shape_that_broadcasts_fails(results):
    exact, yardstick = results
    with pytest.raises(AssertionError, match="shape"):
        assert_correct({"out": yardstick["out"][:, :, :1]}, exact, yardstick)


@pytest.mark.parametrize("name", NAMES)
def test_tensorfloat32_fails_the_bound_of_float32(name):
    """Ten bits of mantissa, which is what a GPU multiplies where input_precision is left at its default."""
    q, k, v, grad_out = make_inputs(*TILED, dtype=torch.float32)
    coarse = [(tensor.view(torch.int32) + (1 << 12) & -(1 << 13)).view(torch.float32) for tensor in (q, k, v, grad_out)]
    got = plain(*coarse[:3], True, SCALE, coarse[3])[name]
    with pytest.raises(AssertionError, match=name):
        assert_correct({name: got}, truth(q, k, v, True, SCALE, grad_out), plain(q, k, v, True, SCALE, grad_out))


def test_the_diagonal_is_where_pytorch_s_lower_right_has_it():
    q, k, v, _ = make_inputs(5, 9, 16, torch.float32)
    expected = scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=causal_lower_right(5, 9), scale=0.3)
    torch.testing.assert_close(truth(q, k, v, True, 0.3, diagonal=4)["out"], expected)
