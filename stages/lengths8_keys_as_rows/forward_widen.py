"""Widen K and V from 8 to 16 bits in registers, as the first operand of a matmul. No element moves to another thread."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from common.kernels.hopper import matrix


@gluon.jit
def _descale(descale_ptr, tile, problem):
    """Return the factor of a tile's K or V. `descale_ptr` points to all factors, [B, Hkv]."""
    if descale_ptr is None:
        return 1.0
    else:
        kv_heads = problem.heads // problem.heads_per_kv
        return gl.load(descale_ptr + tile.batch * kv_heads + tile.kv_head)


@gluon.jit
def _by_lanes(tile):
    """Change the order of a matrix's columns, in name only: 8-bit operands have one order, and 16-bit operands another.

    Of 16 columns, lane t of a row's four holds 4t to 4t + 3 as 8-bit numbers, and 2t, 2t + 1, 2t + 8 and 2t + 9 as 16-bit ones.
    """
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    return tile.reshape([ROWS, COLUMNS // 16, 4, 2, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS, COLUMNS])


@gluon.jit
def _wide_keys(buffer, s_layout: gl.constexpr, dtype: gl.constexpr):
    """Return K [keys, D] as an operand. Its columns have the order of `_by_lanes`."""
    eight: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=4)
    sixteen: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=2)
    k = _to(matrix(buffer).load(eight), dtype)
    return gl.convert_layout(_by_lanes(k), sixteen, assert_trivial=True)


@gluon.jit
def _wide_values(buffer, acc_layout: gl.constexpr, dtype: gl.constexpr):
    """Return Vᵀ [Dv, keys] as an operand. `_out` undoes the order of its rows.

    A thread reads neighbouring columns of V, and holds them as rows that lie 8 or 64 apart.
    """
    KEYS: gl.constexpr = buffer.shape[2]
    VALUE_DIM: gl.constexpr = buffer.shape[3]
    OWN: gl.constexpr = VALUE_DIM // 32  # columns of a thread
    layout: gl.constexpr = gl.BlockedLayout([2, OWN], [4, 8], [1, 4], [0, 1])
    sixteen: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=2)
    v = _to(matrix(buffer).load(layout), dtype).permute([1, 0])
    v = v.reshape([4, 8, OWN // 2, 2, KEYS]).permute([2, 0, 3, 1, 4]).reshape([VALUE_DIM, KEYS])
    return gl.convert_layout(v, sixteen, assert_trivial=True)


@gluon.jit
def _out(acc):
    """Return O [N, Dv] of Oᵀ, whose rows have the order of `_wide_values`."""
    OWN: gl.constexpr = acc.shape[0] // 32
    out = acc.reshape([OWN // 2, 4, 2, 8, acc.shape[1]]).permute([4, 1, 3, 0, 2])
    return out.reshape([acc.shape[1], acc.shape[0]])


@gluon.jit
def _to(numbers, dtype: gl.constexpr):
    """Widen e4m3 numbers. Both 16-bit types have each of them exactly."""
    if dtype == gl.bfloat16:
        numbers = numbers.to(gl.float32)  # else each number takes an F2F.BF16.F16, and an SM runs few of these in a cycle
    return numbers.to(dtype)
