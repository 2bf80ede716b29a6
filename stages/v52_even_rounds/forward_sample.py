"""The kernel that computes samples, which tell before the first tile whether most guesses would fail."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from common.kernels.hopper import LOG2_E, ROWS, new_barriers

from .forward_scheduler import LATELY, LOOKED_AT, Problem, _row, _rows_before, _seen, _state, _tile
from .forward_softmax import _visible


@gluon.jit(do_not_specialize=["batch_heads", "heads", "seq_q", "seq_k", "diagonal", "splits"])
def _sample_kernel(
    q_desc, k_desc, first_desc, state_ptr, scale, highest,
    batch_heads, heads, heads_per_kv, seq_q, seq_k, diagonal, splits,
    BLOCK_M: gl.constexpr, PACKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Test guesses on samples, spread over all tiles. Each CTA guesses the maxima of a consumer's 64 rows, and tests the guess
    with two key tiles. It sets the sample's flags if P of one of these keys exceeds 2^highest. All samples together have LATELY
    flags, which lie before the flags of the tiles. Also zero the counter and the flags of all tiles."""
    gdc_launch_dependents()  # the next launch may start its setup before this launch ends
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    HEAD_DIM: gl.constexpr = k_desc.block_shape[3]
    FIRST_KEYS: gl.constexpr = first_desc.block_shape[2]
    ROW_BYTES: gl.constexpr = 4 * HEAD_DIM  # bytes of a key's K and V, as if V had as many columns as K
    tiles_m = gl.cdiv(seq_q + _rows_before(diagonal, PACKED), BLOCK_M)
    tiles = batch_heads * tiles_m
    sample = gl.program_id(0)
    samples = gl.num_programs(0)
    problem = Problem(batch_heads, heads, heads_per_kv, tiles_m, seq_q, seq_k, diagonal, scale, 1, None, None)
    number = (sample.to(gl.int64) * tiles // samples).to(gl.int32)
    tile = _tile(number, problem, ROW_BYTES, BLOCK_M, BLOCK_N, PACKED, CAUSAL)
    start_m = tile.start_m + sample % (BLOCK_M // ROWS) * ROWS
    seen = _seen(start_m, problem, BLOCK_N, PACKED, CAUSAL)
    state = _state(state_ptr)

    q_s = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_shape, q_desc.layout)
    first_s = gl.allocate_shared_memory(k_desc.dtype, first_desc.block_shape, first_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [3] + k_desc.block_shape, k_desc.layout)
    full = new_barriers(1, 1)
    mbarrier.expect(full.index(0), q_desc.block_type.nbytes + first_desc.block_type.nbytes + 3 * k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, _row(tile.batch, tile.head, start_m, PACKED), full.index(0), q_s)
    tma.async_copy_global_to_shared(first_desc, [tile.batch, tile.kv_head, 0, 0], full.index(0), first_s)
    last_n = (seen - 1) * BLOCK_N
    one_n = sample % seen * BLOCK_N
    other_n = (sample + gl.cdiv(seen, 2)) % seen * BLOCK_N
    tma.async_copy_global_to_shared(k_desc, [tile.batch, tile.kv_head, last_n, 0], full.index(0), k_s.index(0))
    tma.async_copy_global_to_shared(k_desc, [tile.batch, tile.kv_head, one_n, 0], full.index(0), k_s.index(1))
    tma.async_copy_global_to_shared(k_desc, [tile.batch, tile.kv_head, other_n, 0], full.index(0), k_s.index(2))

    if sample == 0:
        gl.store(state.counter, 0)
        gl.store(state.any_failed, 0)
    layout: gl.constexpr = gl.BlockedLayout([LOOKED_AT // 128], [32], [4], [0])
    share = gl.cdiv(tiles * splits, samples)
    for start in range(0, share, LOOKED_AT):
        offs = start + gl.arange(0, LOOKED_AT, layout)
        own = (offs < share) & (sample * share + offs < tiles * splits)
        gl.store(state.tile_failed + sample * share + offs, gl.zeros([LOOKED_AT], gl.int32, layout), mask=own)

    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    first_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, FIRST_KEYS, 16])
    s_last = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    s_first = gl.zeros([ROWS, FIRST_KEYS], gl.float32, first_layout)
    mbarrier.wait(full.index(0), 0)
    q = q_s.reshape([ROWS, HEAD_DIM])
    s_one = warpgroup_mma(q, k_s.index(1).reshape([BLOCK_N, HEAD_DIM]).permute([1, 0]), s_last, use_acc=False, is_async=True)
    s_other = warpgroup_mma(q, k_s.index(2).reshape([BLOCK_N, HEAD_DIM]).permute([1, 0]), s_last, use_acc=False, is_async=True)
    s_first = warpgroup_mma(q, first_s.reshape([FIRST_KEYS, HEAD_DIM]).permute([1, 0]), s_first, use_acc=False, is_async=True)
    s_last = warpgroup_mma(q, k_s.index(0).reshape([BLOCK_N, HEAD_DIM]).permute([1, 0]), s_last, use_acc=False, is_async=True)
    s_one, s_other, s_first, s_last = warpgroup_mma_wait(0, [s_one, s_other, s_first, s_last])
    last = start_m // PACKED + diagonal
    m = gl.max(_visible(s_last, last_n, seq_k, last, PACKED, CAUSAL), 1)
    m_first = gl.convert_layout(gl.max(_visible(s_first, 0, seq_k, last, PACKED, CAUSAL), 1), m.type.layout)
    m = gl.where(seen > 1, gl.maximum(m, m_first), m)
    s = gl.maximum(_visible(s_one, one_n, seq_k, last, PACKED, CAUSAL), _visible(s_other, other_n, seq_k, last, PACKED, CAUSAL))
    above = gl.max((gl.max(s, 1) - m) * gl.maximum(scale * LOG2_E, 1e-37), 0)
    lately: gl.constexpr = gl.BlockedLayout([LATELY // 128], [32], [4], [0])
    offs = gl.arange(0, LATELY, lately)
    gl.store(
        state.sample_failed + offs,
        gl.full([LATELY], gl.where(above > highest, 1, 0), gl.int32, lately),
        mask=offs % samples == sample,
    )


# A sample fails if one of its P is above 2 to this power. Other P of its tile may be larger. Fitted to times on an H200.
SAMPLE_LIMIT = 9
