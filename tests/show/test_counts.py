"""The command that counts bytes and FLOPs prints and saves the right numbers, and refuses wrong options."""

import json

import programs
import pytest

import stages
from common.kernels.tuning import tuners
from common.measure import traffic
from common.measure.workloads import Workload
from common.show import tables


def run_counts(*arguments, interpret="1"):
    small = ["--pass=fwd", "--seq-len=64", "--causal=yes"]
    return programs.python("-m", "common.show.counts", *small, *arguments, TRITON_INTERPRET=interpret)


@pytest.mark.parametrize("gpu", [pytest.param("h200", marks=pytest.mark.long), "a100"])
def test_stages_that_a_gpu_cannot_run_are_named_and_left_out(gpu):
    run = run_counts("--head-dim=16", f"--gpu={gpu}")  # all stages
    assert run.returncode == 0, run.stderr
    for name in stages.names():
        left_out = gpu != "h200" and hasattr(stages.load(name), "unavailable")
        assert (name in run.stdout) != left_out
        assert (f"{name} is not counted: it needs a Hopper GPU" in run.stderr) == left_out


def test_command_prints_the_table_and_saves_every_launch(tmp_path):
    """The command uses the interpreter even if the environment asks for a GPU."""
    path = tmp_path / "traffic.json"
    run = run_counts("--stage=v1,v2", "--head-dim=16", "--gpu=a100", f"--json={path}", interpret="0")
    assert run.returncode == 0, run.stderr
    saved = json.loads(path.read_text())
    assert [record["impl"].split("_")[0] for record in saved["records"]] == ["v1", "v2"]
    for record in saved["records"]:
        assert record["bytes_read"] == sum(launch["read"] for launch in record["launches"])
    assert tables.speed_table(saved["records"], saved["machine_info"], columns=100) in run.stdout
    assert "NVIDIA A100 80GB SXM, 312 TFLOP/s and 2.039 TB/s" in " ".join(run.stdout.split())


def test_shared_heads_and_a_v_of_another_dimension_are_counted(tmp_path):
    path = tmp_path / "traffic.json"
    run = run_counts("--stage=v3", "--head-dim=16", "--heads=4", "--kv-heads=4,1", "--value-dim=32", f"--json={path}")
    assert run.returncode == 0, run.stderr
    records = json.loads(path.read_text())["records"]
    assert [(r["heads"], r["kv_heads"], r["head_dim"], r["value_dim"]) for r in records] == [(4, 4, 16, 32), (4, 1, 16, 32)]
    every, shared = records
    assert every["bytes_read"] == shared["bytes_read"] and every["bytes_written"] == shared["bytes_written"]
    assert "K/V heads" in run.stdout and "D=16, Dv=32" in run.stdout


@pytest.mark.parametrize(("head_dim", "value_dim"), [(256, 64), (64, 256)])
def test_autotuned_kernels_have_the_tiles_of_the_larger_head_dimension(head_dim, value_dim, monkeypatch):
    tiles = []

    def look(stage, *_):
        tiles.append([config.kwargs for tuner in tuners(stage).values() for config in tuner.configs])
        return lambda: None

    monkeypatch.setattr(traffic, "stage_call", look)
    for dims in ((head_dim, value_dim), (256, 256), (64, 64)):
        workload = Workload("fwd", 1, 1, 64, dims[0], False, "float16", value_dim=dims[1])
        traffic.count_stage(stages.load("v4"), workload, traffic.GPUS["h200"])
    assert tiles[0] == tiles[1] != tiles[2]
