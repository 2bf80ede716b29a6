"""With a stage's attention, the Llama examples have the same training losses as with SDPA, in one process and in several.

They refuse options that a stage does not support.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import stages
from common.runtime import DEVICE

transformers = pytest.importorskip("transformers")

from torch.nn.attention.bias import causal_lower_right  # noqa: E402

from examples import llama, long_llama  # noqa: E402

SIZE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE = 4, 2, 40  # steps, batch, tokens of a sequence
TOKENS = 1 + torch.arange(12, device=DEVICE).repeat(2, 1) * 7  # [B, S], arbitrary token ids


def sdpa(q, k, v, *, causal, scale):
    options = {"attn_mask": causal_lower_right(q.shape[2], k.shape[2])} if causal == "bottom-right" else {"is_causal": causal}
    return scaled_dot_product_attention(q, k, v, **options, scale=scale, enable_gqa=True)


def sdpa_in_float64(q, k, v, **options):
    return sdpa(q.double(), k.double(), v.double(), **options).to(q.dtype)


@functools.cache
def losses(attention):
    """Return the losses of a few float32 training steps. If `attention` is None, transformers' own SDPA computes attention."""
    if attention is not None:
        llama.register("attention", attention)
    model = llama.build("sdpa" if attention is None else "attention", torch.float32, **SIZE)
    return torch.tensor([loss for loss, _ in llama.train(model, llama.draw(*SHAPE), 1e-2)])


def tolerance():
    """Return the tolerance of a loss.

    It is five times the effect of SDPA's rounding on the losses, plus 4e-6 for the rounding of the loss.
    """
    return 5 * (losses(sdpa_in_float64) - losses(None)).abs().max() + 4e-6


@pytest.mark.parametrize("name", ["v3", next(name for name in reversed(stages.names()) if not stages.is_dead_end(name))])
def test_loss_matches_sdpa(name):
    if reason := stages.unavailable(name):
        pytest.skip(f"{name} {reason}")
    got = losses(stages.load(name).attention)
    assert (got - losses(None)).abs().max() <= tolerance()
    assert got[-1] < got[0] - 0.5, "nothing was learned"


def of_family(family, attn_implementation, **options):
    """Return a small model in eval mode. Its weights do not depend on the attention. "attention" is SDPA, which is registered
    as a stage would be."""
    llama.register("attention", sdpa)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(vocab_size=256, intermediate_size=64, pad_token_id=0, **SIZE, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    return model.to(DEVICE).eval()


@pytest.fixture
def model():
    return of_family("Llama", "attention")


ONES = torch.ones_like(TOKENS)


@pytest.mark.parametrize("options", [
    {}, {"attention_mask": ONES}, {"use_cache": True}, {"position_ids": torch.arange(5, 17, device=DEVICE)[None]},
    {"is_causal": False}, {"output_hidden_states": True, "output_router_logits": True},
    {"num_items_in_batch": torch.tensor(7)}, {"cu_seq_lens_q": None},
], ids=lambda options: ", ".join(options) or "none")  # fmt: skip
def test_takes_options_that_change_nothing(options, model):
    expected = of_family("Llama", "sdpa")(TOKENS, **options).logits
    torch.testing.assert_close(model(TOKENS, **options).logits, expected, rtol=0, atol=1e-5)


def padded(at):
    mask = ONES.clone()
    mask[1, at] = 0
    return mask


PACKED = {"position_ids": torch.arange(12, device=DEVICE)[None] % 6}
REFUSED = [  # (arguments of the model, text of the error)
    ({"attention_mask": padded(0)}, "a padding mask"), ({"attention_mask": padded(-1)}, "a padding mask"),
    ({"attention_mask": torch.ones(2, 1, 12, 12, device=DEVICE).tril()}, "an attention mask"),
    (PACKED, "packed sequences"), (PACKED | {"attention_mask": ONES}, "packed sequences"),
    (PACKED | {"use_cache": True}, "packed sequences"), ({"cu_seq_lens_q": torch.tensor([0, 6, 12])}, "cu_seq_lens_q"),
    ({"output_attentions": True}, "output_attentions"), ({"tilt": 0.5}, "tilt"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refuses_options_that_change_the_result(options, message, model):
    with pytest.raises(NotImplementedError, match=f"attention does not support .*{message}"):
        model(TOKENS, **options)


@pytest.mark.parametrize(("family", "options", "message"), [
    ("Llama", {"attention_dropout": 0.1}, "dropout"), ("Mistral", {"sliding_window": 11}, "a sliding window"),
    ("Llama4Text", {"attention_chunk_size": 11, "num_local_experts": 2, "head_dim": 16}, "chunks"),
    ("Gemma2", {"head_dim": 16}, "softcap"), ("GptOss", {"num_local_experts": 2, "head_dim": 16}, "s_aux"),
])  # fmt: skip
def test_refuses_features_of_other_models(family, options, message):
    with pytest.raises(NotImplementedError, match=message):
        of_family(family, "attention", **options).train()(TOKENS)


def test_queries_after_a_cache(model):
    """They have the logits of a whole sequence. A mask that leaves the cache out is refused, and so is an unfilled cache."""
    cache = model(TOKENS[:, :8], use_cache=True).past_key_values
    with pytest.raises(NotImplementedError, match="a padding mask"):
        model(TOKENS[:, 8:9], attention_mask=ONES[:, :1], past_key_values=cache, use_cache=True)
    after = model(TOKENS[:, 8:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(after, model(TOKENS).logits[:, 8:])
    for queries in (1, 4):
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        with pytest.raises(NotImplementedError, match="cache"):
            model(TOKENS[:, :queries], past_key_values=cache, use_cache=True)


def spread(group):
    """Return the losses in several processes that share the sequences."""
    return long_llama.train_together(stages.load("v3"), torch.float32, llama.draw(*SHAPE), SHAPE[2], 1e-2, group, **SIZE)


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
def test_losses_in_two_processes_equal_those_in_one(ranks):
    if ranks.size < 2:
        pytest.skip("needs 2 GPUs")
    for together in ranks.call(2, spread):
        assert together == pytest.approx(losses(stages.load("v3").attention).tolist(), abs=1e-5)
