"""Stages that guess the maximum are right and fast, even if later keys score far above the first keys.

CTAs share failed tiles equally. If guesses fail, CTAs start no further tiles with a guess.
"""

import itertools
from typing import NamedTuple

import pytest
import torch
from cases import available, make_inputs, names_in, never_short, once, once_by_file, set_names
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import stages
from common import recording
from common.measure.reference import assert_correct, plain, truth
from common.runtime import DEVICE, Device, interpreted_as, num_sms

SAFE = once([name for name in stages.names() if "FIRST_KEYS" in names_in(name) and not stages.is_dead_end(name)], "forward")
SHARING = [name for name in SAFE if "LOOKED_AT" in names_in(name)]  # in these stages, CTAs take the failed tiles in turn
GIVING_UP = [name for name in SAFE if "LATELY" in names_in(name)]
SAMPLING = [name for name in SAFE if "_sample_kernel" in names_in(name)]
PROGRAMS = 2  # number of concurrent programs; there are few, so that each takes several tiles
SAMPLES = names_in(SAMPLING[0])["LATELY"].value


def options_of(name):
    """Return the argument names of a stage's forward kernel."""
    kernel = stages.load(name).forward.__globals__.get("_forward_kernel")
    return getattr(kernel, "arg_names", ())


def make_long(name, monkeypatch):
    """Make a stage treat all work as long, and replay no launches."""
    set_names(monkeypatch, name, **never_short(name))
    monkeypatch.setattr(recording, "is_watched", lambda: True)


def newest_of(names):
    """Return stages as parameters; only the newest is in the default run."""
    return [pytest.param(name, marks=[] if name == names[-1] else pytest.mark.long) for name in names]


@pytest.fixture
def long_work(request, monkeypatch):
    """A stage that guesses the maximum for work of any length, with few concurrent programs."""
    stage = available(request.param)
    make_long(request.param, monkeypatch)
    with interpreted_as(Device(num_sms=PROGRAMS)):
        yield stage


def check(stage, q, k, v, causal):
    options = {"causal": causal, "scale": q.shape[-1] ** -0.5, "diagonal": 0}
    out, lse = stage.forward(q, k, v, **options)
    assert_correct({"out": out, "lse": lse}, truth(q, k, v, **options), plain(q, k, v, **options))


def with_key(key, nats, heads, seq_len, head_dim, dtype):
    """Return q, k and v, where one key scores `nats` for all queries and the other keys are normally distributed."""
    q, k, v, _ = make_inputs(seq_len, seq_len, head_dim, dtype, batch=1, heads=heads)
    q[..., 0], k[..., 0], k[:, :, key] = 4, 0, 0
    k[:, :, key, 0] = nats * head_dim**0.5 / 4
    return q, k, v


SPECULATING = [
    pytest.param(name, marks=[] if place % 3 == 0 else pytest.mark.long)  # from the newest on, every third one
    for place, name in enumerate(reversed(once([name for name in stages.names() if "MODE" in options_of(name)], "forward")))
]
SINKS = [0, 10, 15, 16, 45]  # for each head, the key that is the sink; rows guess their maximum from the first 16 keys


@pytest.mark.parametrize("speculating", SPECULATING)
@pytest.mark.parametrize(("dtype", "nats"), [(torch.float16, 120), (torch.bfloat16, 16)], ids=str)
def test_rows_before_a_sink_do_not_see_it(speculating, nats, dtype, monkeypatch):
    """A causal row's guess ignores keys that the row does not see. Otherwise all P of the row would be too small, or 0."""
    stage = available(speculating)
    make_long(speculating, monkeypatch)
    heads = [with_key(key, nats, 1, 130, 64, dtype) for key in SINKS]
    q, k, v = (torch.cat(tensors, 1) for tensors in zip(*heads, strict=True))
    check(stage, q, k, v, True)


@pytest.mark.parametrize("long_work", newest_of(SAFE), indirect=True)
@pytest.mark.parametrize(("dtype", "nats"), [(torch.float16, 40), (torch.bfloat16, 60)], ids=str)
def test_sinks_around_the_last_of_the_first_keys_of_long_rows(long_work, nats, dtype):
    heads = [with_key(key, nats, 1, 600, 16, dtype) for key in (15, 16)]
    check(long_work, *(torch.cat(tensors, 1) for tensors in zip(*heads, strict=True)), True)


class Recorded:
    """A forward kernel that records which tiles its first launch has started, and which of them have failed.

    The second launch repeats the failed tiles. The flags of `samples` samples stand before the tiles' flags.
    """

    def __init__(self, kernel, samples, gives_up):
        self.kernel, self._sizes = kernel, [1, 1, gives_up, samples]

    def __getitem__(self, grid):
        def launch(*args, MODE, **options):
            if MODE == "again":
                named = dict(zip(self.kernel.arg_names, args, strict=False))
                state = named["state_ptr"]
                counter, _, self.given_up, self.samples, self.failed = state.split(
                    [*self._sizes, len(state) - sum(self._sizes)]
                )
                self.programs, self.begun = grid[0], grid[0] + counter.item()
            return self.kernel[grid](*args, MODE=MODE, **options)

        return launch


