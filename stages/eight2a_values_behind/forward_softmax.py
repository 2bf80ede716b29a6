"""A consumer's online softmax."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from common.kernels.hopper import LOG2_E, ROWS, matrix, per_row, signal, wait_full

LARGEST = gl.constexpr(448.0)  # the largest number of e4m3
P_SHIFT = gl.constexpr(8.807354922)  # log2(448): a row's largest P is 448
UNITS = gl.constexpr(2.0**15)  # `_exp2_from_bits` keeps 8 bits of exponent and 15 of mantissa, so it counts in units of 2^-15
# 448 = 2^8 * 1.75 is the float32 with exponent bits 8 + 127 and mantissa 0.75. So P is exact at a row's maximum. Elsewhere it
# is 3.9 % too small to 2.0 % too large, and 0.01 % too large in the mean.
LARGEST_BITS = gl.constexpr(8 + 127 + 0.75)


@gluon.constexpr_function
def _layout(columns):
    """Return the register layout of the result of an 8-bit wgmma, which adds up 32 products at a time."""
    return gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, columns, 32])


@gluon.jit
def _to_e4m3(x):
    """Convert x to e4m3, four elements to a register. Gluon's own conversion splits the bytes and joins them again."""
    four: gl.constexpr = (
        "/* a */{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
        " mov.b32 $0, {low, high}; }"
    )
    return gl.inline_asm_elementwise(four, "=r,f,f,f,f", [x], gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def _quantize(q, q8, scale):
    """Store Q in e4m3 in the buffer `q8`, with a scale for each row. Return the rows' factors of the scores, for exp2."""
    q = q.to(gl.float32)
    size = gl.abs(q)
    largest = gl.maximum(gl.max(gl.where(size < float("inf"), size, 0.0), 1), 1e-30)
    q8.store(_to_e4m3(gl.where(size < float("inf"), q * (LARGEST / largest)[:, None], float("nan"))))
    fence_async_shared()  # wgmma reads through the async proxy
    return largest * (1.0 / LARGEST) * (scale * LOG2_E)


@gluon.jit
def _scores(q, ring, slot):
    """Start to compute the scores of a key tile, once its K has arrived."""
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    no_s = gl.zeros([ROWS, BLOCK_N], gl.float32, _layout(BLOCK_N))
    k = matrix(ring.k.index(slot))
    return warpgroup_mma(q, k.permute([1, 0]), no_s, use_acc=False, is_async=True)  # S = Q Kᵀ


@gluon.jit
def _values(p, ring, slot):
    """Start to compute P V of a key tile, in an accumulator of its own.

    The tensor cores add with about 14 bits, and cut the others off. So in one accumulator for all key tiles, a tile's P V would
    lose most of its bits.
    """
    VALUE_DIM: gl.constexpr = ring.v.shape[3]
    no_o = gl.zeros([ROWS, VALUE_DIM], gl.float32, _layout(VALUE_DIM))
    return warpgroup_mma(p, matrix(ring.v.index(slot)).permute([1, 0]), no_o, use_acc=False, is_async=True)


@gluon.jit
def _exp2_from_bits(s, factor, m):
    """Return about 448 * 2^(s * factor - m) without the hardware's exponential (Schraudolph, 1999).

    A float32 has 8 bits of exponent, then a mantissa. The logarithm plus 127 becomes these bits: its integer part the exponent,
    and its fraction the mantissa. So the result is a line between powers of two.
    """
    # From 2^23 to 2^24, float32 has only integers. So adding 2^23 rounds to an integer, which the sum's last 23 bits have.
    # A sum below 2^23 would mean an exponent below the smallest, or a masked score: P is 0. NaN stays NaN, also when shifted.
    rounds: gl.constexpr = 2.0**23
    bits = s * (factor * UNITS) + ((LARGEST_BITS - m) * UNITS + rounds)
    bits = gl.maximum(bits, rounds, propagate_nan=tl.PropagateNan.ALL)
    return (bits.to(gl.int32, bitcast=True) << 8).to(gl.float32, bitcast=True)  # the shift drops the exponent of 2^23


@gluon.jit
def _probabilities(s, factor, m):
    """Return P of a key tile: even columns from the hardware's exponential, odd columns from bits.

    A thread has pairs of neighbouring columns, so no element moves to another thread.
    """
    even, odd = gl.split(s.reshape([s.shape[0], s.shape[1] // 2, 2]))
    halves: gl.constexpr = even.type.layout
    factor, m = per_row(factor, halves), per_row(m, halves)
    even = gl.exp2(even * factor - (m - P_SHIFT))
    p = gl.join(even, _exp2_from_bits(odd, factor, m))
    return gl.convert_layout(p.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def _sums(p):
    """Return four partial sums of each row of p, one per thread that holds part of the row.

    To add them up, the threads must exchange them. But all four threads rescale by the same factor, and only the tile's end
    needs whole row sums, for LSE and 1 / l. So one exchange at the end is enough, and no step of the loop has one.
    """
    # In wgmma's layout, each of a row's four threads holds 2 of every 8 columns.
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _packed(p):
    """Convert P to e4m3, four keys to a number, without moving an element to another thread.

    Of 16 keys, thread c of a row's four has scores 2c, 2c + 1, 8 + 2c and 9 + 2c. As an operand of 8 bits, a thread's four
    elements are neighbours. So the keys' order is changed here, in name only, and `_quantize_kernel` stores V in this order.
    """
    ROWS_OF_P: gl.constexpr = p.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    p = p.reshape([ROWS_OF_P, KEYS // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS_OF_P, KEYS // 4, 2, 2])
    even, odd = gl.split(p)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    four: gl.constexpr = (
        "/* a.to(gl.float8e4nv).to(gl.uint8, bitcast=True).to(gl.int32)"
        " | b.to(gl.float8e4nv).to(gl.uint8, bitcast=True).to(gl.int32) << 8"
        " | c.to(gl.float8e4nv).to(gl.uint8, bitcast=True).to(gl.int32) << 16"
        " | d.to(gl.float8e4nv).to(gl.uint8, bitcast=True).to(gl.int32) << 24 */"
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
        " mov.b32 $0, {low, high}; }"
    )
    return gl.inline_asm_elementwise(four, "=r,f,f,f,f", [first, second, third, fourth], gl.int32, is_pure=True, pack=1)


@gluon.jit
def _operand(packed, acc_layout: gl.constexpr):
    """Return packed P as the operand of P V. It stays where it is: a register with four keys already is what wgmma reads."""
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=4)
    even, odd = gl.join(packed, packed >> 16), gl.join(packed >> 8, packed >> 24)
    four = gl.join(even, odd).reshape([packed.shape[0], packed.shape[1] * 4])
    four = gl.convert_layout(four, layout, assert_trivial=True)
    first: gl.constexpr = "/* (a & 255).to(gl.uint8).to(gl.float8e4nv, bitcast=True) */ mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(first, "=r,r,r,r,r", [four], gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def _copied(packed):
    """Copy packed P to other registers. A permutation of bytes that keeps their order is a copy that the compiler keeps.

    wgmma reads the last tile's P until P V ends, and the compiler would use the same registers for the next tile's P.
    """
    copy: gl.constexpr = "/* a */ prmt.b32 $0, $1, $1, 0x3210;"
    return gl.inline_asm_elementwise(copy, "=r,r", [packed], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _visible(s, start_n, seq_k, last, CAUSAL: gl.constexpr):
    """Return the scores s of the key tile at start_n, with -inf for masked keys. `last` is the first row's last visible key."""
    offs_n = start_n + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    visible = (offs_n < seq_k)[None, :]
    if CAUSAL:
        last_n = last + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))  # the last key that each row sees
        visible = visible & (last_n[:, None] >= offs_n[None, :])
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def _factors(scales, tile, q_factor):
    """Return the factors of the scores of a key tile, for exp2, and the log2 of its V's scale."""
    # Never scale by 0, because a masked score (-inf) times 0 is NaN.
    return gl.maximum(q_factor * gl.load(scales + 2 * tile), 1e-37), gl.load(scales + 2 * tile + 1)


@gluon.jit
def _accumulate(s, q, q_factor, scales, ring, fill, tiles, problem, last, CAUSAL: gl.constexpr):
    """Run a consumer's online softmax over `tiles` key tiles, the last tile first. The last tile's scores are already being
    computed.

    Returns acc, o, rescale, m (maximum), l (sum) and unit: O is (acc * rescale + o) * 2^unit / l, because V's scale differs
    from tile to tile, and acc has the unit of the last one added. The matmul o of the first tile, visited last, is still in
    flight.
    """
    BLOCK_N: gl.constexpr = ring.k.shape[3]
    s_layout: gl.constexpr = _layout(BLOCK_N)
    VALUE_DIM: gl.constexpr = ring.v.shape[3]
    acc_layout: gl.constexpr = _layout(VALUE_DIM)
    acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, acc_layout)
    tile = tiles - 1
    factor, unit = _factors(scales, tile, q_factor)
    s = warpgroup_mma_wait(0, [s])  # [rows, BLOCK_N]
    signal(ring.empty, fill)  # the first slot has no V
    # The tile visited first has code of its own, because m and l start from it. Here that is the last key tile, the only one
    # with a mask. So all other tiles share one loop, without a mask, in which a step can leave work to the next step.
    # Other tiles need no mask, because `start_m` lets a consumer's last row see a multiple of ROWS keys, or all keys.
    # The mask is applied even if it hides no key: a branch would cost the loop registers.
    s = _visible(s, tile * BLOCK_N, problem.seq_k, last, CAUSAL)
    m = gl.max(s, 1) * factor  # finite, because every row sees this tile's first key
    p = _probabilities(s, factor, m)
    packed = _packed(p)
    l = _sums(p)
    l_layout: gl.constexpr = l.type.layout
    rescale = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, s_layout))

    slot = wait_full(ring.full, fill + 1)
    for _ in range(1, tiles):
        # P V runs during the softmax of the next scores. The compiler would move its wait before the exponentials. But the wait
        # for the next slot is a loop, which no code crosses.
        fill += 1
        tile -= 1
        p = _operand(packed, acc_layout)
        s = _scores(q, ring, slot)
        o = _values(p, ring, slot)
        factor, new_unit = _factors(scales, tile, q_factor)
        s = warpgroup_mma_wait(1, [s])  # [rows, BLOCK_N]
        m_new = gl.maximum(m, gl.max(s, 1) * factor)
        p = _probabilities(s, factor, m_new)
        sums = _sums(p)
        following = _packed(p)
        slot = wait_full(ring.full, fill + 1)
        o = warpgroup_mma_wait(0, [o])
        signal(ring.empty, fill)
        packed = _copied(following)
        acc = acc * per_row(rescale, acc_layout) + o  # in the unit of o, 2^unit, and for the rows' maxima of its tile
        l = l * per_row(gl.exp2(m - m_new), l_layout) + sums
        rescale = gl.exp2(m - m_new + (unit - new_unit))  # factor for acc in the next step
        m = m_new
        unit = new_unit

    fill += 1
    # While this matmul runs, the partial sums are added up here, and `_consumer` computes LSE and 1 / l.
    o = _values(_operand(packed, acc_layout), ring, slot)
    return acc, o, rescale, m, gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, s_layout)), unit
