"""The benchmark's tables and their summary show measurements in stage order, and compare nothing with a failure."""

import pytest

import stages
from common.show.summary import summary
from common.show.tables import speed_table

GPU = {
    "gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "commit": "abc", "date": "2026-01-02",
    "matmul_tflops": {"float16": 800.0},
}  # fmt: skip
V0, V1, V2, V3, V4A, V5 = map(stages.resolve, ("v0", "v1", "v2", "v3", "v4a", "v5"))


def record(impl, ms=None, seq_len=512, **changes):
    result = {"impl": impl, "pass": "fwd", "batch": 32, "heads": 16, "seq_len": seq_len, "head_dim": 128, "causal": False}
    if ms is not None:
        result |= {"flops": 4e9, "ms": ms, "iqr_ms": 0.01, "tflops": 400.0 / ms, "launch_hidden": True, "peak_extra_mib": 64.0}
    return result | {"dtype": "float16", "host_us": 33.0} | changes


def rows(text, impl=""):
    """Return the cells of all rows of an implementation, or of all rows."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    return [row for row in found if row[1] != "implementation" and impl in ("", row[1])]


def test_a_table_compares_with_the_parent_v0_cudnn_and_matmul():
    records = [record(V0, 8.0), record(V1, 4.0), record(V2, 1.0), record("sdpa-cudnn", 0.8)]
    table = speed_table(records, GPU)
    assert rows(table, V2) == [["", V2, "1.000", "0.0100", "400.0", "4.00", "8.00", "80", "50", "67.1", "33"]]
    assert rows(table, V0)[0][5:8] == ["-", "1.00", "10"]
    assert rows(table, "sdpa-cudnn")[0][5:8] == ["-", "10.00", "100"]
    for fact in GPU["gpu"], "torch 2.11.0", "triton 3.6.0", "commit abc", "2026-01-02", "matmul float16 800 TFLOP/s":
        assert fact in table


def test_columns_are_explained_and_those_that_nothing_fills_are_left_out():
    table = speed_table([record(V2, 1.0), record(f"{V2} (again)", 1.0)], GPU)
    assert "× parent: the speed of a stage divided by the speed of its parent; ± IQR: " in table
    assert "(again): the same code, measured twice." in table and "µs in a row" not in table and "× v0" not in table
    assert "(again)" not in speed_table([record(V2, 1.0)], GPU)
    assert "IQR" not in speed_table([record(V2, 1.0)], GPU, columns=60)


def test_there_is_a_table_for_each_kind_of_workload_with_lengths_and_stages_in_order():
    changes = [{"pass": "bwd"}, {"causal": True}, {"dtype": "float32"}, {"score_std": 2.5}, {"value_dim": 64}]
    records = [record(V0, 1.0, **change) for change in changes]
    for seq_len in (16384, 512, 2048):
        records += [record(impl, 1.0, seq_len) for impl in (V5, V2, V0, "sdpa-flash")]
    table = speed_table(records, GPU)
    assert [line for line in table.splitlines() if "D=" in line] == [
        "forward D=128 Dv=64 full float16",
        "forward D=128 full float16",
        "forward D=128 full float16 std=2.5",
        "forward D=128 full float32",
        "forward D=128 causal float16",
        "backward D=128 full float16",
    ]
    found = rows(table)[1:13]
    assert [row[0] for row in found[::4]] == [f"B=32 H=16 S={seq_len}" for seq_len in (512, 2048, 16384)]
    assert [row[1] for row in found] == ["sdpa-flash", V0, V2, V5] * 3


def test_failures_are_rows_and_nothing_is_compared_with_them():
    records = [record(V1, 2.0), record(V2, failure="WRONG", note="out: error 1 > 0.1"), record(V3, 1.0)]
    table = speed_table([*records, record(V0, failure="OOM")], GPU)
    assert rows(table, V0)[0][2:] == ["OOM"] + ["-"] * 8 and rows(table, V2)[0][2:] == ["WRONG"] + ["-"] * 8
    assert rows(table, V3)[0][5:7] == ["-", "-"]
    assert f"{V2} at B=32 H=16 S=512: out: error 1 > 0.1" in table


def test_workloads_with_other_heads_and_keys_have_rows_of_their_own_and_a_rate_of_k_and_v():
    shapes = [{}, {"kv_len": 64}, {"kv_len": 64, "kv_heads": 4}]
    records = [record(impl, ms + len(shape), **shape) for shape in shapes for impl, ms in ((V0, 4.0), (V1, 2.0))]
    table = speed_table(records, GPU | {"copy_gbps": 4321.5})
    assert [row[0] for row in rows(table, V0)] == [f"B=32 H=16{x}" for x in (" Hkv=4 S=512 Sk=64", " S=512 Sk=64", " S=512")]
    assert [row[5] for row in rows(table, V1)] == ["1.50", "1.67", "2.00"] and "copy 4322 GB/s" in table
    assert rows(table)[0][-1] == f"{2 * 32 * 4 * 64 * 128 * 2 / 6e-3 / 1e9:.0f}"  # four K/V heads and 64 keys in 6 ms


def test_a_narrow_table_has_fewer_columns_and_short_names():
    records = [record(name, 1234.5, 16384, launch_hidden=False) for name in ("sdpa-cudnn", V2, V4A)]
    wide, narrow = speed_table(records, GPU), speed_table(records, GPU | {"commit": 40 * "f"}, columns=80)
    assert max(map(len, wide.splitlines())) > 100 >= 80 >= max(map(len, narrow.splitlines()))
    assert [row[1] for row in rows(narrow)] == ["cuDNN", "v2", "v4a"] and rows(wide)[-1][1].endswith(" (dead end)")
    assert rows(narrow)[-1][2] == "1,234.500*" and "some of the CPU's time" in " ".join(narrow.split())
    assert 3 < len(rows(narrow)[0]) < len(rows(wide)[0])


def test_ratios_within_the_noise_are_equal_signs_and_changed_code_is_marked():
    """The run measures v0 twice at six lengths, where the times differ by 2 %."""
    lengths = [2**n for n in range(9, 15)]
    records = [record(V0, 2.0, s) for s in lengths] + [record(f"{V0} (again)", 2.04, s) for s in lengths]
    records += [record(V1, 2.06, s) for s in lengths[:-1]] + [record(V1, 2.20, lengths[-1])]
    assert all(sign not in speed_table(records[:6] + records[12:], GPU) for sign in ("=:", "†"))
    records += [record(V3, 1.0, s, source="000000000000") for s in lengths]
    table = speed_table(records, GPU)
    assert [row[5] for row in rows(table, V1)] == ["="] * 5 + ["0.91"]
    assert len(rows(table, f"{V3} †")) == 6 and table.count("\n\n=: ") == table.count("\n\n†: ") == 1
    text = summary(records + [record(V2, 1.01, s) for s in lengths], GPU, V3)
    assert "forward: 1.01 times as fast (1.01–1.01), which is within the noise" in text and "again" not in text
    assert "\n=: within the noise." in text


def test_a_summary_names_what_was_not_measured():
    records = [record(V2, 1.0), record(V3, failure="WRONG", note="why"), record(V3, failure="WRONG", seq_len=1024, note="why")]
    assert f"Not measured: {V3} WRONG (2)" in summary(records, GPU, V3)


def test_a_summary_begins_with_the_gain_over_the_parent():
    """A pass's gain is a geometric mean over the workloads that both stages have."""
    records = [record(V2, 4.0), record(V3, 1.0), record(V2, 9.0, 1024), record(V3, 9.0, 1024), record(V3, 1.0, 2048)]
    records += [record("sdpa-cudnn", 0.5), record("sdpa-cudnn", 9.0, 1024)]
    records += [record(V2, 3.0, **{"pass": "bwd"}), record(V3, 6.0, **{"pass": "bwd"})]
    assert summary(records, GPU, V3).splitlines()[:3] == [
        f"{V3} compared with its parent, {V2}:",
        "  forward: 2.00 times as fast (1.00–4.00), 71 % of cuDNN's speed",
        "  backward: 0.50 times as fast",
    ]


@pytest.mark.parametrize("about", [None, max(stages.names(), key=len)])
def test_a_summary_of_all_stages_fits_a_terminal(about):
    """Without a stage in question, it compares the newest with the first."""
    names = ["sdpa-flash", "sdpa-cudnn", "flash-3", "flash-4", *stages.names()]
    kinds = [{"pass": pass_, "head_dim": head_dim} for pass_ in ("fwd", "bwd", "fwd+bwd") for head_dim in (64, 128)]
    records = [record(name, 12345.678 - place, **kind) for place, name in enumerate(names) for kind in kinds]
    lines = summary(records, GPU, about).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    first = f"{stages.newest()} compared with the first stage of this run, {stages.names()[0]}:"
    assert about or lines[0] == first and any("more implementations" in line for line in lines)
