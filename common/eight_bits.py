"""Quantize a cache to 8 bits."""

import torch
from torch import Tensor

from common.checks import EIGHT_BITS

LARGEST = 448.0  # the largest number of e4m3


def quantized(tensor: Tensor, lengths: Tensor | None = None, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round K or V to float8 e4m3, with a factor for each head.

    e4m3 has 3 bits after the leading one, so a normal number's relative error is at most 1/16. A head's largest number becomes
    448. Numbers under 1/28,672 of it are rounded to multiples of 1/229,376 of it.

    Args:
        tensor: [B, Hkv, S, D].
        lengths: None, or the number of keys of each sequence, [B]. What is behind a sequence then does not count, and becomes
            zeros.
        factor: None, or a factor that is known, [B, Hkv], as for tokens that join a cache. Larger numbers than 448 factors
            become 448 factors.

    Returns:
        k or v for an `attention` that takes caches in 8 bits, and its `k_descale` or `v_descale`, [B, Hkv]: `tensor` is their
        product, except for rounding.
    """
    if lengths is not None:
        behind = torch.arange(tensor.shape[2], device=tensor.device) >= lengths[:, None]
        tensor = tensor.masked_fill(behind[:, None, :, None], 0)
    if factor is None:
        largest = tensor.abs().amax((2, 3)).float()
        factor = largest.clamp(min=torch.finfo(torch.float32).tiny * LARGEST) / LARGEST
    return (tensor / factor[..., None, None]).clamp(-LARGEST, LARGEST).to(EIGHT_BITS), factor
