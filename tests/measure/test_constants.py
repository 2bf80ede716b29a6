"""Forced choices take the place of the host's own."""

import pytest
from cases import names_in

from common import recording
from common.measure import constants


@pytest.mark.parametrize("key", constants.DECISIONS)
def test_a_choice_is_forced_and_the_host_decides_again_afterwards(key):
    try:
        names = names_in(constants.stage_of(key))
    except SystemExit as error:
        pytest.skip(str(error))
    function = constants.DECISIONS[key].function
    own = names[function]
    for choice in constants.DECISIONS[key].choices:
        with constants.forced(key, choice) as found:
            assert names[function]("any", "arguments") == choice and recording.is_watched()
        assert found == [choice] and names[function] is own


def test_a_decision_that_no_stage_has_is_named(monkeypatch):
    monkeypatch.setattr(constants.stages, "line", lambda track: ["v3_fa2_causal"])
    with pytest.raises(SystemExit, match="splits cannot be measured, because no stage's forward has a function 'splits_of'"):
        constants.stage_of("splits")