@pytest.fixture
def recorded(long_work, monkeypatch):
    name = long_work.__name__.removeprefix("stages.")
    kernel = Recorded(long_work.forward.__globals__["_forward_kernel"], SAMPLES * (name in SAMPLING), name in GIVING_UP)
    monkeypatch.setitem(long_work.forward.__globals__, "_forward_kernel", kernel)
    return kernel


def sinks():
    """Yield (stage, head dimension, nats, mask, dtype).

    The default run has the newest stage alone, because all these stages guess with the same code, and not the middle sink.
    """
    for name, head_dim, nats, causal in itertools.product(SAFE, [64, 128], [8, 16, 24], [False, True]):
        for dtype in (torch.float16, torch.bfloat16):
            marks = [] if name == SAFE[-1] and nats != 16 else [pytest.mark.long]
            yield pytest.param(name, head_dim, nats, causal, dtype, marks=marks)


@pytest.mark.parametrize("long_work, head_dim, nats, causal, dtype", list(sinks()), ids=str, indirect=["long_work"])
def test_a_sink_is_known_from_the_beginning(long_work, recorded, head_dim, nats, causal, dtype):
    """The guess includes the sink. So the P of the sink is 1, which every dtype holds exactly, and no tile fails."""
    check(long_work, *with_key(0, nats, 2, 330, head_dim, dtype), causal)
    assert not recorded.failed.any()


class Flags(NamedTuple):
    tile_failed: gl.tensor


@gluon.jit
def _share_kernel(failed_ptr, taker_ptr, tiles, next_failed: gl.constexpr):
    flags = Flags(failed_ptr)
    number = next_failed(gl.to_tensor(0), gl.program_id(0), tiles, flags)
    while number < tiles:
        gl.store(taker_ptr + number, gl.program_id(0))
        number = next_failed(number + 1, gl.num_programs(0) - 1, tiles, flags)


@pytest.mark.parametrize("name", once_by_file(SHARING, "forward_scheduler.py")[-1:])
@pytest.mark.parametrize("tiles", [1, 511, 1300])
@pytest.mark.parametrize("share", [0, 0.01, 0.5, 1])
def test_failed_tiles_are_shared_out_in_turn(name, tiles, share):
    available(name)
    failed = (torch.rand(tiles, device=DEVICE) < share).int()
    takers = torch.full_like(failed, -1)
    _share_kernel[5,](failed, takers, tiles, names_in(name)["_next_failed"], num_warps=1)
    ranks = failed.cumsum(0) - 1
    assert torch.equal(takers, torch.where(failed > 0, ranks % 5, -1).int())


HEADS = 300 if DEVICE == "cpu" else 1000  # each head has one tile; they are more than twice the tiles that a CTA looks at


@pytest.mark.parametrize("long_work", newest_of(SAMPLING), indirect=True)
def test_no_tile_is_started_if_samples_fail(long_work, recorded):
    check(long_work, *with_key(100, 30, HEADS, 130, 16, torch.float16), False)
    assert recorded.samples.sum() > SAMPLES / 4
    assert recorded.begun == recorded.programs  # each CTA started one tile and then gave up
    assert recorded.failed[: recorded.programs].all() and not recorded.failed[recorded.programs :].any()


def predictions():
    """Yield (stage, head dimension, mask, standard deviation, whether samples fail). The default run has three."""
    for name, head_dim, causal in itertools.product(SAMPLING, (64, 128), (False, True)):
        for std, fail in ((1, False), (2.5, False), (5, True)):
            soon = name == SAMPLING[-1] and (head_dim, causal, std) in ((64, False, 5), (64, True, 2.5), (128, True, 5))
            yield pytest.param(name, head_dim, causal, std, fail, marks=[] if soon else pytest.mark.long)


@pytest.mark.parametrize("long_work, head_dim, causal, std, fail", list(predictions()), ids=str, indirect=["long_work"])
def test_samples_predict_whether_tiles_fail(long_work, recorded, head_dim, causal, std, fail):
    q, k, v, _ = make_inputs(600, 600, head_dim, torch.float16, batch=1, heads=4)
    with interpreted_as(Device(num_sms=SAMPLES)):  # one SM per sample
        check(long_work, q * std, k, v, causal)
    assert (recorded.samples.sum() > SAMPLES / 4) == fail


class NotRun:
    """A forward kernel that copies the flags at its first launch, and does nothing else."""

    def __init__(self, kernel):
        self._kernel, self.flags = kernel, None

    def __getitem__(self, grid):
        def launch(*args, MODE, **options):
            if MODE == "guess":
                self.flags = dict(zip(self._kernel.arg_names, args, strict=False))["state_ptr"].clone()

        return launch


