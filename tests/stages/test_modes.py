"""Each mode of a forward kernel is right, with and without split keys.

MODE "guess" guesses each row's maximum. MODE "again" repeats the tiles whose guess failed. MODE "running" keeps a running
maximum. The host chooses by shape, and for most small problems it chooses "running". So these tests force or find each choice.
"""

import pytest
import torch
from cases import ALWAYS, available, make_inputs, names_in, never_short, once, set_names

import stages
from common import recording
from common.measure.reference import assert_correct, plain, truth
from common.operator import diagonal
from common.runtime import DEVICE, num_sms


def has_modes(name):
    """Return whether a stage's forward kernel has an argument MODE."""
    return "MODE" in getattr(names_in(name).get("_forward_kernel"), "arg_names", ())


GUESSING = once([name for name in stages.names() if has_modes(name)], "forward")
NEWEST = GUESSING[-1]


class Recorded:
    """A forward kernel that records the mode and the number of splits of each launch.

    `failed` has a flag for each split of the last tile: 1 if the split failed in the launch with mode "guess".
    """

    def __init__(self, kernel):
        self.kernel, self.launched, self.failed = kernel, [], None

    def __getitem__(self, grid):
        def launch(*args, MODE, **options):
            named = dict(zip(self.kernel.arg_names, args, strict=False))
            splits = named.get("splits", 1)
            self.launched.append((MODE, splits))
            if MODE == "again":
                state = torch.cat([named[name] for name in ("counter_ptr", "failed_ptr", "state_ptr") if name in named])
                self.failed = state[-splits:].tolist()
            return self.kernel[grid](*args, MODE=MODE, **options)

        return launch


@pytest.fixture
def recorded(monkeypatch):
    """A function that replaces a stage's forward kernel with a `Recorded` one. It returns the stage and the new kernel."""

    def record(name):
        stage = available(name)
        kernel = Recorded(stage.forward.__globals__["_forward_kernel"])
        set_names(monkeypatch, name, _forward_kernel=kernel)
        monkeypatch.setattr(recording, "is_watched", lambda: True)  # a replayed call would launch the original kernel
        return stage, kernel

    return record


def check(stage, q, k, v, causal):
    options = {"causal": bool(causal), "scale": q.shape[-1] ** -0.5, "diagonal": diagonal(causal, q.shape[2], k.shape[2])}
    out, lse = stage.forward(q, k, v, **options)
    assert_correct({"out": out, "lse": lse}, truth(q, k, v, **options), plain(q, k, v, **options))


MASKS = {False: "full", "bottom-right": "bottom-right", True: "top-left"}


def combinations():
    """Yield (stage, mode, number of splits, mask). The default run takes only one mask for stages before the newest."""
    for name in GUESSING:
        for mode in ("guess", "again", *(["running"] if "SHORT" in names_in(name) else [])):
            for splits in (1, 2) if "splits_of" in names_in(name) else (1,):
                for causal, mask in MASKS.items():
                    if causal is True and mode == "again":
                        continue  # the last split has one key tile, so its guess cannot fail
                    marks = [] if mask == "bottom-right" or name == NEWEST else [pytest.mark.long]
                    yield pytest.param(name, mode, splits, causal, id=f"{name}-{mode}-{splits}-{mask}", marks=marks)


@pytest.mark.parametrize(("name", "mode", "splits", "causal"), list(combinations()))
def test_each_mode_with_and_without_splits(name, mode, splits, causal, recorded, monkeypatch):
    """If mode "again" is tested, key 70 makes the last split fail. Else key 0 is a sink, which only split 0 may guess.

    A sink of 120 nats in the guess of another split would make all P of this split underflow to 0.
    """
    stage, kernel = recorded(name)
    q, k, v, _ = make_inputs(130, 200, 16, batch=1, heads=1)  # 4 key tiles, and too many rows for the tiles of few rows
    q[..., 0], k[..., 0] = 4, 0
    if mode == "again":
        k[:, :, 70, 0] = 30  # no guess includes key 70, and its P overflows float16
    elif "FIRST_KEYS" in names_in(name):
        k[:, :, 0, 0] = 120
    # All samples pass, so that the launch with mode "guess" starts each tile.
    set_names(monkeypatch, name, **never_short(name), splits_of=lambda *_: splits, SAMPLE_LIMIT=2**20)
    if mode == "running":
        set_names(monkeypatch, name, SHORT=dict.fromkeys(names_in(name)["SHORT"], ALWAYS))
    check(stage, q, k, v, causal)
    if mode == "running":
        assert kernel.launched == [("running", splits)]
    else:
        assert kernel.launched == [("guess", splits), ("again", splits)]
        assert kernel.failed == [0] * (splits - 1) + [int(mode == "again")]


# (batch, heads, queries, keys, head_dim, mask, mode, splits on a GPU with 132 SMs)
CHOSEN = [
    (4, 16, 520, 500, 64, False, "running", 1),
    (2, 16, 520, 1000, 128, False, "running", 1),
    (1, 8, 300, 2000, 64, False, "running", 4),
    (1, 8, 300, 4000, 128, "bottom-right", "running", 5),
    (2, 16, 520, 2000, 64, False, "guess", 1),
    (1, 16, 1000, 2000, 128, "bottom-right", "guess", 1),
    (1, 8, 1000, 4000, 64, "bottom-right", "guess", 4),
    (1, 8, 1000, 4000, 128, "bottom-right", "guess", 2),
    (1, 1, 520, 64000, 128, False, "guess", 25),
]


@pytest.mark.parametrize(("batch", "heads", "seq_q", "seq_k", "head_dim", "causal", "mode", "splits"), CHOSEN)
def test_the_host_chooses_each_mode(batch, heads, seq_q, seq_k, head_dim, causal, mode, splits):
    offset = diagonal(causal, seq_q, seq_k)
    cut = names_in(NEWEST)["plan"](batch, heads, heads, seq_q, seq_k, offset, bool(causal), head_dim, head_dim, 132)
    assert (cut.short, cut.splits) == (mode == "running", splits)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter takes minutes")
@pytest.mark.parametrize(("batch", "heads", "seq_q", "seq_k", "head_dim", "causal", "mode", "splits"), CHOSEN)
def test_modes_that_the_host_chooses(batch, heads, seq_q, seq_k, head_dim, causal, mode, splits, recorded):
    """Most heads have a sink at key 0. In the last head, a later key makes guesses fail."""
    if num_sms() != 132:
        pytest.skip("the host chooses so for 132 SMs")
    stage, kernel = recorded(NEWEST)
    q, k, v, _ = make_inputs(seq_q, seq_k, head_dim, batch=batch, heads=heads)
    q[..., 0], k[..., 0] = 4, 0
    k[:, :-1, 0, 0] = 30 * head_dim**0.5
    k[:, -1:, 100, 0] = 10 * head_dim**0.5
    check(stage, q, k, v, causal)
    assert kernel.launched == [(each, splits) for each in (["running"] if mode == "running" else ["guess", "again"])]
