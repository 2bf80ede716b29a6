"""The measurement of 8-bit forwards: a model of the tensor core's sum, errors and the table."""

import re

import pytest
import torch

import stages
from common.measure import eight
from common.measure.reference import plain_in_eight_bits, rounded_to_eight_bits, truth
from common.runtime import DEVICE


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


def test_half_of_p_from_bits_adds_few_errors():
    """Odd keys' P may be 3.9 % too small. A row with one visible key has no error of P, whichever key it is."""
    q, k, v = (torch.randn(1, 1, rows, 64) for rows in (64, 512, 512))
    exact = truth(q, k, v, False, 0.125)["out"]
    usual, found = plain_in_eight_bits(q, k, v, False, 0.125)["out"], eight.half_from_bits(q, k, v, 0.125)
    assert not torch.equal(found, usual)
    assert 0.95 < eight.relative(found, exact) / eight.relative(usual, exact) < 1.1
    one = torch.tensor([1.0, -1e4]).expand(2, 2).clone()
    one[1] = one[1].flip(0)
    k = torch.cat([one.mT[None, None], torch.zeros(1, 1, 2, 62)], -1)  # row i sees key i alone
    q = torch.eye(2, 64)[None, None]
    torch.testing.assert_close(eight.half_from_bits(q, k, v[:, :, :2], 1.0), rounded_to_eight_bits(v[:, :, :2], 128))


def test_a_rotation_keeps_scores_and_spreads_outliers():
    q, k = (torch.randn(1, 1, 8, 64) for _ in range(2))
    torch.testing.assert_close(eight.rotated(q) @ eight.rotated(k).mT, q @ k.mT)
    one = torch.zeros(1, 1, 1, 64)
    one[..., 5] = 8
    assert (eight.rotated(one).abs() == 1).all()


def test_all_inputs_differ_from_normal_ones():
    for kind, change in eight.INPUTS.items():
        tensors = [torch.ones(1, 1, 4, 64) for _ in range(3)]
        change(*tensors)
        assert (kind == "normal") == all((each == 1).all() for each in tensors)


def record_of(names, us):
    record = {"batch": 1, "seq_len": 2048, "heads": 16, "kv_heads": 2, "head_dim": 128, "causal": True, "us": us}
    return record | {"error": dict.fromkeys(names, 0.05), "error_float16": 0.0005, "bias": dict.fromkeys(names, -0.002)}


def test_the_table_shows_ratios_and_what_was_not_measured():
    record = record_of(["mine"], {"mine": 100.0, "pre-pass": 20.0, "other": 150.0})
    less = record | {"us": {"mine": 100.0}, "causal": False}
    header, _, *rows = eight.table([record, less]).splitlines()
    assert "× other" in header and "× pre-pass" not in header
    assert rows[0].split() == ["normal", "2048", "128", "causal", "100.0", "20.0", "172", "1.50", "0.0500", "100", "-0.20", "%"]
    assert rows[1].split()[4:8] == ["100.0", "-", "344", "-"]


def test_the_table_shows_several_stages():
    record = record_of(["mine", "parent"], {"mine": 100.0, "parent": 110.0, "other": 150.0})
    record["error"]["parent"] = 0.04
    header, _, row = eight.table([record]).splitlines()
    assert re.findall(r"× (?!float)\w+|error, \w+", header) == ["× parent", "× other", "error, mine", "error, parent"]
    assert row.split()[7:] == ["1.10", "1.50", "0.0500", "100", "-0.20", "%", "0.0400", "80", "-0.20", "%"]


class FakeTimer:
    """Runs a call, and says that it takes as many µs as it has been asked before, and one more."""

    asked = 0

    def measure(self, call):
        call()
        self.asked += 1
        return [self.asked * 1e-6], True


def test_a_case_has_every_stage_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(eight, "BASELINES", {})
    monkeypatch.setattr(eight, "TOKENS", 130)
    monkeypatch.setattr(eight, "HIDDEN", 16 * 64)
    randn, generator = torch.randn, torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: generator(DEVICE))
    monkeypatch.setattr(torch, "randn", lambda *shape, generator, device: randn(*shape, generator=generator, device=DEVICE))
    names = eight.eight_bit_stages()[-2:]
    record = eight.measure(130, 64, True, "late sink", FakeTimer(), names)
    assert list(record["us"].items()) == [(name, n) for n, name in enumerate([*names, stages.newest(), "pre-pass"], start=1)]
    assert record["inputs"] == "late sink"
    assert list(record["error"]) == list(record["bias"]) == names
    eight.table([record])


def test_stages_without_8_bits_are_refused(capsys):
    with pytest.raises(SystemExit):
        eight.main(["--stage", "eight1,v3", "x.json"])
    assert "v3_fa2_causal: not in 8 bits" in capsys.readouterr().err
