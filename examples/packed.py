"""Train a small Llama on packed sequences with a stage's attention, and an equal one on the padded batch with PyTorch's SDPA.

`make example-packed` runs this example. In a packed batch, the tokens of all sequences follow each other, so no time goes to
padding.
"""

import torch
from tabulate import tabulate
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

import stages
from common.measure import terminal
from common.measure.options import positive, single
from common.runtime import DEVICE
from examples import llama

SIZE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
LENGTHS = 9, 70, 33, 1, 20  # tokens of the sequences in a batch
NO_LABEL = -100  # the loss ignores this label


def register(name, attention_varlen):
    """Let `attn_implementation=name` select a stage's attention of packed sequences, in float16.

    The model gets `starts` as an argument: where each sequence starts, and where the last one ends.
    """

    def attend(module, query, key, value, mask, *, starts, scaling, **options):
        q, k, v = (tensor[0].transpose(0, 1).half() for tensor in (query, key, value))  # [tokens, heads, D]
        out = attention_varlen(q, k, v, starts, starts, causal=True, scale=scaling)
        return out[None].to(query.dtype), None  # the output as [1, tokens, H, D], and no attention weights

    AttentionInterface.register(name, attend)


def loss_of_packed(model, sequences):
    """Return the mean loss over all tokens that follow another token of their sequence."""
    lengths = torch.tensor([0, *map(len, sequences)], device=DEVICE)
    starts = lengths.cumsum(0, dtype=torch.int32)
    tokens = torch.cat(sequences)
    positions = torch.cat([torch.arange(len(each), device=DEVICE) for each in sequences])
    labels = tokens.masked_fill(positions == 0, NO_LABEL)  # no token predicts the first token of the next sequence
    return model(input_ids=tokens[None], position_ids=positions[None], labels=labels[None], starts=starts).loss


def loss_of_padded(model, sequences):
    """Return the same loss, with padding on the right: a causal mask hides it from all tokens."""
    tokens, labels = (pad_sequence(sequences, batch_first=True, padding_value=value) for value in (0, NO_LABEL))
    return model(input_ids=tokens, labels=labels).loss


def draw(steps, lengths=LENGTHS):
    """Yield the batches of a run, each a list of sequences."""
    for batch in llama.draw(steps, len(lengths), max(lengths)):
        yield [row[:length] for row, length in zip(batch, lengths, strict=True)]


def losses(steps, gradients=True):
    """Return the loss of each step, for both ways. Without gradients, the models do not learn."""
    found = {}
    for name, loss_of in {"packed": loss_of_packed, "sdpa": loss_of_padded}.items():
        model = llama.build(name, torch.float32, **SIZE)
        if gradients:
            found[name] = [loss for loss, _ in llama.train(model, draw(steps), loss_of=loss_of)]
        else:
            with torch.no_grad():
                found[name] = [loss_of(model, batch).item() for batch in draw(steps)]
    return found


def main(argv=None):
    parser = terminal.Parser(prog="make example-packed", description=__doc__.partition("\n")[0])
    parser.add_argument("--stage", type=single(stages.resolve), default=stages.newest(), help="(default: %(default)s)")
    parser.add_argument("--steps", type=single(positive), default=5, metavar="N", help="(default: %(default)s)")
    options = parser.parse_args(argv)

    register("packed", stages.load(options.stage).attention_varlen)
    padded = len(LENGTHS) * max(LENGTHS)
    print(f"Sequences of {', '.join(map(str, LENGTHS))} tokens: {sum(LENGTHS)} tokens packed, {padded} padded")
    try:
        found = losses(options.steps)
    except NotImplementedError as error:
        print(f"{options.stage} cannot train on packed sequences: {error}.\nThese are the losses of the untrained model.")
        found = losses(options.steps, gradients=False)
    headers = ["step", f"loss, packed, {options.stage}", "loss, padded, sdpa"]
    print("\n" + tabulate(zip(*found.values(), strict=True), headers=headers, floatfmt=".5f", showindex=True))
    print(f"\nlargest difference: {max(abs(a - b) for a, b in zip(found['packed'], found['sdpa'], strict=True)):.5f}")


if __name__ == "__main__":
    main()
