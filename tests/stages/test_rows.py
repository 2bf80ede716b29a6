"""Forwards that choose the sizes of their tiles are right with tiles of 192 rows and of 32 keys. The host reaches each size."""

import itertools

import pytest
import torch
from cases import available, make_inputs, names_in, once, set_names

import stages
from common import recording
from common.checks import BOTTOM_RIGHT, diagonal
from common.measure.reference import assert_correct, plain, truth
from common.runtime import INTERPRETED, Device, interpreted_as

CHOOSING = once([name for name in stages.names() if "queries_of" in names_in(name)], "forward")


def watched_shapes(monkeypatch, name, **values):
    """Replace names of a stage by these values, and return a list that gets the shape of each forward's tiles."""
    shapes, sizes_of = [], names_in(name)["sizes_of"]

    def watched(*args):
        shapes.append(sizes_of(*args))
        return shapes[-1]

    set_names(monkeypatch, name, sizes_of=watched, **values)
    monkeypatch.setattr(recording, "is_watched", lambda: True)  # recorded launches would not contain the test's changes
    return shapes


@pytest.mark.parametrize("name", CHOOSING)
@pytest.mark.parametrize(
    ("heads", "seq_q", "seq_k", "causal", "queries"),
    [
        (128, 4096, 4096, True, 256), (1024, 512, 512, False, 256), (9, 3456, 3456, True, 128), (1440, 192, 169, False, 192),
        (1680, 544, 544, True, 192), (3400, 192, 5376, False, 192), (729, 374, 374, True, 192),
    ],
)  # fmt: skip
def test_each_number_of_rows_is_chosen(heads, seq_q, seq_k, causal, queries, name):
    sizes_of = names_in(name)["sizes_of"]
    for width in (16, 32, 64):
        assert sizes_of(heads, seq_q, seq_k, 0, causal, width, width, 132).queries == queries
    assert sizes_of(heads, seq_q, seq_k, 0, causal, 128, 128, 132).queries == 128


OF_192 = [  # (queries, keys, causal, head_dim, value_dim, dtype)
    *((seq, seq, causal, 64, 64, torch.float16) for seq in (1, 191, 192, 193, 374, 544) for causal in (False, True)),
    (193, 374, BOTTOM_RIGHT, 64, 64, torch.bfloat16),  # the first tile starts before query 0
    (374, 193, True, 32, 64, torch.float16),
    (200, 65, False, 64, 16, torch.bfloat16),
]  # fmt: skip


def of_192():
    """Yield each stage with each problem. The interpreter's default run takes every second one; the next stage, the others."""
    for (place, name), (turn, problem) in itertools.product(enumerate(CHOOSING), enumerate(OF_192)):
        yield pytest.param(*problem, name, marks=[pytest.mark.long] if INTERPRETED and (place + turn) % 2 else [])


@pytest.mark.parametrize(("seq_q", "seq_k", "causal", "head_dim", "value_dim", "dtype", "name"), [*of_192()])
def test_tiles_of_192_rows_are_right(seq_q, seq_k, causal, head_dim, value_dim, dtype, name, monkeypatch):
    """Two CTAs share the tiles of three heads, so a CTA computes several tiles."""
    stage = available(name)
    shapes = watched_shapes(monkeypatch, name, queries_of=lambda *_: 192)
    q, k, v, _ = make_inputs(seq_q, seq_k, head_dim, dtype, batch=1, heads=3, kv_heads=1, value_dim=value_dim)
    options = {"causal": bool(causal), "scale": head_dim**-0.5, "diagonal": diagonal(causal, seq_q, seq_k)}
    with interpreted_as(Device(num_sms=2)):
        out, lse = stage.forward(q, k, v, **options)
    assert [shape.queries for shape in shapes] == [192]
    assert_correct({"out": out, "lse": lse}, truth(q, k, v, **options), plain(q, k, v, **options))


FEW_KEYS = once([name for name in stages.names() if "fewer_keys" in names_in(name)], "forward")


@pytest.mark.parametrize("name", FEW_KEYS)
@pytest.mark.parametrize(
    ("heads", "seq_q", "seq_k", "causal", "keys"),
    [
        (100, 11392, 77, False, 32),
        (2520, 402, 402, True, 64),
        (512, 224, 224, True, 64),
        (512, 96, 224, False, 32),
        (100, 5000, 290, False, 64),
    ],
)
def test_each_number_of_keys_is_chosen(heads, seq_q, seq_k, causal, keys, name):
    sizes_of = names_in(name)["sizes_of"]
    assert sizes_of(heads, seq_q, seq_k, 0, causal, 256, 256, 132).keys == keys
    assert sizes_of(heads, seq_q, seq_k, 0, causal, 256, 128, 132).keys == 64  # O has buffers of its own, so one of Q fits
    assert sizes_of(heads, seq_q, seq_k, 0, causal, 64, 256, 132).keys == 64


@pytest.mark.parametrize("name", FEW_KEYS)
@pytest.mark.parametrize(
    ("seq_q", "seq_k", "causal", "keys"),
    [(257, 77, False, 32), (257, 77, False, 64), (129, 1, False, 32), (200, 200, True, 64), (130, 193, BOTTOM_RIGHT, 64)],
)
def test_tiles_of_32_keys_are_right(seq_q, seq_k, causal, keys, name, monkeypatch):
    """Two CTAs share the tiles of four heads, so a CTA computes several tiles. With a mask, the tiles have 64 keys."""
    stage = available(name)
    shapes = watched_shapes(monkeypatch, name, fewer_keys=lambda *_: keys == 32 or causal)
    q, k, v, _ = make_inputs(seq_q, seq_k, 256, torch.float16, batch=2, heads=2, kv_heads=1)
    options = {"causal": bool(causal), "scale": 256**-0.5, "diagonal": diagonal(causal, seq_q, seq_k)}
    with interpreted_as(Device(num_sms=2)):
        out, lse = stage.forward(q, k, v, **options)
    assert [shape.keys for shape in shapes] == [keys]
    assert_correct({"out": out, "lse": lse}, truth(q, k, v, **options), plain(q, k, v, **options))
