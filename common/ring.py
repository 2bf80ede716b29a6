"""Attention over a sequence that is spread over GPUs, of any stage: ring attention (Liu et al. 2023, arXiv 2310.01889).

A stage's forward gives out and LSE, and its backward takes them. That is all it takes: each rank keeps its queries, K and V go
round, and what a rank has of each block of keys is merged by the LSEs. With the LSE of all keys a stage's backward gives each
block's part of the true gradients. docs/several-gpus.md derives it, and says what travels.

What travels does so on `torch.distributed`: NCCL's, on a stream of its own, between GPUs, and gloo between processes on CPUs.
Each rank calls the same functions in the same order, as with every collective.
"""

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.kernels.merging import add, merge
from common.operator import autocast, check_inputs, checked_flag, checked_scale, contiguous_rows, empty_rows, plainly
from common.runtime import DEVICE

PAUSE_CYCLES = 20_000  # of a GPU, some 10 µs: in as much NCCL's kernel has begun


def _gathered(numbers: list[int], group, device) -> list[list[int]]:
    """What each rank of a group has for `numbers`. Where the group has gloo too, the GPU is not waited for."""
    where = "cpu" if "cpu:" in dist.get_backend_config(group) else device
    mine = torch.tensor(numbers, device=where)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return torch.stack(every).tolist()


def _agree(group, device, said: str, wrong: Exception | None):
    """Raise on every rank unless all say the same, and nothing is wrong on any.

    Every call asks: a rank that went by what was agreed before would wait for one whose options have changed. It costs 8 bytes;
    only where these differ is it said in words.
    """
    size = dist.get_world_size(group)
    said = f"{type(wrong).__name__}: {wrong}" if wrong else said
    if size > 1:
        digest = int.from_bytes(hashlib.sha256(said.encode()).digest()[:8], "little", signed=True)
        if len({number for (number,) in _gathered([digest], group, device)}) > 1:
            every = [None] * size
            dist.all_gather_object(every, said, group=group)
            if not wrong:
                differ = "; ".join(f"rank {rank} has {what}" for rank, what in enumerate(every))
                raise ValueError(f"the ranks of the group differ: {differ}")
    if wrong:
        raise wrong


