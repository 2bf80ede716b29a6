"""The kernel that merges the outputs of the splits.

Splits take few microseconds, so the merge's latency counts: PDL launches it early, and a thread loads many splits at once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from common.kernels.hopper import LOG2_E
from common.layout import cdiv


@gluon.jit(do_not_specialize=["rows", "heads", "seq_q", "splits"])
def _merge_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, stride_ob, stride_oh, stride_om, rows, heads, seq_q, splits,
    VALUE_DIM: gl.constexpr, ROWS: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Compute some rows of out and lse. out is the sum of the splits' outputs, weighted by exp(lse of the split - lse)."""
    # A warp has rows of its own (`by_rows`), so a thread adds up AT_ONCE splits of its columns. If splits are many, four warps
    # share rows (`by_splits`): a thread adds up a quarter of AT_ONCE splits, so that more splits are read at once.
    WARP_ROWS: gl.constexpr = max(1, 128 // VALUE_DIM)
    threads: gl.constexpr = [WARP_ROWS, 1, 32 // WARP_ROWS]
    by_rows: gl.constexpr = gl.BlockedLayout([1, AT_ONCE, 4], threads, [4, 1, 1], [2, 1, 0])
    by_splits: gl.constexpr = gl.BlockedLayout([1, AT_ONCE // 4, 4], threads, [1, 4, 1], [2, 1, 0])
    layout: gl.constexpr = by_rows if ROWS > WARP_ROWS else by_splits
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    of_out: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, layout))
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, of_rows)
    offs_s = gl.arange(0, AT_ONCE, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    offs_d = gl.arange(0, VALUE_DIM, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    gdc_wait()  # wait until the launch that computes the splits has ended
    m = gl.full([ROWS], float("-inf"), gl.float32, of_rows)
    l = gl.zeros([ROWS], gl.float32, of_rows)
    acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, gl.SliceLayout(1, layout))
    for first in range(0, splits, AT_ONCE):
        part = (first + offs_s).to(gl.int64)[None, :] * rows + row[:, None]
        inside = (first + offs_s < splits)[None, :] & (row < rows)[:, None]
        lse = gl.load(part_lse_ptr + part, mask=inside, other=float("-inf"))
        o = gl.load(part_ptr + (part * VALUE_DIM)[:, :, None] + offs_d[None, None, :], mask=inside[:, :, None], other=0.0)
        m_new = gl.maximum(gl.maximum(m, gl.max(lse, 1)), -1e38)  # keeps m_new finite if the row has seen no key so far
        rescale = gl.exp2((m - m_new) * LOG2_E)
        weight = gl.exp2((lse - m_new[:, None]) * LOG2_E)
        l = l * rescale + gl.sum(weight, 1)
        acc = acc * gl.convert_layout(rescale, of_out)[:, None] + gl.sum(weight[:, :, None] * o, 1)
        m = m_new
    gl.store(lse_ptr + row, m + gl.log2(l) / LOG2_E, mask=row < rows)
    out = acc / gl.convert_layout(gl.maximum(l, 1.0), of_out)[:, None]  # l is at least 1, or 0 if the row sees no key
    row = gl.convert_layout(row, of_out)
    head = row // seq_q
    offs_o = (head // heads).to(gl.int64) * stride_ob + (head % heads).to(gl.int64) * stride_oh
    offs_o += (row % seq_q).to(gl.int64) * stride_om
    gl.store(out_ptr + offs_o[:, None] + offs_d[None, :], out.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None])


def merge(parts, lses, out, lse):
    """Merge the splits' outputs `parts`, [splits, B, H, Sq, Dv], and their `lses` into `out` and `lse`."""
    splits, value_dim = len(parts), parts.shape[-1]
    own = min(16, 2048 // value_dim)  # number of splits whose outputs fit into 64 registers of each thread
    at_once = next((n for n in (4, 8, 16) if splits <= n <= own), 4 * own)  # 4 * own: four warps share a row
    merged = max(1, 128 // value_dim) * (4 if at_once <= own else 1)  # rows per CTA: a warp has 128 columns
    _merge_kernel[cdiv(lse.numel(), merged),](
        parts, lses, out, lse, *out.stride()[:3], lse.numel(), *lse.shape[1:], splits,
        VALUE_DIM=value_dim, ROWS=merged, AT_ONCE=at_once, num_warps=4, launch_pdl=True,
    )  # fmt: skip
