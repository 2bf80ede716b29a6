"""The kernel that merges the parts of O.

It takes few microseconds, so its latency counts: PDL launches it early, and a thread loads many parts at once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from common.kernels.hopper import LOG2_E
from common.layout import cdiv

from .forward_scheduler import SEQUENCES, _key_tiles_from


@gluon.jit(do_not_specialize=["heads", "rows", "seq_q", "seq_k", "batch", "programs"])
def _merge_kernel(
    part_ptr, part_lse_ptr, lengths_ptr, out_ptr, lse_ptr, stride_ob, stride_oh, stride_om, heads, rows, seq_q, seq_k, batch,
    programs, VALUE_DIM: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Compute some rows of a sequence's out and lse. out is the sum of the shares' outputs, weighted by exp(lse of the share -
    lse). A sequence has `heads` tiles of `rows` rows."""
    # A warp has rows of its own (`by_rows`), so a thread adds up AT_ONCE parts of its columns. If parts are many, four warps
    # share rows (`by_parts`): a thread adds up a quarter of AT_ONCE parts, so that more parts are read at once.
    WARP_ROWS: gl.constexpr = max(1, 128 // VALUE_DIM)
    threads: gl.constexpr = [WARP_ROWS, 1, 32 // WARP_ROWS]
    by_rows: gl.constexpr = gl.BlockedLayout([1, AT_ONCE, 4], threads, [4, 1, 1], [2, 1, 0])
    by_parts: gl.constexpr = gl.BlockedLayout([1, AT_ONCE // 4, 4], threads, [1, 4, 1], [2, 1, 0])
    layout: gl.constexpr = by_rows if ROWS > WARP_ROWS else by_parts
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    of_out: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, layout))
    of_sequence = gl.cdiv(heads * rows, ROWS)  # programs of a sequence
    own = gl.program_id(0) // of_sequence
    row = gl.program_id(0) % of_sequence * ROWS + gl.arange(0, ROWS, of_rows)
    offs_p = gl.arange(0, AT_ONCE, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    offs_d = gl.arange(0, VALUE_DIM, gl.SliceLayout(0, gl.SliceLayout(1, layout)))

    # Find the shares that have a row's key tiles, as `_share` divides them.
    start, of_heads, total = 0, 0, 0
    for sequence in range(0, batch, SEQUENCES):
        number, tiles = _key_tiles_from(sequence, lengths_ptr, batch, heads, seq_k, BLOCK_N)
        start += gl.sum(gl.where(number < own, tiles, 0), 0)
        of_heads += gl.sum(gl.where(number == own, tiles, 0), 0)
        total += gl.sum(tiles, 0)
    share = gl.cdiv(total, programs)
    tile = row // rows
    start += tile * (of_heads // heads)
    first = start // share
    parts = gl.where(row < heads * rows, (start + of_heads // heads - 1) // share - first + 1, 0)
    part_row = (own * heads + tile + first).to(gl.int64) * rows + row % rows

    gdc_wait()  # wait until the launch that computes the parts has ended
    m = gl.full([ROWS], float("-inf"), gl.float32, of_rows)
    l = gl.zeros([ROWS], gl.float32, of_rows)
    acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, gl.SliceLayout(1, layout))
    for at in range(0, gl.max(parts, 0), AT_ONCE):
        part = (at + offs_p).to(gl.int64)[None, :] * rows + part_row[:, None]
        inside = (at + offs_p)[None, :] < parts[:, None]
        lse = gl.load(part_lse_ptr + part, mask=inside, other=float("-inf"))
        o = gl.load(part_ptr + (part * VALUE_DIM)[:, :, None] + offs_d[None, None, :], mask=inside[:, :, None], other=0.0)
        m_new = gl.maximum(gl.maximum(m, gl.max(lse, 1)), -1e38)  # keeps m_new finite if the row has seen no key so far
        rescale = gl.exp2((m - m_new) * LOG2_E)
        weight = gl.exp2((lse - m_new[:, None]) * LOG2_E)
        l = l * rescale + gl.sum(weight, 1)
        acc = acc * gl.convert_layout(rescale, of_out)[:, None] + gl.sum(weight[:, :, None] * o, 1)
        m = m_new
    heads_rows = heads * rows  # rows of the sequence
    gl.store(lse_ptr + own.to(gl.int64) * heads_rows + row, m + gl.log2(l) / LOG2_E, mask=row < heads_rows)
    out = acc / gl.convert_layout(gl.maximum(l, 1.0), of_out)[:, None]  # l is at least 1, or 0 if the row sees no key
    row = gl.convert_layout(row, of_out)
    offs_o = own.to(gl.int64) * stride_ob + (row // seq_q).to(gl.int64) * stride_oh + (row % seq_q).to(gl.int64) * stride_om
    out = out.to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + offs_o[:, None] + offs_d[None, :], out, mask=(row < heads_rows)[:, None])


def merge(parts, lses, lengths, seq_k, block_n, programs, out, lse):
    """Merge the parts of O, [tiles + programs, rows, Dv], and their `lses` into `out` and `lse`.

    Program p has computed part number t + p of tile t.
    """
    batch, heads, seq_q, value_dim = out.shape
    tiles, rows = len(parts) - programs, parts.shape[1]
    own = min(16, 2048 // value_dim)  # number of parts whose outputs fit into 64 registers of each thread
    usual = cdiv(programs, tiles) + 1  # parts of a tile, if the sequences' lengths are equal
    at_once = next((n for n in (4, 8, 16) if usual <= n <= own), 4 * own)  # 4 * own: four warps share a row
    merged = max(1, 128 // value_dim) * (4 if at_once <= own else 1)  # rows per CTA: a warp has 128 columns
    _merge_kernel[batch * cdiv(heads * seq_q, merged),](
        parts, lses, lengths, out, lse, *out.stride()[:3], tiles // batch, rows, seq_q, seq_k, batch, programs,
        VALUE_DIM=value_dim, BLOCK_N=block_n, ROWS=merged, AT_ONCE=at_once, num_warps=4, launch_pdl=True,
    )  # fmt: skip
