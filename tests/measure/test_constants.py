"""Forced choices reach the newest stage's plan, and the host chooses what was fast."""

import json

import pytest
from cases import names_in

from common import recording
from common.measure import constants
from common.measure.workloads import Workload
from common.show.results import ROOT

PLANS = {  # decision -> arguments of `plan` for which the host has this decision
    "splits": (1, 16, 16, 1, 65536, 0, False, 64, 64, 132),
    "running": (4, 16, 16, 4096, 4096, 0, False, 128, 128, 132),
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
