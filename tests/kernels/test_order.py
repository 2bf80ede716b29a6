"""Programs take every tile once, in the right order."""

import pytest
import torch
import triton
import triton.language as tl

from common.kernels.order import l2_share, tile_and_head
from common.runtime import DEVICE

TILES, HEADS, SEQ, ROW_BYTES = 5, 7, 1000, 256


@triton.jit
def _record_kernel(taken_ptr, tiles, seq, ROW_BYTES: tl.constexpr, CAUSAL: tl.constexpr, L2_SHARE: tl.constexpr):
    tile, head = tile_and_head(tiles, seq, ROW_BYTES, CAUSAL, L2_SHARE)
    tl.store(taken_ptr + 2 * tl.program_id(0), tile)
    tl.store(taken_ptr + 2 * tl.program_id(0) + 1, head)


def taken(l2_share, causal):
    """Return (tile, head) of each program."""
    result = torch.empty(TILES * HEADS, 2, dtype=torch.int32, device=DEVICE)
    _record_kernel[TILES * HEADS,](result, TILES, SEQ, ROW_BYTES, causal, l2_share)
    return list(map(tuple, result.tolist()))


def test_full_attention_goes_through_head_after_head():
    assert taken(2**24, causal=False) == [(tile, head) for head in range(HEADS) for tile in range(TILES)]


@pytest.mark.parametrize("group", [1, 3, 7, 100])
def test_causal_attention_goes_through_a_group_of_heads_longest_tile_first(group):
    groups = [range(first, min(first + group, HEADS)) for first in range(0, HEADS, group)]
    expected = [(tile, head) for heads in groups for tile in range(TILES) for head in heads]
    assert taken(group * SEQ * ROW_BYTES, causal=True) == expected


@pytest.mark.filterwarnings("error")  # on the interpreter, numpy warns if a kernel divides by zero
def test_short_heads_do_not_make_groups_of_two_to_the_32_tiles():
    """A group has at most as many heads as the launch.

    Here 2**24 heads fit in the L2 cache. They would have 2**32 tiles, and int32 stores 2**32 as 0.
    """
    taken = torch.empty(256, 2, dtype=torch.int32, device=DEVICE)
    _record_kernel[256,](taken, 256, 1, 1, True, 2**24)
    assert taken.tolist() == [[tile, 0] for tile in range(256)]


def test_a_head_that_is_larger_than_the_share_goes_alone():
    assert taken(SEQ * ROW_BYTES - 1, causal=True) == taken(2**24, causal=False)


@pytest.mark.parametrize(("cache", "share"), [(40, 8), (50, 16), (60, 16), (126, 32)])  # MiB of an A100, H100, H200, B200
def test_a_group_takes_a_third_of_the_l2_cache_or_less(cache, share):
    assert l2_share(cache * 2**20) == share * 2**20
