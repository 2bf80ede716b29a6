"""The first kernel computes the softmax of rows of any length, and the glossary's page shows its lines."""

import re

import pytest
import torch

from common.runtime import DEVICE
from common.show import documents
from examples.first_kernel import softmax


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (5, 100), (2, 1000)])
def test_it_computes_the_softmax(shape):
    x = torch.randn(shape, device=DEVICE) * 10
    torch.testing.assert_close(softmax(x), x.softmax(1))


def test_it_is_explained_line_by_line():
    table = documents.first_kernel()
    assert table.count("\n| `") == 15 and "| `    row = tl.program_id(0)`" in table
    kernel = table.partition("`def softmax(")[0]
    assert not re.search(r"` *\| *\|$", kernel, re.MULTILINE), "each line of the kernel has an explanation"
