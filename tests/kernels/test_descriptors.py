"""A tensor is copied only if a descriptor cannot address it."""

import pytest
import torch

from common.kernels.descriptors import addressable

TENSOR = torch.randn(2, 3, 40, 16)
PADDED = torch.randn(2, 3, 40, 48)
VIEWS = {
    "contiguous": TENSOR,
    "heads inside": TENSOR.transpose(1, 2),
    "columns of longer rows": PADDED[..., 16:32],
    "every other row": PADDED[:, :, ::2],
    "expanded heads": TENSOR[:, :1].expand(2, 5, 40, 16),
    "one row at any stride": torch.randn(43).as_strided((1, 1, 1, 16), (5, 7, 3, 1)),
    "half precision": torch.randn(2, 3, 40, 64).half()[..., 8:24],
}
OTHERS = {
    "address": PADDED[..., 1:17],
    "stride": PADDED[..., :42].contiguous()[..., :16],
    "columns": TENSOR.mT,
    "one number": TENSOR[0, 0, 0, 0].expand(2, 3, 40, 16),
    "half precision": torch.randn(2, 3, 40, 64).half()[..., 4:20],
}


@pytest.mark.parametrize("tensor", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_that_needs_no_copy_is_not_copied(tensor):
    assert addressable(tensor) is tensor


@pytest.mark.parametrize("tensor", OTHERS.values(), ids=OTHERS.keys())
def test_others_are_copied(tensor):
    copy = addressable(tensor)
    assert copy.is_contiguous() and copy.data_ptr() % 16 == 0 and torch.equal(copy, tensor)
