"""Options that the commands share accept the right values. A file that cannot be written is refused at once."""

import argparse
import errno
import json
import os
from unittest.mock import Mock

import pytest

import stages
from common.measure import aot, energy, ncu, options, units
from common.show import counts

COMMANDS = {"aot": aot.main, "ncu": ncu.main, "units": units.main, "energy": energy.main, "counts": counts.parse_options}


@pytest.mark.parametrize(("command", "arguments"), [
    ("aot", ["--json={}"]), ("counts", ["--json={}"]), ("ncu", ["count", "{}"]), ("ncu", ["measure", "{}"]),
    ("units", ["measure", "{}"]), ("energy", ["{}"]),
])  # fmt: skip
@pytest.mark.parametrize("place", ["no directory", "no permission", "a directory"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(command, arguments, place, tmp_path, monkeypatch, capsys):
    path, message = {
        "no directory": (tmp_path / "gone" / "x.json", "the directory of"),
        "no permission": (tmp_path / "x.json", "cannot be written: Permission denied"),
        "a directory": (tmp_path, "is not the name of a file"),
    }[place]
    if place == "no permission":  # root always has permission
        refusal = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        monkeypatch.setattr(options.tempfile, "TemporaryFile", Mock(side_effect=refusal))
    with pytest.raises(SystemExit) as stopped:
        COMMANDS[command]([argument.format(path) for argument in arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and str(path) in error and message in error


@pytest.mark.parametrize(("command", "flag", "value", "message"), [
    ("aot", "--stage", "v99", "no stage is called 'v99'; there are v0 to v"),
    ("aot", "--arch", "70", "'70' is not one of 80"), ("aot", "--dtype", "float64", "'float64' is not one of float16"),
    ("units", "--head-dim", "48", "'48' is not one of 16"), ("ncu", "--seq-len", "0", "'0' is not a whole number"),
    ("counts", "--causal", "maybe", "'maybe' is not one of no, yes"),
    ("counts", "--kv-heads", "2", "2 K/V heads do not divide 1 heads"),
    ("ncu", "--kv-heads", "3", "3 K/V heads do not divide 2 heads"), ("ncu", "--value-dim", "48", "'48' is not one of 16"),
    ("energy", "--impl", "v99", "no stage is called 'v99'; there are v0 to v"),
    ("units", "--impl", "v3_fa2", "no stage is called 'v3_fa2'; did you mean v3_fa2_causal?"),
    ("aot", "--value-dim", "48", "'48' is not one of 16"), ("counts", "--pass", "both", "'both' is not one of fwd, bwd"),
])  # fmt: skip
def test_a_wrong_value_is_named_with_what_is_allowed(command, flag, value, message, tmp_path, capsys):
    file = str(tmp_path / "x.json")
    files = {"units": ["measure", file], "ncu": ["count", file], "energy": [file]}
    with pytest.raises(SystemExit) as stopped:
        COMMANDS[command]([*files.get(command, []), f"{flag}={value}"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and f"argument {flag}: {message}" in error


def test_a_missing_directory_is_an_error_of_one_line(tmp_path):
    options.write_json(tmp_path / "x.json", [1])
    assert json.loads((tmp_path / "x.json").read_text()) == [1]
    with pytest.raises(SystemExit, match="cannot be written: No such file"):
        options.write_json(tmp_path / "gone" / "x.json", [1])


@pytest.mark.parametrize(("given", "found"), [
    ("flash-3, V3", ["flash-3", "v3_fa2_causal"]), ("sdpa_cudn", "did you mean sdpa-cudnn?"),
    ("x", f"{stages.version(list(filter(stages.is_dead_end, stages.names()))[-1])}; the baselines are sdpa-cudnn, flash-3"),
])  # fmt: skip
def test_implementations_are_baselines_and_stages(given, found, capsys):
    parser = argparse.ArgumentParser()
    options.add_implementations(parser, ["sdpa-cudnn", "flash-3"], (3, ""))
    if isinstance(found, list):
        assert parser.parse_args([f"--impl={given}"]).impl == found
        return
    with pytest.raises(SystemExit):
        parser.parse_args([f"--impl={given}"])
    assert found in capsys.readouterr().err
