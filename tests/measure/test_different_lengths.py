"""The benchmarks of packed batches and of decoding loops draw valid lengths, and compare what computes the same."""

import pytest
import torch
from cases import available

import stages
from common.measure import ceilings, decoding, eight, options, packed, ways
from common.measure.baselines import BASELINES
from common.runtime import DEVICE


@pytest.mark.parametrize("tokens", packed.TOKENS)
def test_lengths_are_drawn_within_their_limits(tokens):
    lengths = [packed.draw(tokens, seed) for seed in range(20)]
    assert all(sum(drawn) == tokens for drawn in lengths)
    assert all(packed.SHORTEST <= length <= packed.LONGEST for drawn in lengths for length in drawn[:-1])
    assert packed.draw(tokens, 3) == lengths[3] != lengths[4]
    assert packed.starts_of([3, 0, 2], "cpu").tolist() == [0, 3, 3, 5]


@pytest.mark.parametrize("causal", [True, False])
def test_a_padded_batch_has_the_results_of_the_packed_one(causal):
    """Without a mask, a padded batch also sees its padding. So only a batch without padding has the same results."""
    available(stages.newest())
    lengths = [70, 5, 130] if causal else [64, 64]
    q, k, v, grad_out = (torch.randn(sum(lengths), 2, 64, device=DEVICE).half() for _ in range(4))
    found = packed.calls(lengths, "fwd", [q, k, v], grad_out, causal)
    own, batch = found[stages.newest()]()(), found["padded"]()()
    for number, part in enumerate(own.split(lengths)):
        torch.testing.assert_close(batch[number, :, : len(part)].transpose(0, 1), part, rtol=1e-2, atol=1e-3)
    assert packed.calls([1] * 40 + [130], "fwd", [q, k, v], grad_out, causal).keys() == found.keys() - {"padded"}


def test_a_step_attends_to_the_keys_that_the_lengths_count():
    available(stages.newest())
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, *shape, 64, device=DEVICE).half() for shape in ((1, 4), (100, 2), (100, 2)))
    whole = decoding.implementations(q, k, v, torch.full((2,), 100, dtype=torch.int32, device=DEVICE))
    eight = f"{stages.newest()}, 8 bits"
    assert whole.keys() == {stages.newest(), eight, "sdpa, whole"} | BASELINES.keys() & {"flash-3"}
    torch.testing.assert_close(whole[stages.newest()](), whole["sdpa, whole"](), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(whole[eight](), whole["sdpa, whole"](), rtol=0.2, atol=0.05)
    part = decoding.implementations(q, k, v, torch.full((2,), 60, dtype=torch.int32, device=DEVICE))[stages.newest()]()
    expected = decoding.implementations(q, k[:, :60], v[:, :60], None)["sdpa, whole"]()
    torch.testing.assert_close(part, expected, rtol=1e-2, atol=1e-3)
    lengths, table = torch.full((2,), 32, dtype=torch.int32, device=DEVICE), torch.tensor([[1, 0], [3, 2]]).int().to(DEVICE)
    paged = (tensor[:, :32].reshape(4, 16, 2, 64) for tensor in (k, v))
    swapped = (tensor[:, :32].unflatten(1, (2, 16)).flip(1).flatten(1, 2) for tensor in (k, v))
    expected = decoding.implementations(q, *swapped, None)["sdpa, whole"]()
    found = decoding.implementations(q, *paged, lengths, table, ["lengths1", stages.newest(), "lengths4"])
    eight = found.pop(f"{stages.newest()}, 8 bits")()
    torch.testing.assert_close(eight, expected, rtol=0.2, atol=0.05)
    own = [call() for name, call in found.items() if name not in BASELINES]
    assert len(own) == 2, "lengths1 takes no pages"
    for part in own:
        torch.testing.assert_close(part, expected, rtol=1e-2, atol=1e-3)


def test_equal_lengths_have_as_many_keys_as_different_ones():
    different, equal = decoding.spread(64, 8192)
    assert different.dtype == equal.dtype == torch.int32 and different.min() >= decoding.SHORTEST and different.max() <= 8192
    assert abs(different.sum() - equal.sum()) <= 64 and len(set(different.tolist())) > 50


def test_tables_compare_with_the_newest_stage():
    us = {stages.newest(): 10.0, "flash-3": 15.0, "flash-2": 20.0}
    record = {"pass": "fwd", "tokens": 100, "sequences": 2, "kv_heads": 8, "head_dim": 64, "causal": True, "us": us}
    assert "1.50" in packed.table([record | {"host_us": 1.0}])
    us = {
        name: dict.fromkeys(
            ("graph", "alone", "host", "different", "equal", *(f"pages of {page}" for page in decoding.PAGES)), time
        )
        for name, time in us.items()
    }
    record = {"batch": 1, "heads": 32, "kv_heads": 8, "capacity": 1024, "copy_us": 9.0, "us": us}
    assert "0.90" in (found := decoding.table([record])) and "1.50" in found and "pages of 16, × flash-3" in found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("module", [packed, decoding, ceilings, eight, ways])
def test_a_hopper_gpu_is_needed(module, device, tmp_path, monkeypatch):
    """Also if kernels are not interpreted, and there is no GPU."""
    monkeypatch.setattr(options, "DEVICE", device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=rf"common.measure.{module.__name__.split('.')[-1]} needs a Hopper GPU"):
        module.main([str(tmp_path / "run.json")])
