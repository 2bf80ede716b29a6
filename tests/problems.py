"""Draw random problems with all inputs that a stage must support: lengths, heads, memory layouts, scales and score spreads."""

import itertools
import math
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from common.checks import BOTTOM_RIGHT, DTYPES, HEAD_DIMS, LARGEST_SCALE, SMALLEST_SCALE
from common.measure import inputs
from common.measure.inputs import NORMAL, Scores, Sink, hostile
from common.runtime import DEVICE

on_gpu = DEVICE == "cuda"

DIMENSIONS = "bhsd"  # the letters mean batch, heads, sequence, head dimension
TILE_EDGES = (32, 64, 128, 256, 512) if on_gpu else (16, 32, 64)
LONGEST = TILE_EDGES[-1] + 20
# In problems with fewer rows than FEW_ROWS, k is not `expanded` along "s". If all keys are equal, dQ is 0, and each of its rows
# has a single rounding error. With few rows, this error may be tiny by chance in plain PyTorch. If the scale is tiny too,
# nearby scales do not change the error.
FEW_ROWS = 16
# The range of scales for each dtype. Float16 has a smaller range, because gradients grow with the scale, and float16 ends at
# 65504.
SCALES = dict.fromkeys(DTYPES, (SMALLEST_SCALE, LARGEST_SCALE)) | {torch.float16: (1e-4, 1e4)}


@dataclass(frozen=True)
class Layout:
    """The layout of a [B, H, S, D] tensor in memory. The memory between its elements is NaN.

    order: the dimensions, from the outermost in memory to the innermost.
    gaps: for each of B, H, S and D, the numbers of unused positions before and after the tensor.
    offset: the number of elements in memory before the first element.
    expanded: the dimensions with stride 0, where all positions share one element.
    """

    order: str = DIMENSIONS
    gaps: tuple = ((0, 0),) * 4
    offset: int = 0
    expanded: str = ""

    def place(self, values):
        """Return a tensor with this layout and these values. An expanded dimension stores only its first value."""
        shape = values.shape
        for dim, name in enumerate(DIMENSIONS):
            values = values.narrow(dim, 0, 1) if name in self.expanded else values
        padded = [values.shape[dim] + sum(self.gaps[dim]) for dim in map(DIMENSIONS.index, self.order)]
        memory = values.new_full((self.offset + math.prod(padded),), float("nan"))
        tensor = memory[self.offset :].view(padded).permute(*map(self.order.index, DIMENSIONS))
        for dim, (before, _) in enumerate(self.gaps):
            tensor = tensor.narrow(dim, before, values.shape[dim])
        return tensor.copy_(values).expand(shape)


@dataclass(frozen=True)
class Problem:
    """A description of attention's inputs.

    kv_heads: the number of heads of k and v; None means the heads of q.
    value_dim: the last dimension of v; None means the last dimension of q.
    scores: how q, k and v are distributed.
    layouts: the layouts of q, k, v and the gradient of the output.
    return_lse: whether the differentiated call also returns the LSE.
    """

    seq_q: int
    seq_k: int
    batch: int = 1
    heads: int = 1
    kv_heads: int | None = None
    head_dim: int = 16
    value_dim: int | None = None
    dtype: torch.dtype = torch.float32
    causal: bool | str = False
    scale: float = 1.0
    scores: Scores = NORMAL
    layouts: tuple[Layout, Layout, Layout, Layout] = (Layout(),) * 4
    return_lse: bool = True
    seed: int = 0

    def tensors(self):
        """Return q, k, v and the gradient of the output."""
        torch.manual_seed(self.seed)
        kv_heads, value_dim = self.kv_heads or self.heads, self.value_dim or self.head_dim
        kv_rows = self.batch, kv_heads, self.seq_k
        values = inputs.draw(
            (self.batch, self.heads, self.seq_q, self.head_dim), (*kv_rows, self.head_dim), (*kv_rows, value_dim),
            self.dtype, self.scale, self.scores,
        )  # fmt: skip
        return tuple(layout.place(tensor) for layout, tensor in zip(self.layouts, values, strict=True))


def _orders():
    """Return a strategy that draws the order of dimensions in memory.

    Most drawn orders have contiguous rows. Other orders test less, because a stage first copies the tensor.
    """
    every = ["".join(order) for order in itertools.permutations(DIMENSIONS)]
    whole_rows = [order for order in every if order.endswith("d")]
    return st.sampled_from(3 * whole_rows + every)


