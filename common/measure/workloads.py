"""Workloads of the FlashAttention papers: shapes, FLOPs and inputs."""

from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from common.runtime import DEVICE

# How many matmuls of a pass have q's and k's head dimension, and how many have v's. Forward: (S; O). Backward: (S again, dQ and
# dK; dP and dV).
PASSES = {"fwd": (1, 1), "bwd": (3, 2), "fwd+bwd": (4, 3)}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

TOKENS = 16384  # batch * seq_len
HIDDEN = 2048  # heads * head_dim
SINK_QUERY = 4  # not larger than other elements of a row
if DEVICE == "cuda":
    HEAD_DIMS = (64, 128)
    SEQ_LENS = (512, 1024, 2048, 4096, 8192, 16384)
else:  # small for the interpreter, but with several tiles of queries and keys
    HEAD_DIMS = (64,)
    SEQ_LENS = (512, 1024)


@dataclass(frozen=True)
class Workload:
    """One pass of attention over q [batch, heads, seq_len, head_dim], k [batch, kv_heads, kv_len, head_dim] and v
    [batch, kv_heads, kv_len, value_dim].

    Raises:
        ValueError: the K/V heads do not divide the heads, or a causal workload has more or fewer keys than queries.
    """

    pass_: str  # a key of PASSES
    batch: int
    heads: int
    seq_len: int
    head_dim: int
    causal: bool
    dtype: str  # a key of DTYPES
    score_std: float = 1.0  # the standard deviation of the scores, q·k / √D
    kv_heads: int | None = None  # heads / kv_heads query heads share a K/V head; None: kv_heads = heads
    value_dim: int | None = None  # None: as head_dim
    kv_len: int | None = None  # keys; None: as many as queries, seq_len
    sink: float = 0.0  # if not 0, the score of key 0 for every query, in nats; the other keys' scores have mean 0

    def __post_init__(self):
        for name, usual in (("kv_heads", self.heads), ("value_dim", self.head_dim), ("kv_len", self.seq_len)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} K/V heads do not divide {self.heads} heads")
        if self.causal and self.kv_len != self.seq_len:  # the alignment of the mask would be ambiguous
            raise ValueError(f"a causal workload of {self.seq_len} queries has as many keys, not {self.kv_len}")

    @classmethod
    def of(cls, record: dict) -> "Workload":
        """Return the workload of a record. An older record may lack the last fields; other missing fields raise TypeError."""
        names = {field.name: field.name.rstrip("_") for field in fields(cls)}
        return cls(**{field: record[name] for field, name in names.items() if name in record})

    @property
    def flops(self) -> float:
        """FLOPs as the papers count them: only matmuls, half if causal, without recomputation."""
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
        """Return the workload's fields of a table's record."""
        return {name.rstrip("_"): value for name, value in asdict(self).items()}

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v and the output's gradient, the same for all implementations.

        All are normally distributed, and q is multiplied by `score_std`. A sink uses the first element of each row of q and k.
        This element is `SINK_QUERY` in q and 0 in k. In key 0 it is the value that gives the sink's score. Inputs are never all
        zeros: a GPU needs less power to multiply zeros, so its clock would be higher.
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
    """Return (batch, heads) such that there are 16k tokens and the hidden size is 2048; (1, 2) on the CPU."""
    if DEVICE == "cpu":
        return 1, 2
    return max(1, TOKENS // seq_len), HIDDEN // head_dim
