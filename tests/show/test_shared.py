"""The tables of shared K/V heads have the right times and ratios. A missing number is a dash, or a reason such as OOM."""

import json

from common.measure.workloads import Workload
from common.show import results
from common.show.shared import shared_tables

MACHINE = {"gpu": "X", "torch": "1", "triton": "2", "commit": "abc", "date": "2026-01-02"}


def record(impl, ms=None, sharing=1, *, pass_="fwd", seq_len=1024, causal=False, value_dim=None, **values):
    """Return a measurement with eight query heads. `sharing` query heads share each K/V head."""
    workload = Workload(pass_, 2, 8, seq_len, 64, causal, "float16", kv_heads=8 // sharing, value_dim=value_dim)
    measured = {"ms": ms, "tflops": 100 / ms, "launch_hidden": True, "peak_extra_mib": 8.0 / sharing} if ms else {}
    return {"impl": impl, **workload.record(), **measured, **values}


RECORDS = [
    *(record("v12_late", ms, sharing) for ms, sharing in ((2.0, 1), (1.0, 4), (4.0, 8))),
    *(record("sdpa-cudnn", ms, sharing) for ms, sharing in ((1.0, 1), (2.0, 4), (2.0, 8))),
    record("v12_late", 1.0, seq_len=2048, causal=True), record("v12_late", 4.0, 4, seq_len=2048, causal=True),
    record("sdpa-cudnn", failure="OOM", seq_len=2048, causal=True),
]  # fmt: skip


def rows(text, *begin):
    """Find the rows that begin with the cells `begin`. Return the other cells of each such row."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row[len(begin) :] for row in found if row[: len(begin)] == list(begin)]


def test_each_point_has_the_numbers_of_every_sharing():
    text = shared_tables(RECORDS, MACHINE)
    assert rows(text, "forward", "64", "full", "float16", "1024") == [
        ["50 / 100 / 25", "100 / 50 / 50", "0.50 / 2.00", "2.00 / 0.50 / 2.00", "8 / 2 / 1"]
    ]
    assert rows(text, "forward", "64", "causal", "float16", "2048") == [
        ["100 / 25 / -", "OOM / - / -", "4.00 / -", "- / - / -", "8 / 2 / -"]
    ]
    assert "8 heads of D = 64" in text and "1, 4, 8 query heads per K/V head" in text and "commit abc, 2026-01-02" in text


def test_summary_has_each_ratio_s_mean_and_worst_point_of_shared_heads():
    text = shared_tables([*RECORDS, record("v12_late", 3.0, pass_="bwd"), record("v12_late", 3.0, 8, pass_="bwd")], MACHINE)
    assert rows(text, "v12 without GQA") == [
        ["forward", "1.000", "1.414", "2.000", "4.000: fwd B=2 H=8 Hkv=2 S=2048 D=64 causal float16"],
        ["backward", "1.000", "-", "1.000", "1.000: bwd B=2 H=8 Hkv=1 S=1024 D=64 full float16"],
    ]
    assert rows(text, "cuDNN") == [
        ["forward", "2.000", "0.500", "2.000", "2.000: fwd B=2 H=8 Hkv=1 S=1024 D=64 full float16"],
        ["backward", "-", "-", "-", "-"],
    ]


def test_another_dimension_of_v_has_its_own_table_with_the_libraries_messages():
    refusals = [
        record("flash-3", value_dim=128, pass_=pass_, failure="n/a", note="V headdim\n  is 128") for pass_ in ("fwd", "bwd")
    ]
    others = [record("v12_late", 2.0, value_dim=128), record("sdpa-cudnn", 1.0, value_dim=128, launch_hidden=False)]
    text = shared_tables([*RECORDS, *others, *refusals], MACHINE)
    assert rows(text, "pass", "D", "Dv") == [["mask", "v12", "cuDNN", "FlashAttention-3"]]
    assert rows(text, "forward", "64", "128", "full") == [["50", "100*", "n/a"]]
    assert rows(text, "backward", "64", "128", "full") == [["-", "-", "n/a"]]
    assert text.count("FlashAttention-3: V headdim is 128") == 1 and "some of the CPU's time" in text
    assert "Dv" not in shared_tables(RECORDS, MACHINE)


def test_traffic_of_a_step_is_from_heads_that_share_nothing(monkeypatch, tmp_path):
    shape = {"impl": "v12_late", "pass": "fwd", "batch": 1, "heads": 8, "seq_len": 64, "head_dim": 64, "causal": False,
             "dtype": "float16"}  # fmt: skip
    cases = [shape | {"kv_heads": 2, "value_dim": 64}, shape | {"kv_heads": 8, "value_dim": 32}, shape | {"tuned": {}}]
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "traffic-some.json").write_text(json.dumps({"cases": cases}))
    assert results.tuned_case("v12_late", "fwd", 64, False) == cases[2]
