"""Stages whose idea is an order of tiles take their tiles in that order, and their results are right."""

import ast
import collections
import itertools

import pytest
from cases import make_inputs, names_in, once, once_by_file, set_names, usual
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

import stages
from common import recording
from common.interpreter import gluon
from common.interpreter.asynchronous import Load
from common.interpreter.schedule import now
from common.kernels import order
from common.measure.reference import assert_correct, plain, truth
from common.runtime import DEVICE, Device, interpreted_as

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="watches the interpreters")

HEADS, SEQ, HEAD_DIM = 5, 270, 128  # at D = 128, query tiles have 128 rows; at D = 16, they may have 256
GROUPS = [[0, 1], [2, 3, 4]]  # the cache holds two heads, and the last group has the head that is left over, too
KV_BYTES = SEQ * 2 * HEAD_DIM * 2  # number of bytes of a head's K and V


def ordering(pass_):
    """Return the stages that order the tiles of a pass, each distinct scheduler once."""
    file = f"{pass_}_scheduler.py"
    ordered = [name for name in once(stages.names(), pass_) if "tile_and_head" in names_in(name, pass_)]
    schedulers = once_by_file(ordered, file)
    return [name for name in ordered if not stages.source(name, file) or name in schedulers]


ORDERED = ordering("forward")


def set_share(monkeypatch, function, share):
    """Set the default of a function's `BUDGET`."""
    for ordered in (function.rewrite(), gluon._translated(function.fn)):  # one for each interpreter
        monkeypatch.setattr(ordered, "__defaults__", (share, *ordered.__defaults__[1:]))


@pytest.fixture(params=usual(ORDERED))
def ordered(request, monkeypatch):
    """A stage with an order of tiles, on a pretended GPU with one SM. The L2 cache holds K and V of two heads."""
    set_share(monkeypatch, order.tile_and_head, 2 * KV_BYTES)
    set_names(monkeypatch, request.param, FEW_SQUARES=0, splits_of=lambda *_: 1)  # the tiles of many rows, and no splits
    monkeypatch.setattr(recording, "is_watched", lambda: True)
    with interpreted_as(Device(num_sms=1)):
        yield stages.load(request.param)


