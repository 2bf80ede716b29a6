"""Programs take every tile once, in the right order."""

import heapq
import itertools

import pytest
import torch
import triton
import triton.language as tl

from common.kernels.order import busiest, l2_budget, mean_keys, tile_and_head
from common.runtime import DEVICE

TILES, HEADS, SEQ, ROW_BYTES = 5, 7, 1000, 256


@triton.jit
def _record_kernel(taken_ptr, tiles, seq, ROW_BYTES: tl.constexpr, CAUSAL: tl.constexpr, BUDGET: tl.constexpr):
    tile, head = tile_and_head(tiles, seq, ROW_BYTES, CAUSAL, BUDGET)
    tl.store(taken_ptr + 2 * tl.program_id(0), tile)
    tl.store(taken_ptr + 2 * tl.program_id(0) + 1, head)


def taken(tiles, heads, *arguments):
    """Return (tile, head) of each program."""
    result = torch.empty(tiles * heads, 2, dtype=torch.int32, device=DEVICE)
    _record_kernel[tiles * heads,](result, tiles, *arguments)
    return list(map(tuple, result.tolist()))


@pytest.mark.filterwarnings("error")  # on the interpreter, numpy warns if a kernel divides by zero
@pytest.mark.parametrize(
    ("causal", "heads_in_share", "sizes"),
    [
        (False, 16, [1] * 7), (True, 0.99, [1] * 7), (True, 1, [1] * 7), (True, 2, [2, 2, 3]), (True, 3, [3, 4]),
        (True, 4, [7]), (True, 7, [7]), (True, 100, [7]),
    ],
)  # fmt: skip
def test_programs_go_through_a_group_of_heads_longest_tile_first(causal, heads_in_share, sizes):
    """Without a causal mask, and if a head is larger than the L2 cache's share, a group has one head. The last group has the
    heads that are left over, too."""
    heads = iter(range(HEADS))
    groups = [list(itertools.islice(heads, size)) for size in sizes]
    expected = [(tile, head) for group in groups for tile in range(TILES) for head in group]
    assert taken(TILES, HEADS, SEQ, ROW_BYTES, causal, int(heads_in_share * SEQ * ROW_BYTES)) == expected


@pytest.mark.filterwarnings("error")
def test_short_heads_do_not_make_groups_of_two_to_the_32_tiles():
    """A group has at most as many heads as the launch. 2**24 heads, which fit in the share here, would have 2**32 tiles."""
    assert taken(256, 1, 1, 1, True, 2**24) == [(tile, 0) for tile in range(256)]


def test_a_group_takes_a_third_of_the_l2_cache_or_less():
    budgets = {mib: l2_budget(mib * 2**20) // 2**20 for mib in (40, 50, 60, 126)}  # of an A100, H100, H200 and B200
    assert budgets == {40: 8, 50: 16, 60: 16, 126: 32}


@pytest.mark.parametrize("queries", [64, 128, 256])
@pytest.mark.parametrize(
    ("seq_q", "seq_k", "diagonal"),
    [
        (1024, 1024, 0), (2048, 4096, 2048), (9216, 2048, 0), (256, 3072, 2816), (256, 3072, 0), (8192, 4096, -4096),
        (2048, 512, -1536),
    ],
)  # fmt: skip
def test_mean_number_of_keys(seq_q, seq_k, diagonal, queries):
    ends = [min(start + queries, seq_q) + diagonal for start in range(0, seq_q, queries)]
    mean = sum(min(max(end, 0), seq_k) for end in ends) / len(ends)
    keys = min(seq_k, seq_q + diagonal)
    assert mean_keys(seq_q, keys, diagonal, queries) == pytest.approx(mean)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [1, 9, 17, 96, 300])
@pytest.mark.parametrize(("seq_q", "seq_k", "diagonal"), [(3456, 3456, 0), (700, 5000, 4300), (9000, 2000, 0), (100, 100, 0)])
def test_the_busiest_cta_of_a_simulation_takes_hardly_longer_than_predicted(seq_q, seq_k, diagonal, heads, causal):
    queries, keys, programs, tile, key_tile = 128, 64, 132, 2.0, 0.7
    ends = [min(end, seq_q) + diagonal if causal else seq_k for end in range(-(-seq_q // queries) * queries, 0, -queries)]
    lengths = [tile + key_tile * -(-min(end, seq_k) // keys) for end in ends for _ in range(heads)]
    free = [0.0] * programs
    for length in lengths:  # the longest first
        heapq.heapreplace(free, free[0] + length)
    predicted = busiest(heads, seq_q, seq_k, diagonal, causal, queries, keys, programs, tile, key_tile)
    assert 0.95 <= max(free) / predicted <= 1.15
