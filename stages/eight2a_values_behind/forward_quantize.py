"""The kernel that runs before the forward kernel: round K and V to e4m3, a scale for each key tile, and transpose V."""

import torch
import triton
import triton.language as tl

from common.kernels.descriptors import describe
from common.layout import cdiv

LARGEST = tl.constexpr(448.0)  # the largest number of e4m3
# Limits of a key tile's scale. With V's, an accumulator does not overflow when its unit changes (see `_accumulate`).
K_SCALES = tl.constexpr((1e-30, 1e36))
V_SCALES = tl.constexpr((2.0**-40, 2.0**40))


@triton.jit
def _rounded(x, SCALES: tl.constexpr):
    """Return a tile in e4m3, and its scale: the largest finite number becomes 448.

    Numbers that are not finite, or too large for the largest scale, become NaN.
    """
    size = tl.abs(x)
    largest = tl.max(tl.max(tl.where(size < float("inf"), size, 0.0), 1), 0)
    scale = tl.minimum(tl.maximum(largest / LARGEST, SCALES[0]), SCALES[1])
    x *= 1.0 / scale
    return tl.where(tl.abs(x) < LARGEST + 1, x, float("nan")).to(tl.float8e4nv), scale


@triton.jit(do_not_specialize=["kv_heads", "seq_k"])
def _quantize_kernel(k_desc, v_desc, k8_desc, v8_desc, scales_ptr, kv_heads, seq_k, BLOCK_N: tl.constexpr):
    """Round a key tile. An 8-bit matmul reads both operands along the summed dimension, so V is stored as Vᵀ, [Dv, keys]."""
    HEAD_DIM: tl.constexpr = k_desc.block_shape[3]
    VALUE_DIM: tl.constexpr = v_desc.block_shape[3]
    tiles = tl.cdiv(seq_k, BLOCK_N)
    start_n = tl.program_id(0) % tiles * BLOCK_N
    batch = tl.program_id(0) // tiles // kv_heads
    head = tl.program_id(0) // tiles % kv_heads
    scale_ptr = scales_ptr + tl.program_id(0).to(tl.int64) * 2
    k = k_desc.load([batch, head, start_n, 0]).reshape(BLOCK_N, HEAD_DIM).to(tl.float32)
    k, scale = _rounded(k, K_SCALES)
    k8_desc.store([batch, head, start_n, 0], k.reshape(1, 1, BLOCK_N, HEAD_DIM))
    tl.store(scale_ptr, scale)
    v = v_desc.load([batch, head, start_n, 0]).reshape(BLOCK_N, VALUE_DIM).to(tl.float32)
    v, scale = _rounded(v, V_SCALES)
    # The order of the keys in `_operand`'s P: [16 keys, half, thread, element] becomes [16 keys, thread, half, element].
    v = v.reshape(BLOCK_N // 16, 2, 4, 2, VALUE_DIM).permute(0, 2, 1, 3, 4).reshape(BLOCK_N, VALUE_DIM)
    v8_desc.store([batch, head, 0, start_n], tl.trans(v).reshape(1, 1, VALUE_DIM, BLOCK_N))
    tl.store(scale_ptr + 1, tl.log2(scale))


def quantized(k, v, keys):
    """Round K and V to e4m3, with a scale for each tile of `keys` keys.

    Returns:
        K, [B, Hkv, Sk, D]; Vᵀ of whole key tiles, [B, Hkv, Dv, tiles * keys], with zeros behind the last key, and keys in
        the order of `_operand`; K's scale and the log2 of V's scale, [B, Hkv, tiles, 2], float32.
    """
    batch, heads, seq_k, head_dim = k.shape
    tiles, value_dim = cdiv(seq_k, keys), v.shape[3]
    k8 = k.new_empty(k.shape, dtype=torch.float8_e4m3fn)
    v8 = v.new_empty((batch, heads, value_dim, tiles * keys), dtype=torch.float8_e4m3fn)
    scales = k.new_empty((batch, heads, tiles, 2), dtype=torch.float32)
    _quantize_kernel[batch * heads * tiles,](
        describe(k, keys, head_dim), describe(v, keys, value_dim), describe(k8, keys, head_dim), describe(v8, value_dim, keys),
        scales, heads, seq_k, BLOCK_N=keys, num_warps=8,
    )  # fmt: skip
    return k8, v8, scales
