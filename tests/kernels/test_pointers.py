"""Kernels address tensors by pointers. A tensor is copied first only if its rows cannot be loaded 16 bytes at a time."""

import pytest
import torch

from common.kernels.pointers import aligned

TENSOR = torch.randn(2, 3, 40, 16)
PADDED = torch.randn(2, 3, 40, 48)


@pytest.mark.parametrize("tensor", [TENSOR, TENSOR.transpose(1, 2), PADDED[..., 16:32], TENSOR[:, :1].expand(2, 5, 40, 16)])
def test_rows_that_load_16_bytes_at_a_time_are_not_copied(tensor):
    assert aligned(tensor) is tensor


@pytest.mark.parametrize(
    "tensor",
    [PADDED[..., 1:17], PADDED[..., :40].contiguous()[..., :16], TENSOR.mT, TENSOR[0, 0, 0, 0].expand(2, 3, 40, 16)],
    ids=["address", "stride", "columns", "one number"],
)
def test_other_rows_are_copied(tensor):
    copy = aligned(tensor)
    assert copy.is_contiguous() and copy.data_ptr() % 16 == 0 and torch.equal(copy, tensor)
