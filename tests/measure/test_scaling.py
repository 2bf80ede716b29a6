"""The benchmark of ring attention measures correctly.

Each rank (one process with its GPU) sends as many bytes as the formula says. Wrong results are not timed. Tables compare
several GPUs with one GPU.
"""

import functools
import itertools
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import MOST
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import stages
from common.measure import scaling
from common.measure.workloads import Workload
from common.ring import Ring, _backward, _forward, ring_attention
from common.runtime import DEVICE
from common.show.results import ROOT

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")


def workload(pass_, seq_len, causal, **others):
    return Workload(pass_, 1, 2, seq_len, 16, causal, "float16", **others)


def measured(group, *of_workload):
    return scaling.measure("v3", workload(*of_workload, kv_heads=1), group)


class Live(TorchDispatchMode):
    """Count the bytes of new tensors. `most` is the maximum number of bytes that exist at the same time."""

    def __init__(self, *given):
        super().__init__()
        self.given, self.storages, self.most = {tensor.untyped_storage()._cdata for tensor in given}, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.storages = {at: (storage, size) for at, (storage, size) in self.storages.items() if not storage.expired()}
        for tensor in (leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.given:
                self.storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, sum(size for _, size in self.storages.values()))
        return results


def held(group, work):
    """Return the maximum bytes that a rank holds at a time. A stand-in for the stage allocates only the results."""

    def forward(q, k, v, *, causal, scale):
        return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)

    def backward(grad_out, q, k, v, out, lse, *, causal, scale):
        return tuple(tensor.new_empty(tensor.shape) for tensor in (q, k, v))

    *qkv, grad_out = scaling.inputs(work, group)
    stage = SimpleNamespace(forward=forward, backward=backward)
    options = {"stage": stage, "ring": Ring(group), "causal": work.causal, "scale": 1.0}
    with mock.patch.multiple("common.ring", merge=lambda *tensors: None, add=lambda *tensors: None):
        if work.pass_ == "fwd":
            with Live(*qkv) as live:
                _forward(*qkv, **options)
            return live.most
        out, lse = forward(*qkv, causal=False, scale=1.0)
        with Live(*qkv, grad_out, out, lse) as live:
            _backward(grad_out, *qkv, out, lse, **options)
        return live.most + out.nbytes + lse.nbytes


def checked(group, wrong, pass_, causal):
    """Run the benchmark's check on ring attention, or on an attention with the mistake `wrong`."""
    stage, size = stages.load("v3"), dist.get_world_size(group)
    ring = functools.partial(ring_attention, stage, group=group, causal=causal)
    attends = {
        None: ring,
        "own keys alone": functools.partial(stage.attention, causal=causal),
        "another mask": functools.partial(ring_attention, stage, group=group, causal=not causal),
        "half of a gradient": lambda q, k, v: ring(q, k, 0.5 * v + 0.5 * v.detach()),
        "NaN in another head": lambda q, k, v: ring(q, k, v).index_fill(1, torch.tensor(1, device=q.device), float("nan")),
    }
    scaling.check(attends[wrong], workload(pass_, 12 * size, causal), group)


@pytest.mark.parametrize(("size", "causal", "pass_", "sent"), [
    (2, True, "fwd", (2, 2)), (2, True, "fwd+bwd", (4 + 2, 4 + 1)), (3, False, "fwd+bwd", (8 + 2 + 4,) * 3),
    (3, True, "fwd+bwd", (8 + 2 + 4, 8 + 1 + 4, 8 + 1 + 2)),
])  # fmt: skip
def test_a_rank_sends_what_the_formula_says(ranks, size, causal, pass_, sent):
    """`sent` has a number for each rank: the bytes that it sends, divided by the elements of its K and V."""
    if size > MOST:
        pytest.skip(f"needs {size} GPUs")
    for found, of_rank in zip(ranks.call(size, measured, pass_, 8 * size, causal), sent, strict=True):
        assert found["sent_bytes"] == found["sent_formula"] == 8 * (16 + 16) * of_rank
        assert found["held_mib"] > 0 and ("ms" in found) == (DEVICE == "cuda")


@pytest.mark.parametrize(("pass_", "causal"), [*itertools.product(scaling.PASSES, (False, True))])
def test_right_results_pass_the_check(ranks, pass_, causal):
    for size in (1, 2):
        ranks.call(size, checked, None, pass_, causal)


@pytest.mark.parametrize(("wrong", "pass_", "causal", "message"), [
    ("own keys alone", "fwd", True, "out: "), ("another mask", "fwd", False, "out: "),
    ("half of a gradient", "fwd+bwd", True, "dv: "), ("NaN in another head", "fwd", True, "NaN or infinity in out of rank 1"),
])  # fmt: skip
def test_wrong_results_raise_on_every_rank(ranks, wrong, pass_, causal, message):
    for outcome in ranks.outcomes(2, checked, wrong, pass_, causal):
        assert isinstance(outcome, AssertionError) and message in str(outcome), outcome


