"""Merging attention over two sets of keys gives attention over both. `merge` and `add` round each result only once."""

import pytest
import torch
from cases import make_inputs

from common.kernels.merging import add, merge
from common.measure.reference import assert_correct, plain, truth
from common.runtime import DEVICE

HALF, FULL = torch.float16, torch.float32


@pytest.mark.parametrize(("seq_q", "seq_k", "cut", "value_dim"), [(1, 2, 1, 16), (40, 100, 30, 32), (150, 40, 39, 256)])
def test_two_sets_of_keys(seq_q, seq_k, cut, value_dim):
    q, k, v, _ = make_inputs(seq_q, seq_k, dtype=HALF, kv_heads=1, value_dim=value_dim)
    parts = [truth(q, k[:, :, some], v[:, :, some], False, 1.0) for some in (slice(cut), slice(cut, None))]
    out, lse = parts[0]["out"].float(), parts[0]["lse"].float()
    merge(out, lse, parts[1]["out"].to(HALF), parts[1]["lse"].float())
    assert_correct({"out": out.to(HALF), "lse": lse}, *(make(q, k, v, False, 1.0) for make in (truth, plain)))


@pytest.mark.parametrize(("dtype", "into_dtype"), [(HALF, FULL), (FULL, torch.bfloat16), (FULL, FULL)])
def test_merge_into_rows_of_a_larger_result_rounds_once(dtype, into_dtype):
    """The second part has another layout. The other rows of the larger result stay, and `out` may be the result."""
    out, more = torch.randn(2, 3, 20, 32, device=DEVICE).to(dtype), torch.randn(2, 20, 3, 32, device=DEVICE).transpose(1, 2)
    lse, more_lse = torch.randn(2, 3, 30, device=DEVICE)[:, :, 10:], torch.randn(3, 2, 20, device=DEVICE).transpose(0, 1)
    weight, new_lse = torch.sigmoid(lse - more_lse)[..., None], torch.logaddexp(lse, more_lse)
    whole = torch.full((2, 3, 30, 32), 7.0, dtype=into_dtype, device=DEVICE)
    exact, of_exact = out.float().clone(), lse.clone()
    merge(exact, of_exact, more, more_lse)
    torch.testing.assert_close((exact, of_exact), (weight * out + (1 - weight) * more, new_lse))
    merge(out, lse, more, more_lse, whole[:, :, 10:])
    assert torch.equal(whole[:, :, 10:], exact.to(into_dtype)) and (whole[:, :, :10] == 7).all() and torch.equal(lse, of_exact)


@pytest.mark.parametrize("apart", [1e4, -1e4])
def test_log_sum_exps_that_are_far_apart(apart):
    out, more = torch.randn(2, 1, 1, 5, 16, device=DEVICE)
    lse = torch.randn(1, 1, 5, device=DEVICE)
    expected = (out if apart > 0 else more).clone(), torch.maximum(lse, lse - apart)
    more_lse = lse - apart
    merge(out, lse, more, more_lse)
    torch.testing.assert_close((out, lse), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "part_dtype", "into_dtype"), [(torch.bfloat16, torch.bfloat16, FULL), (FULL, HALF, HALF)])
@pytest.mark.parametrize(("rows", "first", "length"), [(1, 0, 1), (40, 0, 40), (300, 0, 170), (300, 130, 170)])
def test_a_sum_is_rounded_once(rows, first, length, dtype, part_dtype, into_dtype):
    """`add` rounds once, and keeps the rows outside the part.

    The result is some heads of a larger tensor. The part has another layout.
    """
    whole = torch.randn(2, 3, rows, 32, device=DEVICE).to(dtype)
    part = torch.randn(2, length, 3, 32, device=DEVICE).to(part_dtype).transpose(1, 2)
    expected = whole.float().clone()
    expected[:, :, first : first + length] += part.float()
    result = torch.full((2, 5, rows, 32), 7.0, dtype=into_dtype, device=DEVICE)
    add(whole, part, first, result[:, 1:4])
    assert torch.equal(result[:, 1:4], expected.to(into_dtype)) and (result[:, [0, 4]] == 7).all()
    add(whole, part, first, whole)
    assert torch.equal(whole, expected.to(dtype))
