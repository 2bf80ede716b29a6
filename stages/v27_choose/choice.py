"""Say what the host chooses for a problem, without running it."""

import math
from typing import NamedTuple

import torch

from common.layout import cdiv
from common.runtime import num_sms
from stages.shortbwd10_packed_backward.backward_splits import splits_of
from stages.wide11_packed_backward.backward_splits import splits_of as splits_of_wide

from .backward import BACKWARDS, chosen_backward
from .forward import FORWARDS, chosen_forward


class Choice(NamedTuple):
    """The directory names of the stages whose passes run, and in words how they divide the work."""

    forward: str
    backward: str
    forward_work: str = ""
    backward_work: str = ""


def _in_words(size: str, tiles: int, splits: int = 1) -> str:
    """Return the number of work tiles, and how many waves of CTAs they need if they all take the same time."""
    shared = f" in {splits} splits" if splits > 1 else ""
    return f"{tiles} tiles of {size}{shared}, {tiles * splits / num_sms():.2f} waves"


def choice(
    batch, heads, kv_heads, seq_q, seq_k, head_dim, value_dim, causal=False, diagonal=0, dtype=torch.float16
) -> Choice:  # fmt: skip
    """Return the stages that compute a problem of these sizes on the current GPU.

    float32 always runs v6's kernels, to which all tracks fall back.
    """
    if dtype == torch.float32:
        return Choice("v6_tile_order", "v6_tile_order")
    chosen = chosen_forward(batch, heads, kv_heads, seq_q, seq_k, head_dim, value_dim, causal, diagonal)
    track = chosen_backward(head_dim, value_dim)
    homes = (function.__module__.split(".")[1] for function in (FORWARDS[chosen.track], BACKWARDS[track]))
    width = max(head_dim, value_dim)
    keys = 64 if track == "wide" else 128
    tiles = cdiv(seq_k, keys) * batch * kv_heads
    if track == "wide":
        splits = splits_of_wide(tiles, heads // kv_heads, seq_q, seq_k, causal, diagonal, num_sms())
    else:
        block_m = 64 if width == 128 else 128  # queries of a step
        sizes = tiles, heads // kv_heads, seq_q, seq_k, head_dim, value_dim, block_m
        splits = math.prod(splits_of(*sizes, causal, diagonal, num_sms()))
    return Choice(
        *homes,
        _in_words(f"{chosen.queries} queries", chosen.tiles, chosen.splits),
        _in_words(f"{keys} keys", tiles, splits),
    )
