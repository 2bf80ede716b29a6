"""Results are right if programs split the keys, with any number of splits.

Query heads that share a K/V head share a tile.
"""

import itertools
import random

import pytest
import torch
from cases import LONG, available, by_functions, make_inputs, names_in, once, once_by_file, set_names

import stages
from common import recording
from common.checks import diagonal
from common.measure.reference import assert_correct, plain, truth
from common.runtime import DEVICE, INTERPRETED, Device, interpreted_as

OWN = [name for name in stages.names() if "takes" not in names_in(name)]  # the others fall back where there are no lengths
SPLITTING = once([name for name in OWN if "splits_of" in names_in(name)], "forward")
PLANNING = [name for name in stages.names() if "CROWDED" in names_in(name)]  # these stages have a cost model
PACKING = once([name for name in OWN if "_place" in names_in(name)], "forward")


@pytest.fixture(autouse=True)
def _every_call_by_itself(monkeypatch):
    """Switch replay (common/recording.py) off, because recorded launches would not contain the test's changes."""
    monkeypatch.setattr(recording, "is_watched", lambda: True)


def set_splits(monkeypatch, name, number):
    """Set a stage's number of splits. With FEW_SQUARES = 0, more than 128 query rows use the tile sizes of many rows."""
    set_names(monkeypatch, name, splits_of=lambda *_: number, FEW_SQUARES=0)


@pytest.fixture(params=SPLITTING if LONG else SPLITTING[-1:])
def split(request, monkeypatch):
    """A stage that splits keys, and a function that sets its number of splits."""
    return available(request.param), lambda number: set_splits(monkeypatch, request.param, number)


def forward(stage, q, k, v, causal=False, scale=None):
    """Return a stage's out and lse, the truth, and the results of plain PyTorch."""
    options = {"causal": bool(causal), "scale": scale or q.shape[-1] ** -0.5}
    options["diagonal"] = diagonal(causal, q.shape[2], k.shape[2])
    out, lse = stage.forward(q, k, v, **options)
    return {"out": out, "lse": lse}, truth(q, k, v, **options), plain(q, k, v, **options)


PROBLEMS = [  # (queries, keys, head_dim, causal, heads, K/V heads, value_dim)
    (1, 700, 64, False, 4, 1, 64),  # the last split ends inside a tile
    (1, 1, 16, False, 2, 2, 16),
    (5, 300, 128, "bottom-right", 2, 1, 128),  # one of the two consumers has no rows
    (40, 600, 64, "bottom-right", 2, 1, 32),
    (40, 600, 64, True, 2, 1, 32),  # top-left: the queries see only the first 40 keys, so some splits have no visible key
    (70, 203, 32, "bottom-right", 3, 1, 64),  # the number of heads is no power of two
    (150, 700, 64, "bottom-right", 2, 1, 64),  # too many rows for the tiles of few rows
    (140, 400, 128, False, 1, 1, 128),
    (1, 239, 256, True, 1, 1, 256),  # one visible key
]


