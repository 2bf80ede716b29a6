"""Forced choices reach the newest stage's plan, and measured choices become a table."""

import json

import programs
import pytest
from cases import names_in

from common import recording
from common.measure import constants
from common.measure.workloads import Workload
from common.show.profiles import constants_table
from common.show.results import ROOT

INFO = {"gpu": "X", "torch": "1", "triton": "2", "commit": "abc", "date": "2026-01-02"}
PLANS = {  # decision -> arguments of `plan` for which the host has this decision
    "splits": (1, 16, 16, 1, 65536, 0, False, 64, 64, 132),
    "running": (4, 16, 16, 4096, 4096, 0, False, 128, 128, 132),
    "few rows": (1, 32, 32, 1024, 1024, 0, False, 64, 64, 132),
}


@pytest.mark.parametrize(("key", "choice"), [(key, choice) for key in PLANS for choice in constants.DECISIONS[key].choices])
def test_a_forced_choice_is_in_the_plan(key, choice):
    plan = names_in(constants.NEWEST)["plan"]
    with constants.forced(key, choice) as plans:
        names_in(constants.NEWEST)["plan"](*PLANS[key])
        assert recording.is_watched()
    assert constants.DECISIONS[key].own(plans[0]) == choice
    assert names_in(constants.NEWEST)["plan"] is plan  # nothing stays forced


def test_the_host_decides_if_nothing_is_forced():
    with constants.forced("splits", None) as plans:
        cut = names_in(constants.NEWEST)["plan"](*PLANS["splits"])
    assert plans == [cut] and cut.splits > 1


KEYS = """
from common.kernels import order
from common.measure import constants

kernel = next(module._forward_kernel for module in constants._modules() if hasattr(module, "_forward_kernel"))
keys = [kernel.cache_key]
for share in (order.SHARE.value >> 20, 4):
    with constants.forced("L2 share", share):
        keys.append(kernel.cache_key)
keys.append(kernel.cache_key)
print(*map(keys.index, keys))
"""


def test_a_forced_share_of_the_l2_cache_compiles_the_kernel_anew():
    """Only another share changes the key under which Triton keeps the compiled kernel."""
    run = programs.python("-c", KEYS, TRITON_INTERPRET="0")
    assert run.stdout.split() == ["0", "0", "2", "0"], run.stderr


def test_table_shows_where_another_choice_is_faster():
    shape = {"pass": "fwd", "batch": 1, "heads": 16, "seq_len": 1, "head_dim": 64, "causal": False, "dtype": "float16"}
    times = [{"1": 30.0, "2": 20.0, "4": 25.0}, {"1": 40.0, "2": 20.0, "4": 20.0}]
    cases = [{"decision": "splits", **shape, "own": 4, "us": us} for us in times]
    table = constants_table({"machine_info": INFO, "cases": cases})
    assert "On 2 workloads, the host's choice takes 1.118 times as long as the fastest choice, and at most 1.25 times." in table
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "S=1" in line]
    assert [row[1:] for row in rows] == [["4", "25.0", "2", "20.0", "1.25"]]
    assert "few rows" not in table  # not measured


@pytest.mark.parametrize(("gpu", "workloads"), [("h100", 72), ("h200", 71)])
def test_the_host_chooses_what_was_fast(gpu, workloads):
    """A running maximum or a guess: the newest stage's choice takes at most 2 % longer than the faster one."""
    plan = names_in(constants.NEWEST)["plan"]
    cases = json.loads((ROOT / "results" / f"constants-{gpu}.json").read_text())["cases"]
    cases = [case for case in cases if case["decision"] == "running"]
    assert len(cases) == workloads
    for case in cases:
        w = Workload.of(case)
        cut = plan(w.batch, w.heads, w.kv_heads, w.seq_len, w.kv_len, 0, w.causal, w.head_dim, w.value_dim, 132)
        assert case["us"][str(int(cut.short))] <= 1.02 * min(case["us"].values()), w.label
