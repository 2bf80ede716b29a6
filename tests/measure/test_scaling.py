"""The benchmark of ring attention measures correctly.

Each rank (one process with its GPU) sends as many bytes as the formula says. Wrong results are not timed.
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


def held(rank, size, pass_, kv_heads, causal):
    """Return the maximum bytes that a rank with 8 tokens holds at a time.

    Nothing is sent, and a stand-in for the stage allocates only the results.
    """

    def forward(q, k, v, *, causal, scale):
        return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)

    def backward(grad_out, q, k, v, out, lse, *, causal, scale):
        return tuple(tensor.new_empty(tensor.shape) for tensor in (q, k, v))

    q, k, v, grad_out = (torch.ones(1, heads, 8, 32, dtype=torch.bfloat16) for heads in (6, kv_heads, kv_heads, 6))
    ring = object.__new__(Ring)
    ring.rank, ring.size = rank, size
    stage = SimpleNamespace(forward=forward, backward=backward)
    options = {"stage": stage, "ring": ring, "causal": causal, "scale": 1.0}
    nothing = {"merge": lambda *tensors: None, "add": lambda *tensors: None}
    with mock.patch.multiple("common.ring", **nothing), mock.patch.object(Ring, "pass_on", lambda *tensors: []):
        if pass_ == "fwd":
            with Live(q, k, v) as live:
                _forward(q, k, v, **options)
            return live.most
        out, lse = forward(q, k, v, causal=False, scale=1.0)
        with Live(q, k, v, grad_out, out, lse) as live:
            _backward(grad_out, q, k, v, out, lse, **options)
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
        assert ("ms" in found) == (DEVICE == "cuda")


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


@pytest.mark.skipif(DEVICE == "cuda", reason="launches on a GPU are recorded, and here none is made")
@pytest.mark.parametrize("kv_heads", [6, 1])
@pytest.mark.parametrize("pass_", scaling.PASSES)
def test_memory_of_a_rank_does_not_grow_with_the_ranks(pass_, kv_heads):
    """The bound is what a rank holds without its inputs, whatever the number of ranks.

    Forward: two blocks of K and V, the result, one block's output, the merged O in float32, and two LSEs. Backward: O, LSE, two
    blocks of K and V, dQ and two blocks of dK and dV in float32, the own block's gradients, dQ of another block, and that
    block's dK and dV or a copy of its dQ.
    """
    q, kv, lse = 2 * 8 * 6 * 32, 2 * 8 * kv_heads * 64, 4 * 8 * 6  # bytes for the 8 tokens of a rank
    bound = {"fwd": 2 * kv + 4 * q + 2 * lse, "fwd+bwd": lse + 5 * q + 7 * kv + max(q, kv)}[pass_]
    for size, causal in itertools.product((2, 3, 4, 8), (False, True)):
        most = max(held(rank, size, pass_, kv_heads, causal) for rank in range(size))
        assert most <= bound
    assert most >= 0.7 * bound, "the bound is much more than a rank holds"


@pytest.mark.long
@pytest.mark.skipif(DEVICE == "cuda", reason="measures, for a minute")
def test_the_command_counts_without_a_gpu(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", scaling.__name__]
    command += ["--stage=v3", "--tokens=8", f"--json={tmp_path / 'run.json'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "run.json").read_text())
    assert "3072 bytes sent, 3072 by the formula" in done.stdout and "times mean nothing" in done.stdout
    sent = {(r["ranks"], r["pass"]): r["sent_bytes"] for r in run["records"] if r["seq_len"] == 16}
    assert sent == {(1, "fwd"): 0, (1, "fwd+bwd"): 0, (2, "fwd"): 1024, (2, "fwd+bwd"): 3072}
