"""With a stage's attention, the Llama example has the same training losses as with SDPA. It refuses options that a stage does
not support."""

import functools

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

import stages
from common.runtime import DEVICE

transformers = pytest.importorskip("transformers")

from examples import llama  # noqa: E402

SIZE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
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
    return torch.tensor([loss for loss, _ in llama.train(model, llama.draw(4, 1, 40), 1e-2)])


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


WRONG = {
    "sees the future": lambda q, k, v, causal, scale: sdpa(q, k, v, causal=False, scale=scale),
    "scale off by 1 %": lambda q, k, v, causal, scale: sdpa(q, k, v, causal=causal, scale=scale * 1.01),
    "heads shared in another order": lambda q, k, v, **options: sdpa(q, k.flip(1), v.flip(1), **options),
}


@pytest.mark.parametrize("attention", WRONG.values(), ids=WRONG.keys())
def test_loss_reveals_wrong_attention(attention):
    assert (losses(attention) - losses(None)).abs().max() > tolerance()


@pytest.fixture
def model():
    """Return a Llama in eval mode. Its attention is SDPA, registered with `llama.register`."""
    llama.register("attention", sdpa)
    return llama.build("attention", torch.float32, **SIZE).eval()


@pytest.fixture
def reference():
    """Return the same Llama with transformers' own SDPA."""
    return llama.build("sdpa", torch.float32, **SIZE).eval()


TAKEN = {
    "nothing else": {}, "a mask of ones": {"attention_mask": torch.ones_like(TOKENS)}, "a cache": {"use_cache": True},
    "positions that do not begin at 0": {"position_ids": torch.arange(5, 17, device=DEVICE)[None]},
    "no causal mask": {"is_causal": False}, "hidden states asked for": {"output_hidden_states": True},
    "router logits asked for": {"output_router_logits": True},
    "what a trainer says": {"num_items_in_batch": torch.tensor(7)}, "lengths of None": {"cu_seq_lens_q": None},
}  # fmt: skip


@pytest.mark.parametrize("options", TAKEN.values(), ids=TAKEN.keys())
def test_takes_options_that_change_nothing(options, model, reference):
    torch.testing.assert_close(model(TOKENS, **options).logits, reference(TOKENS, **options).logits, rtol=0, atol=1e-5)


def test_a_mask_of_ones_is_none(model):
    assert torch.equal(model(TOKENS, attention_mask=torch.ones_like(TOKENS)).logits, model(TOKENS).logits)


@pytest.mark.long
def test_compiles_with_a_mask_of_ones(model):
    ones = torch.ones_like(TOKENS)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(TOKENS, attention_mask=ones).logits, model(TOKENS).logits)


def test_generates_with_a_cache(model, reference):
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    got, expected = (each.generate(TOKENS, **options) for each in (model, reference))
    assert got.shape == (2, 17) and torch.equal(got, expected)


def padded(at):
    mask = torch.ones_like(TOKENS)
    mask[1, at] = 0
    return mask


