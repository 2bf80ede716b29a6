"""A consumer's online softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from common.kernels.hopper import LOG2_E, ROWS, matrix, per_row, signal, wait_full

LARGEST = gl.constexpr(448.0)  # the largest number of e4m3
P_SHIFT = gl.constexpr(8.0)  # P is 2^8 times as large: e4m3 then has numbers from 2^-17 of a row's largest P on


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
def _sums(p):
    """Return four partial sums of each row of p, one per thread that holds part of the row.

    To add them up, the threads must exchange them. But all four threads rescale by the same factor, and only the tile's end
    needs whole row sums, for LSE and 1 / l. So one exchange at the end is enough, and no step of the loop has one.
    """
    # In wgmma's layout, each of a row's four threads holds 2 of every 8 columns.
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _operand(p, acc_layout: gl.constexpr):
    """Convert P to e4m3, as the operand of P V, without moving an element to another thread.

    Of 16 keys, thread c of a row's four has scores 2c, 2c + 1, 8 + 2c and 9 + 2c. As an operand of 8 bits, a thread's four
    elements are neighbours. So the keys' order is changed here, in name only, and `_quantize_kernel` stores V in this order.
    """
    ROWS_OF_P: gl.constexpr = p.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_layout, k_width=4)
    p = p.reshape([ROWS_OF_P, KEYS // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS_OF_P, KEYS])
    return _to_e4m3(gl.convert_layout(p, layout, assert_trivial=True))


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
    p = gl.exp2(s * factor[:, None] - (m - P_SHIFT)[:, None])
    l = _sums(p)
    l_layout: gl.constexpr = l.type.layout
    rescale = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, s_layout))

    for _ in range(1, tiles):
        # Issue both matmuls at once, so that the tensor cores have work while other consumers compute their softmax. P V is the
        # first, so that P needs no registers beside S, and is added to acc while S is computed.
        fill += 1
        tile -= 1
        slot = wait_full(ring.full, fill)
        o = _values(_operand(p, acc_layout), ring, slot)
        s = _scores(q, ring, slot)
        factor, new_unit = _factors(scales, tile, q_factor)
        o = warpgroup_mma_wait(1, [o])
        acc = acc * per_row(rescale, acc_layout) + o  # in the unit of o, 2^unit, and for the rows' maxima of its tile
        s = warpgroup_mma_wait(0, [s])  # [rows, BLOCK_N]
        signal(ring.empty, fill)
        m_new = gl.maximum(m, gl.max(s, 1) * factor)
        # NOTE: exponentials take as long as the matmuls; eight2 computes every second one from a float's bits.
        p = gl.exp2(s * factor[:, None] - (m_new - P_SHIFT)[:, None])
        l = l * per_row(gl.exp2(m - m_new), l_layout) + _sums(p)
        rescale = gl.exp2(m - m_new + (unit - new_unit))  # factor for acc in the next step
        m = m_new
        unit = new_unit

    fill += 1
    slot = wait_full(ring.full, fill)
    # While this matmul runs, the partial sums are added up here, and `_consumer` computes LSE and 1 / l.
    o = _values(_operand(p, acc_layout), ring, slot)
    return acc, o, rescale, m, gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, s_layout)), unit
