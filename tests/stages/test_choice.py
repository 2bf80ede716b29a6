"""The newest stage chooses among the ends of the tracks. Each choice is reached, and runs the pass that it names."""

import re

import pytest
import torch
from cases import by_functions, check, make_inputs

import stages
from common.runtime import DEVICE, INTERPRETED, Device, interpreted_as

NEWEST = stages.load("newest")


def homes(functions):
    """Return the names of the stages that have these functions."""
    return {function.__module__.split(".")[1] for function in functions.values()}


FORWARDS, BACKWARDS = homes(NEWEST.forward.__globals__["FORWARDS"]), homes(NEWEST.backward.__globals__["BACKWARDS"])
H100 = Device(num_sms=132)
PROBLEMS = [  # batch, heads, K/V heads, queries, keys, D, Dv, causal; on 132 SMs, as in a GPU's benchmarks
    (8, 32, 8, 1, 16384, 128, 128, False), (64, 32, 8, 1, 65536, 64, 64, False), (1, 16, 16, 16, 1024, 64, 64, False),
    (32, 16, 16, 512, 512, 128, 128, True), (32, 8, 8, 512, 512, 256, 256, True), (32, 32, 32, 512, 512, 64, 64, False),
    (4, 32, 32, 4096, 4096, 64, 64, True), (4, 16, 16, 4096, 4096, 128, 128, False), (4, 8, 8, 4096, 4096, 256, 256, False),
]  # fmt: skip
SMALL = [(1, 2, 1, 1, 300, 64, 64, False), (1, 2, 2, 300, 1000, 128, 128, True), (2, 4, 4, 256, 700, 32, 32, False)]


def end_of(track):
    """Return the last stage of a track whose kernels a GPU has run; None for a track without one."""
    return next((name for name in reversed(stages.line(track)) if not hasattr(stages.load(name), "UNTRIED")), None)


def test_every_track_is_chosen_and_is_a_track_s_end():
    assert FORWARDS | BACKWARDS <= set(map(end_of, stages.tracks()))
    with interpreted_as(H100):
        chosen = [NEWEST.choice(*problem) for problem in PROBLEMS]
    assert {choice.forward for choice in chosen} == FORWARDS
    assert {choice.backward for choice in chosen} == BACKWARDS
    assert chosen[-2].forward_work == "2048 tiles of 128 queries, 15.52 waves"
    assert chosen[-1].backward_work == "2048 tiles of 64 keys, 15.52 waves"
    assert re.fullmatch(r"64 tiles of \d+ queries in \d+ splits, [\d.]+ waves", chosen[0].forward_work)


def test_splits_of_few_waves_are_chosen_only_if_they_are_faster():
    """Each shape was measured in all ways on an H200 (results/even-waves-h200.json). Splits took 0.91 and 1.16 of the time of
    the fastest other way."""
    with interpreted_as(H100):
        faster, slower = (NEWEST.choice(1, 4, 4, 4532, 4532, 256, 256), NEWEST.choice(1, 16, 1, 4285, 4285, 64, 64))
    assert faster.forward in FORWARDS and "splits" in faster.forward_work
    assert "splits" not in slower.forward_work


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter's number of SMs makes small problems long")
def test_the_chosen_pass_runs(monkeypatch):
    """Small problems reach all forwards. The stage that `choice` names is the one that runs, and the results are right."""
    ran = []

    def noted(run):
        def call(*args, **options):
            ran.append(run.__module__)
            return run(*args, **options)

        return call

    for function, name in ((NEWEST.forward, "FORWARDS"), (NEWEST.backward, "BACKWARDS")):
        space = function.__globals__
        monkeypatch.setitem(space, name, {track: noted(run) for track, run in space[name].items()})
    reached = set()
    for batch, heads, kv_heads, seq_q, seq_k, head_dim, value_dim, causal in SMALL:
        choice = NEWEST.choice(batch, heads, kv_heads, seq_q, seq_k, head_dim, value_dim, causal)
        inputs = make_inputs(seq_q, seq_k, head_dim, batch=batch, heads=heads, kv_heads=kv_heads, value_dim=value_dim)
        ran.clear()
        check(NEWEST, *inputs, causal=causal, run=by_functions)
        assert ran == [f"stages.{choice.forward}.forward", f"stages.{choice.backward}.backward"]
        reached.add(choice.forward)
    assert reached == FORWARDS


@pytest.mark.parametrize("call", ["attention", "attention_varlen"])
def test_different_lengths_run_the_end_of_their_track(call):
    """The newest stage passes all options on, so its results are those of the track's end."""
    end = stages.load(end_of("lengths"))
    lengths = torch.tensor([0, 70, 128] if call == "attention_varlen" else [90, 100], dtype=torch.int32, device=DEVICE)
    q, k, v = (tensor.detach() for tensor in make_inputs(128, 128, 64, batch=2)[:3])
    arguments = (q, k, v)
    given = {"cache_seqlens": lengths}
    if call == "attention_varlen":
        arguments, given = (*(tensor[0].transpose(0, 1) for tensor in arguments), lengths, lengths), {}
    results = [getattr(stage, call)(*arguments, causal=True, scale=0.1, return_lse=True, **given) for stage in (NEWEST, end)]
    for own, expected in zip(*results, strict=True):
        assert torch.equal(own, expected)
    assert NEWEST.forward.__globals__["forward_of_lengths"] is end.forward


def test_float32_falls_back_whatever_is_chosen():
    choice = NEWEST.choice(4, 32, 32, 4096, 4096, 64, 64, True, dtype=torch.float32)
    assert choice.forward == choice.backward and not stages.track(choice.forward)
