"""The kernel that merges the outputs of the shares.

A step may take few microseconds, so the merge's latency counts: PDL launches it early, and a thread loads many parts at once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from common.kernels.hopper import LOG2_E
from common.layout import cdiv


@gluon.jit(do_not_specialize=["rows", "heads", "seq_q", "of_tile"])
def _merge_kernel(
    part_ptr, part_lse_ptr, shares_ptr, out_ptr, lse_ptr, stride_ob, stride_oh, stride_om, rows, heads, seq_q, of_tile,
    VALUE_DIM: gl.constexpr, ROWS: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Compute some rows of out and lse, whose keys are in several shares. out is the sum of the shares' outputs, weighted by
    exp(lse of the share - lse). A tile has `of_tile` rows."""
    # A warp has rows of its own (`by_rows`), so a thread adds up AT_ONCE parts of its columns. If parts are many, four warps
    # share rows (`by_parts`): a thread adds up a quarter of AT_ONCE parts, so that more parts are read at once.
    WARP_ROWS: gl.constexpr = max(1, 128 // VALUE_DIM)
    threads: gl.constexpr = [WARP_ROWS, 1, 32 // WARP_ROWS]
    by_rows: gl.constexpr = gl.BlockedLayout([1, AT_ONCE, 4], threads, [4, 1, 1], [2, 1, 0])
    by_parts: gl.constexpr = gl.BlockedLayout([1, AT_ONCE // 4, 4], threads, [1, 4, 1], [2, 1, 0])
    layout: gl.constexpr = by_rows if ROWS > WARP_ROWS else by_parts
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    of_out: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, layout))
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, of_rows)
    offs_p = gl.arange(0, AT_ONCE, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    offs_d = gl.arange(0, VALUE_DIM, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    gdc_wait()  # wait until the launch that computes the parts has ended
    tile = row // of_tile
    first = gl.load(shares_ptr + tile * 2, mask=row < rows, other=0)
    shares = gl.load(shares_ptr + tile * 2 + 1, mask=row < rows, other=1)
    shares = gl.where(shares == 1, 0, shares)  # a single share has stored out and lse
    first_row = (tile + first).to(gl.int64) * of_tile + row % of_tile
    m = gl.full([ROWS], float("-inf"), gl.float32, of_rows)
    l = gl.zeros([ROWS], gl.float32, of_rows)
    acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, gl.SliceLayout(1, layout))
    for at in range(0, gl.max(shares, 0), AT_ONCE):
        part = (at + offs_p).to(gl.int64)[None, :] * of_tile + first_row[:, None]
        inside = (at + offs_p)[None, :] < shares[:, None]
        lse = gl.load(part_lse_ptr + part, mask=inside, other=float("-inf"))
        o = gl.load(part_ptr + (part * VALUE_DIM)[:, :, None] + offs_d[None, None, :], mask=inside[:, :, None], other=0.0)
        m_new = gl.maximum(gl.maximum(m, gl.max(lse, 1)), -1e38)  # keeps m_new finite if the row has seen no key so far
        rescale = gl.exp2((m - m_new) * LOG2_E)
        weight = gl.exp2((lse - m_new[:, None]) * LOG2_E)
        l = l * rescale + gl.sum(weight, 1)
        acc = acc * gl.convert_layout(rescale, of_out)[:, None] + gl.sum(weight[:, :, None] * o, 1)
        m = m_new
    gl.store(lse_ptr + row, m + gl.log2(l) / LOG2_E, mask=shares > 0)
    out = acc / gl.convert_layout(gl.maximum(l, 1.0), of_out)[:, None]  # l is at least 1, or 0 if the row sees no key
    row, shares = gl.convert_layout(row, of_out), gl.convert_layout(shares, of_out)
    head = row // seq_q
    offs_o = (head // heads).to(gl.int64) * stride_ob + (head % heads).to(gl.int64) * stride_oh
    offs_o += (row % seq_q).to(gl.int64) * stride_om
    gl.store(out_ptr + offs_o[:, None] + offs_d[None, :], out.to(out_ptr.dtype.element_ty), mask=(shares > 0)[:, None])


def merge(parts, part_lses, shares, out, lse):
    """Merge the shares' outputs `parts`, [tiles + shares, rows, Dv], and their `part_lses` into `out` and `lse`."""
    value_dim = parts.shape[-1]
    own = min(16, 2048 // value_dim)  # number of parts whose outputs fit into 64 registers of each thread
    usual = cdiv(len(parts), len(shares))  # parts of a tile, if all sequences are equally long
    at_once = next((n for n in (4, 8, 16) if usual <= n <= own), 4 * own)  # 4 * own: four warps share a row
    merged = max(1, 128 // value_dim) * (4 if at_once <= own else 1)  # rows per CTA: a warp has 128 columns
    _merge_kernel[cdiv(lse.numel(), merged),](
        parts, part_lses, shares, out, lse, *out.stride()[:3], lse.numel(), *lse.shape[1:], parts.shape[1],
        VALUE_DIM=value_dim, ROWS=merged, AT_ONCE=at_once, num_warps=4, launch_pdl=True,
    )  # fmt: skip
