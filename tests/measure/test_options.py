"""Options that the commands share accept the right values. A file that cannot be written is refused at once."""

import argparse
import errno
import os
import warnings
from unittest.mock import Mock

import pytest

import stages
from common.measure import ncu, options


@pytest.mark.parametrize(("place", "message"), [
    ("gone/x.json", "cannot be written: No such file"), ("x.json", "cannot be written: Permission denied"),
    ("", "is not the name of a file"),
])  # fmt: skip
def test_a_file_that_cannot_be_written_is_refused_before_the_work(place, message, tmp_path, monkeypatch):
    if "denied" in message:  # root always has permission
        refusal = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        monkeypatch.setattr(options.tempfile, "TemporaryFile", Mock(side_effect=refusal))
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        options.json_path(str(tmp_path / place))


@pytest.mark.parametrize(("flag", "value", "message"), [
    ("--stage", "v99", "no stage is called 'v99'; there are v0 to v"), ("--seq-len", "0", "'0' is not a whole number"),
    ("--kv-heads", "3", "3 K/V heads do not divide 2 heads"), ("--value-dim", "48", "'48' is not one of 16"),
])  # fmt: skip
def test_a_wrong_value_is_named_first_with_what_is_allowed(flag, value, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        ncu.main(["count", str(tmp_path / "x.json"), f"{flag}={value}"])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.startswith(f"python -m common.measure.ncu: argument {flag}: {message}")
    assert said.splitlines()[1].startswith("usage: ")


def test_warnings_become_notes_without_source_code(capsys):
    def parse(text):
        warnings.warn(f"{text} is another stage now", stacklevel=2)
        return text

    assert options.list_of(parse)("v9, v10") == ["v9", "v10"]
    assert capsys.readouterr().err == "note: v9 is another stage now\nnote: v10 is another stage now\n"


def test_implementations_are_baselines_and_stages():
    parser = argparse.ArgumentParser()
    options.add_implementations(parser, ["sdpa-cudnn", "flash-3"])
    usual = parser.parse_args([]).impl
    assert usual[:3] == ["sdpa-cudnn", "flash-3", "v3_fa2_causal"] and stages.newest() in usual
    assert not any(map(stages.is_dead_end, usual))
    assert parser.parse_args(["--impl=flash-3, V3"]).impl == ["flash-3", "v3_fa2_causal"]
