"""Options that the commands share accept the right values. A file that cannot be written is refused at once."""

import argparse
import errno
import os
from unittest.mock import Mock

import pytest
import torch
import triton

import stages
from common.measure import ncu, options, terminal


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


@pytest.mark.parametrize("text", [None, "x", "[]", "{}"])
def test_a_file_that_no_command_has_written_is_named(text, tmp_path):
    path = tmp_path / "run.json"
    if text:
        path.write_text(text)
    with pytest.raises(SystemExit, match=f"{path} is no file that this command has written"):
        options.read_json(path, "records")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_missing_gpu_is_named(capsys):
    with pytest.raises(RuntimeError) as raised:
        triton.runtime.driver.active.get_current_device()
    terminal._explain(raised.type, raised.value, raised.tb)
    assert capsys.readouterr().err == "Triton finds no GPU here; with TRITON_INTERPRET=1, kernels run on the CPU\n"


def test_implementations_are_baselines_and_stages():
    parser = argparse.ArgumentParser()
    options.add_implementations(parser, ["sdpa-cudnn", "flash-3"])
    usual = parser.parse_args([]).impl
    assert usual[:3] == ["sdpa-cudnn", "flash-3", "v3_fa2_causal"] and stages.newest() in usual
    assert not any(map(stages.is_dead_end, usual))
    assert parser.parse_args(["--impl=flash-3, V3"]).impl == ["flash-3", "v3_fa2_causal"]
