"""What is measured: the workloads of the FlashAttention papers, their FLOPs and their inputs."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from common.runtime import DEVICE

PASSES = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}  # FLOPs relative to the forward's two products; the backward has five
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

TOKENS = 16384  # batch * seq_len
HIDDEN = 2048  # heads * head_dim
if DEVICE == "cuda":
    HEAD_DIMS = (64, 128)
    SEQ_LENS = (512, 1024, 2048, 4096, 8192, 16384)
else:  # what the interpreter gets through in seconds
    HEAD_DIMS = (16, 32)
    SEQ_LENS = (64, 128, 256)


@dataclass(frozen=True)
class Workload:
    """One pass of attention over q, k and v of one shape, [batch, heads, seq_len, head_dim]."""

    pass_: str  # a key of PASSES
    batch: int
    heads: int
    seq_len: int
    head_dim: int
    causal: bool
    dtype: str  # a key of DTYPES
    score_std: float = 1.0  # the standard deviation of the scores, q·k / √D

    @property
    def flops(self) -> float:
        """FLOPs as the papers count them: matrix products alone, half of them when causal, recomputation not counted."""
        products = 4 * self.batch * self.heads * self.seq_len**2 * self.head_dim
        return products * PASSES[self.pass_] * (0.5 if self.causal else 1)

    @property
    def label(self) -> str:
        mask = "causal" if self.causal else "full"
        spread = "" if self.score_std == 1 else f" std={self.score_std:g}"
        return f"{self.pass_} B={self.batch} H={self.heads} S={self.seq_len} D={self.head_dim} {mask} {self.dtype}{spread}"

    def record(self) -> dict:
        """What a record of a table says of its workload."""
        return {name.rstrip("_"): value for name, value in asdict(self).items()}

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output: normal numbers, q's times `score_std`, the same for every implementation.

        Never zeros: a GPU multiplies zeros with less power, so at a higher clock.
        """
        generator = torch.Generator(DEVICE).manual_seed(0)
        shape = self.batch, self.heads, self.seq_len, self.head_dim
        numbers = [torch.randn(shape, generator=generator, device=DEVICE, dtype=DTYPES[self.dtype]) for _ in range(4)]
        return self.score_std * numbers[0], *numbers[1:]


def paper_shape(seq_len: int, head_dim: int) -> tuple[int, int]:
    """The batch and the number of heads that make 16k tokens of hidden size 2048; 1 and 2 on the CPU."""
    if DEVICE == "cpu":
        return 1, 2
    return max(1, TOKENS // seq_len), HIDDEN // head_dim
