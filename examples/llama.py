"""Train a small Llama with a stage's attention, and an equal one with PyTorch's SDPA.

`make example STAGE=v5` runs this example. The models come from Hugging Face's transformers. To use a stage in transformers,
copy `register`.
"""

import statistics
import time
from pathlib import Path

import torch
from tabulate import tabulate
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, LlamaConfig

import stages
from common.measure import terminal
from common.measure.options import positive, single
from common.runtime import DEVICE

TEXT = Path(__file__).parents[1] / "tests" / "stages" / "data" / "alice.txt"  # the training text; each byte is a token
WARM_UP = 5  # the median time leaves out this many first steps, in which kernels may be compiled and tuned
if DEVICE == "cuda":
    SIZE = {"num_hidden_layers": 4, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8}
    # With more steps the model memorizes the text. Then even two runs of SDPA end with different losses.
    RATE, STEPS, BATCH, SEQ_LEN = 3e-4, 100, 1, 16384
else:  # the interpreter is slow
    SIZE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    RATE, STEPS, BATCH, SEQ_LEN = 3e-3, 100, 1, 64

# These options of transformers 5.17 do not change the attention.
HARMLESS = {"num_items_in_batch", "output_hidden_states", "output_router_logits", "use_cache"}


def register(name, attention):
    """Let `attn_implementation=name` select a stage's attention in transformers.

    This works in every model that supports other attention implementations. Options that the stage lacks raise
    NotImplementedError. Under `torch.compile`, pass an attention_mask of ones. Without this mask, transformers treats each
    batch as packed sequences.
    """

    def refuse(asked):
        for what, value in asked.items():
            if torch.is_tensor(value) or value not in (None, False, 0):
                raise NotImplementedError(f"{name} does not support {what}")

    def mask(
        q_length, kv_length, q_offset=0, kv_offset=0, attention_mask=None, local_size=None, allow_is_causal_skip=True,
        allow_is_bidirectional_skip=False, **others,
    ):  # fmt: skip
        """Return None, because a stage needs no mask tensor. Raise NotImplementedError for masks that a stage lacks.

        Without this function, transformers would silently ignore padding and other masks.
        """
        refuse({
            "a padding mask": attention_mask is not None and (attention_mask.shape[1] < kv_length or not attention_mask.all()),
            "a sliding window, or chunks": local_size is not None and local_size < kv_offset + kv_length,
            "packed sequences, a static cache, or another mask than the causal one":
                not (allow_is_causal_skip or allow_is_bidirectional_skip),
            "a cache with room to spare":
                q_length > 1 and not allow_is_bidirectional_skip and bool(q_offset + q_length != kv_offset + kv_length),
        })  # fmt: skip

    def attend(
        module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, sliding_window=None,
        position_ids=None, **options,
    ):  # fmt: skip
        queries, keys = query.shape[2], key.shape[2]  # query [B, H, Sq, D], key and value [B, Hkv, Sk, D]
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = causal and queries > 1  # a single query is the newest token and sees all keys
        if causal and queries != keys:
            causal = "bottom-right"  # the queries follow cached keys, so the last query sees all keys
        refuse({
            "an attention mask": attention_mask,
            "dropout": dropout,
            "a sliding window": sliding_window is not None and sliding_window < keys,
            "packed sequences": queries > 1 and position_ids is not None and bool((position_ids.diff() != 1).any()),
        } | {option: value for option, value in options.items() if option not in HARMLESS})  # fmt: skip
        out = attention(query, key, value, causal=causal, scale=scaling)
        return out.transpose(1, 2).contiguous(), None  # the output as [B, Sq, H, D], and no attention weights

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)


def build(attn_implementation, dtype=torch.bfloat16, **size):
    """Build a Llama with random weights, equal for every `attn_implementation`."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, intermediate_size=2 * size["hidden_size"], use_cache=False, **size)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=dtype).to(DEVICE)


def draw(steps, batch, seq_len):
    """Yield the batches of a run, each [batch, seq_len]. A row begins at a random place in the text. After the text's last
    byte, the row goes on with the first byte."""
    text = torch.tensor(list(TEXT.read_bytes()), device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text), (batch, 1), generator=generator).to(DEVICE)
        yield text[(starts + torch.arange(seq_len, device=DEVICE)) % len(text)]


def loss_of_whole(model, batch):
    """Return the mean loss over a batch [batch, seq_len]."""
    return model(input_ids=batch, labels=batch).loss


def train(model, batches, rate=RATE, loss_of=loss_of_whole):
    """Train on each batch. Yield the loss and the seconds of each step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for batch in batches:
        begun = time.perf_counter()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), time.perf_counter() - begun  # loss.item() waits for the GPU


def main(argv=None):
    parser = terminal.Parser(prog="make example", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--stage", type=single(stages.resolve), default=stages.recommended(), help="such as v5 (default: %(default)s)"
    )
    for flag, default in (("--steps", STEPS), ("--batch", BATCH), ("--seq-len", SEQ_LEN)):
        parser.add_argument(flag, type=single(positive), default=default, metavar="N", help="(default: %(default)s)")
    options = parser.parse_args(argv)

    names = (stages.version(options.stage), "sdpa")
    register(names[0], stages.load(options.stage).attention)
    print("Llama, bfloat16, " + ", ".join(f"{key} {value}" for key, value in SIZE.items()))
    print(f"{options.stage} and sdpa, {options.steps} steps of {options.batch} × {options.seq_len} tokens")
    runs = [train(build(name, **SIZE), draw(options.steps, options.batch, options.seq_len)) for name in names]
    losses, times = {name: [] for name in names}, {name: [] for name in names}
    for step in (bar := tqdm(zip(*runs, strict=True), total=options.steps, disable=None)):  # show the bar only on a terminal
        for name, (loss, seconds) in zip(names, step, strict=True):
            losses[name].append(loss)
            times[name].append(1e3 * seconds)
        bar.set_postfix_str(", ".join(f"{name} {losses[name][-1]:.3f} {times[name][-1]:.0f} ms" for name in names))

    rows = sorted({*range(0, options.steps, -(-options.steps // 10)), options.steps - 1})
    shown = {"step": rows} | {f"loss, {name}": [losses[name][row] for row in rows] for name in names}
    print("\n" + tabulate(shown, headers="keys", floatfmt=".4f"))
    print(f"\nlargest difference of the losses: {max(abs(a - b) for a, b in zip(*losses.values(), strict=True)):.4f}")
    for name in names:
        print(f"median step, {name}: {statistics.median(times[name][WARM_UP:] or times[name]):.1f} ms")
    if DEVICE == "cpu":
        print("No GPU is in use. The kernels are interpreted on the CPU, so the times mean nothing.")


if __name__ == "__main__":
    main()
