"""docs/several-gpus.md shows the runs in results/, or says that there are no runs. A plot shows the runs too."""

import json

import pytest

from common.measure.workloads import Workload
from common.show import scaling

plots = pytest.importorskip("common.show.plots")


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
MILLION = RUN | {"records": [each for each in RUN["records"] if each["ranks"] == 2], "links": []}


@pytest.fixture
def root(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(scaling, "ROOT", tmp_path)
    return tmp_path


def test_a_run_is_shown_with_its_most_gpus(root):
    (root / "results" / "ring-x.json").write_text(json.dumps(RUN))
    (root / "results" / "ring-million.json").write_text(json.dumps(MILLION))
    text = scaling.scaling_passage()
    assert "H = 16, Hkv = 16, D = 128, bfloat16." in text and "on 2 × X, torch 1, triton 2, commit abc, 2026-01-02." in text
    assert "K and V of 1,000 tokens travel in 0.50 ms, at 16 GB/s in each direction." in text
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| forward")]
    assert len(rows) == 8 and all(row[2] == "2,000" for row in rows)
    assert [row[6:8] for row in rows] == [["-", "-"]] * 4 + [["80%", "80%"]] * 4, "the run with one GPU and with two"
    assert rows[-1][:4] == ["forward + backward", "causal", "2,000", "v3"] and rows[-1][8:] == ["7"]
    assert text.count("(../plots/") == 1 and "(../plots/ring-x.png)" in text


def test_a_run_s_document_has_every_case():
    """A case that was not measured has its reason. A star marks a time that includes CPU time."""
    failed = MILLION["records"][0] | {"impl": "v4_y", "failure": "n/a", "note": "why"}
    del failed["ms"]
    exposed = MILLION["records"][-1] | {"launch_hidden": False, "sent_bytes": 3_000_000}
    table = scaling.scaling_tables(RUN | {"records": [*RUN["records"][:-1], exposed, failed]})
    rows = [[cell.strip() for cell in line.strip("|").split("|")][2:] for line in table.splitlines() if line.startswith("| f")]
    assert len(rows) == 13
    assert rows[-1] == ["2", "2,000", "v3", "2.500*", "0.100", "11", "80%", "80%", "3.0", "7"]
    assert ["2", "2,000", "v4", "n/a"] + ["-"] * 6 in rows and "v4, 2 GPUs, S = 2,000: why" in table
    assert "this time includes CPU time" in table


def test_shares_of_one_gpu_and_of_a_linear_gain():
    """Weak scaling is perfect: with twice the tokens, two GPUs do four times the work of one GPU, in twice the time.

    Strong scaling is 0.75: one GPU takes 3 ms for all tokens, and two GPUs take 2 ms instead of 1.5 ms.
    """
    alone = [record("v3_x", "fwd", 1, 1000, 1.0), record("v3_x", "fwd", 1, 2000, 3.0), record("v4_y", "fwd", 1, 2000, 9.0)]
    both = record("v3_x", "fwd", 2, 2000, 2.0)
    found = scaling.Scaling(RUN | {"records": [*alone, both]})
    assert (found.weak(both), found.strong(both)) == (pytest.approx(1.0), pytest.approx(0.75))
    assert (
        scaling.Scaling(RUN | {"records": [both]}).weak(both) is scaling.Scaling(RUN | {"records": [both]}).strong(both) is None
    )


def test_a_run_with_several_numbers_of_gpus_is_drawn(tmp_path):
    plots.draw_scaling("ring-x", RUN, tmp_path)
    assert (tmp_path / "ring-x.png").exists()
    assert scaling.Scaling(RUN).is_drawn() and not scaling.Scaling(MILLION).is_drawn()
