"""The command that counts bytes and FLOPs prints and saves the right numbers, for the GPU that is asked for."""

import json
import os

import pytest

import stages
from common.runtime import INTERPRETED
from common.show import counts, results


@pytest.mark.skipif(not INTERPRETED, reason="counts in the interpreter only")
def test_the_command_prints_the_table_and_saves_every_launch(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "runs", list)
    path = tmp_path / "traffic.json"
    shape = ["--head-dim=16", "--heads=4", "--kv-heads=4,1", "--value-dim=32", "--pass=fwd", "--seq-len=64", "--causal=yes"]
    counts.main([*shape, "--stage=v1,v3,newest", "--gpu=a100", "--wide", f"--json={path}"])
    shown, said = capsys.readouterr()
    assert f"{stages.newest()} is not counted: it needs a Hopper GPU" in said and "tiles of the A100" in shown
    assert "forward D=16 Dv=32 causal float16" in shown and "B=1 H=4 Hkv=1 S=64" in shown
    saved = json.loads(path.read_text())
    assert counts.tables(saved["records"], saved["machine_info"], wide=True) in shown
    found = [(r["impl"], r["heads"], r["kv_heads"], r["head_dim"], r["value_dim"]) for r in saved["records"]]
    assert found == [(name, 4, kv_heads, 16, 32) for kv_heads in (4, 1) for name in ("v1_online_softmax", "v3_fa2_causal")]
    for record in saved["records"]:
        assert record["bytes_read"] == sum(launch["read"] for launch in record["launches"])
        assert f"{record['bytes_read'] / 1e6:,.3f}" in shown


def test_the_command_restarts_itself_with_the_interpreter(monkeypatch):
    calls = []
    monkeypatch.setattr(counts, "INTERPRETED", False)
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call) or exit())
    with pytest.raises(SystemExit):
        counts.main(["--stage=v3"])
    ((_, command, environment),) = calls
    assert command[-1] == "--stage=v3" and environment["TRITON_INTERPRET"] == "1"
