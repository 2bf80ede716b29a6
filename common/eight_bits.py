"""Quantize a cache to 8 bits."""

import torch
from torch import Tensor

from common.checks import EIGHT_BITS

LARGEST = 448.0  # the largest number of e4m3


def quantized(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Round K or V to float8 e4m3, with a factor for each head.

    e4m3 has 3 bits after the leading one, so a normal number's relative error is at most 1/16. A head's largest number becomes
    448. Numbers under 1/28,672 of it are rounded to multiples of 1/229,376 of it.

    Args:
        tensor: [B, Hkv, S, D]. All S positions count for the factor. So fill those behind a sequence with zeros.

    Returns:
        k or v for an `attention` that takes caches in 8 bits, and its `k_descale` or `v_descale`, [B, Hkv]: `tensor` is their
        product, except for rounding.
    """
    largest = tensor.abs().amax((2, 3)).float()
    factor = largest.clamp(min=torch.finfo(torch.float32).tiny * LARGEST) / LARGEST
    return (tensor / factor[..., None, None]).to(EIGHT_BITS), factor
