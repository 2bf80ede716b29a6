"""Draw the inputs of attention: normally distributed ones, and hostile ones.

The tests and the benchmark draw their inputs here. Attention sinks may stand at any key, in all heads or in one. Scores may
have any standard deviation. Some channels of K may be much larger than the others, and V may have a mean.
"""

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from common.runtime import DEVICE


@dataclass(frozen=True)
class Sink:
    """A key that has the same score with every query of some heads.

    key: the number of the key, modulo the number of keys.
    nats: the score, after scaling. The other keys of these heads have scores of mean 0.
    head: the number of the K/V head, modulo the number of K/V heads; None means all heads.
    """

    key: int
    nats: float
    head: int | None = None


@dataclass(frozen=True)
class Scores:
    """How q, k and v are distributed.

    std: the standard deviation of the scaled scores.
    sinks: the attention sinks.
    outliers: (n, factor): the first n channels of K are larger by this factor; q is smaller, so that `std` holds.
    value_mean: the mean of V.
    repeats: this many keys from the first sink on equal it, K and V; 0 and 1 mean no repetition.
    lone: all other keys of heads with sinks, except the first and the last, score far below the sinks (-12 nats).
    """

    std: float = 1.0
    sinks: tuple[Sink, ...] = ()
    outliers: tuple[int, float] = (0, 1.0)
    value_mean: float = 0.0
    repeats: int = 0
    lone: bool = False


NORMAL = Scores()


def draw(
    q_shape, k_shape, v_shape, dtype: torch.dtype, scale: float, scores: Scores = NORMAL, generator=None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q, k, v and the output's gradient.

    Args:
        q_shape: [B, H, Sq, D]. k_shape: [B, Hkv, Sk, D]. v_shape: [B, Hkv, Sk, Dv].
        scale: the scale that attention will be called with. With a scale of 0, q and k are drawn as for a scale of 1.
        generator: a torch.Generator on the device; None means torch's default generator.
    """
    shapes = q_shape, k_shape, v_shape, (*q_shape[:3], v_shape[3])
    q, k, v, grad_out = (torch.randn(shape, generator=generator, device=DEVICE) for shape in shapes)
    size, head_dim = abs(scale) or 1.0, q_shape[3]
    wide, factor = scores.outliers
    spread = math.sqrt(scores.std / size) * head_dim**-0.25  # the standard deviation of q and of k
    q *= spread * math.sqrt(head_dim / (head_dim - wide + wide * factor**2))
    k *= spread
    k[..., :wide] *= factor
    v += scores.value_mean
    _place_sinks(q, k, v, scores, math.copysign(size, scale))
    return tuple(tensor.to(dtype) for tensor in (q, k, v, grad_out))


def _place_sinks(q, k, v, scores, scale):
    """Change q, k and v so that they have the sinks.

    Sinks use the last channel, so that a score's large product is added last. Products added after it would lose digits.
    """
    height = math.sqrt(max((sink.nats for sink in scores.sinks), default=0) / abs(scale))  # of these queries
    groups = q.unflatten(1, (k.shape[1], -1))  # [B, Hkv, H / Hkv, Sq, D], a view of q
    every = list(range(k.shape[1]))
    heads_of = [every if sink.head is None else [sink.head % len(every)] for sink in scores.sinks]
    for heads in heads_of:
        groups[:, heads, :, :, -1] = height
        k[:, heads, :, -1] = 0
        if scores.lone:
            k[:, heads, 1:-1, -1] = -12 / (height * scale)
    for number, (sink, heads) in enumerate(zip(scores.sinks, heads_of, strict=True)):
        key = sink.key % k.shape[2]
        k[:, heads, key] = 0
        k[:, heads, key, -1] = sink.nats / (height * scale)
        if scores.repeats and number == 0:
            k[:, heads, key : key + scores.repeats] = k[:, heads, key : key + 1]
            v[:, heads, key : key + scores.repeats] = v[:, heads, key : key + 1]


def hostile(seed: int, keys: int, kv_heads: int) -> Scores:
    """Return hostile scores: sinks of 4 to 88 nats at any keys, in one head or in all; wide scores; outlier channels; V with a
    mean. Each is left out at times.

    Args:
        seed: equal seeds give equal scores.
        keys: the number of keys.
        kv_heads: the number of K/V heads.
    """
    choose = random.Random(seed)
    highest = choose.choice((12, 24, 88))
    nats = choose.uniform(4, highest)
    equal = choose.random() < 0.3
    sinks = []
    for _ in range(choose.choice((0, 1, 1, 1, 2, 4))):
        key, own = choose.randrange(keys), nats if equal else choose.uniform(4, highest)
        sinks.append(Sink(key, own, choose.choice((None, choose.randrange(kv_heads)))))
    return Scores(
        std=choose.choice((1, 1, 1, 0.3, 2, 4, 8, 16)),
        sinks=tuple(sinks),
        outliers=choose.choice(((0, 1.0), (0, 1.0), (4, 20.0))),
        value_mean=choose.choice((0, 0, 1.0, 10.0)),
        lone=choose.random() < 0.2,
        repeats=choose.choice((0, 0, 0, 4, 16)),
    )