def _place(group) -> tuple[int, int]:
    """This rank of the group, and their number; raises ValueError where it is none of them."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"group must have this process as a rank, got one of {size} others")
    return rank, size


def shard(tensor: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The part of a sequence that this rank has of it, in zigzag: one chunk from the front, and its mirror from the back.

    Of n ranks and 2 n equal chunks, rank r has chunks r and 2 n - 1 - r, in this order. With a causal mask the first queries
    have few keys and the last ones many: so each rank has as much to do as any other, and in each step of the ring too. (Zigzag
    is what ring-flash-attention and Llama 3's context parallelism do, arXiv 2407.21783; Striped Attention, arXiv 2311.09431,
    balances by interleaving.) Without a mask any order would do; it is the same.

    Whatever has to do with positions is to be sharded like the tokens: position_ids, labels (shifted before), masks.

    Args:
        tensor: the whole sequence along `dim`, the same on each rank. Any dtype.
        dim: of the sequence; 2 for [B, H, S, D].
        group: None is all processes.

    Returns:
        A new tensor, S / n along `dim`; of a single rank, `tensor` itself. Differentiable; nothing is sent.

    Raises:
        ValueError: S is no multiple of 2 n.
    """
    rank, size = _place(group)
    if size == 1:
        return tensor
    if tensor.shape[dim] % (2 * size):
        raise ValueError(
            f"dimension {dim} of tensor must be a multiple of 2 × {size}, two chunks for each rank, got {tensor.shape[dim]}"
        )
    chunks = tensor.chunk(2 * size, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


@torch.no_grad()
def unshard(tensor: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The whole sequence, on each rank, of the parts that `shard` gave. Not differentiable: a result, no step of a model.

    Args:
        tensor: S / n along `dim`, of one shape and dtype on each rank.
        dim, group: as `shard` was given them.

    Returns:
        S along `dim`; of a single rank, `tensor` itself.

    Raises:
        ValueError: on each rank, where shapes or dtypes differ, or S / n is odd.
    """
    _, size = _place(group)
    odd = size > 1 and tensor.shape[dim] % 2
    wrong = ValueError(f"dimension {dim} of tensor must be even, two chunks, got {tensor.shape[dim]}") if odd else None
    _agree(group, tensor.device, f"unshard of {tuple(tensor.shape)}, {tensor.dtype}, dim {dim}", wrong)
    if size == 1:
        return tensor
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    fronts, backs = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat((*fronts, *reversed(backs)), dim)


def _wait(works: list[dist.Work]):
    """Until what was begun has arrived; of a GPU only the current stream waits. Empties the list, which keeps what was sent."""
    while works:
        works.pop().wait()


class Ring:
    """A rank's place in a group, what it has to do at each step, and what travels."""

    def __init__(self, group):
        self.group = group
        self.rank, self.size = _place(group)

    def pass_on(self, tensors, into) -> list[dist.Work]:
        """Begin to send contiguous tensors to the next rank, and to receive like ones from the one before."""
        sends = [dist.P2POp(dist.isend, t, group=self.group, group_peer=(self.rank + 1) % self.size) for t in tensors]
        receives = [dist.P2POp(dist.irecv, t, group=self.group, group_peer=(self.rank - 1) % self.size) for t in into]
        return dist.batch_isend_irecv(sends + receives)

    def blocks(self, k: Tensor, v: Tensor):
        """K and V of each rank: this one's, those of the rank before, and so on. Beside its own it holds two of them.

        When a block is given the next one has begun to travel. NCCL's kernel needs SMs, though, and the programs of
        a persistent kernel leave none until they end: begin with something short, under which it starts. There is nothing
        short before the first block, and so a pause.
        """
        held, buffers = (k, v), []
        for step in range(self.size - 1):
            if step < 2:
                buffers.append((torch.empty_like(k), torch.empty_like(v)))
            following = buffers[step % 2]  # which had the block of the step before
            works = self.pass_on(held, following)
            if step == 0 and k.is_cuda:
                torch.cuda._sleep(PAUSE_CYCLES)
            yield held
            _wait(works)
            held = following
        yield held

    def meet(self, step: int, causal: bool, length: int, before: int = 0) -> tuple[slice, slice, bool]:
        """Which of this rank's queries see which keys of the block that it has at a step, and whether with a causal mask.

        With `before`, those of the rank that is so many before this one.

        A block's keys are two chunks, as the queries are. Of an earlier rank the front chunk comes before all queries, and the
        back one after; of a later rank both lie between the front queries and the back ones. Either way half of the scores
        are there, without a mask; of the rank's own block the mask leaves half.
        """
        every = slice(None)
        if not causal or step == 0:
            return every, every, causal
        half = length // 2
        rank = (self.rank - before) % self.size
        earlier = (rank - step) % self.size < rank
        return (every, slice(half), False) if earlier else (slice(half, None), every, False)


def _float32(tensor: Tensor) -> Tensor:
    """Where a float32 sum that begins with a tensor can be written: there, if it is float32, else new memory of its shape."""
    return tensor if tensor.dtype == torch.float32 else torch.empty_like(tensor, dtype=torch.float32)


class _Merged:
    """out and lse of a rank's queries, to which each block of keys adds its own.

    Those of the rank's own block, in the dtype of q, are given; both change in place. out is float32 only between two merges
    of the same rows: the first reads what the stage gave, and the last writes the result.
    """

    def __init__(self, ring: Ring, causal: bool, out: Tensor, lse: Tensor):
        self.out, self.lse = out, lse
        half = out.shape[2] // 2
        # Rows, of a tensor that may have only the back ones; the last step at which they meet a block; what they have so far.
        chunks = (slice(half), ring.rank), (slice(-half, None), ring.size - 1)
        if not causal or ring.rank == ring.size - 1:
            chunks = ((slice(None), ring.size - 1),)
        self.chunks = [[rows, last, out[:, :, rows]] for rows, last in chunks]

    def add(self, step: int, more: Tensor, more_lse: Tensor):
        """Merge with the out and lse of a step's block: of all queries, or of the back ones."""
        for chunk in self.chunks:
            rows, last, out = chunk
            if step > last:
                continue
            into = self.out[:, :, rows] if step == last else _float32(out)
            merge(out, self.lse[:, :, rows], more[:, :, rows], more_lse[:, :, rows], into)
            chunk[2] = into


def _forward(q, k, v, *, stage, ring: Ring, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out like q and lse, of this rank's queries and the keys of all ranks. K and V are contiguous."""
    if ring.size == 1:
        return stage.forward(q, k, v, causal=causal, scale=scale)
    merged = part = None
    for step, (block_k, block_v) in enumerate(ring.blocks(k, v)):
        if part:
            merged.add(step - 1, *part)  # short, as `blocks` asks
            part = None  # whose memory the stage may take
        rows, keys, masked = ring.meet(step, causal, q.shape[2])
        operands = q[:, :, rows], block_k[:, :, keys], block_v[:, :, keys]
        part = stage.forward(*operands, causal=masked, scale=scale)
        if step == 0:
            merged, part = _Merged(ring, causal, *part), None
    merged.add(ring.size - 1, *part)
    return merged.out, merged.lse


def _sum(one: Tensor, other: Tensor, at_end: bool = False) -> Tensor:
    """The float32 sum of two tensors, of which one may have only the first rows of the other, or with `at_end` the last."""
    whole, part = (one, other) if one.shape[2] >= other.shape[2] else (other, one)
    into = _float32(whole)
    add(whole, part, whole.shape[2] - part.shape[2] if at_end else 0, into)
    return into


class _Gradients:
    """What the blocks of other ranks give: dQ of this rank's queries, and dK and dV, which follow their block, a step later.

    A sum begins with what a stage has given, as it is: one part has lost nothing that float32 would keep. So it stays where it
    is, or travels so; the sum of two is float32. Of dQ there are all rows, or only the back ones, and of dK and dV all keys, or
    only the front ones, as long as no rank's queries have met others: the rest is 0, and neither written nor sent.
    """

    def __init__(self, ring: Ring, causal: bool, keys: int):
        """keys: of a block."""
        self.ring, self.causal, self.keys = ring, causal, keys

    def add(self, step: int, part: list[Tensor]):
        """Add dq, dk and dv of a step's block, and send dK and dV on. The list is empty then, and their memory free."""
        dq, dk, dv = part
        part.clear()
        if step == 1:
            self.sums = [dk.contiguous(), dv.contiguous()]
        else:
            _wait(self.works)
            self.sums = [_sum(came, of_block) for came, of_block in zip(self.coming, (dk, dv), strict=True)]
        del dk, dv
        self.coming = None
        _, met, _ = self.ring.meet(step, self.causal, self.keys, before=1)
        keys = len(range(self.keys)[met])
        self.coming = [total.new_empty(*total.shape[:2], keys, total.shape[3]) for total in self.sums]
        self.works = self.ring.pass_on(self.sums, self.coming)
        self.dq = dq if step == 1 else _sum(self.dq, dq, at_end=True)  # short, as `blocks` asks

    def home(self) -> list[Tensor]:
        """dK and dV of the rank's own keys, once they have come; nothing else is kept."""
        _wait(self.works)
        self.sums = self.dq = None
        return self.coming


def first_heads(kv_heads: int, itemsize: int, ranks: int) -> int:
    """Of the K/V heads of a rank's own block, how many the backward computes before all else; the others come last.

    Under the first ones K and V travel, under the last ones the gradients of the last step: so each have a share like the bytes
    of these. They are `itemsize` for each number of K and V, and of the gradients too if there are two ranks, else 4, as they
    are sums. A single head is not shared out: it comes first.
    """
    last = itemsize if ranks == 2 else 4
    return max(1, min(round(kv_heads * itemsize / (itemsize + last)), kv_heads - 1))


def _backward(grad_out, q, k, v, out, lse, *, stage, ring: Ring, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in the dtype of q, each rounded once from a float32 sum over blocks. K and V are contiguous."""
    if ring.size == 1:
        return stage.backward(grad_out, q, k, v, out, lse, causal=causal, scale=scale)
    kv_heads, shared_by = k.shape[1], q.shape[1] // k.shape[1]

    def queries(heads):
        return slice(shared_by * heads.start, shared_by * heads.stop)

    def of_block(step, k, v, heads):
        """A list of dq, dk and dv of some K/V heads, and of the query heads that share them."""
        rows, keys, masked = ring.meet(step, causal, q.shape[2])
        rows, keys = (slice(None), queries(heads), rows), (slice(None), heads, keys)
        # NOTE: a stage computes delta, the row sums of dO ∘ O, again for each block.
        operands = grad_out[rows], q[rows], k[keys], v[keys], out[rows], lse[rows].contiguous()
        return [*stage.backward(*operands, causal=masked, scale=scale)]

    cut = first_heads(kv_heads, k.itemsize, ring.size)
    shares = [heads for heads in (slice(0, cut), slice(cut, kv_heads)) if heads.start < heads.stop]
    gradients, own, part = _Gradients(ring, causal, k.shape[2]), [], []
    for step, block in enumerate(ring.blocks(k, v)):
        if part:
            gradients.add(step - 1, part)  # short, as `blocks` asks
        if step == 0:
            own.append(of_block(step, *block, shares[0]))
        else:
            part = of_block(step, *block, slice(0, kv_heads))
    del block
    gradients.add(ring.size - 1, part)
    dq = empty_rows(q)
    for at, heads in enumerate(shares):
        if at:
            own.append(of_block(0, k, v, heads))
        of_q, some = own[at].pop(0), queries(heads)
        add(of_q, gradients.dq[:, some], q.shape[2] - gradients.dq.shape[2], dq[:, some])
        del of_q
    every_came = gradients.home()
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    for heads, of_kv in zip(shares, own, strict=True):
        for total, of_own, came in zip((dk, dv), of_kv, every_came, strict=True):
            add(of_own, came[:, heads], 0, total[:, heads])
    return dq, dk, dv


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, options, return_lse):
        out, lse = plainly(_forward, q, k, v, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.return_lse = options, return_lse
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_lse):
        q, k, v, out, lse = ctx.saved_tensors
        q, out, k, v = contiguous_rows(q), contiguous_rows(out), k.contiguous(), v.contiguous()  # hooks may have changed that
        ring = ctx.options["ring"]
        of_out, of_lse = grad_out is not None, grad_lse is not None
        if ctx.return_lse and ring.size > 1:  # a rank whose loss needs only one of the two is needed for the others' keys
            every = _gathered([of_out, of_lse], ring.group, q.device)
            of_out, of_lse = (any(column) for column in zip(*every, strict=True))
        if of_out:
            grad_out = torch.zeros_like(out) if grad_out is None else grad_out
            dq, dk, dv = plainly(_backward, grad_out, q, k, v, out, lse, **ctx.options)
        else:
            dq, dk, dv = (torch.zeros_like(tensor) for tensor in (q, k, v))
        if of_lse:
            # As in `common.operator`: an attention output with K for V, and the dV of a backward with that matmul for dO.
            weight = (ctx.options["scale"] * (torch.zeros_like(lse) if grad_lse is None else grad_lse))[..., None]
            mean_key, _ = plainly(_forward, q, k, k, **ctx.options)
            dq = dq + (weight * mean_key).to(dq.dtype)
            dk = dk + plainly(_backward, (weight * q).to(q.dtype), q, k, k, mean_key, lse, **ctx.options)[2]
        return dq, dk, dv, None, None


def _checked(stage, q, k, v, causal, scale, return_lse, size):
    """The options as `_RingAttention` takes them; raises TypeError or ValueError, naming the argument."""
    if not all(callable(getattr(stage, name, None)) for name in ("forward", "backward")):
        raise TypeError(f"stage must be a stage's module, as stages.load gives it, got {type(stage).__name__}")
    check_inputs(q, k, v)
    causal, return_lse = checked_flag("causal", causal), checked_flag("return_lse", return_lse)
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"k must have the length of q where causal, got {k.shape[2]} and {q.shape[2]}")
    if causal and size > 1 and q.shape[2] % 2:
        raise ValueError(f"the length of q must be even, two chunks of the sequence, got {q.shape[2]}")
    return causal, checked_scale(scale, q.shape[-1]), return_lse


@torch.compiler.disable  # a graph would break at each of the transfers
def ring_attention(stage, q, k, v, *, group=None, causal=False, scale=None, return_lse=False):
    """A stage's attention over a sequence that the ranks of a group share as `shard` has it; differentiable in q, k and v.

    The result is that of attention over the whole sequence: blocks are merged in float32, and nothing is left out.

    Args:
        stage: a stage's module, of which `forward` and `backward` are called: `stages.load("v3")`.
        q: [B, H, S / n, D] on each of n ranks; dtypes, D and Dv, heads and strides as each stage's `attention` takes them.
        k, v: [B, Hkv, S / n, D] and [B, Hkv, S / n, Dv]. Without a mask their length may be another than q's.
        group: None is all processes. Any number of ranks; of one, the stage alone is called. With both backends,
            `init_process_group("cpu:gloo,cuda:nccl")`, no call waits for the GPU; with NCCL alone each does.
        causal: a bool; hides key j from query i where j > i, positions in the whole sequence.
        scale: as the stage's `attention` takes it; None is 1 / sqrt(D).
        return_lse: also return the log-sum-exp, differentiable too, at the price of one more forward and backward.

    Returns:
        out [B, H, S / n, Dv] like q, or (out, lse) with lse [B, H, S / n] float32, of this rank's queries.

    Raises:
        TypeError, ValueError: before anything is sent, what is wrong with an argument, as the stage's `attention` says it; or
            S / n is odd with a mask. On the other ranks, and on every one where ranks differ in shapes, dtype, options, stage
            or in what needs a gradient, a ValueError says what each has.
        RuntimeError: PyTorch's, when a rank has ended, or has not come within the group's timeout.

    K and V travel while a block is computed, and in the backward so do their gradients, whose sums are float32. Beside its
    arguments and results a forward holds two blocks of K and V, out of a block, and with more than two ranks out in float32; a
    backward two blocks of K and V, the gradients of a block, and two blocks of dK and dV and dQ, with more than two ranks in
    float32. Nothing has the length of the whole sequence.

    The same inputs give the same bits on the same number of ranks, if the stage's do. Under `torch.autocast` inputs are cast
    as SDPA does. The gradients cannot be differentiated again.
    """
    ring = Ring(group)
    if torch.is_autocast_enabled(DEVICE):
        q, k, v = autocast(q, k, v)
    wrong, said = None, ""
    try:
        causal, scale, return_lse = _checked(stage, q, k, v, causal, scale, return_lse, ring.size)
        needed = [name for name, t in zip("qkv", (q, k, v), strict=True) if torch.is_grad_enabled() and t.requires_grad]
        said = (
            f"{stage.__name__.rpartition('.')[2]}, q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, {q.dtype}, "
            f"causal={causal}, scale={scale}, return_lse={return_lse}, gradients of {', '.join(needed) or 'nothing'}"
        )
    except (TypeError, ValueError) as error:
        wrong = error
    _agree(group, q.device if isinstance(q, Tensor) else DEVICE, said, wrong)
    options = {"stage": stage, "ring": ring, "causal": causal, "scale": scale}
    out, lse = _RingAttention.apply(contiguous_rows(q), k.contiguous(), v.contiguous(), options, return_lse)
    return (out, lse) if return_lse else out
