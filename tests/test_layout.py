"""A tensor is copied only if kernels cannot address it well. The copy has the dimensions in the same order."""

import pytest
import torch

from common.layout import addressable, empty_rows

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
    "rows of 24 half-precision elements": torch.randn(2, 3, 40, 24).half()[..., :16],  # TMA could address these
    "heads inside": PADDED.transpose(1, 2)[..., 1:17],
    "expanded heads": PADDED[:, :1, :, 1:17].expand(2, 5, 40, 16),
}


@pytest.mark.parametrize("tensor", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_that_needs_no_copy_is_not_copied(tensor):
    assert addressable(tensor) is tensor


@pytest.mark.parametrize("tensor", OTHERS.values(), ids=OTHERS.keys())
def test_others_are_copied(tensor):
    copy = addressable(tensor)
    assert copy is not tensor and addressable(copy) is copy and torch.equal(copy, tensor)
    assert copy.stride() == empty_rows(tensor).stride() == empty_rows(copy).stride()
