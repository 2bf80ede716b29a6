"""The command that counts: what it prints, saves and refuses."""

import json
import os
import subprocess
import sys

import pytest

import stages
from common.show import counts, tables
from common.show.results import ROOT


def run_counts(*arguments):
    small = ["--pass=fwd", "--seq-len=64", "--causal=yes"]
    return subprocess.run(
        [sys.executable, "-m", "common.show.counts", *small, *arguments], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"}, check=False,
    )  # fmt: skip


def test_stages_that_the_interpreter_cannot_run_are_named_and_left_out():
    run = run_counts("--head-dim=16")  # all stages
    assert run.returncode == 0, run.stderr
    for name in stages.names():
        left_out = hasattr(stages.load(name), "unavailable")
        assert (name in run.stdout) != left_out and (f"{name} is not counted: it needs" in run.stderr) == left_out
    run = run_counts("--stage=v6")
    assert run.returncode == 1 and "nothing to count" in run.stderr


def test_command_prints_the_table_and_saves_every_launch(tmp_path):
    """In the interpreter even where a GPU would be used."""
    path = tmp_path / "traffic.json"
    run = run_counts("--stage=v1,v2", "--head-dim=16", "--gpu=a100", f"--json={path}")
    assert run.returncode == 0, run.stderr
    saved = json.loads(path.read_text())
    assert [record["impl"].split("_")[0] for record in saved["records"]] == ["v1", "v2"]
    for record in saved["records"]:
        assert record["bytes_read"] == sum(launch["read"] for launch in record["launches"])
    assert tables.speed_table(saved["records"], saved["machine_info"]) in run.stdout
    assert "NVIDIA A100 80GB SXM, 312 TFLOP/s and 2.039 TB/s" in run.stdout


@pytest.mark.parametrize(("argument", "message"), [
    ("--gpu=h100", "h200"), ("--pass=fwd+bwd", "is not one of fwd, bwd"), ("--seq-len=0", "'0'"), ("--stage=v99", "'v99'"),
])  # fmt: skip
def test_options_name_the_bad_value(argument, message, capsys):
    with pytest.raises(SystemExit):
        counts.parse_options([argument])
    assert message in capsys.readouterr().err
