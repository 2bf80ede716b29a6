"""How the host chooses between a guess and a running maximum."""

from common.kernels.order import mean_keys
from common.layout import cdiv

# A running maximum costs extra time for each key tile. A guess costs extra time for its launches, as much as SHORT key tiles,
# and for each query tile's first keys, as much as FEW_KEY_TILES key tiles. So if a CTA has n query tiles with k key tiles each,
# a running maximum is faster if n * (k - FEW_KEY_TILES) <= SHORT (fitted to results/constants-h200.json, and as good for
# constants-h100.json). Both are indexed by the larger of D and Dv.
SHORT = {16: 16, 32: 16, 64: 16, 128: 28, 256: 32}
FEW_KEY_TILES = {16: 0, 32: 0, 64: 3, 128: 7, 256: 22}


def is_short(tiles: int, seq_q: int, seq_k: int, diagonal: int, causal: bool, shape, width: int, programs: int) -> bool:
    """Return whether rows are so short that a running maximum costs less than a guess.

    Args:
        tiles: number of query tiles of all heads. `programs` CTAs share them.
        shape: `queries` and `keys`, the sizes of query tiles and key tiles.
        width: the larger of D and Dv.
    """
    keys = mean_keys(seq_q, min(seq_k, seq_q + diagonal), diagonal, shape.queries) if causal else seq_k
    return cdiv(tiles, programs) * (keys / shape.keys - FEW_KEY_TILES[width]) <= SHORT[width]
