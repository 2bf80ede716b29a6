"""Merging attention over two sets of keys gives attention over both. `merge` and `add` round each result only once."""

import pytest
import torch
from cases import make_inputs

from common.kernels.merging import add, merge
from common.measure.reference import assert_correct, plain, truth
from common.operator import DTYPES
from common.runtime import DEVICE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("seq_q", "seq_k", "cut", "value_dim"), [(1, 2, 1, 16), (40, 100, 30, 32), (150, 40, 39, 256)])
def test_two_sets_of_keys(seq_q, seq_k, cut, value_dim, dtype):
    q, k, v, _ = make_inputs(seq_q, seq_k, dtype=dtype, kv_heads=1, value_dim=value_dim)
    parts = [truth(q, k[:, :, some], v[:, :, some], False, 1.0) for some in (slice(cut), slice(cut, None))]
    out, lse = parts[0]["out"].float(), parts[0]["lse"].float()
    merge(out, lse, parts[1]["out"].to(dtype), parts[1]["lse"].float())
    assert_correct({"out": out.to(dtype), "lse": lse}, *(make(q, k, v, False, 1.0) for make in (truth, plain)))


def test_merge_into_rows_of_a_larger_result_from_another_layout():
    out, more = torch.randn(2, 3, 20, 32, device=DEVICE), torch.randn(2, 10, 3, 32, device=DEVICE).transpose(1, 2)
    lse, more_lse = torch.randn(2, 3, 20, device=DEVICE), torch.randn(3, 2, 10, device=DEVICE).transpose(0, 1)
    before = out.clone(), lse.clone()
    merge(out[:, :, 10:], lse[:, :, 10:], more, more_lse)
    assert torch.equal(out[:, :, :10], before[0][:, :, :10]) and torch.equal(lse[:, :, :10], before[1][:, :, :10])
    weight = torch.sigmoid(before[1][:, :, 10:] - more_lse)[..., None]
    torch.testing.assert_close(out[:, :, 10:], weight * before[0][:, :, 10:] + (1 - weight) * more)
    torch.testing.assert_close(lse[:, :, 10:], torch.logaddexp(before[1][:, :, 10:], more_lse))


@pytest.mark.parametrize("into_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_takes_any_dtypes_and_rounds_once(dtype, into_dtype):
    """The result equals a float32 merge that is rounded once.

    The result may go to rows of a larger tensor, or replace `out`.
    """
    out, more = torch.randn(2, 2, 3, 20, 32, device=DEVICE).to(dtype)
    lse, more_lse = torch.randn(2, 2, 3, 20, device=DEVICE)
    expected, expected_lse = out.float().clone(), lse.clone()
    merge(expected, expected_lse, more, more_lse)
    whole = torch.full((2, 3, 30, 32), 7.0, dtype=into_dtype, device=DEVICE)
    new_lse = lse.clone()
    merge(out, new_lse, more, more_lse, whole[:, :, 10:])
    assert torch.equal(whole[:, :, 10:], expected.to(into_dtype)) and (whole[:, :, :10] == 7).all()
    assert torch.equal(new_lse, expected_lse)
    merge(out, lse, more, more_lse)
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("apart", [1e4, -1e4])
def test_log_sum_exps_that_are_far_apart(apart):
    out, more = torch.randn(2, 1, 1, 5, 16, device=DEVICE)
    lse = torch.randn(1, 1, 5, device=DEVICE)
    expected = (out if apart > 0 else more).clone(), torch.maximum(lse, lse - apart)
    more_lse = lse - apart
    merge(out, lse, more, more_lse)
    torch.testing.assert_close((out, lse), expected, rtol=0, atol=0)


@pytest.mark.parametrize("into_dtype", DTYPES)
@pytest.mark.parametrize(("dtype", "part_dtype"), [(torch.bfloat16,) * 2, (torch.float32, torch.float16), (torch.float32,) * 2])
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
