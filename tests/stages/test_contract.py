"""What makes two stages comparable, and the code readable: the same files, the same names."""

import inspect
import pathlib

import pytest

import stages


@pytest.fixture(params=stages.names())
def stage(request):
    """Every stage, those that cannot run here too."""
    return stages.load(request.param)


@pytest.mark.parametrize("file", ["__init__.py", "forward.py", "backward.py", "README.md"])
def test_a_stage_has_the_same_files_as_every_other(stage, file):
    assert (pathlib.Path(stage.__file__).parent / file).is_file()


def test_a_stage_exports_the_contract(stage):
    """Two functions with the same arguments in every stage, and the operator made of them."""
    assert set(stage.__all__) >= {"attention", "forward", "backward"}
    arguments = {
        name: list(inspect.signature(getattr(stage, name)).parameters) for name in ("attention", "forward", "backward")
    }
    assert arguments == {
        "attention": ["q", "k", "v", "causal", "scale", "return_lse"],
        "forward": ["q", "k", "v", "causal", "scale"],
        "backward": ["grad_out", "q", "k", "v", "out", "lse", "causal", "scale"],
    }


def test_a_stage_says_what_it_is(stage):
    for text in (stage.__doc__, stage.attention.__doc__, stage.forward.__doc__, stage.backward.__doc__):
        assert text


def test_stages_load_by_version_alone(stage):
    name = stage.__name__.removeprefix("stages.")
    assert stages.load(name) is stages.load(name.split("_")[0]) is stage


@pytest.mark.parametrize("name", ["v", "v99", "naive", ""])
def test_a_stage_that_is_not_there(name):
    with pytest.raises(ValueError, match=stages.names()[0]):
        stages.load(name)


def test_stages_are_in_order():
    positions = [stages.position(name) for name in stages.names()]
    assert positions == sorted(set(positions))
    assert {stages.before(position) for position in positions} <= {(-1, ""), *positions}
