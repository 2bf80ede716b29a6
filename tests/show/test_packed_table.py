"""The tables of packed sequences compare times of the same case. The times are invented."""

import json

from test_documents import cells

from common.show import packed, results


def test_a_row_has_the_mean_of_the_cases_that_both_were_timed_in(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    times = [
        ("bwd", 64, {"v27_choose": 10.0, "flash-3": 20.0, "padded": 40.0}),
        ("bwd", 64, {"v27_choose": 10.0, "flash-3": 5.0}),  # padding would take too much memory
        ("bwd", 64, {"flash-3": 99.0, "padded": 99.0}),  # the host was slower than the stage
        ("bwd", 128, {"v27_choose": 10.0, "flash-3": 30.0}),
        ("fwd", 64, {"v27_choose": 10.0, "flash-3": 99.0, "padded": 99.0}),
    ]
    records = [{"pass": pass_, "head_dim": head_dim, "us": us} for pass_, head_dim, us in times]
    saved = {"machine_info": {"gpu": "NVIDIA H200", "commit": 40 * "a"}, "records": records}
    (tmp_path / "results" / "packed-h200.json").write_text(json.dumps(saved))
    table = packed.table("shortbwd10_packed_backward")
    assert "v27" in table and "H200, aaaaaaaaaaaa" in table
    assert cells(table, "D") == ["FlashAttention-3", "padded"]
    assert cells(table, "64") == ["×1.00 (0.50–2.00)", "×4.00"]
    assert cells(table, "128") == ["×3.00", "-"]
