"""The benchmark's tables show measurements in stage order, and compare nothing with a failure."""

from cases import cells

from common.show.tables import speed_table

GPU = {
    "gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "commit": "abc", "date": "2026-01-02",
    "matmul_tflops": {"float16": 800.0},
}  # fmt: skip


def record(impl, ms=None, seq_len=512, **changes):
    result = {
        "impl": impl, "pass": "fwd", "batch": 32, "heads": 16, "seq_len": seq_len, "head_dim": 128, "causal": False,
        "dtype": "float16", "score_std": 1.0,
    }  # fmt: skip
    if ms is not None:
        result |= {
            "flops": 4e9, "ms": ms, "iqr_ms": 0.01, "tflops": 400.0 / ms, "launch_hidden": True, "peak_extra_mib": 64.0,
            "host_us": 33.0,
        }  # fmt: skip
    return result | changes


def test_table_compares_with_the_stage_before_v0_cudnn_and_matmul():
    records = [record("v0_a", 8.0), record("v1_b", 4.0), record("v2_c", 1.0), record("sdpa-cudnn", 0.8)]
    table = speed_table(records, GPU)
    assert cells(table, "v2_c") == [
        ["", "", "v2_c", "1.000", "0.0100", "400.0", "4.00", "8.00", "80", "50", "67.1", "33"],
    ]  # fmt: skip
    assert cells(table, "v0_a")[0][6:9] == ["-", "1.00", "10"]
    assert cells(table, "sdpa-cudnn")[0][6:9] == ["-", "10.00", "100"]
    for fact in GPU["gpu"], "torch 2.11.0", "triton 3.6.0", "commit abc", "2026-01-02", "matmul float16 800 TFLOP/s":
        assert fact in table


def test_table_is_in_stage_order_whatever_the_order_of_the_records_and_the_speed():
    records = [record(impl, ms) for impl, ms in (("v16_k", 1.0), ("v2_c", 0.5), ("v0_a", 9.0), ("sdpa-flash", 3.0))]
    lines = speed_table(records, GPU).splitlines()
    found = [line.split("|")[3].strip() for line in lines if line.startswith("|") and "_" in line or "sdpa" in line]
    assert found == ["sdpa-flash", "v0_a", "v2_c", "v16_k"]


def test_table_keeps_failures_as_rows_and_compares_nothing_with_them():
    records = [record("v1_b", 2.0), record("v2_c", failure="WRONG", note="out: error 1 > 0.1"), record("v3_d", 1.0)]
    table = speed_table([*records, record("v0_a", failure="OOM")], GPU)
    assert cells(table, "v0_a")[0][3:] == ["OOM"] + ["-"] * 8
    assert cells(table, "v2_c")[0][3:] == ["WRONG"] + ["-"] * 8
    assert cells(table, "v3_d")[0][6:8] == ["-", "-"]
    assert "v2_c at S=512: out: error 1 > 0.1" in table


