"""Random shapes are reproducible, in the promised ranges, and cover what the README promises."""

from collections import Counter

from common.measure.random_shapes import GROUPS, HEAD_DIMS, LONGEST_S, MOST_HEADS, SHORTEST_S, draw, seconds
from common.measure.workloads import Workload


def test_a_seed_gives_the_same_shapes_again_and_another_seed_others():
    first = draw(0, 20)
    assert first == draw(0, 20) and first[:10] == draw(0, 5) and not {*first} & {*draw(1, 20)}
    shape = {"batch": 21, "heads": 3, "seq_len": 2688, "head_dim": 64, "causal": True, "dtype": "float16"}
    assert draw(2, 3)[4] == Workload("fwd", **shape)  # results of a seed stay comparable: its shapes never change


def test_shapes_are_in_range_and_of_all_kinds():
    works = draw(3, 300)
    for forward, backward in zip(works[::2], works[1::2], strict=True):
        assert forward.record() | {"pass": "bwd"} == backward.record()
        assert seconds(forward) >= SHORTEST_S and seconds(backward) <= LONGEST_S and forward.heads <= MOST_HEADS
        assert all(64 <= length <= 16384 for length in (forward.seq_len, forward.kv_len))
    for kinds, least in {
        tuple((work.head_dim,) for work in works): len(HEAD_DIMS),
        tuple((work.heads // work.kv_heads,) for work in works): len(GROUPS),
        tuple((work.causal, work.seq_len == work.kv_len, work.dtype) for work in works): 6,
    }.items():
        assert len(found := Counter(kinds)) == least and min(found.values()) >= len(works) / 20
    multiples = sum(work.seq_len % 64 == 0 for work in works) / len(works)
    assert 0.28 < multiples < 0.42  # a third, and a 64th of the others


def test_an_estimate_is_the_larger_of_the_times_for_flops_and_bytes():
    assert seconds(Workload("fwd", 1, 1, 16384, 128, False, "float16")) == 4 * 16384**2 * 128 / 5e14
    decoding = Workload("fwd", 64, 32, 1, 128, False, "float16", kv_heads=8, kv_len=16384)
    assert seconds(decoding) == 64 * (32 + 8 * 16384) * 256 * 2 / 2.5e12
