"""Examples of sequences of different lengths: a stage has the results of SDPA, which gets each sequence alone or padded."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import stages
from common.runtime import DEVICE

pytest.importorskip("transformers")

from examples import generate, packed  # noqa: E402

STEPS = 3
needs_the_newest = pytest.mark.skipif(bool(stages.unavailable(stages.newest())), reason="the newest stage cannot run here")


@needs_the_newest
def test_a_batch_with_a_cache_chooses_the_tokens_of_each_sequence_alone(capsys):
    generate.main(["--tokens", "8"])
    said = capsys.readouterr().out
    assert said.endswith("choose the same tokens.\n")
    learned = (" but it ", " to do: ", *([" beginni"] if DEVICE == "cpu" else []))  # a GPU draws another model, which errs once
    assert all(f"{words!r}\n" in said for words in learned), "the text was not learned"


def sdpa_of_each(q, k, v, starts, _, *, causal, scale):
    """Return SDPA's attention of packed sequences. It gets each sequence alone, and has gradients."""
    sizes = starts.diff().tolist()
    parts = zip(*(each.float().transpose(0, 1).split(sizes, dim=1) for each in (q, k, v)), strict=True)
    outs = [scaled_dot_product_attention(*part, is_causal=causal, scale=scale, enable_gqa=True) for part in parts]
    return torch.cat(outs, dim=1).transpose(0, 1).to(q.dtype)


def differences(gradients):
    """Return how far the losses of the packed sequences, with SDPA rounded to float16, are from the padded batch's."""
    packed.register("packed", sdpa_of_each)
    found = packed.losses(STEPS, gradients)
    return [abs(one - other) for one, other in zip(*found.values(), strict=True)]


@needs_the_newest
def test_packed_sequences_have_the_losses_of_the_padded_batch(capsys):
    packed.main(["--steps", str(STEPS)])
    said = capsys.readouterr().out
    assert float(said.split()[-1]) <= 5 * max(differences("cannot train" not in said)) + 1e-5  # 1e-5 for the printed digits


def test_a_model_learns_from_packed_sequences_as_from_the_padded_batch():
    """The last loss depends on two gradients. If sequences saw each other, losses would change by over 2e-3."""
    assert max(differences(True)) < 1e-3
    learned, unlearned = (packed.losses(STEPS, gradients)["packed"][-1] for gradients in (True, False))
    assert learned < unlearned - packed.llama.RATE / 0.03  # 0.1 on the CPU; a GPU has a lower rate
