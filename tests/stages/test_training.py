"""A small language model learns equally well with every stage and with PyTorch's own attention."""

import functools
import pathlib

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from common.runtime import DEVICE

TEXT = (pathlib.Path(__file__).parent / "data" / "alice.txt").read_bytes()
STEPS, RATE = (30, 3e-3) if DEVICE == "cuda" else (12, 1e-2)
BATCH, CONTEXT, WIDTH, HEADS = (16, 250, 128, 4) if DEVICE == "cuda" else (1, 50, 32, 2)


class Block(nn.Module):
    """A block of attention and an MLP, with LayerNorms and residuals. q, k and v are views of one packed projection."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, S, D]
        x = x + self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class LanguageModel(nn.Module):
    """A model of two blocks that predicts the next byte from the bytes before it."""

    def __init__(self, attend):
        super().__init__()
        self.byte, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(attend), Block(attend), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        return self.head(self.blocks(self.byte(tokens) + self.position.weight))


def losses(attend, dtype):
    """Return the loss of each step. Each call starts with equal weights and reads equal text."""
    torch.manual_seed(0)
    model = LanguageModel(attend).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    text = torch.tensor(list(TEXT), device=DEVICE)
    curve = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1))
        window = text[starts.to(DEVICE) + torch.arange(CONTEXT + 1, device=DEVICE)]
        with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
            logits = model(window[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return torch.tensor(curve)


sdpa = functools.partial(scaled_dot_product_attention, is_causal=True)


def sdpa_in_float64(q, k, v):
    return sdpa(q.double(), k.double(), v.double()).to(q.dtype)


@functools.cache
def expected(dtype):
    """Return the losses with SDPA, and the tolerance of a stage's losses.

    Rounding changes the losses a little. SDPA in float64 shows how much. The tolerance is five times this change, plus 4e-6
    for rounding the loss itself.
    """
    curve = losses(sdpa, dtype)
    return curve, 5 * (losses(sdpa_in_float64, dtype) - curve).abs().max() + 4e-6


pytestmark = pytest.mark.long

dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=[] if DEVICE == "cuda" else [pytest.mark.long])]
)


@dtypes
def test_loss_matches_sdpa(stage, dtype):
    curve, tolerance = expected(dtype)
    got = losses(functools.partial(stage.attention, causal=True), dtype)
    assert (got - curve).abs().max() <= tolerance
    assert got[-3:].mean() < got[0] - 1.5, "nothing was learned"


class ScaledGradient(torch.autograd.Function):
    """The identity function with a gradient that is wrong by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


WRONG = {
    "sees the future": scaled_dot_product_attention,
    "scale off by 1 %": lambda q, k, v: sdpa(q * 1.01, k, v),
    "dq off by 10 %": lambda q, k, v: sdpa(ScaledGradient.apply(q, 1.1), k, v),
    "dk off by 10 %": lambda q, k, v: sdpa(q, ScaledGradient.apply(k, 1.1), v),
    "dv off by 10 %": lambda q, k, v: sdpa(q, k, ScaledGradient.apply(v, 1.1)),
}


@pytest.mark.parametrize("attend", WRONG.values(), ids=WRONG.keys())
def test_loss_reveals_wrong_attention(attend):
    """Each mistake changes the losses by more than the tolerance."""
    curve, tolerance = expected(torch.float32)
    assert (losses(attend, torch.float32) - curve).abs().max() > tolerance