def _layouts(*expanded):
    """Return a strategy that draws layouts. One draw chooses all gaps, because a draw is slow."""
    gaps = list(itertools.product(((0, 0), (0, 1), (1, 0), (8, 8), (5, 3)), repeat=4))
    return st.just(Layout()) | st.builds(
        Layout,
        order=_orders(),
        gaps=st.sampled_from(gaps),
        offset=st.sampled_from((0, 1, 8, 3)),
        expanded=st.sampled_from(("", "", "", "h", "s", "b", "bh", *expanded)),
    )


# Only the output's gradient may have an expanded head dimension. In q, k or v, it would make all products of a row equal. Equal
# rounding errors add up.
LAYOUTS = st.tuples(_layouts(), _layouts(), _layouts(), _layouts("d", "bhsd"))


def value_dims(head_dim):
    """Return head dimensions of V to draw from. Most equal `head_dim`, because each pair of D and Dv costs a compilation."""
    place = HEAD_DIMS.index(head_dim)
    return [head_dim, head_dim, *HEAD_DIMS[max(0, place - 1) : place + 2]]


def problems(head_dims):
    """Return a strategy that draws problems with these head dimensions."""
    edges = [edge + by for edge in TILE_EDGES for by in (-1, 0, 1)]
    lengths = st.sampled_from([1] * len(edges) + edges) | st.integers(1, LONGEST)
    # (batch, K/V heads, query heads per K/V head)
    few = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 2, 2), (1, 1, 3)]
    more = [(2, 2, 1), (1, 3, 1), (3, 2, 1), (2, 2, 3), (1, 1, 8), (2, 3, 8)]
    batch_and_heads = st.sampled_from(few + more if on_gpu else few)
    far = st.builds(Sink, st.integers(0, LONGEST), st.sampled_from((100.0, 1000.0)))
    spread = st.builds(Scores, st.sampled_from((1.0, 0.1, 3.0, 8.0, 30.0)), st.just(()) | st.tuples(far))
    distributions = spread | st.builds(hostile, st.integers(0, 2**16), st.just(LONGEST), st.just(8))
    scales = {
        dtype: st.sampled_from((1.0, 0.125, -0.125, 0.0, smallest, largest, -smallest, -largest))
        | st.floats(math.log(smallest), math.log(largest)).map(math.exp)
        for dtype, (smallest, largest) in SCALES.items()
    }

    @st.composite
    def problem(draw):
        dtype, (head_dim, value_dim), causal, return_lse = draw(kinds)
        batch, kv_heads, shared = draw(batch_and_heads)
        seq_q, seq_k, scale, layouts = draw(lengths), draw(lengths), draw(scales[dtype]), draw(LAYOUTS)
        scores = draw(distributions)
        if scale == 0:
            # The LSE of a single key is 0, so its bound is 0 too. But kernels replace a scale of 0 by 1e-37, and this LSE is
            # then about 1e-38.
            seq_q, seq_k = max(2, seq_q), max(2, seq_k)
        if causal == BOTTOM_RIGHT:  # "bottom-right" needs at least as many keys as queries
            seq_q, seq_k = sorted((seq_q, seq_k))
        q, k, v, grad_out = layouts
        sizes = zip(DIMENSIONS, (batch, kv_heads * shared, seq_q), strict=False)
        if math.prod(size for name, size in sizes if name not in q.expanded or name not in grad_out.expanded) < FEW_ROWS:
            layouts = q, replace(k, expanded=k.expanded.replace("s", "")), v, grad_out
        return Problem(
            seq_q=seq_q, seq_k=seq_k, batch=batch, heads=kv_heads * shared, kv_heads=kv_heads, head_dim=head_dim,
            value_dim=value_dim, dtype=dtype, causal=causal, scale=scale, scores=scores, layouts=layouts,
            return_lse=return_lse, seed=draw(seeds),
        )  # fmt: skip

    dimensions = [(head_dim, value_dim) for head_dim in head_dims for value_dim in value_dims(head_dim)]
    kinds = st.sampled_from(list(itertools.product(DTYPES, dimensions, (False, True, BOTTOM_RIGHT), (True, False))))
    seeds = st.integers(0, 2**16)
    return problem()