def numbers():
    """Yield each stage with each problem and each number of splits.

    The interpreter's default run takes one case in nine of the newest stage, and one or two of each other stage. The next stage
    gets other cases.
    """
    for place, name in enumerate(SPLITTING):
        every = 9 if name == SPLITTING[-1] else 32
        for i, (number, problem) in enumerate(itertools.product((1, 2, 3, 9, 40), PROBLEMS)):
            marks = [pytest.mark.long] if INTERPRETED and (i + i // len(PROBLEMS) + place) % every else []
            yield pytest.param(name, number, problem, id=f"{name}-{number}-{problem}", marks=marks)


@pytest.mark.parametrize("split, number, problem", list(numbers()), indirect=["split"])
def test_any_number_of_splits_makes_one_softmax(split, problem, number):
    stage, into = split
    seq_q, seq_k, head_dim, causal, heads, kv_heads, value_dim = problem
    q, k, v, _ = make_inputs(seq_q, seq_k, head_dim, batch=1, heads=heads, kv_heads=kv_heads, value_dim=value_dim)
    into(number)
    assert_correct(*forward(stage, q, k, v, causal))


# head_dim, value_dim, splits, and growth of the scores from the first split to the last. A merge reads 64 splits at once, and
# 32 for Dv = 256. If scores fall by 400, a merge that forgets its maximum overflows.
MORE_THAN_AT_ONCE = [
    (16, 16, 65, 4), (32, 256, 33, 4), (16, 16, 65, -400),
    *(pytest.param(*slow, marks=[pytest.mark.long] * INTERPRETED)
      for slow in [(32, 32, 130, 4), (16, 64, 65, 4), (64, 128, 128, 4), (256, 128, 65, 4), (256, 256, 65, 4)]),
]  # fmt: skip


@pytest.mark.parametrize(("head_dim", "value_dim", "number", "growth"), MORE_THAN_AT_ONCE)
def test_more_splits_than_a_merge_reads_at_once(split, head_dim, value_dim, number, growth):
    """A merge of many splits rescales its accumulator if scores grow, and keeps its old maximum if scores fall.

    Each split has one tile of 64 keys. Only the last tile is not full.
    """
    stage, into = split
    seq_k = number * 64 - 5
    q, k, v, _ = make_inputs(2, seq_k, head_dim, batch=1, heads=2, kv_heads=1, value_dim=value_dim)
    q[..., 0] = 2.0
    k[..., 0] = torch.linspace(-growth / 4, growth / 4, seq_k, device=DEVICE) * head_dim**0.5
    into(number)
    assert_correct(*forward(stage, q, k, v))


# (queries, keys, query heads of one K/V head). A tile has one row for each pair of a query and a head. The first tile
# may begin before query 0. Three heads do not share a tile, because 3 does not divide 64.
PACKED = [(2, 129, 64), (2, 130, 64), (3, 67, 64), (12, 17, 8), (5, 70, 32), (33, 160, 4), (70, 113, 2), (7, 90, 3), (9, 75, 1)]


def of_packed():
    """Yield (stage, number of splits, problem). The default run has all for the newest stage, and a third for the others."""
    for (place, name), number in itertools.product(enumerate(PACKING), (1, 2)):
        for turn, problem in enumerate(PACKED if number == 1 or name in SPLITTING else ()):
            marks = pytest.mark.long if INTERPRETED and name != PACKING[-1] and (turn + place + number) % 3 else []
            yield pytest.param(name, number, *problem, marks=marks)


@pytest.mark.parametrize(("name", "number", "seq_q", "seq_k", "heads"), list(of_packed()))
def test_diagonals_of_heads_that_share_a_tile(name, seq_q, seq_k, heads, number, monkeypatch):
    """The last key that a query sees may be inside a block of 64 keys."""
    stage = available(name)
    q, k, v, _ = make_inputs(seq_q, seq_k, 16, batch=1, heads=heads, kv_heads=1)
    set_splits(monkeypatch, name, number)
    assert_correct(*forward(stage, q, k, v, "bottom-right"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seq_q", [2, 140])
def test_scores_that_differ_widely_from_split_to_split(split, seq_q, dtype):
    """The softmax sum of one split may be negligible, or nearly the whole sum."""
    stage, into = split
    q, k, v, _ = make_inputs(seq_q, 640, 64, dtype, batch=1, heads=2)
    q[..., 0], k[..., 0] = 8.0, 0.0
    k[:, :, 300:310, 0] = 60.0
    k[:, :, 500:, 0] = -60.0
    into(5)
    assert_correct(*forward(stage, q, k, v))


def test_same_bits_on_every_run(split):
    stage, into = split
    q, k, v, grad_out = make_inputs(3, 500, 64, batch=1, heads=4, kv_heads=2)
    into(4)
    first, second = (by_functions(stage, q, k, v, grad_out, causal=False, scale=0.1) for _ in range(2))
    assert torch.equal(first["out"], second["out"]) and torch.equal(first["lse"], second["lse"])


@pytest.mark.parametrize("name", PACKING if LONG else PACKING[-1:])
@pytest.mark.parametrize(("heads", "packed"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 1), (8, 8)])
def test_heads_that_share_keys_share_a_tile(name, heads, packed, monkeypatch):
    """K and V are read once for all query heads of a K/V head, if the number of these heads divides 64."""
    stage = available(name)
    launched = []
    kernel = stage.forward.__globals__["_forward_kernel"]
    monkeypatch.setitem(stage.forward.__globals__, "_forward_kernel", Recorded(kernel, launched))
    assert_correct(*forward(stage, *make_inputs(2, 200, 64, batch=2, heads=2 * heads, kv_heads=2)[:3]))
    of_a_query = [packed] if packed > 1 else []
    assert launched and all(launch["tile"] == [1, 1, 64 // packed, *of_a_query, 64] for launch in launched)
    assert all(launch["shape"] == [2, 2 * heads // packed, 2, *of_a_query, 64] for launch in launched)


class Recorded:
    """A kernel that records the options of its launches, and the shapes of Q and Q's tiles."""

    def __init__(self, kernel, launched):
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launched.append({**options, "tile": args[0].block_shape, "shape": args[0].shape})
            return self.kernel[grid](*args, **options)

        return launch


@pytest.mark.parametrize("name", [name for name in SPLITTING if name not in PLANNING][-1:])
def test_as_many_splits_as_the_gpu_has_room_for(name):
    splits_of = names_in(name)["splits_of"]
    assert [splits_of(tiles, 512, 132) for tiles in (1, 16, 66, 67, 132, 1000)] == [132, 8, 2, 1, 1, 1]
    assert splits_of(16, 3, 132) == 3  # each split has one key tile


@pytest.mark.parametrize("name", once_by_file(PLANNING, "forward.py"))
def test_splits_fill_the_gpu_where_tiles_do_not(name):
    splits_of = names_in(name)["splits_of"]

    def splits(tiles, key_tiles, programs=132, rows=1):
        return splits_of(tiles, key_tiles, rows, 128, 256, programs)

    assert splits(16, 512) == 8  # 16 tiles with 8 splits each keep 128 of 132 programs busy
    assert splits(128, 512) == 1  # without splits, 128 of 132 programs are busy
    assert splits(1024, 512) == 1
    assert splits(1, 2) == 1  # merging would take longer
    assert splits(1, 100_000) > 124
    assert splits(16, 8, rows=64) < splits(16, 8)  # with more rows, writing and reading the splits' outputs takes longer
    for tiles in (1, 7, 67, 133, 200):
        best = splits(tiles, 400)
        turns = -(-tiles * best // 132) * -(-400 // best)
        assert turns <= 1.2 * tiles * 400 / 132 + 4, "the programs are busy nearly all of the time"


@pytest.mark.parametrize("name", once_by_file(PLANNING, "forward.py"))
def test_splits_are_those_of_a_full_search(name):
    """The stage skips numbers of splits that cannot be the best. A search over all numbers finds the same."""
    names = names_in(name)
    splits_of, crowded, rows_read, merge = (names[each] for each in ("splits_of", "CROWDED", "ROWS_READ", "MERGE"))

    def searched(tiles, key_tiles, rows, keys, width, programs):
        def cost(splits):
            turns = -(-tiles * splits // programs)
            busy = tiles * splits / (turns * programs)
            key_tile = keys * width * max(1 + crowded * busy**2, rows / rows_read)
            parts = 2 * tiles * splits * rows * width * (1 + crowded) / programs
            return turns * -(-key_tiles // splits) * key_tile + (merge + parts) * (splits > 1)

        costs = [cost(splits) for splits in range(1, min(key_tiles, programs) + 1)]
        return next(splits for splits, each in enumerate(costs, 1) if each <= 1.01 * min(costs))

    draw = random.Random(0)
    for _ in range(3000):
        shape = (
            int(2 ** draw.uniform(0, 10)), int(2 ** draw.uniform(0, 11)), draw.randint(1, 256), draw.choice([64, 128]),
            draw.choice([32, 128, 192, 256, 512]), draw.choice([1, 4, 78, 114, 132]),
        )  # fmt: skip
        assert splits_of(*shape) == searched(*shape), shape


WAVES = [name for name in SPLITTING if "FEW_WAVES" in names_in(name)]


@pytest.mark.parametrize("name", WAVES)
def test_splits_fill_the_last_of_few_waves(name):
    """147 tiles come in two waves on 132 SMs, and the second has 15. With a mask, they take different times."""
    plan = names_in(name)["plan"]
    full = plan(3, 1, 1, 12416, 12416, 0, 64, 64, 132, False)
    assert (full.tiles, full.splits > 1) == (147, True)
    assert plan(3, 1, 1, 12416, 12416, 0, 64, 64, 132, True).splits == 1
    assert plan(12, 1, 1, 12416, 12416, 0, 64, 64, 132, False).splits == 1  # more than four waves


COUNTING = [name for name in SPLITTING if "counted" in getattr(names_in(name).get("Plan"), "_fields", ())]


@pytest.mark.parametrize("name", COUNTING)
def test_a_counter_only_where_it_balances(name):
    plan = names_in(name)["plan"]
    assert plan(4, 16, 16, 4096, 4096, 0, 128, 128, 132).counted
    assert not plan(1, 16, 16, 512, 512, 0, 128, 128, 132).counted  # 64 tiles: no CTA has a second tile
    assert not plan(64, 32, 8, 1, 4096, 0, 64, 64, 132).counted  # one tile per head: all tiles are equal


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has more SMs than this problem has tiles")
@pytest.mark.parametrize("name", COUNTING)
def test_second_tiles_in_fixed_strides(name, monkeypatch):
    """Eight heads with one query on three SMs: a CTA takes up to three tiles, without splits and without a counter."""
    set_names(monkeypatch, name, splits_of=lambda *_: 1)
    with interpreted_as(Device(num_sms=3)):
        assert_correct(*forward(stages.load(name), *make_inputs(1, 300, 64, batch=1, heads=8)[:3]))
