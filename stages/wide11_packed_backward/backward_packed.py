"""The backward of packed sequences at D = 256. Each tile has one CTA, because packed batches have many tiles."""

from common.kernels.descriptors import describe
from common.kernels.hopper import describe_rows, describe_tile
from common.kernels.packed import by_first_token
from common.layout import empty_rows

from .backward_list import list_tiles
from .backward_prepare import _prepare_kernel
from .backward_wide_dkv import _wide_dkv_kernel
from .backward_wide_dq import _wide_dq_kernel


def packed_backward(grad_out, q, k, v, out, lse, *, causal, scale, starts):
    """Return the gradients of q, k and v, of sequences that lie where `starts` says. Tokens of no sequence have zeros."""
    _, heads, tokens_q, head_dim = q.shape
    _, kv_heads, tokens_k, value_dim = v.shape
    dq, dk, dv = empty_rows(q), empty_rows(k), empty_rows(v)
    as_rows, as_tile = by_first_token(describe), by_first_token(describe_tile)
    key_list, query_list, head_tiles = list_tiles(starts, tokens_q, tokens_k, 64)
    stats = lse.new_empty(head_tiles * heads * 2, 64)
    _prepare_kernel[head_tiles * heads,](
        as_rows(out, 64, value_dim), as_rows(grad_out, 64, value_dim), lse, stats, None, None, heads, tokens_q,
        starts.queries, len(starts.queries) - 1, HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=64,
    )  # fmt: skip
    tiles = as_tile(q, 64), as_tile(k, 64), as_tile(v, 64), as_tile(grad_out, 64)
    sizes = scale, kv_heads, heads // kv_heads, tokens_q, tokens_k, 0, None
    _wide_dkv_kernel[(len(key_list) - 1) * kv_heads,](
        *tiles, describe_rows(stats, 2), as_tile(dk, 64), as_tile(dv, 64), None, None, dk, dv, key_list, *sizes,
        BLOCK_M=64, STAGES=2, CAUSAL=causal, num_warps=4, maxnreg=168,
    )  # fmt: skip
    _wide_dq_kernel[(len(query_list) - 1) * heads,](
        *tiles, stats, as_tile(dq, 64), None, dq, query_list, *sizes,
        HEAD_DIM=head_dim, VALUE_DIM=value_dim, K_STAGES=2, V_STAGES=1, CAUSAL=causal, num_warps=4, maxnreg=168,
    )  # fmt: skip
    return dq, dk, dv
