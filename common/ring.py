"""Run ring attention with any stage, over a sequence that GPUs share (Liu et al. 2023, arXiv 2310.01889).

Each rank (process) keeps its queries, and blocks of K and V travel around the ring of ranks. A stage's forward returns out and
LSE for a block of keys. Each rank merges the outs of all blocks by LSE. In the backward, a stage gets one block of keys, and
the LSE over all keys. So the stage computes the probabilities of the whole softmax, and the block's part of the gradients.
docs/several-gpus.md has the derivation and the traffic.

`torch.distributed` sends the blocks. NCCL sends between GPUs on a stream of its own, and gloo sends between CPU processes. All
ranks must call the functions of this module in the same order.
"""

import contextlib
import hashlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.checks import check_inputs, checked_flag, checked_scale
from common.entry import differentiable_entry, entry, plainly
from common.kernels.merging import add, merge
from common.layout import contiguous_rows, empty_rows
from common.operator import autocast
from common.runtime import DEVICE

PAUSE_CYCLES = 20_000  # a pause of this many GPU cycles, some 10 µs, lets NCCL's kernel begin


def _agree(group, device, said: str, wrong: Exception | None):
    """Raise an error on every rank if the ranks have different texts `said`, or if any rank has an error `wrong`.

    Without this check, ranks with different options could wait for each other forever. The ranks exchange 8-byte hashes of the
    texts, and the texts only if hashes differ. If the group has gloo for CPU tensors, no rank waits for its GPU.
    """
    size = dist.get_world_size(group)
    said = f"{type(wrong).__name__}: {wrong}" if wrong else said
    if size > 1:
        digest = int.from_bytes(hashlib.sha256(said.encode()).digest()[:8], "little", signed=True)
        mine = torch.tensor([digest], device="cpu" if "cpu:" in dist.get_backend_config(group) else device)
        digests = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(digests, mine, group=group)
        if len({*torch.cat(digests).tolist()}) > 1:
            every = [None] * size
            dist.all_gather_object(every, said, group=group)
            if not wrong:
                differ = "; ".join(f"rank {rank} has {what}" for rank, what in enumerate(every))
                raise ValueError(f"the ranks of the group differ: {differ}")
    if wrong:
        raise wrong


