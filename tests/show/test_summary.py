"""The first lines of a benchmark's output state the right ratios and fit a terminal."""

import pytest

import stages
from common.show.summary import COLUMNS, LINES, summary

GPU, CPU = {"gpu": "NVIDIA H200"}, {"gpu": None}


def record(impl, time=None, seq_len=512, on_gpu=True, **changes):
    found = {
        "impl": impl, "pass": "fwd", "batch": 32, "heads": 16, "seq_len": seq_len, "head_dim": 128, "causal": False,
        "dtype": "float16",
    }  # fmt: skip
    if time is not None:
        found |= {"ms": time, "flops": 4e9} if on_gpu else {"roofline_us": time, "flops_executed": 8e6}
        found |= {} if on_gpu else {"bytes_read": 3e6, "bytes_written": 1e6}
    return found | changes


V2, V3 = stages.resolve("v2"), stages.resolve("v3")


def rows(text, impl):
    return [line.strip("|").split("|") for line in text.splitlines() if line.startswith(f"| {impl} ")]


def test_gain_over_the_parent_comes_first():
    """A pass's gain is a geometric mean over the workloads that both stages have."""
    records = [record(V2, 4.0), record(V3, 1.0), record(V2, 9.0, 1024), record(V3, 9.0, 1024), record(V3, 1.0, 2048)]
    records += [record("sdpa-cudnn", 0.5), record("sdpa-cudnn", 9.0, 1024)]
    records += [record(V2, 3.0, **{"pass": "bwd"}), record(V3, 6.0, **{"pass": "bwd"})]
    lines = summary(records, GPU, V3).splitlines()
    assert lines[:3] == [
        f"{V3} compared with its parent, {V2}:",
        "  forward: 2.00 times as fast (1.00–4.00), 71 % of cuDNN's speed",
        "  backward: 0.50 times as fast",
    ]


def test_a_gain_within_the_noise_says_so():
    lengths = [2**n for n in range(9, 15)]
    records = [record(name, ms, s) for name, ms in ((V2, 2.0), (f"{V2} (again)", 2.04), (V3, 2.01)) for s in lengths]
    text = summary(records, GPU, V3)
    assert "forward: 1.00 times as fast (1.00–1.00), which is within the noise" in text
    assert rows(text, V3)[0][1].split()[1] == "=" and "=: the difference" in text and "again" not in text


def test_without_a_gpu_bytes_flops_and_time_at_peak_are_compared():
    def counted(impl, time, **changes):
        return record(impl, time, on_gpu=False, **changes)

    records = [counted(V2, 6.0), counted(V3, 1.5, bytes_read=1e6, flops_executed=8e6)]
    records += [counted(V2, 2.0, **{"pass": "bwd"}), counted(V3, 2.5, bytes_written=3e6, flops_executed=4e6, **{"pass": "bwd"})]
    text = summary(records, CPU, V3)
    assert text.splitlines()[1:3] == [
        "  forward: 4.00 times as fast at peak, 2.00 times fewer bytes, as many FLOPs",
        "  backward: 0.80 times as fast at peak, 1.50 times more bytes, 2.00 times fewer FLOPs",
    ]
    assert rows(text, V3)[0][1].split() == ["1.5", "×4.00"] and "There is no GPU." in text


def test_a_run_of_all_stages_compares_the_newest_with_the_first():
    names = stages.names()
    newest = [name for name in names if not stages.is_dead_end(name)][-1]
    times = {name: 100.0 - place for place, name in enumerate(names)}
    text = summary([record(name, time) for name, time in times.items()], GPU)
    assert text.splitlines()[0] == f"{newest} compared with the first stage of this run, {names[0]}:"
    assert f"{times[names[0]] / times[newest]:.2f} times as fast" in text
    assert "The tables below have" in text and rows(text, newest) and rows(text, names[0])


@pytest.mark.parametrize("machine", [GPU, CPU])
@pytest.mark.parametrize("about", [None, max(stages.names(), key=len)])
def test_it_fits_a_terminal(machine, about):
    """The summary fits even if a run has every library, stage, pass and head dimension, and many failures."""
    shapes = [(pass_, head_dim) for pass_ in ("fwd", "bwd", "fwd+bwd") for head_dim in (64, 128)]
    names = ["sdpa-flash", "sdpa-cudnn", "flash-3", "flash-4", *stages.names()]
    on_gpu = machine["gpu"] is not None
    records = [
        record(name, 12345.678 + place, on_gpu=on_gpu, head_dim=head_dim, flops=9e15, **{"pass": pass_})
        for place, name in enumerate(names) for pass_, head_dim in shapes
    ]  # fmt: skip
    records += [record(name, failure="WRONG") for name in names]
    lines = summary(records, machine, about).splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
    assert any("WRONG" in line for line in lines)
