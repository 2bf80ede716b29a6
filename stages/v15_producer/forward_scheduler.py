"""The scheduler: the order of the work tiles, and where a tile's rows and keys lie.

The functions that load and the functions that compute get the same `Tile`. Gluon kernels can call these Triton functions.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from common.kernels.order import tile_and_head


class Problem(NamedTuple):
    """Sizes that all work tiles share."""

    heads: tl.tensor
    heads_per_kv: tl.tensor
    tiles_m: tl.tensor  # number of query tiles of a head
    seq_q: tl.tensor
    seq_k: tl.tensor
    diagonal: tl.tensor  # with a causal mask, query i sees key j if j <= i + diagonal
    scale: tl.tensor


class Tile(NamedTuple):
    """A work tile: BLOCK_M query rows of one head, and the key tiles that they see."""

    batch_head: tl.tensor  # batch * H + head
    batch: tl.tensor
    head: tl.tensor
    kv_head: tl.tensor
    start_m: tl.tensor  # the tile's first query row
    key_tiles: tl.tensor


@triton.jit
def _tile(problem, ROW_BYTES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the work tile of this CTA."""
    tile, batch_head = tile_and_head(problem.tiles_m, tl.cdiv(problem.seq_k, problem.heads_per_kv), ROW_BYTES, CAUSAL)
    start_m = (problem.tiles_m - 1 - tile) * BLOCK_M  # last rows see the most keys, so their tile is tile 0 and starts first
    head = batch_head % problem.heads
    end = tl.minimum(start_m + BLOCK_M + problem.diagonal, problem.seq_k) if CAUSAL else problem.seq_k
    return Tile(
        batch_head, batch_head // problem.heads, head, head // problem.heads_per_kv, start_m, tl.cdiv(end, BLOCK_N)
    )  # fmt: skip