def test_table_sorts_lengths_as_numbers_and_splits_by_pass_dimension_mask_dtype_and_spread():
    records = [record("v0_a", 1.0, seq_len, batch=16384 // seq_len) for seq_len in (16384, 512, 2048)]
    changes = {"pass": "bwd"}, {"causal": True}, {"dtype": "float32"}, {"score_std": 2.5}
    records += [record("v0_a", 1.0, **change) for change in changes]
    table = speed_table(records, GPU)
    assert [row[0] for row in cells(table, "v0_a")] == ["512", "2048", "16384", "512", "512", "512", "512"]
    titles = [line for line in table.splitlines() if ", D=" in line]
    assert titles == [
        "forward, D=128, full, float16",
        "forward, D=128, full, float16, scores of standard deviation 2.5",
        "forward, D=128, full, float32",
        "forward, D=128, causal, float16",
        "backward, D=128, full, float16",
    ]


def test_table_shows_kv_heads_if_some_are_shared_and_dv_if_it_differs():
    def changed(impl, ms=None, **changes):
        return record(impl, ms, kv_heads=16, value_dim=128) | changes

    records = [record("v0_a", 8.0), changed("v1_b", 4.0)]
    usual = speed_table(records, GPU)
    # v0's record has neither kv_heads nor value_dim
    assert "K/V" not in usual and "Dv" not in usual and cells(usual, "v1_b")[0][6] == "2.00"
    records += [changed("v0_a", 6.0, kv_heads=4), changed("v1_b", kv_heads=4, failure="n/a", note="sm_80")]
    records += [changed("v1_b", 2.0, value_dim=64)]
    table = speed_table(records, GPU)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    assert [row[:5] for row in rows if row[3].startswith("v")] == [
        ["512", "32 × 16", "16", "v1_b", "2.000"],
        ["512", "32 × 16", "4", "v0_a", "6.000"], ["", "", "", "v1_b", "n/a"],
        ["512", "32 × 16", "16", "v0_a", "8.000"], ["", "", "", "v1_b", "4.000"],
    ]  # fmt: skip
    assert ["", "", "", "v1_b", "n/a"] + ["-"] * 8 in rows and "v1_b at S=512, 4 K/V heads: sm_80" in table
    assert [line for line in table.splitlines() if ", D=" in line] == [
        "forward, D=128, Dv=64, full, float16",
        "forward, D=128, full, float16",
    ]


def test_table_shows_the_number_of_keys_if_it_differs_from_queries():
    def decoding(impl, ms=None, kv_len=64, **changes):
        return record(impl, ms, seq_len=1, kv_len=kv_len, **changes)

    usual = speed_table([record("v0_a", 8.0), record("v0_a", 8.0, kv_len=512)], GPU)
    assert "Sk" not in usual and "copy" not in usual
    records = [decoding("v0_a", 3.0, 1024), decoding("v0_a", 8.0), decoding("v1_b", failure="n/a", note="sm_80")]
    table = speed_table([*records, decoding("v1_b", 1.0, 1024), decoding("v0_a", 4.0, kv_heads=4)], GPU | {"copy_gbps": 4321.5})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    assert rows[0][:6] == ["S", "Sk", "B × H", "K/V heads", "implementation", "ms"]
    assert [row[:6] for row in rows[2:]] == [
        ["1", "64", "32 × 16", "4", "v0_a", "4.000"],
        ["1", "64", "32 × 16", "16", "v0_a", "8.000"], ["", "", "", "", "v1_b", "n/a"],
        ["1", "1024", "32 × 16", "16", "v0_a", "3.000"], ["", "", "", "", "v1_b", "1.000"],
    ]  # fmt: skip
    assert rows[-1][8] == "3.00" and "v1_b at S=1, Sk=64: sm_80" in table
    assert "copy 4322 GB/s" in table and rows[0][-1] == "GB/s of K, V"
    assert rows[2][-1] == f"{2 * 32 * 4 * 64 * 128 * 2 / 4e-3 / 1e9:.0f}"  # K and V of four K/V heads and 64 keys in 4 ms
    assert {len(row) for row in rows} == {len(rows[0])}


def test_table_marks_times_with_the_launch_in_them():
    table = speed_table([record("v0_a", 1.0, launch_hidden=False)], GPU)
    assert cells(table, "v0_a")[0][3] == "1.000*"
    assert "some of the CPU's time" in table
    assert "*" not in speed_table([record("v0_a", 1.0)], GPU)


def test_table_without_a_gpu_shows_counts_and_no_times():
    counts = {"bytes_read": 3e6, "bytes_written": 1e6, "flops_executed": 8e6, "bound": "bytes", "kernel_launches": 17}
    records = [
        record("v0_a", 1234.5, launch_hidden=None, tiles="", roofline_us=6.0, **counts),
        record("v1_b", 4321.5, launch_hidden=None, tiles="128×64", roofline_us=1.5, **counts),
        record("v2_c", failure="OOM"),
    ]
    table = speed_table(records, GPU | {"gpu": None, "matmul_tflops": {}, "roofline": "some GPU, 9 TFLOP/s"})
    common = ["3.000", "1.000", "8.0", "2.0"]
    assert cells(table, "v0_a") == [
        ["512", "32 × 16", "v0_a", "-", *common, "6.000", "bytes", "-", "17", "67.109"],
    ]  # fmt: skip
    assert cells(table, "v1_b") == [["", "", "v1_b", "128×64", *common, "1.500", "bytes", "4.00", "17", "67.109"]]
    assert cells(table, "v2_c")[0][3:] == ["OOM"] + ["-"] * 9
    assert "some GPU, 9 TFLOP/s" in table and "ms" not in table and "1,234" not in table


def lines_too_long(text):
    return [line for line in text.splitlines() if len(line) > 100]


def test_a_terminal_gets_the_columns_that_it_has_room_for():
    """Without a limit, a table has all columns. In 100 characters, it has only the most important columns."""
    names = ["sdpa-cudnn", "v2_fa1_tiling", "v28a_polynomial_exponentials"]
    records = [record(name, 1234.5, seq_len=16384, batch=64, host_us=1234.4, host_iqr_us=56.6) for name in names]
    everything, fitted = speed_table(records, GPU), speed_table(records, GPU | {"commit": 40 * "f"}, columns=100)
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in fitted.splitlines() if line.startswith("|")]
    header = ["S", "B × H", "implementation", "ms", "± IQR", "TFLOP/s", "× parent", "× v0", "% of cuDNN", "% of matmul"]
    assert cells(everything, "implementation")[0][:10] == header and lines_too_long(everything)
    kept = found[0]
    assert {"S", "implementation", "ms", "TFLOP/s", "× parent"} <= set(kept) < set(cells(everything, "implementation")[0])
    assert not lines_too_long(fitted)
    of_last = dict(zip(kept, found[-1], strict=True))
    assert of_last["ms"] == "1,234.500"  # a cell stays under its header


def test_ratios_within_the_noise_are_equal_signs_and_changed_code_is_marked():
    """The run measures v0 twice at six lengths, where the times differ by 2 %."""
    lengths = [2**n for n in range(9, 15)]
    records = [record("v0_a", 2.0, s) for s in lengths] + [record("v0_a (again)", 2.04, s) for s in lengths]
    records += [record("v1_b", 2.06, s) for s in lengths[:-1]] + [record("v1_b", 2.20, lengths[-1])]
    assert all(sign not in speed_table(records[:6] + records[12:], GPU) for sign in ("=:", "†"))
    records += [record("v3_fa2_causal", 1.0, s, source="000000000000") for s in lengths]
    table = speed_table(records, GPU)
    assert [row[6] for row in cells(table, "v1_b")] == ["="] * 5 + ["0.91"]
    assert len(cells(table, "v3_fa2_causal †")) == 6 and table.count("\n\n=: ") == table.count("\n\n†: ") == 1
    assert "| v3 † " in speed_table(records, GPU, columns=60)
