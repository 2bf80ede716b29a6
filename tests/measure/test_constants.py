"""Forced choices reach the plan of the stage on which they are measured, and the host chooses what was fast."""

import inspect
import json

import pytest
from cases import names_in

import stages
from common import recording
from common.measure import constants
from common.measure.workloads import Workload
from common.show.results import ROOT

PROBLEMS = {  # decision -> a problem for which the host has this decision
    "splits": Workload("fwd", 1, 16, 1, 64, False, "bfloat16", kv_len=65536),
    "running": Workload("fwd", 4, 16, 4096, 128, False, "float16"),
}


@pytest.fixture(params=constants.DECISIONS)
def key(request):
    """A decision. The test is skipped if the tree has no stage with it."""
    if not stages.line(constants.DECISIONS[request.param].track):
        pytest.skip("no stage of the tree has this decision")
    return request.param


def problem(key, work):
    """Return the arguments of the plan function of a decision's stage, for a workload on a GPU with 132 SMs."""
    given = {name: getattr(work, name) for name in ("batch", "heads", "kv_heads", "head_dim", "value_dim", "causal")}
    given |= {"seq_q": work.seq_len, "keys": work.kv_len, "diagonal": 0, "programs": 132}
    return [given[name] for name in inspect.signature(names_in(constants.stage_of(key))["plan"]).parameters]


def test_a_forced_choice_is_in_the_plan(key):
    names, arguments = names_in(constants.stage_of(key)), problem(key, PROBLEMS[key])
    plan = names["plan"]
    for choice in constants.DECISIONS[key].choices:
        with constants.forced(key, choice) as plans:
            names["plan"](*arguments)
            assert recording.is_watched()
        assert constants.DECISIONS[key].own(plans[0]) == choice
        assert names["plan"] is plan  # nothing stays forced
    with constants.forced(key, None) as plans:
        assert plans == [] and names["plan"](*arguments) == plans[0]


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_host_chooses_what_was_fast(key, gpu):
    """The stage's own choice takes at most 2 % longer than the fastest one, if the saved times are of this stage."""
    cases = json.loads((ROOT / "results" / f"constants-{gpu}.json").read_text())["cases"]
    cases = [case for case in cases if case["decision"] == key == "running" and case.get("impl") == constants.stage_of(key)]
    for case in cases:
        own = constants.DECISIONS[key].own(names_in(case["impl"])["plan"](*problem(key, Workload.of(case))))
        assert case["us"][str(own)] <= 1.02 * min(case["us"].values()), Workload.of(case).label


def test_a_decision_of_no_stage_is_named(monkeypatch):
    monkeypatch.setattr(stages, "line", lambda track: [])
    with pytest.raises(SystemExit, match="splits cannot be measured, because no stage is of the track 'decode'"):
        constants.stage_of("splits")
