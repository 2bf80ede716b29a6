"""Stages survive long and hard use: many calls, many threads, and killed processes."""

import concurrent.futures
import contextlib
import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from cases import assert_same_bits, by_operator, check, make_inputs

import stages
from common.kernels import tuning
from common.runtime import DEVICE

on_gpu = DEVICE == "cuda"
needs_gpu = pytest.mark.skipif(not on_gpu, reason="needs a GPU")

ROOT = Path(__file__).parents[2]
AVAILABLE = [name for name in stages.names() if not stages.unavailable(name)]
THREADS, ROUNDS = (8, 100) if on_gpu else (4, 1)


def test_threads_do_not_disturb_each_other(monkeypatch):
    """Several threads run all stages, each on its own stream, with empty tuner caches. Each thread gets the bits that a
    single thread gets."""
    inputs = make_inputs(40, 70, 16, batch=1, heads=1)
    options = {"causal": True, "scale": 0.25}
    names = AVAILABLE if on_gpu else [*AVAILABLE[1:6], "newest"]  # in Triton, and in Gluon
    expected = {name: check(stages.load(name), *inputs, **options) for name in names}
    for name in names:
        for tuner in tuning.tuners(stages.load(name)).values():
            monkeypatch.setattr(tuner, "cache", {})
    if on_gpu:
        torch.cuda.synchronize()
    together = threading.Barrier(THREADS)

    def work(number):
        own_stream = torch.cuda.stream(torch.cuda.Stream()) if on_gpu else contextlib.nullcontext()
        turn = number % len(names)
        with own_stream:
            together.wait(timeout=60)
            for name in ROUNDS * (names[turn:] + names[:turn]):
                stage = stages.load(name)
                results = check(stage, *inputs, **options)
                assert_same_bits(expected[name], results, getattr(stage, "UNORDERED", ()))

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, number) for number in range(THREADS)]:
            done.result()


CALLS = 100_000  # number of forward and backward calls
WARM_UP = 4_000  # number of calls until every kernel is compiled and the allocator has its blocks
HOST_BYTES, GPU_BYTES = 32 * 2**20, 32 * 2**20  # memory may grow by so many bytes, about 300 for each call


def memory_in_use():
    """Return the bytes of this process's host memory, and of all processes' GPU memory."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident, total - free


@pytest.mark.long
@pytest.mark.alone
@needs_gpu
def test_many_calls_leave_no_memory_behind():
    """Memory does not grow over many calls. Lengths differ, so a cache with an entry for each length would grow."""
    longest = 300
    lengths = [length for length in range(2, longest) if length % 16]  # these lengths share compiled kernels
    pick = random.Random(0)
    inputs = make_inputs(longest, longest, 64)

    def call(count):
        for _ in range(count // 2):
            seq_q, seq_k = pick.choice(lengths), pick.choice(lengths)
            q, k, v, grad_out = (t[:, :, :n] for t, n in zip(inputs, (seq_q, seq_k, seq_k, seq_q), strict=True))
            by_operator(stages.load(pick.choice(AVAILABLE)), q, k, v, grad_out, causal=pick.random() < 0.5, scale=0.125)

    call(WARM_UP)
    host, gpu = memory_in_use()
    call(CALLS)
    host_now, gpu_now = memory_in_use()
    print(f"{CALLS} calls: {(host_now - host) / 2**20:.1f} MiB more on the host, {(gpu_now - gpu) / 2**20:.1f} on the GPU")
    assert host_now - host < HOST_BYTES
    assert gpu_now - gpu < GPU_BYTES


FIRST_CALL = """
import torch, stages
from common.measure.reference import assert_correct, plain, truth
q, k, v = torch.randn(3, 1, 2, 300, 64, device="cuda").half()
q.requires_grad_()
out = stages.load("v4").attention(q, k, v)
out.sum().backward()
assert_correct({"out": out}, *(make(q, k, v, False, 0.125) for make in (truth, plain)))
print("right")
"""


def kill(command, said, delay, **options):
    """Start a process and kill it `delay` seconds after it writes `said` to stderr, unless the process ends earlier."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **options) as process:
        for line in process.stderr:
            if said in line:
                break
        time.sleep(delay)
        process.kill()


@pytest.mark.long
@needs_gpu
def test_killed_while_it_tunes_the_next_process_works(tmp_path):
    """A process that is killed while it writes Triton's cache on disk does not harm the next process."""
    command = [sys.executable, "-c", FIRST_CALL]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    for delay in (0.0, 0.3, 1.0, 2.0, 4.0):
        kill(command, "tuning", delay, env=environment)
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0 and run.stdout == "right\n", run.stderr


@pytest.mark.long
@needs_gpu
def test_killed_while_it_measures_the_next_run_works(tmp_path):
    """A killed run leaves a readable results file, or no file."""
    command = [sys.executable, str(ROOT / "bench.py"), "--stage=v3", "--seq-len=512", "--head-dim=64", "--json=run.json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    for delay in (0.0, 1.0, 3.0):
        kill(command, "", delay, cwd=tmp_path, env=environment)
        if (tmp_path / "run.json").exists():
            json.loads((tmp_path / "run.json").read_text())
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads((tmp_path / "run.json").read_text())["benchmarks"]
