"""Draw workloads at random: shapes that nobody chose."""

import random

from common.measure.workloads import DTYPES, Workload

GROUPS = (1, 3, 4, 5, 8, 16)  # query heads that share a K/V head
HEAD_DIMS = (64, 128, 256)
SHORTEST, LONGEST = 64, 16384  # queries and keys
MOST_HEADS = 128  # query heads

# Seeds, and their numbers of shapes. No constant is fitted to these shapes.
JUDGED = {100: 100, 200: 50, 300: 50}

# FLOP/s, and bytes/s from memory, to estimate a time. They are round numbers below what Hopper GPUs reach.
FLOP_RATE, MEMORY_RATE = 5e14, 2.5e12
SHORTEST_S, LONGEST_S = 1e-5, 2e-2


def seconds(work: Workload) -> float:
    """Estimate a pass's time on a GPU, without launches: the larger of the times for FLOPs and for bytes."""
    queries = work.heads * work.seq_len * (work.head_dim + work.value_dim)
    keys = work.kv_heads * work.kv_len * (work.head_dim + work.value_dim)
    size = work.batch * (queries + keys) * DTYPES[work.dtype].itemsize * (1 if work.pass_ == "fwd" else 2)
    return max(work.flops / FLOP_RATE, size / MEMORY_RATE)


def _log_uniform(rng: random.Random, least: int, most: int) -> int:
    """Return a number between `least` and `most`; each factor of 2 is equally likely."""
    return min(most, int(least * ((most + 1) / least) ** rng.random()))


def _pick(rng: random.Random, values):
    return values[int(rng.random() * len(values))]  # unlike `choice`, it draws the same values with every version of Python


def _length(rng: random.Random) -> int:
    """Return a length, log-uniform. A third of all lengths are multiples of 64."""
    length = _log_uniform(rng, SHORTEST, LONGEST)
    return max(1, round(length / 64)) * 64 if rng.random() < 1 / 3 else length


def _shape(rng: random.Random) -> dict:
    """Return the fields of a workload. Half of the shapes are causal, and a quarter have more or fewer keys than queries."""
    group, kv_heads = _pick(rng, GROUPS), _log_uniform(rng, 1, 32)
    mask = _pick(rng, ("causal", "causal", "full", "keys"))
    seq_len, kv_len = _length(rng), _length(rng)
    return {
        "batch": _log_uniform(rng, 1, 64), "heads": group * kv_heads, "kv_heads": kv_heads,
        "seq_len": seq_len, "kv_len": kv_len if mask == "keys" else seq_len, "causal": mask == "causal",
        "head_dim": _pick(rng, HEAD_DIMS), "dtype": _pick(rng, ("float16", "bfloat16")),
    }  # fmt: skip


def draw(seed: int, count: int) -> list[Workload]:
    """Return the forwards and the backwards of `count` shapes, the same for the same seed.

    Shapes are drawn again until a forward takes about 10 µs or more, and a backward 20 ms or less.
    """
    rng, found = random.Random(seed), []
    while len(found) < 2 * count:
        shape = _shape(rng)
        forward, backward = (Workload(pass_, **shape) for pass_ in ("fwd", "bwd"))
        if shape["heads"] <= MOST_HEADS and seconds(forward) >= SHORTEST_S and seconds(backward) <= LONGEST_S:
            found += [forward, backward]
    return found
