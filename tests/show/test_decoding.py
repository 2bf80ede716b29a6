"""The tables of decoding have the right times. They compare the rate of reading K and V with a copy's rate."""

import pytest

from common.measure.workloads import Workload
from common.show.decoding import decoding_tables, kv_bytes, kv_gbps

MACHINE = {"gpu": "X", "torch": "1", "triton": "2", "commit": "abc", "date": "2026-01-02", "copy_gbps": 1000.0}
KV = 2 * 2 * 8 * 1024 * 128  # bytes of K and V for a batch size of 1, eight K/V heads and 1024 keys


def record(impl, gbps=None, *, batch=1, heads=8, seq_len=1, kv_len=1024, **values):
    """Return the record of a forward that reads K and V at `gbps` GB/s. Without `gbps`, the record has no time."""
    workload = Workload("fwd", batch, heads, seq_len, 128, False, "bfloat16", kv_heads=8, kv_len=kv_len)
    measured = {"ms": KV * batch * kv_len / 1024 / gbps / 1e6, "launch_hidden": True} if gbps else {}
    return {"impl": impl, **workload.record(), **measured, **values}


LARGE = {"batch": 64, "kv_len": 4096}  # K and V take 1.07 GB
RECORDS = [
    *(record(impl, gbps) for impl, gbps in (("v34_split", 100.0), ("v29_late", 10.0), ("sdpa-cudnn", 50.0), ("flash-3", 20.0))),
    record("v34_split", 200.0, kv_len=4096), record("flash-3", 400.0, kv_len=4096),
    record("sdpa-cudnn", failure="n/a", note="no\n  plan", kv_len=4096),
    record("v34_split", 900.0, **LARGE), record("sdpa-cudnn", 450.0, **LARGE), record("v29_late", 90.0, **LARGE),
    record("v34_split", 700.0, **LARGE, seq_len=16, heads=32, launch_hidden=False), record("flash-3", 180.0, **LARGE, heads=32),
    record("v34_split", 10.0, **LARGE, seq_len=64, heads=16),  # not in the shares, because a K/V head has over 64 query rows
]  # fmt: skip


def rows(text, *begin):
    """Find the rows that begin with the cells `begin`. Return the other cells of each such row."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row[len(begin) :] for row in found if row[: len(begin)] == list(begin)]


def test_rate_counts_one_read_of_k_and_v():
    one = record("v34_split", 100.0, heads=32, seq_len=16)
    assert kv_bytes(Workload.of(one)) == KV and kv_gbps(one) == pytest.approx(100)
    other = Workload("fwd", 3, 8, 1, 64, False, "float32", kv_heads=4, value_dim=16, kv_len=10)
    assert kv_bytes(other) == 3 * 4 * 10 * (64 + 16) * 4


def test_each_point_has_time_rate_and_share_of_each_implementation():
    text = decoding_tables(RECORDS, MACHINE)
    assert rows(text, "S", "Sk") == [["MB", "cuDNN", "FlashAttention-3", "v29", "v34"]] * 4
    assert rows(text, "1", "1024", "4") == [["0.0839 / 50 / 5%", "0.2097 / 20 / 2%", "0.4194 / 10 / 1%", "0.0419 / 100 / 10%"]]
    assert rows(text, "1", "4096", "17") == [["n/a", "0.0419 / 400 / 40%", "-", "0.0839 / 200 / 20%"]]
    assert rows(text, "16", "4096", "1,074") == [["-", "-", "-", "1.5339* / 700 / 70%"]]
    models = [line for line in text.splitlines() if line.startswith("B = ")]
    assert models == [f"B = {batch}, H / Hkv = {heads} / 8" for batch, heads in ((1, 8), (64, 8), (64, 16), (64, 32))]
    assert "cuDNN: no plan" in text and "some of the CPU's time" in text
    assert "commit abc, 2026-01-02" in text and "1,000 GB/s" in text and "D = 128, bfloat16" in text


def test_summary_sets_the_newest_stage_against_the_fastest_peer_of_each_point():
    more = [record("v34_split", 90.0, seq_len=64), record("flash-3", 30.0, seq_len=64)]
    text = decoding_tables(RECORDS + more, MACHINE)
    worst = "0.50: fwd B=1 H=8 S=1 Sk=4096 D=128 full bfloat16"
    assert rows(text, "1")[:1] == [["1.26", worst]]  # the mean of 2, 0.5 and 2
    assert ["64", "3.00", "3.00: fwd B=1 H=8 S=64 Sk=1024 D=128 full bfloat16"] in rows(text)
    assert rows(text, "all") == [["1.57", worst]]


def test_shares_are_of_the_points_with_a_large_k_and_v_and_few_queries():
    text = decoding_tables(RECORDS, MACHINE)
    assert rows(text, "v34") == [["80%", "70%: fwd B=64 H=32 Hkv=8 S=16 Sk=4096 D=128 full bfloat16"]]
    assert rows(text, "v29") == [["9%", "9%: fwd B=64 H=8 S=1 Sk=4096 D=128 full bfloat16"]]
    assert rows(text, "FlashAttention-3") == [["18%", "18%: fwd B=64 H=32 Hkv=8 S=1 Sk=4096 D=128 full bfloat16"]]
    assert rows(decoding_tables(RECORDS[:4], MACHINE), "v34") == [["-", "-"]]
    assert rows(decoding_tables(RECORDS[:2], MACHINE), "all") == [["-", "-"]]
