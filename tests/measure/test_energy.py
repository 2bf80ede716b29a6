"""What is read of the GPU's counter of energy becomes power, and a table."""

import programs
import pytest

from common.measure import energy
from common.measure.energy import Reading
from common.runtime import INTERPRETED
from common.show.energy import energy_table

INFO = {"gpu": "X", "torch": "1", "triton": "2", "limit_watts": 700.0, "commit": "abc", "date": "2026-01-02"}


def readings(*steps):
    return [Reading(seconds, joules, 1500, True) for seconds, joules in steps]


def test_power_is_taken_between_steps_of_the_counter():
    """It stands still between its steps: readings before the first one and after the last one say nothing of the time."""
    assert energy.watts(readings((0.0, 5), (1.0, 5), (1.5, 105), (2.0, 105), (2.5, 405), (3.5, 405))) == 300


@pytest.mark.parametrize("steps", [[], [(0.0, 5), (1.0, 5)], [(0.0, 5), (1.0, 6), (2.0, 6)]])
def test_a_counter_that_stands_still_gives_no_power(steps):
    with pytest.raises(ValueError, match="less than twice"):
        energy.watts(readings(*steps))


def test_table_has_a_row_for_each_case():
    shape = {"pass": "bwd", "batch": 4, "heads": 16, "seq_len": 4096, "head_dim": 128, "causal": True, "dtype": "float16"}
    measured = {"seconds": 2e-3, "rested_seconds": 1.5e-3, "watts": 700.0, "joules": 1.4, "mhz": 1590, "capped": 0.998}
    table = energy_table({"machine_info": INFO, "cases": [{"impl": "v6_some", **shape, **measured}]})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "v6_some" in line]
    per_flop = 1.4 / (10 * 4 * 16 * 4096**2 * 128 / 2) * 1e12
    numbers = ["1.400", f"{per_flop:.2f}", "700", "100", "1.59", "2.000", "1.500"]
    assert rows == [["backward", "128", "causal", "4096", "v6_some", *numbers]]
    assert all(str(fact) in table for fact in INFO.values() if fact != 700.0) and "700 W" in table


@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU")
def test_measuring_without_a_gpu_says_what_it_needs(tmp_path):
    run = programs.python("-m", "common.measure.energy", tmp_path / "x.json", TRITON_INTERPRET="1")
    assert run.returncode == 1 and "needs an NVIDIA GPU" in run.stderr
