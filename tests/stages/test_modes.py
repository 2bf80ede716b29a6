"""Each mode of a forward kernel is right.

MODE "guess" guesses each row's maximum. MODE "again" repeats the tiles whose guess failed. MODE "running" keeps a running
maximum. The host chooses by shape, and for most small problems it chooses "running". So these tests force or find each choice.
"""

import json

import pytest
from cases import ALWAYS, available, make_inputs, names_in, never_short, once, set_names

import stages
from common import recording
from common.checks import diagonal
from common.measure.reference import assert_correct, plain, truth
from common.measure.workloads import Workload
from common.runtime import DEVICE, num_sms
from common.show.results import ROOT


def has_modes(name):
    """Return whether a stage's forward kernel has an argument MODE."""
    return "MODE" in getattr(names_in(name).get("_forward_kernel"), "arg_names", ())


GUESSING = once([name for name in stages.names() if has_modes(name)], "forward")
CHOOSING = [name for name in GUESSING if "is_short" in names_in(name)]
NEWEST = CHOOSING[0]


class Recorded:
    """A forward kernel that records the mode of each launch.

    `failed` is 1 if the last tile failed in the launch with mode "guess".
    """

    def __init__(self, kernel):
        self.kernel, self.launched, self.failed = kernel, [], None

    def __getitem__(self, grid):
        def launch(*args, MODE, **options):
            self.launched.append(MODE)
            if MODE == "again":
                self.failed = dict(zip(self.kernel.arg_names, args, strict=False))["state_ptr"][-1].item()
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
    """Yield (stage, mode, mask). The default run takes only one mask for stages before the newest."""
    for name in GUESSING:
        for mode in ("guess", "again", *(["running"] if "SHORT" in names_in(name) else [])):
            for causal, mask in MASKS.items():
                if causal is True and mode == "again":
                    continue  # the last tile's rows see too few keys
                marks = [] if mask == "bottom-right" or name == NEWEST else [pytest.mark.long]
                yield pytest.param(name, mode, causal, id=f"{name}-{mode}-{mask}", marks=marks)


@pytest.mark.parametrize(("name", "mode", "causal"), list(combinations()))
def test_each_mode(name, mode, causal, recorded, monkeypatch):
    """If mode "again" is tested, key 70 makes the last tile fail. Else key 0 is a sink, which may be in the guess."""
    stage, kernel = recorded(name)
    q, k, v, _ = make_inputs(130, 200, 16, batch=1, heads=1)  # 4 key tiles
    q[..., 0], k[..., 0] = 4, 0
    if mode == "again":
        k[:, :, 70, 0] = 30  # no guess includes key 70, and its P overflows float16
    elif "FIRST_KEYS" in names_in(name):
        k[:, :, 0, 0] = 120
    # All samples pass, so that the launch with mode "guess" starts each tile.
    set_names(monkeypatch, name, **never_short(name), SAMPLE_LIMIT=2**20)
    if mode == "running":
        set_names(monkeypatch, name, SHORT=dict.fromkeys(names_in(name)["SHORT"], ALWAYS))
    check(stage, q, k, v, causal)
    assert kernel.launched == (["running"] if mode == "running" else ["guess", "again"])
    assert mode == "running" or kernel.failed == int(mode == "again")


# (batch, heads, queries, keys, head_dim, mask, mode on a GPU with 132 SMs)
CHOSEN = [
    (4, 16, 520, 500, 64, False, "running"),
    (2, 16, 520, 1000, 128, False, "running"),
    (1, 8, 300, 2000, 128, "bottom-right", "running"),
    (2, 16, 520, 2000, 64, False, "guess"),
    (1, 16, 1000, 2400, 128, "bottom-right", "guess"),
    (1, 1, 520, 4000, 128, False, "guess"),
]


def is_short(batch, heads, seq_q, seq_k, head_dim, causal):
    """Return whether the host lets 132 CTAs keep a running maximum."""
    names, offset = names_in(NEWEST), diagonal(causal, seq_q, seq_k)
    shape = names["TILES"][head_dim]
    tiles = -(-(seq_q + offset % 64) // shape.queries) * batch * heads
    return names["is_short"](tiles, seq_q, seq_k, offset, bool(causal), shape, head_dim, 132)


@pytest.mark.parametrize(("batch", "heads", "seq_q", "seq_k", "head_dim", "causal", "mode"), CHOSEN)
def test_the_host_chooses_each_mode(batch, heads, seq_q, seq_k, head_dim, causal, mode):
    assert is_short(batch, heads, seq_q, seq_k, head_dim, causal) == (mode == "running")


@pytest.mark.parametrize(("gpu", "workloads"), [("h100", 72), ("h200", 71)])
def test_the_host_chooses_what_was_fast(gpu, workloads):
    """The host's choice, a running maximum or a guess, takes at most 2 % longer than the faster one."""
    cases = json.loads((ROOT / "results" / f"constants-{gpu}.json").read_text())["cases"]
    cases = [case for case in cases if case["decision"] == "running"]
    assert len(cases) == workloads
    for case in cases:
        w = Workload.of(case)
        short = is_short(w.batch, w.heads, w.seq_len, w.kv_len, w.head_dim, w.causal)
        assert case["us"][str(int(short))] <= 1.02 * min(case["us"].values()), w.label


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter takes minutes")
@pytest.mark.parametrize(("batch", "heads", "seq_q", "seq_k", "head_dim", "causal", "mode"), CHOSEN)
def test_modes_that_the_host_chooses(batch, heads, seq_q, seq_k, head_dim, causal, mode, recorded):
    """Most heads have a sink at key 0. In the last head, a later key makes guesses fail."""
    if num_sms() != 132:
        pytest.skip("the host chooses so for 132 SMs")
    stage, kernel = recorded(NEWEST)
    q, k, v, _ = make_inputs(seq_q, seq_k, head_dim, batch=batch, heads=heads)
    q[..., 0], k[..., 0] = 4, 0
    k[:, :-1, 0, 0] = 30 * head_dim**0.5
    k[:, -1:, 100, 0] = 10 * head_dim**0.5
    check(stage, q, k, v, causal)
    assert kernel.launched == (["running"] if mode == "running" else ["guess", "again"])
