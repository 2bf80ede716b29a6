"""In which order the programs of a launch take their tiles."""

import triton
import triton.language as tl


@triton.jit
def tile_and_head(
    tiles, seq, ROW_BYTES: tl.constexpr, CAUSAL: tl.constexpr, L2_SHARE: tl.constexpr = 16 * 2**20, program=None, programs=None,
):  # fmt: skip
    """This program's tile, of the `tiles` of a head, and its head, of those of all batches.

    Programs start in their order. Where all take as long, they go through head after head, and those that run at the same time
    share that head's `seq` rows of ROW_BYTES. Causal tiles differ in length, and a long one that starts late leaves the other
    SMs idle at the end: so they go through a group of heads, tile 0 of each, then tile 1 of each, before the next
    group. The rows of a group take at most L2_SHARE bytes, unless it is one head. Count tiles so that tile 0 is the longest.
    Where heads share rows, `seq` is the part of these that falls to each. A program that stays gives the number of the one that
    it stands for, and how many there would be.
    """
    if program is None:
        program = tl.program_id(0)
        programs = tl.num_programs(0)
    if CAUSAL:
        heads = programs // tiles
        group = tl.minimum(tl.maximum(L2_SHARE // ROW_BYTES // seq, 1), heads)  # of more, group * tiles could pass 2**31
        first = program // (group * tiles) * group
        group = tl.minimum(group, heads - first)
        inside = program - first * tiles
        return inside // group, first + inside % group
    else:
        return program % tiles, program // tiles
