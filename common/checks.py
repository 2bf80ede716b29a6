"""Check the arguments of the operators. An error names the argument, what it got and what it takes."""

from numbers import Real

import numpy
import torch
from torch import Tensor

from common.runtime import DEVICE, INTERPRETED

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (16, 32, 64, 128, 256)
EIGHT_BITS = torch.float8_e4m3fn  # the dtype of k and v in an 8-bit cache
SMALLEST_SCALE, LARGEST_SCALE = 1e-30, 1e6  # limits of a scale's absolute value, unless the scale is 0
SMALLEST_PAGE = 16  # a page holds a power of two of keys, at least this many
BOTTOM_RIGHT = "bottom-right"  # `causal` is a bool or this text


def checked_flag(name, value) -> bool:
    """Return `value` as a bool if it is a bool of Python or numpy. Otherwise raise TypeError."""
    if not isinstance(value, (bool, numpy.bool_)):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return bool(value)


def diagonal(causal: bool | str, seq_q: int, seq_k: int) -> int:
    """Return the diagonal of a causal mask, as in `torch.tril`. Query i sees key j if j <= i + diagonal."""
    return seq_k - seq_q if causal == BOTTOM_RIGHT else 0


def checked_causal(causal, seq_q: int, seq_k: int) -> tuple[bool, int]:
    """Return whether there is a mask, and its diagonal. Raise TypeError or ValueError for an invalid `causal`."""
    if isinstance(causal, (bool, numpy.bool_)):
        return bool(causal), 0
    if not isinstance(causal, str):
        raise TypeError(f"causal must be a bool or {BOTTOM_RIGHT!r}, got {type(causal).__name__}")
    if causal != BOTTOM_RIGHT:
        raise ValueError(f"causal must be a bool or {BOTTOM_RIGHT!r}, got {causal[:40]!r}")
    if seq_q > seq_k:
        raise ValueError(
            f"causal={BOTTOM_RIGHT!r} needs at least as many keys as queries, got {seq_q} queries and {seq_k} keys"
        )
    return True, diagonal(causal, seq_q, seq_k)


def checked_scale(scale, head_dim: int) -> float:
    """Return `scale` as a float, or 1 / sqrt(head_dim) for None. Raise TypeError or ValueError for an invalid scale."""
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, (bool, numpy.bool_)) or not isinstance(scale, Real):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
    if scale != 0 and not SMALLEST_SCALE <= abs(scale) <= LARGEST_SCALE:  # also for NaN
        raise ValueError(
            f"scale must be 0 or have an absolute value from {SMALLEST_SCALE:g} to {LARGEST_SCALE:g}, got {str(scale)[:40]}"
        )
    return float(scale)