def shard(tensor: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return this rank's part of a sequence: one chunk from the front, and the mirrored chunk from the back.

    With n ranks, the sequence has 2 n equal chunks. Rank r gets chunks r and 2 n - 1 - r. This order is called zigzag. With a
    causal mask, the first queries see few keys and the last queries see many. In zigzag order, each rank has some of the first
    queries and some of the last queries. So all ranks have equal work in each step of the ring. Llama 3's context parallelism
    (arXiv 2407.21783) also uses zigzag order.

    Shard the tokens and everything else that depends on positions: position_ids, masks and labels. Shift the labels before
    sharding, because the next token may be on another rank. The function is differentiable and sends nothing.

    Args:
        tensor: a tensor of any dtype, with the whole sequence along `dim`. All ranks pass equal values.
        dim: the dimension of the sequence; 2 for [B, H, S, D].
        group: the group of ranks. None means all processes.

    Returns:
        A new tensor with S / n elements along `dim`. With a single rank, `tensor` itself.

    Raises:
        ValueError: S is not a multiple of 2 n.
    """
    ring, length = Ring(group), tensor.shape[dim]
    if ring.size == 1:
        return tensor
    if length % (2 * ring.size):
        raise ValueError(
            f"dimension {dim} of tensor must be a multiple of 2 × {ring.size} (two chunks for each rank), got {length}"
        )
    chunks = tensor.chunk(2 * ring.size, dim)
    return torch.cat((chunks[ring.rank], chunks[-1 - ring.rank]), dim)


@torch.no_grad()
def unshard(tensor: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Join the parts that `shard` has made, and return the whole sequence on each rank.

    The function is for results, and is not differentiable.

    Args:
        tensor: this rank's part, with S / n elements along `dim`. All ranks have equal shapes and dtypes.
        dim, group: the arguments of `shard`.

    Returns:
        A tensor with S elements along `dim`. With a single rank, `tensor` itself.

    Raises:
        IndexError: this rank's tensor has no dimension `dim`. Other ranks raise ValueError.
        ValueError: shapes or dtypes of ranks differ, or S / n is odd. Every rank raises it.
    """
    size, wrong = Ring(group).size, None
    if not -tensor.dim() <= dim < tensor.dim():
        wrong = IndexError(f"dim must be a dimension of tensor, got {dim} for the shape {tuple(tensor.shape)}")
    elif size > 1 and tensor.shape[dim] % 2:
        wrong = ValueError(f"dimension {dim} of tensor must be even (two chunks), got {tensor.shape[dim]}")
    _agree(group, tensor.device, f"unshard of {tuple(tensor.shape)}, {tensor.dtype}, dim {dim}", wrong)
    if size == 1:
        return tensor
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    fronts, backs = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat((*fronts, *reversed(backs)), dim)


def _wait(works: list[dist.Work]):
    """Wait for transfers; on a GPU, only the current stream waits. Empty `works` to free the sent tensors."""
    while works:
        works.pop().wait()


class Ring:
    """A rank of a group. In each step the rank computes with one block of keys, while the next block travels."""

    def __init__(self, group):
        """Raise ValueError if this process is not in the group."""
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.begun = []  # the transfers that have begun, as lists; `_wait` empties a list
        if self.rank < 0:
            raise ValueError("group must contain this process, got a group of other processes")

    def pass_on(self, tensors, into) -> list[dist.Work]:
        """Begin to send contiguous tensors to the next rank, and to receive the previous rank's tensors in `into`."""
        sends = [dist.P2POp(dist.isend, t, group=self.group, group_peer=(self.rank + 1) % self.size) for t in tensors]
        receives = [dist.P2POp(dist.irecv, t, group=self.group, group_peer=(self.rank - 1) % self.size) for t in into]
        self.begun.append(dist.batch_isend_irecv(sends + receives))
        return self.begun[-1]

    @contextlib.contextmanager
    def settled(self):
        """Enter a context that waits at its end for all transfers. So if all ranks raise an error, their group stays usable."""
        try:
            yield
        finally:
            while self.begun:
                with contextlib.suppress(RuntimeError):  # in the context, a failed transfer has raised its error
                    _wait(self.begun.pop())

    def blocks(self, k: Tensor, v: Tensor):
        """Yield the K and V of each rank: first this rank's block, then the previous rank's block, and so on.

        A rank holds at most two blocks besides its own. While the caller uses a block, the next block travels. NCCL sends the
        next block with a kernel, which needs SMs. A stage's persistent kernel frees no SM until it ends. So the caller must
        launch a short kernel before the stage's kernel: NCCL's kernel starts while the short kernel runs. For the first block,
        this function launches a short kernel, which only pauses.
        """
        held, buffers = (k, v), []
        for step in range(self.size - 1):
            if step < 2:
                buffers.append((torch.empty_like(k), torch.empty_like(v)))
            following = buffers[step % 2]  # from step 2 on, this is the previous step's block, which is no longer needed
            works = self.pass_on(held, following)
            if step == 0 and k.is_cuda:
                torch.cuda._sleep(PAUSE_CYCLES)
            yield held
            _wait(works)
            held = following
        yield held

    def meet(self, step: int, causal: bool, length: int, before: int = 0) -> tuple[slice, slice, bool]:
        """Return (query rows, keys, causal) for a step: which queries see which keys of the step's block.

        `causal` says whether the stage needs a causal mask. The result is for the rank that stands `before` places before this
        rank in the ring.

        The keys of a block are a front chunk and a back chunk, like the queries. If the keys are from a lower rank, all queries
        see the front chunk and no query sees the back chunk. If the keys are from a higher rank, only the back queries see
        keys, and these queries see both chunks. In both cases, half of the scores are visible, and the stage needs no mask. In
        the rank's own block, the stage needs the mask, which also leaves about half of the scores visible.
        """
        every = slice(None)
        if not causal or step == 0:
            return every, every, causal
        half = length // 2
        rank = (self.rank - before) % self.size
        earlier = (rank - step) % self.size < rank
        return (every, slice(half), False) if earlier else (slice(half, None), every, False)


def _float32(tensor: Tensor) -> Tensor:
    """Return a float32 tensor for a sum: `tensor` if it is float32, else an empty tensor of that shape."""
    return tensor if tensor.dtype == torch.float32 else torch.empty_like(tensor, dtype=torch.float32)


class _Merged:
    """The merged out and lse of a rank's queries.

    At first, out and lse are the results of the rank's own block. A row of out is float32 between its first and last merge. The
    last merge writes the row in the dtype of q.
    """

    def __init__(self, ring: Ring, causal: bool, out: Tensor, lse: Tensor):
        self.out, self.lse = out, lse
        half = out.shape[2] // 2
        # A chunk is [rows, last step in which these rows see any keys, their out so far]. The slice of the back chunk counts
        # from the end, so that it also fits a tensor with only the back rows.
        self.chunks = [[slice(half), ring.rank, out[:, :, :half]], [slice(-half, None), ring.size - 1, out[:, :, -half:]]]
        if not causal or ring.rank == ring.size - 1:
            self.chunks = [[slice(None), ring.size - 1, out]]

    def add(self, step: int, more: Tensor, more_lse: Tensor):
        """Merge the out and lse of a step's block, which are for all queries or only for the back queries."""
        for chunk in self.chunks:
            rows, last, out = chunk
            if step > last:
                continue
            into = self.out[:, :, rows] if step == last else _float32(out)
            merge(out, self.lse[:, :, rows], more[:, :, rows], more_lse[:, :, rows], into)
            chunk[2] = into


def _forward(q, k, v, *, stage, ring: Ring, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out, lse) for this rank's queries and the keys of all ranks. K and V must be contiguous."""
    if ring.size == 1:
        return differentiable_entry(stage.forward)(q, k, v, causal=causal, scale=scale)
    merged = part = None
    for step, (block_k, block_v) in enumerate(ring.blocks(k, v)):
        if part:
            merged.add(step - 1, *part)  # launches the short kernel that `blocks` requires
            part = None  # free the memory for the stage
        rows, keys, masked = ring.meet(step, causal, q.shape[2])
        operands = q[:, :, rows], block_k[:, :, keys], block_v[:, :, keys]
        part = differentiable_entry(stage.forward)(*operands, causal=masked, scale=scale)
        if step == 0:
            merged, part = _Merged(ring, causal, *part), None
    merged.add(ring.size - 1, *part)
    return merged.out, merged.lse


def _sum(one: Tensor, other: Tensor, at_end: bool = False) -> Tensor:
    """Return the float32 sum of two tensors.

    One tensor may have fewer rows. Its rows are added to the first rows of the longer tensor, or to the last rows if `at_end`.
    """
    whole, part = (one, other) if one.shape[2] >= other.shape[2] else (other, one)
    into = _float32(whole)
    add(whole, part, whole.shape[2] - part.shape[2] if at_end else 0, into)
    return into


class _Gradients:
    """The sums of gradients over the blocks of other ranks.

    dQ stays on its rank. dK and dV travel around the ring like their block of keys, one step later. A sum with one addend keeps
    the dtype of the stage's result. A sum with more addends is float32. With a causal mask, the sum of dQ may have only the
    back queries, and the sums of dK and dV may have only the front keys. `keys` is the number of keys in a block.
    """

    def __init__(self, ring: Ring, causal: bool, keys: int):
        self.ring, self.causal, self.keys = ring, causal, keys

    def add(self, step: int, part: list[Tensor]):
        """Add `part`, the dq, dk and dv of a step's block, and empty `part` to free memory. Send dK and dV to the next rank."""
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
        self.dq = dq if step == 1 else _sum(self.dq, dq, at_end=True)  # a short kernel (see `Ring.blocks`)

    def home(self) -> list[Tensor]:
        """Wait for dK and dV of the rank's own keys, and return them. Free everything else."""
        _wait(self.works)
        self.sums = self.dq = None
        return self.coming


def first_heads(kv_heads: int, itemsize: int, ranks: int) -> int:
    """Return how many K/V heads of a rank's own block the backward computes first. It computes the other heads last.

    K and V travel while the rank computes the first heads. The gradients of the last step travel while it computes the last
    heads. So the numbers of first and last heads are in proportion to the bytes that travel meanwhile. An element of K and V
    has `itemsize` bytes. With two ranks, an element of a gradient has `itemsize` bytes too. With more ranks it has 4 bytes,
    because the gradients are float32 sums.
    """
    last = itemsize if ranks == 2 else 4
    return max(1, min(round(kv_heads * itemsize / (itemsize + last)), kv_heads - 1))


def _backward(grad_out, q, k, v, out, lse, *, stage, ring: Ring, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv in the dtype of q. Each is a float32 sum of blocks' parts, which have this dtype. K and V must be
    contiguous."""
    if ring.size == 1:
        return entry(stage.backward)(grad_out, q, k, v, out, lse, causal=causal, scale=scale)
    kv_heads, shared_by = k.shape[1], q.shape[1] // k.shape[1]

    def queries(heads):
        return slice(shared_by * heads.start, shared_by * heads.stop)

    def of_block(step, k, v, heads):
        """Return [dq, dk, dv] of some K/V heads and the query heads that share them."""
        rows, keys, masked = ring.meet(step, causal, q.shape[2])
        rows, keys = (slice(None), queries(heads), rows), (slice(None), heads, keys)
        # NOTE: for each block, the stage computes delta (the row sums of dO ∘ O) again.
        operands = grad_out[rows], q[rows], k[keys], v[keys], out[rows], lse[rows].contiguous()
        return [*entry(stage.backward)(*operands, causal=masked, scale=scale)]

    cut = first_heads(kv_heads, k.itemsize, ring.size)
    shares = [heads for heads in (slice(0, cut), slice(cut, kv_heads)) if heads.start < heads.stop]
    gradients, own, part = _Gradients(ring, causal, k.shape[2]), [], []
    for step, block in enumerate(ring.blocks(k, v)):
        if part:
            gradients.add(step - 1, part)  # launches the short kernel that `blocks` requires
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
        with options["ring"].settled():
            out, lse = plainly(_forward, q, k, v, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.return_lse = options, return_lse
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_lse):
        q, k, v, out, lse = ctx.saved_tensors
        given = [grad for grad in (grad_out, grad_lse) if grad is not None]
        if any(map(torch._C._functorch.is_legacy_batchedtensor, given)):
            raise NotImplementedError("ring attention has no batches of gradients; leave out is_grads_batched and vectorize")
        if ctx.return_lse:  # all ranks raise, so that none waits for the others
            said = "ring attention has no gradient of the log-sum-exp; detach it, or use a stage's attention"
            _agree(ctx.options["ring"].group, q.device, "", None if grad_lse is None else NotImplementedError(said))
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.resolve_neg()
        # Hooks may have changed the strides.
        q, out, k, v, lse = contiguous_rows(q), contiguous_rows(out), k.contiguous(), v.contiguous(), lse.contiguous()
        with ctx.options["ring"].settled():
            return *plainly(_backward, grad_out, q, k, v, out, lse, **ctx.options), None, None


def _checked(stage, q, k, v, causal, scale, return_lse, size):
    """Return checked (causal, scale, return_lse). Raise TypeError or ValueError with the wrong argument's name."""
    if not (hasattr(stage, "__name__") and all(callable(getattr(stage, name, None)) for name in ("forward", "backward"))):
        raise TypeError(f"stage must be a stage's module, as stages.load returns it, got {type(stage).__name__}")
    check_inputs(q, k, v)
    causal, return_lse = checked_flag("causal", causal), checked_flag("return_lse", return_lse)
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"k must have the length of q if causal, got {k.shape[2]} keys and {q.shape[2]} queries")
    if causal and size > 1 and q.shape[2] % 2:
        raise ValueError(f"the length of q must be even (two chunks of the sequence), got {q.shape[2]}")
    return causal, checked_scale(scale, q.shape[-1]), return_lse


@torch.compiler.disable  # torch.compile would break its graph at each transfer
def ring_attention(stage, q, k, v, *, group=None, causal=False, scale=None, return_lse=False):
    """Compute a stage's attention over a sequence that the ranks of a group share.

    `shard` divides the sequence. The result is this rank's part of attention over the whole sequence. It is differentiable in
    q, k and v. The gradients cannot be differentiated again. Under `torch.autocast`, inputs are cast as in PyTorch's SDPA. If
    the stage is deterministic, equal inputs on equally many ranks give equal bits.

    Blocks are merged in float32, but first a stage rounds each block's results to the dtype of q. So where blocks cancel, the
    result loses digits that a single rank keeps.

    K, V and their gradients travel while the stage computes. A rank holds a few blocks, and no tensor with the length of the
    whole sequence.

    Args:
        stage: a stage's module, with `forward` and `backward`, such as `stages.load("v3")`.
        q: [B, H, S / n, D] on each of n ranks. A stage's `attention` lists the valid dtypes, sizes and strides.
        k: [B, Hkv, S / n, D]. Without a mask, k and v may have another length than q.
        v: [B, Hkv, S / n, Dv].
        group: the group of ranks. None means all processes. Every call waits for the GPU, unless the group also has gloo, as
            after `init_process_group("cpu:gloo,cuda:nccl")`.
        causal: a bool. True hides key j from query i if j > i. i and j are positions in the whole sequence.
        scale: the factor of the scores. None means 1 / sqrt(D).
        return_lse: whether to return the log-sum-exp too, which has no gradient here.

    Returns:
        out [B, H, S / n, Dv] of this rank's queries, with the dtype of q; or (out, lse). lse is [B, H, S / n] in float32.

    Raises:
        TypeError: an argument of this rank has the wrong type or dtype.
        ValueError: a shape, a device or another value of this rank is wrong, or S / n is odd with a mask. All ranks raise
            ValueError if their shapes, dtypes, options, stages or required gradients differ. If one rank has an error, the
            other ranks raise ValueError too. The message lists what each rank has.
        NotImplementedError: a backward of this rank needs the gradient of the log-sum-exp. Other ranks raise ValueError.
        RuntimeError: PyTorch raises this error if a rank has ended or does not arrive within the group's timeout.
    """
    ring = Ring(group)
    q, k, v = autocast(q, k, v)
    wrong, said = None, ""
    try:
        causal, scale, return_lse = _checked(stage, q, k, v, causal, scale, return_lse, ring.size)
        needed = [name for name, t in zip("qkv", (q, k, v), strict=True) if torch.is_grad_enabled() and t.requires_grad]
        said = (
            f"{stage.__name__.rpartition('.')[2]}, q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, {q.dtype}, "
            f"causal={causal}, scale={scale}, return_lse={return_lse}, gradients of {', '.join(needed) or 'nothing'}"
        )
    except Exception as error:  # so that the other ranks do not wait for this rank
        wrong = error
    _agree(group, q.device if isinstance(q, Tensor) and q.device.type == DEVICE else DEVICE, said, wrong)
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    options = {"stage": stage, "ring": ring, "causal": causal, "scale": scale}
    out, lse = _RingAttention.apply(contiguous_rows(q), k.contiguous(), v.contiguous(), options, return_lse)
    return (out, lse) if return_lse else out
