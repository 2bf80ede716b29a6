"""Generate text from prompts of different lengths in one batch, with a stage's attention to a K/V cache.

`make example-generate` runs this example. The lengths of the sequences stay on the device. So a step has no mask tensor, and a
CUDA graph of one step serves all steps. The tokens equal those of PyTorch's SDPA, which gets each sequence alone.
"""

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

import stages
from common.measure import terminal
from common.measure.options import positive, single
from common.runtime import DEVICE
from examples import llama

SIZE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT = llama.TEXT.read_text().split("\n\n")[2]  # the model learns this paragraph by heart; each byte is a token
PROMPTS = "Alice was", "had peeped into the book her sister was reading,", "and of having nothing"
WARM_UP = 3  # decoding steps before the CUDA graph, in which kernels are compiled


class Cache:
    """The keys and values of all layers, in float16. Sequence b has lengths[b] tokens."""

    def __init__(self, config, batch, capacity):
        shape = capacity + 1, config.num_key_value_heads, config.head_dim  # the last row is for padding, and is never read
        self.keys, self.values = torch.empty(2, config.num_hidden_layers, batch, *shape, dtype=torch.float16, device=DEVICE)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=DEVICE)

    def positions(self, tokens):
        """Return the positions of each sequence's last tokens, [B, tokens]. Padding, on the left, has negative positions."""
        return self.lengths[:, None] - tokens + torch.arange(tokens, device=DEVICE)

    def write(self, layer, key, value):
        """Write the last tokens of each sequence, [B, Hkv, tokens, D]. Return all keys and values of the layer."""
        positions = self.positions(key.shape[2])
        rows = positions.where(positions >= 0, self.keys.shape[2] - 1)
        batch = torch.arange(len(rows), device=DEVICE)[:, None]
        for cache, new in ((self.keys, key), (self.values, value)):
            cache[layer, batch, rows] = new.transpose(1, 2).to(cache.dtype)
        return self.keys[layer].transpose(1, 2), self.values[layer].transpose(1, 2)


def register(name, attention):
    """Let `attn_implementation=name` select a stage's attention to a cache, which the model gets as its argument `cache`."""

    def attend(module, query, key, value, mask, *, cache, scaling, **options):
        keys, values = cache.write(module.layer_idx, key, value)
        out = attention(query.to(keys.dtype), keys, values, causal=True, scale=scaling, cache_seqlens=cache.lengths)
        return out.transpose(1, 2).to(query.dtype), None  # the output as [B, tokens, H, D], and no attention weights

    AttentionInterface.register(name, attend)


def next_tokens(model, tokens, cache):
    """Return the most likely next token of each sequence, [B, 1]. `cache.lengths` already counts the tokens [B, tokens]."""
    positions = cache.positions(tokens.shape[1]).clamp(min=0)
    return model(input_ids=tokens, position_ids=positions, cache=cache, logits_to_keep=1).logits.argmax(-1)


@torch.no_grad()
def generate(model, prompts, count):
    """Return the next `count` tokens of each prompt, [B, count]. All prompts are one batch, whatever their lengths."""
    cache = Cache(model.config, len(prompts), max(map(len, prompts)) + count)
    cache.lengths += torch.tensor([len(prompt) for prompt in prompts], device=DEVICE)
    newest = next_tokens(model, pad_sequence(prompts, batch_first=True, padding_side="left"), cache)
    found = [newest.clone()]

    def step():
        cache.lengths.add_(1)
        newest.copy_(next_tokens(model, newest, cache))

    for number in range(count - 1):
        if number == WARM_UP and DEVICE == "cuda":
            step = graph_of(step)
        step()
        found.append(newest.clone())
    return torch.cat(found, dim=1)


def graph_of(step):
    """Return a function that replays a CUDA graph of `step`. The step reads and writes the same tensors each time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.no_grad()
def generate_alone(model, prompt, count):
    """Return the next `count` tokens of one prompt, [count]. Each step computes the whole sequence again, without a cache."""
    tokens = prompt[None]
    for _ in range(count):
        tokens = torch.cat([tokens, model(input_ids=tokens, logits_to_keep=1).logits.argmax(-1)], dim=1)
    return tokens[0, len(prompt) :]


def trained(text, steps=200, batch=8, length=100):
    """Return a Llama that has learned a text by heart, with SDPA. So one next token is clearly the most likely."""
    model, parts = llama.build("sdpa", torch.float32, **SIZE), tokens_of(text).unfold(0, length, 1)
    generator = torch.Generator().manual_seed(0)
    batches = (parts[torch.randint(len(parts), (batch,), generator=generator).to(DEVICE)] for _ in range(steps))
    for _ in llama.train(model, batches, rate=5e-3):
        pass
    return model.eval()


def tokens_of(text):
    return torch.tensor(list(text.encode()), device=DEVICE)


def main(argv=None):
    parser = terminal.Parser(prog="make example-generate", description=__doc__.partition("\n")[0])
    parser.add_argument("--stage", type=single(stages.resolve), default=stages.newest(), help="(default: %(default)s)")
    parser.add_argument("--tokens", type=single(positive), default=24, metavar="N", help="for each prompt (default: 24)")
    options = parser.parse_args(argv)

    model, prompts = trained(TEXT), [tokens_of(prompt) for prompt in PROMPTS]
    wanted = torch.stack([generate_alone(model, prompt, options.tokens) for prompt in prompts])
    register("cached", stages.load(options.stage).attention)
    model.set_attn_implementation("cached")
    found = generate(model, prompts, options.tokens)
    for prompt, tokens in zip(PROMPTS, found.tolist(), strict=True):
        print(f"{len(prompt):3} tokens in the cache: {prompt!r} → {bytes(tokens).decode(errors='replace')!r}")
    print(f"\n{options.stage}, one batch with a cache, and SDPA, each sequence alone without a cache, choose ", end="")
    print("the same tokens." if found.equal(wanted) else f"{(found != wanted).sum()} different tokens.")


if __name__ == "__main__":
    main()
