"""Stages whose forward has other tiles without a mask are right with these tiles, also where guesses of the maximum fail."""

import pytest
import torch
from cases import make_inputs, names_in, once, set_names

import stages
from common.measure.reference import assert_correct, plain, truth

UNMASKED = once([name for name in stages.names() if "UNMASKED" in names_in(name)], "forward")
ROWS = 192  # query rows of a tile


@pytest.fixture(params=UNMASKED)
def forward(request, monkeypatch):
    """A stage's forward that takes the tiles of UNMASKED whenever there is no mask, and always guesses the maximum. It
    asserts that it took them.
    """
    if reason := stages.unavailable(request.param):
        pytest.skip(f"{request.param} {reason}")
    plan, plans = names_in(request.param)["plan"], []

    def watched(*args):
        plans.append(plan(*args))
        return plans[-1]

    shorts = dict.fromkeys(names_in(request.param)["SHORT"], 0)
    set_names(monkeypatch, request.param, MORE_ROWS=2, FEW_SQUARES=0, SHORT=shorts, splits_of=lambda *_: 1, plan=watched)

    def checked(q, k, v):
        options = {"causal": False, "scale": q.shape[-1] ** -0.5, "diagonal": 0}
        out, lse = stages.load(request.param).forward(q, k, v, **options)
        assert [cut.shape.queries for cut in plans] == [ROWS]
        assert_correct({"out": out, "lse": lse}, truth(q, k, v, **options), plain(q, k, v, **options))

    return checked


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("seq_q", "seq_k", "kv_heads", "value_dim"), [
    (193, 300, 3, 128), (400, 129, 1, 128), (385, 64, 3, 64), (576, 1, 3, 128),
])  # fmt: skip
def test_results_are_right(seq_q, seq_k, kv_heads, value_dim, dtype, forward):
    q, k, v, _ = make_inputs(seq_q, seq_k, 128, dtype, heads=3, kv_heads=kv_heads, value_dim=value_dim)
    forward(q, k, v)


@pytest.mark.parametrize("row", [0, 70, 191])  # a row of each consumer
def test_a_tile_whose_guess_fails_is_computed_again(row, forward):
    q, k, v, _ = make_inputs(2 * ROWS, 400, 128, batch=1, heads=2)
    q[:, :, row], k[:, :, 200] = 0, 0
    q[:, :, row, 0], k[:, :, 200, 0] = 20, 20  # this row's score with key 200 is 400 / √128 = 35 nats
    forward(q, k, v)
