"""Descriptors have the fields that Triton's own classes would give them."""

import dataclasses

import pytest
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from common.kernels.descriptors import describe
from common.kernels.hopper import describe_rows, describe_tile


def _fields(descriptor):
    values = {field.name: getattr(descriptor, field.name) for field in dataclasses.fields(descriptor)}
    return values | {"base": id(values["base"])}


@pytest.mark.parametrize("shape", [(2, 3, 50, 64), (1, 3, 40, 64), (2, 1, 1, 64)])
@pytest.mark.parametrize("heads_last", [False, True])
def test_fields_are_those_of_a_checked_descriptor(shape, heads_last):
    tensor = torch.empty(shape, dtype=torch.float16)
    if heads_last:
        tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
    rows = torch.empty(shape[2], 64)
    for _ in range(2):  # the second descriptor is not checked
        for got in (describe(tensor, 16, 32), describe_tile(tensor, 16), describe_rows(rows, 2)):
            layout = {"layout": got.layout} if isinstance(got, GluonDescriptor) else {}
            kind = GluonDescriptor if layout else TensorDescriptor
            assert type(got) is kind
            assert _fields(got) == _fields(kind(got.base, list(got.base.shape), got.strides, got.block_shape, **layout))
            steps = [stride for size, stride in zip(got.base.shape, got.base.stride(), strict=True) if size > 1]
            assert [stride for size, stride in zip(got.shape, got.strides, strict=True) if size > 1] == steps


@pytest.mark.parametrize("tensor", [torch.empty(1, 1, 4, 42)[..., :32], torch.empty(1, 1, 32, 32).mT])
def test_rows_that_tma_cannot_address_are_refused(tensor):
    with pytest.raises(AssertionError, match="call a stage through common.entry"):
        describe(tensor, 4, 32)
