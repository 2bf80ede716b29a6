"""Choose the order in which the programs of a launch take their tiles."""

import triton
import triton.language as tl


@triton.jit
def tile_and_head(
    tiles, seq, ROW_BYTES: tl.constexpr, CAUSAL: tl.constexpr, L2_SHARE: tl.constexpr = 16 * 2**20, program=None, programs=None,
):  # fmt: skip
    """Return this program's (tile, head).

    `tile` counts the `tiles` of a head; `head` counts the heads of all batch elements.

    Programs start in the order of their numbers. Without a causal mask they go through head after head. So programs that run at
    the same time share the head's rows in the L2 cache: `seq` rows of ROW_BYTES bytes.

    Causal tiles differ in length, and a long tile that starts late leaves the other SMs idle at the end. So programs go through
    a group of heads: first tile 0 of each head, then tile 1 of each head, and so on. Tile 0 must be the longest. The rows of a
    group take at most L2_SHARE bytes, unless the group is one head.

    If several query heads share K and V, `seq` is the number of rows divided by the number of these heads. A persistent CTA
    computes the tiles of several programs. It passes the number of one `program`, and the number of `programs` in a launch
    without persistent CTAs.
    """
    if program is None:
        program = tl.program_id(0)
        programs = tl.num_programs(0)
    if CAUSAL:
        heads = programs // tiles
        group = tl.minimum(tl.maximum(L2_SHARE // ROW_BYTES // seq, 1), heads)  # at most all heads: group * tiles fits in int32
        first = program // (group * tiles) * group
        group = tl.minimum(group, heads - first)
        inside = program - first * tiles
        return inside // group, first + inside % group
    else:
        return program % tiles, program // tiles
