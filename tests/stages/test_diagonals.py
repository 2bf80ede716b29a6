"""Bottom-right masks whose diagonal crosses tiles at every place: an end that is one key off shows at few of them alone."""

import pytest
import torch
from cases import by_functions, check, make_inputs

from common.runtime import DEVICE

on_gpu = DEVICE == "cuda"

ROWS = 128  # queries of a full tile, at least of one consumer's
TILE = 128  # keys of the longest tile: residues repeat from there on
EDGES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 62, 63, 64, 65, 95, 96, 97, 126, 127)  # one key off the end of some tile


def check_diagonal(stage, seq_q, diagonal, head_dim=16, dtype=torch.float16, **sizes):
    inputs = make_inputs(seq_q, seq_q + diagonal, head_dim, dtype, batch=1, **({"heads": 1} | sizes))
    check(stage, *inputs, causal="bottom-right", run=by_functions)


@pytest.mark.every_stage
def test_diagonals_next_to_the_edges_of_tiles(stage):
    for diagonal in EDGES:
        check_diagonal(stage, ROWS, diagonal)


@pytest.mark.parametrize("first", range(0, TILE, TILE // 4))
def test_diagonals_of_every_residue(stage, first):
    for diagonal in range(first, first + TILE // 4):
        check_diagonal(stage, ROWS, diagonal)


@pytest.mark.long
@pytest.mark.every_stage
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seq_q", [ROWS - 1, ROWS, ROWS + 1, 2 * ROWS])
def test_diagonals_of_every_residue_and_head_dimension(stage, seq_q, head_dim, dtype):
    for diagonal in range(0, 2 * TILE, 1 if on_gpu else 3):
        check_diagonal(stage, seq_q, diagonal, head_dim, dtype)


@pytest.mark.every_stage
@pytest.mark.parametrize(("seq_q", "diagonal"), [(64, 1), (128, 1), (127, 1), (128, 63), (65, 63), (128, 127), (192, 65)])
def test_rows_shifted_over_the_edge_of_a_tile(stage, seq_q, diagonal):
    """A kernel whose first tile begins before query 0, so that the diagonal meets its corner, has a tile more at the end.

    D = 256, which has kernels of its own.
    """
    check_diagonal(stage, seq_q, diagonal, head_dim=256)


@pytest.mark.every_stage
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_scores_far_below_zero_of_more_queries_than_keys(stage, head_dim, causal):
    """A key past the end scores 0, and exp(0 - lse) overflows where it is not masked: 0 times infinity is NaN."""
    q, k, v, grad_out = make_inputs(200, 40, head_dim, torch.bfloat16, batch=1, heads=2, kv_heads=1)
    direction = torch.randn(head_dim, device=DEVICE).sign() * (300 / head_dim**0.5) ** 0.5  # scores of about -300
    q, k = (direction + 0.02 * q).bfloat16(), (-direction + 0.02 * k).bfloat16()
    results = check(stage, q, k, v, grad_out, causal=causal, run=by_functions)
    assert results["lse"].mean() < -200