def _check_dense(name: str, tensor):
    """Raise TypeError if `tensor` is no dense tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout is not torch.strided:
        got = "a nested tensor" if tensor.is_nested else tensor.layout
        raise TypeError(f"{name} must be a dense tensor (layout torch.strided), got {got}")


def _checked_shapes(q, k, v, dimensions: str, of_keys: str | None = None, eight: bool = False) -> list[tuple]:
    """Return the shapes of q, k and v, which must have these `dimensions`, or k and v those `of_keys`.

    Raise as `check_inputs` does. With `eight`, k and v must have 8 bits, and q 16.
    This checks each tensor by itself, and leaves out how the shapes depend on each other.
    """
    shapes, of_keys = [], of_keys or dimensions
    for name, tensor, needed in (("q", q, dimensions), ("k", k, of_keys), ("v", v, of_keys)):
        _check_dense(name, tensor)
        shape = tuple(tensor.shape)
        if len(shape) != (number := needed.count(",") + 1):
            raise ValueError(f"{name} must have {number} dimensions {needed}, got {len(shape)}")
        if eight and name != "q":
            if tensor.dtype != EIGHT_BITS:
                raise TypeError(f"{name} must be {EIGHT_BITS}, as the other of k and v is, got {tensor.dtype}")
        elif tensor.dtype not in DTYPES[: 2 if eight else 3]:
            needed = "float16 or bfloat16, with k and v in 8 bits" if eight else "float16, bfloat16 or float32"
            raise TypeError(f"{name} must be {needed}, got {tensor.dtype}")
        if 0 in shape:
            raise ValueError(f"{name} must not have a dimension of 0, got {shape}")
        shapes.append(shape)
    if not eight and not q.dtype == k.dtype == v.dtype:
        name, other = ("k", k) if k.dtype != q.dtype else ("v", v)
        raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {other.dtype}")
    if not (device := q.device) == k.device == v.device:
        name, other = ("k", k) if k.device != device else ("v", v)
        raise ValueError(f"{name} must be on the device of q, {device}, got {other.device}")
    # On a machine without a GPU, a stage without kernels runs on the CPU.
    if device.type != DEVICE and (device.type != "cpu" or torch.cuda.is_available()):
        why = "kernels run on the CPU, through Triton's interpreter" if INTERPRETED else "a GPU is in use"
        raise ValueError(f"q must be on a {DEVICE} device ({why}), got {device}")
    of_q, _, of_v = shapes
    for name, head_dim in (("head_dim, the last dimension of q and k,", of_q[-1]), ("the last dimension of v", of_v[-1])):
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"{name} must be one of {HEAD_DIMS}, got {head_dim}")
    return shapes


def _check_groups(heads: int, kv_heads: int):
    if heads % kv_heads:
        raise ValueError(f"the heads of q must be a multiple of the heads of k and v: got {heads} and {kv_heads}")


def check_inputs(q, k, v, eight: bool = False):
    """Raise ValueError or TypeError for wrong inputs, before any kernel runs. With `eight`, k and v must have 8 bits.

    The message names the argument, its value and the valid values. Every call makes these checks, so they must be fast.
    """
    of_q, of_k, of_v = _checked_shapes(q, k, v, "[batch, heads, sequence, head_dim]", eight=eight)
    if (of_k[0], of_k[3]) != (of_q[0], of_q[3]):
        needed = "[batch, kv_heads, Sk, head_dim] with the batch and head_dim of q"
        raise ValueError(f"k must be {needed}: q {of_q}, k {of_k}")
    if of_v[:3] != of_k[:3]:
        raise ValueError(f"v must have k's batch, heads and length {of_k[:3]}, got {of_v[:3]}")
    _check_groups(of_q[1], of_k[1])


def _check_int32(name: str, tensor, q):
    """Raise ValueError or TypeError unless `tensor` is a dense int32 tensor on the device of q. Its values stay unread."""
    _check_dense(name, tensor)
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {tensor.dtype}")
    if tensor.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")


def check_cache_seqlens(cache_seqlens, q):
    """Raise ValueError or TypeError for wrong `cache_seqlens`, as `check_inputs` does. The lengths themselves stay unread."""
    _check_int32("cache_seqlens", cache_seqlens, q)
    if tuple(cache_seqlens.shape) != (q.shape[0],):
        needed = f"({q.shape[0]},), one length for each sequence of q"
        raise ValueError(f"cache_seqlens must have the shape {needed}, got {tuple(cache_seqlens.shape)}")


def check_paged(q, k, v, page_table, eight: bool = False):
    """Raise ValueError or TypeError for wrong inputs of a cache in pages, as `check_inputs` does. No values are read."""
    of_pages = "[pages, page_size, kv_heads, head_dim]"
    of_q, of_k, of_v = _checked_shapes(q, k, v, "[batch, heads, sequence, head_dim]", of_pages, eight)
    if of_k[3] != of_q[3]:
        raise ValueError(f"with page_table, k must be {of_pages} with the head_dim of q: q {of_q}, k {of_k}")
    if of_v[:3] != of_k[:3]:
        raise ValueError(f"v must have k's pages, page size and heads {of_k[:3]}, got {of_v[:3]}")
    _check_groups(of_q[1], of_k[2])
    if of_k[1] < SMALLEST_PAGE or of_k[1] & (of_k[1] - 1):
        needed = f"a power of two and at least {SMALLEST_PAGE}"
        raise ValueError(f"page_size, the second dimension of k and v, must be {needed}, got {of_k[1]}")
    _check_int32("page_table", page_table, q)
    if page_table.dim() != 2 or page_table.shape[0] != of_q[0] or page_table.shape[1] < 1:
        needed = f"({of_q[0]}, pages of a sequence), with a row for each sequence of q"
        raise ValueError(f"page_table must have the shape {needed}, got {tuple(page_table.shape)}")


def check_descales(q, k, k_descale, v_descale, kv_heads: int):
    """Raise ValueError or TypeError for wrong `k_descale` and `v_descale`, as `check_inputs` does. No values are read."""
    for name, descale in (("k_descale", k_descale), ("v_descale", v_descale)):
        if descale is None:
            continue
        if k.dtype != EIGHT_BITS:
            raise TypeError(f"{name} needs k and v in {EIGHT_BITS}, got {k.dtype}")
        _check_dense(name, descale)
        if descale.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {descale.dtype}")
        if descale.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {descale.device}")
        if tuple(descale.shape) != (needed := (q.shape[0], kv_heads)):
            raise ValueError(f"{name} must have the shape {needed}, [batch, kv_heads], got {tuple(descale.shape)}")


def check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k):
    """Raise ValueError or TypeError for wrong inputs of `attention_varlen`, as `check_inputs` does. No values are read."""
    of_q, of_k, of_v = _checked_shapes(q, k, v, "[tokens, heads, head_dim]")
    if of_k[2] != of_q[2]:
        raise ValueError(f"k must be [tokens, kv_heads, head_dim] with the head_dim of q: q {of_q}, k {of_k}")
    if of_v[:2] != of_k[:2]:
        raise ValueError(f"v must have k's tokens and heads {of_k[:2]}, got {of_v[:2]}")
    _check_groups(of_q[1], of_k[1])
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_int32(name, starts, q)
        if starts.dim() != 1 or len(starts) < 2:
            raise ValueError(f"{name} must have the shape (B + 1,) for B sequences, B >= 1, got {tuple(starts.shape)}")
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k must have the shape of cu_seqlens_q, {tuple(cu_seqlens_q.shape)}, got {tuple(cu_seqlens_k.shape)}"
        )
