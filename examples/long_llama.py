"""Train a small Llama on sequences that several processes share.

For comparison, one process trains an equal Llama on the whole sequences. `make example-ring GPUS=2 STAGE=v5` runs this example.
To train another model in this way, copy `spread` and `loss_of_part`.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch.nn.parallel import DistributedDataParallel

import stages
from common.measure import scaling, terminal
from common.measure.options import positive, single
from common.ring import ring_attention, shard
from common.runtime import DEVICE
from examples import llama

NOT_A_LABEL = -100  # the loss ignores this label


def spread(model, length, group=None):
    """Prepare a model to train on this rank's part of each sequence, which `shard` cuts out. A sequence has `length` tokens.

    The model gets the positions of this rank's tokens.

    Returns:
        The model as DistributedDataParallel, which takes the mean of the gradients over the ranks.
    """
    positions = shard(torch.arange(length, device=DEVICE)[None], 1, group)
    model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: (args[:1], {"position_ids": positions}), with_kwargs=True
    )
    return DistributedDataParallel(model, process_group=group)


def loss_of_part(model, batch, group=None):
    """Return the loss of this rank's part of a batch [batch, length].

    The loss is scaled so that its mean over the ranks is the mean loss over the batch's tokens.
    """
    labels = F.pad(batch[:, 1:], (0, 1), value=NOT_A_LABEL)  # shift labels before sharding
    part, labels = (shard(tensor, 1, group) for tensor in (batch, labels))
    logits = model(input_ids=part).logits.float()
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NOT_A_LABEL, reduction="sum")
    return dist.get_world_size(group) * total / (batch[:, 1:].numel())


def train_together(stage, dtype, batches, length, rate=llama.RATE, group=None, **size):
    """Train a Llama with a stage's ring attention. Return each step's loss, the mean over the ranks."""

    def attention(q, k, v, *, causal, scale):
        return ring_attention(stage, q, k, v, group=group, causal=causal, scale=scale)

    llama.register("ring", attention)
    model = spread(llama.build("ring", dtype, **size), length, group)
    steps = llama.train(model, batches, rate, loss_of=lambda model, batch: loss_of_part(model, batch, group))
    losses = torch.tensor([loss for loss, _ in steps], device=DEVICE)
    dist.all_reduce(losses, group=group)
    return (losses / dist.get_world_size(group)).tolist()


def main(argv=None):
    parser = terminal.Parser(prog="make example-ring ARGS=…", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--stage", type=single(stages.resolve), default=stages.recommended(), help="such as v5 (default: %(default)s)"
    )
    for flag, default in (("--steps", 20), ("--batch", llama.BATCH), ("--seq-len", llama.SEQ_LEN)):
        parser.add_argument(flag, type=single(positive), default=default, metavar="N", help="(default: %(default)s)")
    gpus_help = "number of GPUs that share a sequence (default: %(default)s)"
    parser.add_argument("--gpus", type=single(positive), default=2, help=gpus_help)
    options = parser.parse_args(argv)
    if "WORLD_SIZE" not in os.environ:
        scaling.start_ranks("examples.long_llama", sys.argv[1:] if argv is None else argv, options.gpus)
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if options.seq_len % (2 * world):
        parser.error(f"argument --seq-len: {options.seq_len} is no multiple of {2 * world} (two chunks for each process)")
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")

    stage, shape = stages.load(options.stage), (options.steps, options.batch, options.seq_len)
    together = train_together(stage, torch.bfloat16, llama.draw(*shape), options.seq_len, **llama.SIZE)
    if rank == 0:
        llama.register("alone", stage.attention)
        alone = [loss for loss, _ in llama.train(llama.build("alone", torch.bfloat16, **llama.SIZE), llama.draw(*shape))]
        print("Llama, bfloat16, " + ", ".join(f"{key} {value}" for key, value in llama.SIZE.items()))
        print(f"{options.stage}, {options.steps} steps of {options.batch} × {options.seq_len} tokens\n")
        rows = sorted({*range(0, options.steps, -(-options.steps // 10)), options.steps - 1})
        named = {f"loss, {world} together": together, "loss, one alone": alone}
        shown = {"step": rows} | {name: [losses[row] for row in rows] for name, losses in named.items()}
        print(tabulate(shown, headers="keys", floatfmt=".4f"))
        print(f"\nlargest difference of the losses: {max(abs(a - b) for a, b in zip(together, alone, strict=True)):.4f}")
    dist.broadcast_object_list([None], src=0)  # the other ranks wait here for rank 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
