"""The benchmark of ring attention measures correctly.

Each rank (one process with its GPU) sends as many bytes as the formula says. Wrong results are not timed.
"""

import functools
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import MOST

import stages
from common.measure import scaling
from common.measure.workloads import Workload
from common.ring import ring_attention
from common.runtime import DEVICE
from common.show.results import ROOT

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")


def workload(pass_, seq_len, causal, **others):
    return Workload(pass_, 1, 2, seq_len, 16, causal, "float16", **others)


def measured(group, *of_workload):
    return scaling.measure("v3", workload(*of_workload, kv_heads=1), group)


def checked(group, wrong, causal):
    """Run the benchmark's check on ring attention with the mistake `wrong`."""
    stage, size = stages.load("v3"), dist.get_world_size(group)
    ring = functools.partial(ring_attention, stage, group=group, causal=causal)
    attends = {
        "own keys alone": functools.partial(stage.attention, causal=causal),
        "another mask": functools.partial(ring_attention, stage, group=group, causal=not causal),
        "half of a gradient": lambda q, k, v: ring(q, k, 0.5 * v + 0.5 * v.detach()),
        "NaN in another head": lambda q, k, v: ring(q, k, v).index_fill(1, torch.tensor(1, device=q.device), float("nan")),
    }
    scaling.check(attends[wrong], workload("fwd+bwd", 12 * size, causal), group)


@pytest.mark.parametrize(("size", "causal", "pass_", "sent"), [
    pytest.param(2, True, "fwd", (2, 2), marks=pytest.mark.long), (2, True, "fwd+bwd", (4 + 2, 4 + 1)),
    pytest.param(3, False, "fwd+bwd", (8 + 2 + 4,) * 3, marks=pytest.mark.long),
    pytest.param(3, True, "fwd+bwd", (8 + 2 + 4, 8 + 1 + 4, 8 + 1 + 2), marks=pytest.mark.long),
])  # fmt: skip
def test_a_rank_sends_what_the_formula_says(ranks, size, causal, pass_, sent):
    """`sent` has a number for each rank: the bytes that it sends, divided by the elements of its K and V."""
    if size > MOST:
        pytest.skip(f"needs {size} GPUs")
    for found, of_rank in zip(ranks.call(size, measured, pass_, 8 * size, causal), sent, strict=True):
        assert found["sent_bytes"] == found["sent_formula"] == 8 * (16 + 16) * of_rank
        assert ("ms" in found) == (DEVICE == "cuda")


@pytest.mark.parametrize(("wrong", "causal", "message"), [
    ("own keys alone", True, "out: "), ("another mask", False, "out: "), ("half of a gradient", True, "dv: "),
    ("NaN in another head", True, "NaN or infinity in out of rank 1"),
])  # fmt: skip
def test_wrong_results_raise_on_every_rank(ranks, wrong, causal, message):
    for outcome in ranks.outcomes(2, checked, wrong, causal):
        assert isinstance(outcome, AssertionError) and message in str(outcome), outcome


def test_cases_hold_the_tokens_of_a_rank_and_the_longest_sequence():
    options = scaling.parse_options(["--stage=v3", "--pass=fwd", "--gpus=4", "--tokens=6,8"])
    ours = [(work.seq_len, ranks) for impl, work, ranks in options.cases if impl == stages.resolve("v3")]
    same_tokens = {(ranks * tokens, ranks) for tokens in (6, 8) for ranks in (1, 2, 4)}
    assert len(ours) == 10 and set(ours) == same_tokens | {(4 * tokens, ranks) for tokens in (6, 8) for ranks in (1, 2)}
    for options.gpus in range(1, 10):
        for _, work, ranks in scaling.cases(options):
            assert ranks <= options.gpus and work.seq_len % (2 * ranks) == 0
    options = scaling.parse_options(["--stage=v3", "--pass=fwd", "--gpus=4", "--million", "--heads=8", "--head-dim=128"])
    ((_, work, ranks),) = options.cases
    assert (work.label, ranks) == ("fwd B=1 H=8 S=1048576 D=128 causal bfloat16", 4)


@pytest.mark.parametrize(("wrong", "message"), [
    ("--tokens=7", "each entry must be an even number"), ("--kv-heads=3", "3 K/V heads do not divide 2 heads"),
])  # fmt: skip
def test_options_that_cannot_be_measured_are_refused(wrong, message, capsys):
    with pytest.raises(SystemExit):
        scaling.parse_options(["--heads=2", wrong])
    assert message in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(DEVICE == "cuda", reason="measures, for a minute")
def test_the_command_counts_without_a_gpu(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", scaling.__name__]
    command += ["--stage=v3", "--tokens=8", f"--json={tmp_path / 'run.json'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "run.json").read_text())
    assert "sent_bytes=3072 sent_formula=3072" in done.stdout and "times mean nothing" in done.stdout
    sent = {(r["ranks"], r["pass"]): r["sent_bytes"] for r in run["records"] if r["seq_len"] == 16}
    assert sent == {(1, "fwd"): 0, (1, "fwd+bwd"): 0, (2, "fwd"): 1024, (2, "fwd+bwd"): 3072}
