"""Define the workloads of the FlashAttention papers: shapes, FLOPs and inputs."""

from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from common.measure.inputs import Scores, Sink, draw
from common.runtime import DEVICE

# pass -> (number of matmuls with the head dimension of q and k, number of matmuls with the head dimension of v). The first
# number counts S in a forward, and S, dQ and dK in a backward. The second number counts O in a forward, and dP and dV in a
# backward.
PASSES = {"fwd": (1, 1), "bwd": (3, 2), "fwd+bwd": (4, 3)}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

TOKENS = 16384  # batch * seq_len
HIDDEN = 2048  # heads * head_dim
# The interpreter gets small sizes, but with several tiles of queries and keys.
HEAD_DIMS = (64, 128) if DEVICE == "cuda" else (64,)
SEQ_LENS = (512, 1024, 2048, 4096, 8192, 16384) if DEVICE == "cuda" else (512, 1024)


@dataclass(frozen=True)
class Workload:
    """One pass of attention over q, k and v.

    The shapes are q [batch, heads, seq_len, head_dim], k [batch, kv_heads, kv_len, head_dim] and
    v [batch, kv_heads, kv_len, value_dim].

    Raises:
        ValueError: heads is no multiple of kv_heads; a causal workload has more or fewer keys than queries; or the key or the
            head of the sink does not exist.
    """

    pass_: str  # a key of PASSES
    batch: int
    heads: int
    seq_len: int
    head_dim: int
    causal: bool
    dtype: str  # a key of DTYPES
    score_std: float = 1.0  # the standard deviation of the scores q·k / √D
    kv_heads: int | None = None  # the number of K/V heads; None means `heads`
    value_dim: int | None = None  # the head dimension of v; None means the same as head_dim
    kv_len: int | None = None  # the number of keys; None means as many as queries
    sink: float = 0.0  # if not 0, the score of the key `sink_key` with each query, in nats; the other scores have mean 0
    sink_key: int = 0
    sink_head: int | None = None  # the K/V head that has the sink; None means all heads

    def __post_init__(self):
        for name, usual in (("kv_heads", self.heads), ("value_dim", self.head_dim), ("kv_len", self.seq_len)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} K/V heads do not divide {self.heads} heads")
        if self.causal and self.kv_len != self.seq_len:  # otherwise the mask could be top-left or bottom-right
            raise ValueError(f"a causal workload of {self.seq_len} queries must have as many keys, not {self.kv_len}")
        if self.sink_key >= self.kv_len or (self.sink_head or 0) >= self.kv_heads:
            raise ValueError(f"there is no key {self.sink_key} of K/V head {self.sink_head or 0} for a sink")

    @classmethod
    def of(cls, record: dict) -> "Workload":
        """Return the workload of a record. A record may lack the fields that have defaults."""
        return cls(**{field.name: record[name] for field in fields(cls) if (name := field.name.rstrip("_")) in record})

    @property
    def flops(self) -> float:
        """The FLOPs as the papers count them: those of the matmuls in `PASSES`, or half of these with a causal mask."""
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
        sink += f"@{self.sink_key}" if self.sink_key else ""
        sink += f" in head {self.sink_head}" if self.sink_head is not None else ""
        return f"{self.pass_} B={self.batch} {heads} {lengths} {dims} {mask} {self.dtype}{spread}{sink}"

    def record(self) -> dict:
        """Return the workload as a dict, which is a part of a results file's record."""
        return {name.rstrip("_"): value for name, value in asdict(self).items()}

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v and the output's gradient, the same for all implementations.

        Inputs are never all zeros, because multiplying zeros needs less power and so raises the GPU's clock.
        """
        sinks = (Sink(self.sink_key, self.sink, self.sink_head),) if self.sink else ()
        kv_rows = (self.batch, self.kv_heads, self.kv_len)
        return draw(
            (self.batch, self.heads, self.seq_len, self.head_dim), (*kv_rows, self.head_dim), (*kv_rows, self.value_dim),
            DTYPES[self.dtype], self.head_dim**-0.5, Scores(self.score_std, sinks), torch.Generator(DEVICE).manual_seed(0),
        )  # fmt: skip


def paper_shape(seq_len: int, head_dim: int) -> tuple[int, int]:
    """Return the papers' (batch, heads), so that B · S = 16384 and H · D = 2048. On the CPU, return (1, 2) to save time."""
    return (1, 2) if DEVICE == "cpu" else (max(1, TOKENS // seq_len), HIDDEN // head_dim)