def test_cases_hold_the_tokens_of_a_rank_and_the_longest_sequence():
    options = scaling.parse_options(["--tokens=6,8", "--pass=fwd", "--stage=v3"], 4)
    ours = [(work.seq_len, ranks) for impl, work, ranks in scaling.cases(options, 4) if impl == stages.resolve("v3")]
    same_tokens = {(ranks * tokens, ranks) for tokens in (6, 8) for ranks in (1, 2, 4)}
    assert len(ours) == 10 and set(ours) == same_tokens | {(4 * tokens, ranks) for tokens in (6, 8) for ranks in (1, 2)}
    options = scaling.parse_options(["--million", "--stage=v3"], 4)
    assert [(work.label, ranks) for _, work, ranks in scaling.cases(options, 4)] == [
        (f"{pass_} B=1 H=8 S=1048576 D={scaling.HEAD_DIMENSION} causal bfloat16", 4) for pass_ in scaling.PASSES
    ]


def test_every_case_can_be_cut_on_any_number_of_ranks():
    for world in range(1, 10):
        for _, work, ranks in scaling.cases(scaling.parse_options(["--tokens=10"], world), world):
            assert ranks <= world and work.seq_len % (2 * ranks) == 0


def record(impl, ranks, seq_len, ms, **others):
    work = Workload("fwd", 1, 16, seq_len, 128, True, "bfloat16")
    tflops = work.flops / ranks / ms / 1e9
    measured = {"ms": ms, "iqr_ms": 0.1, "rounds": 9, "launch_hidden": True, "tflops": tflops, "peak_extra_mib": 7.0}
    return {"impl": impl, **work.record(), "ranks": ranks, **measured, **others}


WORK = Workload("fwd", 1, 16, 2000, 128, True, "bfloat16")
RUN = {
    "machine_info": {
        "gpu": "X", "gpus": "2 × X", "torch": "1", "triton": "2", "commit": "abc", "date": "2026-01-02", "nccl": "NCCL 2",
        "environment": {"NCCL_X": "1"},
    },
    "records": [
        record("v3_x", 1, 1000, 1.0), record("v3_x", 1, 2000, 4.0),
        record("v3_x", 2, 2000, 2.5, sent_bytes=3_000_000, sent_formula=3_000_000, held_mib=5.0, launch_hidden=False),
        {**WORK.record(), "impl": "sdpa-cudnn", "ranks": 2, "failure": "n/a", "note": "why"},
    ],
    "links": [{"tokens": 1000, "ranks": 2, "bytes": 8_000_000, "ms": 0.5, "iqr_ms": 0.01, "gbps": 16.0}],
}  # fmt: skip


def test_tables_compare_with_one_gpu():
    table = scaling.tables(RUN)
    assert "2 × X, torch 1, triton 2, commit abc, 2026-01-02, nccl NCCL 2, NCCL_X=1" in table
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")][2:]
    two = next(row for row in rows if row[:4] == ["2", "1000", "2000", "v3_x"])
    assert two[4] == "2.500*" and two[7:] == ["80", "80", "3.0", "7", "5"]  # 2 GPUs do 4 times the work in 2.5 times the time
    failed = next(row for row in rows if row[3] == "sdpa-cudnn")
    assert failed[4:] == ["n/a"] + ["-"] * 7
    assert (
        "sdpa-cudnn, 2 ranks, S=2000: why" in table and "16 GB/s each way" in table and "this time includes CPU time" in table
    )


@pytest.mark.skipif(DEVICE == "cuda", reason="what the caching allocator has taken is the benchmark's to show")
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_a_rank_holds_no_more_than_the_formula_says(ranks, size, kv_heads):
    for dtype, pass_ in itertools.product(("float32", "bfloat16"), scaling.PASSES):
        most = {}
        for causal in (False, True):
            work = Workload(pass_, 1, 6, 8 * size, 32, causal, dtype, kv_heads=kv_heads, value_dim=16)
            most[causal] = max(ranks.call(size, held, work))
            assert most[causal] <= scaling.held_bytes(work, size)
        assert most[False] >= 0.75 * scaling.held_bytes(work, size), "the formula says much more than a rank holds"


def test_memory_of_a_rank_does_not_grow_with_the_ranks():
    held = [scaling.held_bytes(workload("fwd+bwd", 64 * ranks, True), ranks) for ranks in (3, 4, 8)]
    assert len(set(held)) == 1
    out, kv = 2 * 64 * 16, 2 * 64 * 32  # elements of O, and of K and V, on a rank
    assert scaling.held_bytes(workload("fwd", 64 * 2, True), 2) == kv * 2 + out * 4 + 2 * 2 * 64 * 4
    assert scaling.held_bytes(workload("fwd", 64 * 3, True), 3) == 2 * kv * 2 + out * 8 + 2 * 2 * 64 * 4


@pytest.mark.long
@pytest.mark.skipif(DEVICE == "cuda", reason="measures, for a minute")
def test_the_command_counts_without_a_gpu(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "common.measure.scaling",
    ]
    command += ["--stage=v3", "--tokens=8", f"--json={tmp_path / 'run.json'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "run.json").read_text())
    assert scaling.tables(run) in done.stdout and "times mean nothing" in done.stdout
    sent = {(r["ranks"], r["pass"]): r["sent_bytes"] for r in run["records"] if r["seq_len"] == 16}
    assert sent == {(1, "fwd"): 0, (1, "fwd+bwd"): 0, (2, "fwd"): 1024, (2, "fwd+bwd"): 3072}
