"""The measurement of 8-bit forwards: a model of the tensor core's sum, errors and the table."""

import pytest
import torch

from common.measure import eight
from common.measure.reference import truth


def test_the_model_of_the_sum_keeps_what_fits():
    """Sums of few bits are exact. In a large accumulator, small products vanish."""
    ones = torch.ones(1, 64)
    assert eight.cut_matmul(ones, ones.T) == 64
    a = torch.tensor([[2.0**14] + [1.0] * 63])
    assert eight.cut_matmul(a, ones.T) == 2**14  # each 1 lies one bit too low
    a[0, 0] = 2.0**13
    assert eight.cut_matmul(a, ones.T) == 2**13 + 63


def test_one_accumulator_has_the_bias_that_a_gpu_had():
    """An H200 gave -2.4 % for 2048 keys and -10.1 % for 8192."""
    short, long = eight.biases(2048), eight.biases(8192)
    assert short["one accumulator"] == pytest.approx(-0.024, abs=0.002)
    assert long["one accumulator"] == pytest.approx(-0.101, abs=0.005)
    for found in (short, long):
        assert abs(found["one for each 128 keys"] - found["float32 sums"]) < 0.001


def test_errors_of_the_last_queries():
    q, k, v = (torch.randn(2, heads, 300, 16) for heads in (16, 2, 2))

    def attention(q, k, v, causal):
        return 1.5 * truth(q, k, v, causal, 0.25)["out"]

    for causal in (False, True):
        error, bias = eight.error_of(attention, q, k, v + 1, causal)
        assert error == pytest.approx(0.5) and bias == pytest.approx(0.5)


def test_the_table_shows_ratios_and_what_was_not_measured():
    record = {"batch": 1, "seq_len": 2048, "heads": 16, "kv_heads": 2, "head_dim": 128, "causal": True}
    record |= {"us": {"mine": 100.0, "pre-pass": 20.0, "other": 150.0}, "error": 0.05, "error_float16": 0.0005, "bias": -0.002}
    less = record | {"us": {"mine": 100.0}, "causal": False}
    header, _, *rows = eight.table([record, less]).splitlines()
    assert "× other" in header and "× pre-pass" not in header
    assert rows[0].split() == ["2048", "128", "causal", "100.0", "20.0", "172", "1.50", "0.0500", "100", "-0.20", "%"]
    assert rows[1].split()[3:7] == ["100.0", "-", "344", "-"]
