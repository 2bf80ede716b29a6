"""Drawn inputs have the distribution that is asked for."""

import pytest
import torch

from common.measure.inputs import Scores, Sink, draw, hostile
from common.measure.reference import plain
from common.runtime import DEVICE

SHAPES = (2, 4, 100, 64), (2, 2, 200, 64), (2, 2, 200, 32)


def drawn(scores, scale=0.125, dtype=torch.float32):
    return draw(*SHAPES, dtype, scale, scores, torch.Generator(DEVICE).manual_seed(0))


def scores_of(q, k, scale):
    return (q @ k.repeat_interleave(2, 1).mT * scale).double()


@pytest.mark.parametrize("scale", [0.125, -3.0, 1e-3])
@pytest.mark.parametrize("outliers", [(0, 1.0), (4, 20.0)])
@pytest.mark.parametrize("std", [0.3, 16])
def test_scores_have_their_standard_deviation(std, outliers, scale):
    q, k, v, grad_out = drawn(Scores(std=std, outliers=outliers, value_mean=10.0), scale)
    assert scores_of(q, k, scale).std().item() == pytest.approx(std, rel=0.15)
    assert (k[..., :4].std() / k[..., 4:].std()).item() == pytest.approx(outliers[1], rel=0.1)
    assert grad_out.shape == (2, 4, 100, 32) and abs(v.mean() - 10) < 0.05


@pytest.mark.parametrize("scale", [0.125, -3.0])
def test_several_sinks_have_their_scores(scale):
    sinks = Sink(50, 24.0), Sink(20, 88.0, head=3), Sink(199 + 200, 4.0, head=0)
    scores = scores_of(*drawn(Scores(sinks=sinks), scale)[:2], scale)
    for key, nats, heads in ((50, 24.0, slice(0, 4)), (20, 88.0, slice(2, 4)), (199, 4.0, slice(0, 2))):
        torch.testing.assert_close(scores[:, heads, :, key], torch.full_like(scores[:, heads, :, key], nats), rtol=1e-5, atol=0)
    assert scores[:, :2, :, 20].std().item() == pytest.approx(1, rel=0.2)  # head 0 has no sink there


def test_other_keys_may_be_far_below_the_sinks_and_sinks_may_repeat():
    scores = Scores(sinks=(Sink(50, 9.0, head=1),), lone=True, repeats=3)
    q, k, v, _ = drawn(scores)
    found = scores_of(q, k, 0.125)[:, 2:]
    assert found[..., [*range(1, 50), *range(53, 199)]].mean().item() == pytest.approx(-12, abs=0.2)
    assert (found[..., 50:53] - 9).abs().max() < 1e-4 and found[..., [0, 199]].mean().abs() < 0.5
    assert torch.equal(v[:, 1, 50:53], v[:, 1, 50:51].expand(-1, 3, -1)) and not torch.equal(v[:, 0, 50], v[:, 0, 51])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hostile_scores_differ_and_are_finite(dtype):
    drawn_scores = [hostile(seed, 200, 2) for seed in range(30)]
    assert drawn_scores[0] == hostile(0, 200, 2) and len(set(drawn_scores)) > 20
    assert {len(scores.sinks) for scores in drawn_scores} == {0, 1, 2, 4}
    assert all(4 <= sink.nats <= 88 and sink.key < 200 for scores in drawn_scores for sink in scores.sinks)
    for scores in drawn_scores[:8]:
        q, k, v, grad_out = drawn(scores, dtype=dtype)
        assert all(result.isfinite().all() for result in plain(q, k, v, True, 0.125, grad_out).values())
