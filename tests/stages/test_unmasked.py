"""Stages whose forward has other tiles without a mask are right with these tiles, also where guesses of the maximum fail."""

import pytest
import torch
from cases import available, make_inputs, names_in, never_short, once, set_names

import stages
from common import recording
from common.measure.reference import assert_correct, plain, truth
from common.runtime import Device, interpreted_as

UNMASKED = once([name for name in stages.names() if "shape_of" in names_in(name)], "forward")
ROWS = 192  # query rows of a tile


@pytest.fixture(params=UNMASKED)
def forward(request, monkeypatch):
    """A stage's forward that takes the tiles of UNMASKED whenever there is no mask, and always guesses the maximum. It asserts
    that it took these tiles.
    """
    name = request.param
    available(name)
    shape_of, shapes = names_in(name)["shape_of"], []

    def watched(*args):
        shapes.append(shape_of(*args))
        return shapes[-1]

    set_names(monkeypatch, name, **never_short(name), MORE_ROWS=2, shape_of=watched)
    monkeypatch.setattr(recording, "is_watched", lambda: True)

    def checked(q, k, v):
        options = {"causal": False, "scale": q.shape[-1] ** -0.5, "diagonal": 0}
        with interpreted_as(Device(num_sms=100)):
            out, lse = stages.load(name).forward(q, k, v, **options)
        assert [shape.queries for shape in shapes] == [ROWS]
        assert_correct({"out": out, "lse": lse}, truth(q, k, v, **options), plain(q, k, v, **options))

    return checked


@pytest.mark.parametrize(("seq_q", "seq_k", "kv_heads", "dtype"), [
    (193, 300, 1, torch.float16), pytest.param(385, 129, 3, torch.bfloat16, marks=pytest.mark.long),
    pytest.param(385, 1, 1, torch.float16, marks=pytest.mark.long),
])  # fmt: skip
def test_results_are_right(seq_q, seq_k, kv_heads, dtype, forward):
    q, k, v, _ = make_inputs(seq_q, seq_k, 128, dtype, batch=1, heads=3, kv_heads=kv_heads)
    forward(q, k, v)


@pytest.mark.parametrize("name", UNMASKED)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(128, 64), (64, 128), (128, 256)])
def test_values_of_another_width_keep_two_consumers(head_dim, value_dim, name):
    """O could not take Q's buffers, and shared memory has no room for more."""
    assert names_in(name)["shape_of"](64, 4096, False, head_dim, value_dim, 132).queries == 128


@pytest.mark.parametrize("row", [0, 70, 191])  # a row of each consumer
def test_a_tile_whose_guess_fails_is_computed_again(row, forward):
    q, k, v, _ = make_inputs(2 * ROWS, 400, 128, batch=1, heads=2)
    q[:, :, row], k[:, :, 200] = 0, 0
    q[:, :, row, 0], k[:, :, 200, 0] = 20, 20  # this row's score with key 200 is 400 / √128 = 35 nats
    forward(q, k, v)