PACKED = {"position_ids": torch.arange(12, device=DEVICE)[None] % 6}
REFUSED = {  # name: (arguments of the model, text of the error)
    "padding on the left": ({"attention_mask": padded(0)}, "a padding mask"),
    "padding on the right": ({"attention_mask": padded(-1)}, "a padding mask"),
    "a mask of 4 dimensions": ({"attention_mask": torch.ones(2, 1, 12, 12, device=DEVICE).tril()}, "an attention mask"),
    "packed": (PACKED, "packed sequences"),
    "packed, with a mask of ones": (PACKED | {"attention_mask": torch.ones_like(TOKENS)}, "packed sequences"),
    "packed, with a cache": (PACKED | {"use_cache": True}, "packed sequences"),
    "packed, by their lengths": ({"cu_seq_lens_q": torch.tensor([0, 6, 12])}, "cu_seq_lens_q"),
    "weights asked for": ({"output_attentions": True}, "output_attentions"),
    "a keyword that nobody knows": ({"tilt": 0.5}, "tilt"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses_options_that_change_the_result(options, message, model):
    with pytest.raises(NotImplementedError, match=f"attention does not support .*{message}"):
        model(TOKENS, **options)


def test_several_queries_after_a_cache_give_the_logits_of_a_whole_sequence(model):
    whole = model(TOKENS).logits
    cache = model(TOKENS[:, :8], use_cache=True).past_key_values
    after = model(TOKENS[:, 8:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(after, whole[:, 8:])


def test_refuses_a_mask_that_leaves_the_cache_out(model):
    cache = model(TOKENS[:, :8], use_cache=True).past_key_values
    with pytest.raises(NotImplementedError, match="a padding mask"):
        model(TOKENS[:, 8:9], attention_mask=torch.ones_like(TOKENS)[:, :1], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("queries", [1, 4])
def test_refuses_a_cache_with_room_to_spare(queries, model):
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(NotImplementedError, match="cache"):
        model(TOKENS[:, :queries], past_key_values=cache, use_cache=True)


def test_refuses_dropout_in_training():
    llama.register("attention", sdpa)
    model = llama.build("attention", torch.float32, attention_dropout=0.1, **SIZE)
    model.eval()(TOKENS)
    with pytest.raises(NotImplementedError, match="dropout"):
        model.train()(TOKENS)


def of_family(family, attn_implementation, **options):
    """Return a small model of another family in eval mode. Its weights do not depend on the attention."""
    llama.register("attention", sdpa)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(vocab_size=256, intermediate_size=64, pad_token_id=0, **SIZE, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    return model.to(DEVICE).eval()


@pytest.mark.parametrize(("family", "options", "message"), [
    ("Mistral", {"sliding_window": 11}, "a sliding window"),
    ("Gemma2", {"head_dim": 16, "sliding_window": 11}, "a sliding window"),
    ("Llama4Text", {"attention_chunk_size": 11, "num_local_experts": 2, "head_dim": 16}, "chunks"),
    ("Gemma2", {"head_dim": 16}, "softcap"), ("GptOss", {"num_local_experts": 2, "head_dim": 16}, "s_aux"),
])  # fmt: skip
def test_refuses_features_of_other_models(family, options, message):
    with pytest.raises(NotImplementedError, match=message):
        of_family(family, "attention", **options)(TOKENS)


@pytest.mark.parametrize(("family", "options"), [
    ("Mistral", {"sliding_window": 12}), ("Granite", {"attention_multiplier": 0.5}),
])  # fmt: skip
def test_takes_a_window_that_hides_nothing_and_any_scale(family, options):
    got, expected = (of_family(family, name, **options)(TOKENS).logits for name in ("attention", "sdpa"))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "taken", "refused"), [
    ("sliding_window", (None, 12), (11, 1)),
    *((name, (None, False, 0), (8, 0.5, torch.zeros(4))) for name in ("softcap", "s_aux", "position_bias", "head_mask", "x")),
])  # fmt: skip
def test_refuses_a_keyword_by_its_name(name, taken, refused, model):
    attend = transformers.AttentionInterface()["attention"]
    q = torch.ones(1, 4, 12, 16, device=DEVICE)
    for value in taken:
        assert attend(model, q, q, q, None, **{name: value})[0].shape == (1, 12, 4, 16)
    for value in refused:
        with pytest.raises(NotImplementedError, match=name.replace("sliding_", "a sliding ")):
            attend(model, q, q, q, None, **{name: value})


def test_command_shows_losses_and_times(capsys):
    llama.main(["--stage=v3", "--steps=2", "--batch=1", "--seq-len=20"])
    shown = capsys.readouterr()
    assert "loss, v3 " in shown.out and "median step, sdpa:" in shown.out
    assert ("times mean nothing" in shown.out) == (DEVICE == "cpu")
    assert not shown.err, "a progress bar where there is no terminal"


def test_command_names_the_stages(capsys):
    with pytest.raises(SystemExit):
        llama.main(["--stage=v99"])
    assert "no stage is called 'v99'; there are v0 to v" in capsys.readouterr().err
