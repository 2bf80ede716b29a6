"""The kernel that samples scores, which predict before the first tile whether most guesses would fail.

Without this prediction, each CTA would compute about two tiles in vain before the flags of failed tiles make it stop.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from common.kernels.hopper import LOG2_E, ROWS, new_barriers

from .forward_scheduler import LATELY, LOOKED_AT, Problem, _key_tiles, _state, _tile
from .forward_softmax import _scores_of, _visible

# A sample fails if one of its P is above 2 to this power. Other P of its tile may be larger. Fitted to times on an H200.
SAMPLE_LIMIT = 9


@gluon.jit
def _clear(sample, samples, tiles, state):
    """Zero the counter and all flags but the samples'. Each sample's CTA zeroes a share of the tiles' flags."""
    if sample == 0:
        gl.store(state.counter, 0)
        gl.store(state.any_failed, 0)
        gl.store(state.given_up, 0)
    layout: gl.constexpr = gl.BlockedLayout([LOOKED_AT // 128], [32], [4], [0])
    share = gl.cdiv(tiles, samples)
    for start in range(0, share, LOOKED_AT):
        offs = start + gl.arange(0, LOOKED_AT, layout)
        own = (offs < share) & (sample * share + offs < tiles)
        gl.store(state.tile_failed + sample * share + offs, gl.zeros([LOOKED_AT], gl.int32, layout), mask=own)


@gluon.jit(do_not_specialize=["batch_heads", "heads", "seq_q", "seq_k", "diagonal"])  # compile once for all lengths
def _sample_kernel(
    q_desc, k_desc, first_desc, state_ptr, scale, limit,
    batch_heads, heads, heads_per_kv, seq_q, seq_k, diagonal,
    BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Test guesses on samples, spread over all tiles. Each CTA guesses the maxima of a consumer's 64 rows, and tests the guess
    with two key tiles. The sample fails if P of one of these keys exceeds 2^limit. All samples together have LATELY flags.

    The kernel also zeroes the counter and the flags of the tiles. This needs a launch in any case, so sampling adds none.
    """
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    HEAD_DIM: gl.constexpr = k_desc.block_shape[3]
    ROW_BYTES: gl.constexpr = 4 * HEAD_DIM  # bytes of a key's K and V, as if V had as many columns as K
    tiles_m = gl.cdiv(seq_q + diagonal % ROWS, BLOCK_M)
    tiles = batch_heads * tiles_m
    sample = gl.program_id(0)
    samples = gl.num_programs(0)
    problem = Problem(batch_heads, heads, heads_per_kv, tiles_m, seq_q, seq_k, diagonal, scale)
    # Tiles of different heads come in turns if there is a causal mask. So equal distances would often mean the same few heads.
    number = ((sample.to(gl.int64) * tiles // samples + sample) % tiles).to(gl.int32)
    tile = _tile(number, problem, ROW_BYTES, BLOCK_M, BLOCK_N, CAUSAL)
    start_m = tile.start_m + sample % (BLOCK_M // ROWS) * ROWS
    seen = _key_tiles(start_m + ROWS, problem, BLOCK_N, CAUSAL)
    last_n = (seen - 1) * BLOCK_N
    one_n = sample % seen * BLOCK_N
    other_n = (sample + gl.cdiv(seen, 2)) % seen * BLOCK_N

    q_s = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_shape, q_desc.layout)
    first_s = gl.allocate_shared_memory(k_desc.dtype, first_desc.block_shape, first_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [3] + k_desc.block_shape, k_desc.layout)
    full = new_barriers(1, 1)
    mbarrier.expect(full.index(0), q_desc.block_type.nbytes + first_desc.block_type.nbytes + 3 * k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [tile.batch, tile.head, start_m, 0], full.index(0), q_s)
    tma.async_copy_global_to_shared(first_desc, [tile.batch, tile.kv_head, 0, 0], full.index(0), first_s)
    tma.async_copy_global_to_shared(k_desc, [tile.batch, tile.kv_head, last_n, 0], full.index(0), k_s.index(0))
    tma.async_copy_global_to_shared(k_desc, [tile.batch, tile.kv_head, one_n, 0], full.index(0), k_s.index(1))
    tma.async_copy_global_to_shared(k_desc, [tile.batch, tile.kv_head, other_n, 0], full.index(0), k_s.index(2))
    state = _state(state_ptr)
    _clear(sample, samples, tiles, state)

    mbarrier.wait(full.index(0), 0)
    q = q_s.reshape([ROWS, HEAD_DIM])
    s_first = _scores_of(q, first_s)
    s_last = _scores_of(q, k_s.index(0))
    s_one = _scores_of(q, k_s.index(1))
    s_other = _scores_of(q, k_s.index(2))
    s_first, s_last, s_one, s_other = warpgroup_mma_wait(0, [s_first, s_last, s_one, s_other])
    last = start_m + diagonal
    m = gl.max(_visible(s_last, last_n, seq_k, last, CAUSAL), 1)
    m_first = gl.convert_layout(gl.max(_visible(s_first, 0, seq_k, last, CAUSAL), 1), m.type.layout)
    m = gl.where(seen > 1, gl.maximum(m, m_first), m)
    s = gl.maximum(_visible(s_one, one_n, seq_k, last, CAUSAL), _visible(s_other, other_n, seq_k, last, CAUSAL))
    above = gl.max((gl.max(s, 1) - m) * gl.maximum(scale * LOG2_E, 1e-37), 0)
    layout: gl.constexpr = gl.BlockedLayout([LATELY // 128], [32], [4], [0])
    offs = gl.arange(0, LATELY, layout)
    failed = gl.full([LATELY], gl.where(above > limit, 1, 0), gl.int32, layout)
    gl.store(state.sample_failed + offs, failed, mask=offs % samples == sample)