class Watch:
    """Record which tiles of a tensor each program of a kernel loads."""

    def __init__(self, monkeypatch):
        self._loaded, self._kernel, self._rows, self._block = [], None, None, None
        for owner in (GluonJITFunction, InterpretedFunction):
            monkeypatch.setattr(owner, "run", self._run(owner.run))
        monkeypatch.setattr(Load, "__init__", self._copy(Load.__init__))
        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", self._load(InterpreterBuilder.create_masked_load))

    def begin(self, kernel, tensor, block):
        """Watch what one kernel loads from one contiguous tensor.

        Args:
            block: the rows of a tile, or the name of the kernel's argument for them.
        """
        self._loaded, self._kernel, self._rows = [], kernel, block
        self._start, self._end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        self._seq_len, self._head_dim = tensor.shape[2:]

    def taken(self):
        """Return the tiles as (head, tile of the head), program by program, in the order of a program's loads."""
        tiles = [tile for _, *tile in sorted(self._loaded, key=lambda loaded: loaded[0])]
        return [tuple(tile) for tile, _ in itertools.groupby(tiles)]

    def of_programs(self):
        """Return the tiles that each program loads from each head, in order."""
        tiles = collections.defaultdict(list)
        for program, head, tile in self._loaded:
            tiles[program, head].append(tile)
        return tiles

    def work(self):
        """Return each program's number of causal scores, in tiles of as many keys as queries."""
        work = collections.Counter()
        for program, _, tile in set(self._loaded):
            work[program] += tile + 1
        return work

    def _note(self, program, head, row):
        self._loaded.append((program, head, row // self._block))

    def _run(self, run):
        def watched(function, *args, **options):
            self._block = options.get(self._rows, self._rows) if function.__name__ == self._kernel else None
            return run(function, *args, **options)

        return watched

    def _copy(self, begin):
        def watched(load, descriptor, coord, *args):
            if self._block and descriptor._base.data_ptr() == self._start:
                self._note(now().running.program.number, *map(int, coord[1:3]))
            begin(load, descriptor, coord, *args)

        return watched

    def _load(self, load):
        def watched(builder, pointers, *args, **options):
            if self._block and self._start <= (first := int(pointers.data.min())) < self._end:
                row = (first - self._start) // 2 // self._head_dim
                self._note(builder.grid_idx[0], row // self._seq_len, row % self._seq_len)
            return load(builder, pointers, *args, **options)

        return watched


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


def forward(stage, watch, causal):
    """Run a forward, check its results, and return the tiles in the order in which programs have taken them."""
    q, k, v, _ = make_inputs(SEQ, SEQ, HEAD_DIM, batch=1, heads=HEADS)
    options = {"causal": causal, "scale": 0.05, "diagonal": 0}  # narrow scores, so that no guess fails
    watch.begin("_forward_kernel", q, "BLOCK_M")
    out, lse = stage.forward(q, k, v, **options)
    assert_correct({"out": out, "lse": lse}, truth(q, k, v, **options), plain(q, k, v, **options))
    return watch.taken()


def test_causal_tiles_go_through_groups_of_heads_the_longest_first(ordered, watch):
    taken = forward(ordered, watch, causal=True)
    tiles = 1 + max(tile for _, tile in taken)
    assert tiles >= 3
    assert taken == [(head, tile) for heads in GROUPS for tile in reversed(range(tiles)) for head in heads]


ROUNDS = [name for name in ORDERED if "per_round" in getattr(names_in(name).get("Plan"), "_fields", ())]


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("heads", [4, 5])
def test_causal_tiles_of_short_sequences_give_all_programs_equal_work(name, heads, watch, monkeypatch):
    """A head has four query tiles. With four heads, a fifth SM would break the order and save no round. So one of five SMs gets
    no program. With five heads, it would save a round. Then the tiles of the five heads come longest first.
    """
    monkeypatch.setattr(recording, "is_watched", lambda: True)
    q, k, v, _ = make_inputs(512, 512, 128, batch=1, heads=heads)
    options = {"causal": True, "scale": 0.1, "diagonal": 0}
    watch.begin("_forward_kernel", q, "BLOCK_M")
    with interpreted_as(Device(num_sms=5)):
        out, lse = stages.load(name).forward(q, k, v, **options)
    assert_correct({"out": out, "lse": lse}, truth(q, k, v, **options), plain(q, k, v, **options))
    assert sorted(watch.taken()) == list(itertools.product(range(heads), range(4)))
    assert watch.work() == dict.fromkeys(range(heads), 10)


@pytest.mark.long
def test_tiles_without_a_mask_go_through_head_after_head(ordered, watch):
    taken = forward(ordered, watch, causal=False)
    tiles = 1 + max(tile for _, tile in taken)
    assert taken == [(head, tile) for head in range(HEADS) for tile in reversed(range(tiles))]


def ordered_backwards():
    """Yield each backward kernel with an order: (stage, kernel, tensor whose tiles its programs take, rows of a tile)."""
    for name in usual(ordering("backward")):
        names = names_in(name, "backward")
        arguments = getattr(names.get("_backward_kernel"), "arg_names", ())
        kernels = {
            "_dq_kernel": ("q", "BLOCK_M"),
            "_dkv_kernel": ("k", "BLOCK_N"),
            "_backward_kernel": ("k", "BLOCK_N" if "BLOCK_N" in arguments else 128),
            "_wide_dkv_kernel": ("k", 64),
            "_wide_dq_kernel": ("q", 128),
        }
        for kernel in kernels.keys() & names.keys():
            yield name, kernel, *kernels[kernel]


CAUSAL = {"causal": True, "scale": 0.1, "diagonal": 0}


def check_gradients(gradients, q, k, v, grad_out):
    results = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    assert_correct(results, *(make(q, k, v, grad_out=grad_out, **CAUSAL) for make in (truth, plain)))


@pytest.mark.parametrize(("name", "kernel", "tensor", "rows"), sorted(ordered_backwards()))
def test_causal_tiles_of_a_backward_go_through_heads_the_longest_first(name, kernel, tensor, rows, watch):
    stage = stages.load(name)
    heads = 2
    q, k, v, grad_out = make_inputs(SEQ, SEQ, 256 if "wide" in kernel else HEAD_DIM, batch=1, heads=heads)
    with interpreted_as(Device(num_sms=1)):
        out, lse = stage.forward(q, k, v, **CAUSAL)
        watch.begin(kernel, {"q": q, "k": k}[tensor], rows)
        gradients = stage.backward(grad_out, q, k, v, out, lse, **CAUSAL)
    check_gradients(gradients, q, k, v, grad_out)
    taken = watch.taken()
    tiles = 1 + max(tile for _, tile in taken)
    assert tiles >= 3
    longest_first = (
        range(tiles) if tensor == "k" else reversed(range(tiles))
    )  # the last query tiles see the most keys; the first key tiles are seen by the most queries
    assert taken == [(head, tile) for tile in longest_first for head in range(heads)]


@pytest.mark.parametrize("name", [n for n in ordering("backward") if "heads_of_group" in names_in(n, "backward")][-1:])
def test_query_tiles_of_a_backward_turn_in_each_second_wave(name, watch, monkeypatch):
    """A head has five key tiles, and three CTAs run at once. So each head's second wave has two CTAs."""
    for function in (order.tile_and_head, order.heads_of_group):
        set_share(monkeypatch, function, 1)  # so that a group is one head
    stage = stages.load(name)
    q, k, v, grad_out = make_inputs(640, 640, 128, batch=1, heads=2, kv_heads=1)
    with interpreted_as(Device(num_sms=3)):
        out, lse = stage.forward(q, k, v, **CAUSAL)
        watch.begin("_backward_kernel", q, 64)
        gradients = stage.backward(grad_out, q, k, v, out, lse, **CAUSAL)
    check_gradients(gradients, q, k, v, grad_out)
    expected = {}
    for key_tile, head in itertools.product(range(5), range(2)):
        masked, others = [2 * key_tile, 2 * key_tile + 1], range(2 * key_tile + 2, 10)
        expected[key_tile, head] = [*masked, *(reversed(others) if key_tile < 3 else others)]
    assert watch.of_programs() == expected


def asking(pass_):
    """Return the stages whose producer takes tiles from a counter, each distinct file once."""
    file = f"{pass_}.py"
    every = [name for name in stages.names() if "atomic_add(" in (stages.source(name, file) or "")]
    return once_by_file([name for name in every if "def _producer(" in stages.source(name, file)], file)


@pytest.mark.parametrize(("pass_", "name"), [(pass_, name) for pass_ in ("forward", "backward") for name in asking(pass_)])
def test_a_producer_asks_for_its_next_tile_after_it_has_started_its_loads(pass_, name):
    """A CTA that asks when a tile begins takes tiles in the order in which CTAs began. Results do not depend on it, and the
    interpreter has no time, so the test reads the code."""
    (producer,) = (
        node for node in ast.parse(stages.source(name, f"{pass_}.py")).body if getattr(node, "name", "") == "_producer"
    )
    (asked,) = (node.lineno for node in ast.walk(producer) if isinstance(node, ast.Attribute) and node.attr == "atomic_add")
    loops = [node for node in ast.walk(producer) if isinstance(node, ast.For) and "key_tiles" in ast.unparse(node.iter)]
    loops += [node for node in ast.walk(producer) if isinstance(node, ast.For) and "tile.steps" in ast.unparse(node.iter)]
    assert loops and all(loop.end_lineno < asked for loop in loops)
