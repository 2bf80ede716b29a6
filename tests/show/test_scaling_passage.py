"""The tables of several GPUs show the runs in results/."""

import pytest

from common.measure.workloads import Workload
from common.show import scaling


def record(impl, pass_, ranks, seq_len, ms):
    work = Workload(pass_, 1, 16, seq_len, 128, True, "bfloat16")
    rate = work.flops / ranks / ms / 1e9
    measured = {"ms": ms, "iqr_ms": 0.1, "rounds": 9, "launch_hidden": True, "tflops": rate, "peak_extra_mib": 7.0}
    return {"impl": impl, **work.record(), "ranks": ranks, **measured}


POINTS = [(1, 1000, 1.0), (1, 2000, 4.0), (2, 2000, 2.5)]
RUN = {
    "machine_info": {"gpu": "X", "gpus": "2 × X", "torch": "1", "triton": "2", "commit": "abc", "date": "2026-01-02"},
    "records": [record(impl, pass_, *at) for impl in ("sdpa-cudnn", "v3_x") for pass_ in ("fwd", "fwd+bwd") for at in POINTS],
    "links": [{"tokens": 1000, "ranks": 2, "bytes": 8_000_000, "ms": 0.5, "iqr_ms": 0.01, "gbps": 16.0}],
}


def rows(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| f")]


def test_a_run_s_document_has_every_case():
    """A case that was not measured has its reason. A star marks a time that includes CPU time."""
    *most, last = RUN["records"]
    failed = {name: value for name, value in most[0].items() if name != "ms"} | {
        "impl": "v4_y",
        "failure": "n/a",
        "note": "why",
    }
    exposed = last | {"launch_hidden": False, "sent_bytes": 3_000_000}
    table = scaling.scaling_tables(RUN | {"records": [*most, exposed, failed]})
    found = [row[2:] for row in rows(table)]
    assert len(found) == 13
    assert found[-1] == ["2", "2,000", "v3", "2.500*", "0.100", "11", "80%", "80%", "3.0", "7"]
    assert ["1", "1,000", "v4", "n/a"] + ["-"] * 6 in found and "v4, 1 GPUs, S = 1,000: why" in table
    assert "This time may include CPU time" in table


def test_shares_of_one_gpu_and_of_a_linear_gain():
    """Weak scaling is perfect: with twice the tokens, two GPUs do four times the work of one GPU, in twice the time.

    Strong scaling is 0.75: one GPU takes 3 ms for all tokens, and two GPUs take 2 ms instead of 1.5 ms.
    """
    alone = [record("v3_x", "fwd", 1, 1000, 1.0), record("v3_x", "fwd", 1, 2000, 3.0), record("v4_y", "fwd", 1, 2000, 9.0)]
    both = record("v3_x", "fwd", 2, 2000, 2.0)
    assert scaling.shares(both, [*alone, both]) == pytest.approx((1.0, 0.75))
    assert scaling.shares(both, [both]) == (None, None)
