"""What is measured: the workloads of the FlashAttention papers, their FLOPs and their inputs."""

from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from common.runtime import DEVICE

# The matmuls of a pass: how many sum over, or give, rows of the size of q and k, and how many of v's. A forward has S and O; a
# backward S again, dQ and dK, and dP and dV.
PASSES = {"fwd": (1, 1), "bwd": (3, 2), "fwd+bwd": (4, 3)}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

TOKENS = 16384  # batch * seq_len
HIDDEN = 2048  # heads * head_dim
SINK_QUERY = 4  # no more than what is in a row anyway
if DEVICE == "cuda":
    HEAD_DIMS = (64, 128)
    SEQ_LENS = (512, 1024, 2048, 4096, 8192, 16384)
else:  # few, on the interpreter, but long enough for several tiles each way
    HEAD_DIMS = (64,)
    SEQ_LENS = (512, 1024)


@dataclass(frozen=True)
class Workload:
    """One pass of attention over q [batch, heads, seq_len, head_dim], and k and v of kv_heads and kv_len, with head_dim and
    value_dim.

    Raises:
        ValueError: the K/V heads do not divide the heads, or it is causal and has not as many keys as queries.
    """

    pass_: str  # a key of PASSES
    batch: int
    heads: int
    seq_len: int
    head_dim: int
    causal: bool
    dtype: str  # a key of DTYPES
    score_std: float = 1.0  # the standard deviation of the scores, q·k / √D
    kv_heads: int | None = None  # each serves heads / kv_heads query heads; None: as many as heads
    value_dim: int | None = None  # None: as head_dim
    kv_len: int | None = None  # keys; None: as many as queries, seq_len
    sink: float = 0.0  # nats that key 0 scores for every query, where the others' mean is 0; 0: it is as they are

    def __post_init__(self):
        for name, usual in (("kv_heads", self.heads), ("value_dim", self.head_dim), ("kv_len", self.seq_len)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} K/V heads do not divide {self.heads} heads")
        if self.causal and self.kv_len != self.seq_len:  # which keys a query sees would have to be said
            raise ValueError(f"a causal workload of {self.seq_len} queries has as many keys, not {self.kv_len}")

    @classmethod
    def of(cls, record: dict) -> "Workload":
        """The workload of a record, of an older one too, which lacks the last fields; TypeError where something is missing."""
        names = {field.name: field.name.rstrip("_") for field in fields(cls)}
        return cls(**{field: record[name] for field, name in names.items() if name in record})

    @property
    def flops(self) -> float:
        """FLOPs as the papers count them: matmuls alone, half of them when causal, recomputation not counted."""
        of_keys, of_values = PASSES[self.pass_]
        scores = self.batch * self.heads * self.seq_len * self.kv_len
        return 2 * scores * (of_keys * self.head_dim + of_values * self.value_dim) * (0.5 if self.causal else 1.0)

    @property
    def label(self) -> str:
        heads = f"H={self.heads}" + ("" if self.kv_heads == self.heads else f" Hkv={self.kv_heads}")
        lengths = f"S={self.seq_len}" + ("" if self.kv_len == self.seq_len else f" Sk={self.kv_len}")
        dims = f"D={self.head_dim}" + ("" if self.value_dim == self.head_dim else f" Dv={self.value_dim}")
        mask = "causal" if self.causal else "full"
        spread = "" if self.score_std == 1 else f" std={self.score_std:g}"
        sink = f" sink={self.sink:g}" if self.sink else ""
        return f"{self.pass_} B={self.batch} {heads} {lengths} {dims} {mask} {self.dtype}{spread}{sink}"

    def record(self) -> dict:
        """What a record of a table says of its workload."""
        return {name.rstrip("_"): value for name, value in asdict(self).items()}

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output: normal numbers, q's times `score_std`, the same for every implementation.

        A sink takes the first number of each row of q and k: of q's all `SINK_QUERY`, of k's what makes the scores of key 0, 0
        for the other keys.

        Never zeros: a GPU multiplies zeros with less power, so at a higher clock.
        """
        generator = torch.Generator(DEVICE).manual_seed(0)
        rows, kv_rows = (self.heads, self.seq_len), (self.kv_heads, self.kv_len)
        shapes = (*rows, self.head_dim), (*kv_rows, self.head_dim), (*kv_rows, self.value_dim), (*rows, self.value_dim)
        q, k, v, grad_out = (
            torch.randn(self.batch, *shape, generator=generator, device=DEVICE, dtype=DTYPES[self.dtype]) for shape in shapes
        )
        q.mul_(self.score_std)
        if self.sink:
            q[..., 0], k[..., 0], k[:, :, 0] = SINK_QUERY, 0, 0
            k[:, :, 0, 0] = self.sink * self.head_dim**0.5 / SINK_QUERY
        return q, k, v, grad_out


def paper_shape(seq_len: int, head_dim: int) -> tuple[int, int]:
    """The batch and the number of heads that make 16k tokens of hidden size 2048; 1 and 2 on the CPU."""
    if DEVICE == "cpu":
        return 1, 2
    return max(1, TOKENS // seq_len), HIDDEN // head_dim
