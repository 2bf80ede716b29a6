"""Bottom-right masks are right wherever their diagonal crosses a tile.

A loop that ends one key too early or too late gives errors only for a few diagonals.
"""

import pytest
import torch
from cases import LONG, Part, asked, available, guessing, make_inputs, never_short, set_names

from common import recording
from common.runtime import DEVICE

on_gpu = DEVICE == "cuda"

ROWS = 128  # number of queries of a full tile, or of two consumers
TILE = 128  # number of keys of the longest tile; diagonals that differ by TILE cross key tiles at the same places

# (queries, diagonal, head dimension). A key tile has N keys, and loops run over whole key tiles. A loop that ends one key early
# loses a key only if the diagonal is 1 modulo N. An unmasked loop that ends one key late reads a hidden key if the diagonal is
# -2 modulo N, as 126 is for every N here. In some forwards, the first query tile begins before query 0. A grid that ignores the
# rows before query 0 loses rows at a tile's edge. A diagonal longer than a query tile makes the first query tile's number
# negative.
NEXT_TO_EDGES = [(128, 1, 256), (128, 126, 16), (256, 129, 16), (128, 126, 128), (128, 65, 128), (128, 65, 256)]


def check_diagonal(part, seq_q, diagonal, head_dim=16, dtype=torch.float16):
    inputs = make_inputs(seq_q, seq_q + diagonal, head_dim, dtype, batch=1, heads=1)
    part.check(*inputs, causal="bottom-right")


@pytest.mark.parametrize("turn", range(3 if LONG or asked() or on_gpu else 1))
def test_diagonals_next_to_the_edges_of_tiles(part, turn):
    """Each head dimension has its own tile sizes, and D = 256 its own kernels.

    The interpreter's default run has one D for each pass, in turn. It has all for a stage that is asked for.
    """
    head_dim = (128, 256, 16)[turn if LONG or asked() or on_gpu else part.place % 3]
    for seq_q, diagonal, of in NEXT_TO_EDGES:
        if of == head_dim:
            check_diagonal(part, seq_q, diagonal, head_dim)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("seq_q", [ROWS - 1, ROWS, ROWS + 1, 2 * ROWS])
def test_diagonals_of_every_residue_and_head_dimension(part, seq_q, head_dim, dtype):
    for diagonal in range(0, 2 * TILE, 1 if on_gpu else 3):
        check_diagonal(part, seq_q, diagonal, head_dim, dtype)


FAR_BELOW = [(64, 40, True), (64, 127, False), (128, 127, False), (256, 40, True), (256, 63, False)]


@pytest.mark.parametrize("turn", range(len(FAR_BELOW) if LONG or on_gpu else 1))
def test_scores_far_below_zero_of_more_queries_than_keys(part, turn):
    """Keys past the end are masked, even if all scores are about -300.

    Keys past the end are loaded as zeros. Unmasked, they would score 0, and exp(0 - LSE) would overflow. In some cases the
    last key tile lacks many keys, in the other cases only one.
    """
    head_dim, seq_k, causal = FAR_BELOW[(part.place + turn) % len(FAR_BELOW)]
    q, k, v, grad_out = make_inputs(200, seq_k, head_dim, torch.bfloat16, batch=1, heads=1)
    direction = torch.randn(head_dim, device=DEVICE).sign() * (300 / head_dim**0.5) ** 0.5  # scores of about -300
    q, k = (direction + 0.02 * q).bfloat16(), (-direction + 0.02 * k).bfloat16()
    part.check(q, k, v, grad_out, causal=causal)


@pytest.mark.parametrize("name", guessing())
def test_the_tile_of_the_first_queries_may_fail(name, monkeypatch):
    """A stage that guesses the maximum has a flag for each tile. Rows before query 0 may add a tile, which needs a flag too."""
    available(name)
    set_names(monkeypatch, name, **never_short(name), splits_of=lambda *_: 1)
    monkeypatch.setattr(recording, "is_watched", lambda: True)  # switch replay off
    q, k, v, grad_out = make_inputs(256, 256 + 129, 128, batch=1, heads=1)
    q[..., 0] = 0
    q[:, :, 0, 0], k[:, :, 50, 0] = 40, 40  # only the first query has a score of 141 nats
    Part(name, "forward").check(q, k, v, grad_out, causal="bottom-right")
