"""A Llama whose sequences are split over several processes has the same losses as in one process."""

import pytest
import torch
import torch.distributed as dist

import stages

pytest.importorskip("transformers")

from examples import llama, long_llama  # noqa: E402

SIZE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
STEPS, BATCH, LENGTH, RATE = 4, 2, 40, 1e-2


def together(group):
    batches = llama.draw(STEPS, BATCH, LENGTH)
    return long_llama.train_together(stages.load("v3"), torch.float32, batches, LENGTH, RATE, group, **SIZE)


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
def test_losses_equal_one_process(ranks):
    if ranks.size < 2:
        pytest.skip("needs 2 GPUs")
    llama.register("attention", stages.load("v3").attention)
    model = llama.build("attention", torch.float32, **SIZE)
    alone = [loss for loss, _ in llama.train(model, llama.draw(STEPS, BATCH, LENGTH), RATE)]
    assert alone[-1] < alone[0] - 0.5, "nothing was learned"
    for losses in ranks.call(2, together):
        assert losses == pytest.approx(alone, abs=1e-5)