@pytest.mark.parametrize("long_work", newest_of(SAMPLING), indirect=True)
def test_all_flags_are_zero_before_the_first_tile(long_work, monkeypatch):
    """The launch that computes samples zeroes all flags. Here each of its CTAs has more flags than it zeroes at once."""
    kernel = NotRun(long_work.forward.__globals__["_forward_kernel"])
    monkeypatch.setitem(long_work.forward.__globals__, "_forward_kernel", kernel)
    torch.use_deterministic_algorithms(True)  # PyTorch then fills new memory with the largest integer
    with interpreted_as(Device(num_sms=1)):
        samples = min(SAMPLES, num_sms())
        q, k, v, _ = make_inputs(256 * 520 * samples, 20, 16, batch=1, heads=1)
        long_work.forward(q, k, v, causal=False, scale=0.25)
    assert len(kernel.flags) - 3 - SAMPLES > names_in(SAMPLING[0])["LOOKED_AT"].value * samples
    assert not kernel.flags.any()


@pytest.mark.parametrize("long_work", newest_of(SAMPLING), indirect=True)
@pytest.mark.parametrize("wide", [0, 1], ids=["even heads", "odd heads"])
def test_samples_come_from_all_heads(long_work, monkeypatch, wide):
    """The number of tiles is a multiple of the number of samples, and a causal mask lets tiles of 16 heads come in turns."""
    kernel = NotRun(long_work.forward.__globals__["_forward_kernel"])
    monkeypatch.setitem(long_work.forward.__globals__, "_forward_kernel", kernel)
    q, k, v, _ = make_inputs(2048, 2048, 16, batch=16, heads=16)
    q[:, wide::2] *= 8
    with interpreted_as(Device(num_sms=SAMPLES)):
        long_work.forward(q, k, v, causal=True, scale=0.25)
    assert SAMPLES / 4 < kernel.flags[3:][:SAMPLES].sum() < SAMPLES * 3 / 4


@pytest.fixture
def blind(long_work, monkeypatch):
    """Make all samples pass."""
    set_names(monkeypatch, long_work.__name__.removeprefix("stages."), SAMPLE_LIMIT=2**20)


@pytest.mark.long
@pytest.mark.parametrize("long_work", newest_of(GIVING_UP), indirect=True)
def test_no_further_tile_is_started_in_vain(long_work, blind, recorded):
    check(long_work, *with_key(100, 30, HEADS, 130, 16, torch.float16), False)
    assert not recorded.samples.any()
    assert recorded.begun < HEADS and recorded.given_up
    assert recorded.failed[: recorded.begun].all() and not recorded.failed[recorded.begun :].any()


@pytest.mark.long
@pytest.mark.parametrize("long_work", newest_of(GIVING_UP), indirect=True)
def test_a_few_tiles_that_fail_stop_nothing(long_work, recorded):
    q, k, v = with_key(100, 30, HEADS, 130, 16, torch.float16)
    k[:, 5:, 100] = 0
    check(long_work, q, k, v, False)
    assert recorded.begun >= HEADS and not recorded.given_up
    assert recorded.failed.sum() == 5


class Looked(NamedTuple):
    given_up: gl.tensor
    sample_failed: gl.tensor
    tile_failed: gl.tensor


@gluon.jit
def _look_kernel(state_ptr, number_ptr, result_ptr, looks, samples: gl.constexpr, gives_up: gl.constexpr):
    state = Looked(state_ptr, state_ptr + 1, state_ptr + 1 + samples)
    for look in range(looks):
        if gives_up(gl.load(number_ptr + look), state):
            gl.store(result_ptr + look, 1)


@pytest.mark.parametrize("name", once_by_file(GIVING_UP, "forward_scheduler.py"))
def test_all_give_up_if_one_does(name):
    """One head's 64 tiles fail. A CTA that looks at these tiles gives up, and then so does one that looks at others."""
    available(name)
    samples = SAMPLES if name in SAMPLING else 0
    state = torch.zeros(1 + samples + 1000, device=DEVICE, dtype=torch.int32)
    state[1 + samples + 200 :][:64] = 1
    numbers = torch.tensor([300, 400, 900, 100], device=DEVICE, dtype=torch.int32)  # 400: looks at the tiles 145 to 272
    results = torch.zeros_like(numbers)
    _look_kernel[1,](state, numbers, results, len(numbers), samples, names_in(name)["_gives_up"], num_warps=1)
    assert results.tolist() == [0, 1, 1, 1]
    state[0] = 0
    results.zero_()
    _look_kernel[1,](state, numbers[2:], results, 2, samples, names_in(name)["_gives_up"], num_warps=1)
    assert not results.any()
