"""The benchmark's own parts: what it counts, how it times, what its tables say, what its command line takes."""

import json
import os
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

import bench
import stages
from common import timing, workloads
from common.footprint import footprint
from common.runtime import DEVICE
from common.table import speed_table
from common.workloads import Workload

ROOT = Path(__file__).resolve().parent.parent


# --- workloads


@pytest.mark.parametrize(
    ("pass_", "causal", "flops"),
    [
        ("fwd", False, 4 * 2 * 3 * 100 * 100 * 64),
        ("fwd", True, 2 * 2 * 3 * 100 * 100 * 64),
        ("bwd", False, 10 * 2 * 3 * 100 * 100 * 64),
        ("fwd+bwd", True, 7 * 2 * 3 * 100 * 100 * 64),
    ],
)
def test_flops(pass_, causal, flops):
    assert Workload(pass_, 2, 3, 100, 64, causal, "float16").flops == flops


def test_inputs_are_the_same_each_time_differ_from_each_other_and_are_no_zeros():
    workload = Workload("fwd", 1, 2, 33, 16, False, "bfloat16")
    inputs = workload.inputs()
    assert [t.shape for t in inputs] == [(1, 2, 33, 16)] * 4
    assert all(t.dtype == torch.bfloat16 and t.float().std() > 0.5 for t in inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, workload.inputs(), strict=True))
    assert not torch.equal(inputs[0], inputs[1])


def test_scores_have_the_standard_deviation_asked_for():
    q, k, *_ = Workload("fwd", 1, 2, 512, 64, False, "float32", score_std=4.0).inputs()
    assert (q @ k.mT / 8).std().item() == pytest.approx(4, rel=0.05)


# --- timer: a fake GPU whose clock the test moves


class FakeGpu:
    """Stands in for `torch` in common.timing. Launching is free on its CPU; what is queued runs one after the other."""

    FLUSH_S = 30e-6

    def __init__(self):
        self.cpu_s = self.queue_end_s = 0.0
        self.log = []  # what is queued and waited for
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                gpu.log.append("event")
                self.at_s = max(gpu.queue_end_s, gpu.cpu_s)

            def query(self):
                return self.at_s <= gpu.cpu_s

            def synchronize(self):
                gpu.log.append("wait")
                gpu.cpu_s = max(gpu.cpu_s, self.at_s)

            def elapsed_time(self, end):
                return (end.at_s - self.at_s) * 1e3

        class cuda:
            @staticmethod
            def _sleep(cycles):
                gpu.run(cycles / 2e9, "spin")

            @staticmethod
            def synchronize():
                gpu.log.append("wait")
                gpu.cpu_s = max(gpu.cpu_s, gpu.queue_end_s)

        cuda.Event = Event
        self.cuda = cuda
        self.uint8 = torch.uint8

    def empty(self, size, dtype, device):
        assert (size, dtype, device) == (timing.CACHE_BYTES, torch.uint8, "cuda")
        return types.SimpleNamespace(zero_=lambda: self.run(self.FLUSH_S, "flush"))

    def run(self, seconds, name="call"):
        """Queue work that takes the GPU so long."""
        self.log.append(name)
        self.queue_end_s = max(self.queue_end_s, self.cpu_s) + seconds

    def sleep(self, seconds):
        """Let time pass on the CPU."""
        self.log.append(f"rest {seconds}")
        self.cpu_s += seconds


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeGpu()
    monkeypatch.setattr(timing, "torch", fake)
    monkeypatch.setattr(timing.time, "sleep", fake.sleep)
    return fake


def call_taking(gpu, host_s, gpu_s):
    def call():
        gpu.cpu_s += host_s
        gpu.run(gpu_s)

    return call


def test_rounds_leave_out_flush_and_launch_and_are_queued_without_a_wait(gpu):
    timer = timing.GpuTimer()
    gpu.log.clear()
    times, hidden = timer.measure(call_taking(gpu, 50e-6, 2e-3))
    assert times == pytest.approx([2e-3] * len(times)) and hidden
    last_rounds = gpu.log[-1 - 4 * len(times) :]
    assert last_rounds == ["flush", "event", "call", "event"] * len(times) + ["wait"]
    assert gpu.log.count("wait") == 3  # before the rest, for the first estimate, and at the end: none after the warm-up


def test_case_begins_on_a_gpu_that_has_rested(gpu):
    timer = timing.GpuTimer()
    gpu.run(0.3, "the case before")
    timer.measure(call_taking(gpu, 50e-6, 2e-3))
    begin = gpu.log.index("the case before") + 1
    assert gpu.log[begin : begin + 3] == ["wait", f"rest {timing.REST_S}", "spin"]


def test_head_start_is_in_seconds_whatever_the_clock_of_the_gpu(gpu):
    timer = timing.GpuTimer()
    begin = gpu.cpu_s
    timer._rounds(lambda: None, 1, 0.0)
    assert gpu.cpu_s - begin == pytest.approx(timing.HEAD_START_S + gpu.FLUSH_S, rel=1e-3)


def test_launch_that_takes_longer_than_its_kernels_is_hidden(gpu):
    timer = timing.GpuTimer()
    call = call_taking(gpu, 3e-3, 1e-3)  # seen in full the launch would make it 4 ms
    assert timer._rounds(call, 20, 0.0)[1]
    times, hidden = timer.measure(call)
    assert times == pytest.approx([1e-3] * len(times)) and hidden


def test_launch_that_takes_longer_after_the_warm_up_is_hidden(gpu):
    timer = timing.GpuTimer()
    rounds = 0

    def call():
        nonlocal rounds
        rounds += 1
        gpu.cpu_s += 20e-6 if rounds <= 1 + timing.MOST_ROUNDS else 900e-6
        gpu.run(100e-6)

    times, hidden = timer.measure(call)
    assert times == pytest.approx([100e-6] * len(times)) and hidden


def test_few_long_rounds_are_not_called_exposed_for_the_first_one(gpu):
    for gpu_s in (15e-3, 80e-3):
        times, hidden = timing.GpuTimer().measure(call_taking(gpu, 2e-3, gpu_s))
        assert times == pytest.approx([gpu_s] * len(times)) and hidden


def test_launch_that_is_too_long_to_hide_is_flagged(gpu):
    timer = timing.GpuTimer()
    assert not timer.measure(call_taking(gpu, 10 * timing.LONGEST_SPIN_S, 1e-3))[1]
    assert timer.measure(call_taking(gpu, 0, 1e-3))[1]  # the next case begins anew


@pytest.mark.parametrize(("gpu_s", "rounds"), [(1e-5, 200), (2e-3, 50), (0.04, 5), (0.06, 3)])
def test_rounds_are_bounded_in_number_and_time(gpu, gpu_s, rounds):
    times, _ = timing.GpuTimer().measure(call_taking(gpu, 0, gpu_s * 0.9999))
    assert len(times) == rounds


def test_timer_recovers_from_a_call_that_raised(gpu):
    timer = timing.GpuTimer()

    def call():
        raise RuntimeError

    with pytest.raises(RuntimeError):
        timer.measure(call)
    times, hidden = timer.measure(call_taking(gpu, 0, 1e-3))
    assert times == pytest.approx([1e-3] * len(times)) and hidden


@pytest.mark.parametrize(("gpu_s", "rounds"), [(1e-5, 20), (2.1e-3, 9), (0.2, 1)])
def test_host_time_is_the_cpus_alone(gpu, monkeypatch, gpu_s, rounds):
    """A call that found the queue full would wait for the GPU, and show its time."""
    monkeypatch.setattr(timing.time, "perf_counter", lambda: gpu.cpu_s)
    assert timing.host_seconds(call_taking(gpu, 30e-6, gpu_s), gpu_s) == pytest.approx(30e-6)
    assert gpu.log == ["wait", "call"] * rounds


def test_replay_gives_pytest_benchmark_the_times_that_were_measured():
    """It subtracts two readings a round; float32 milliseconds that go on from round to round would lose digits."""
    replay = timing.Replay()
    replay.load([0.25, 1e-6])
    assert [-replay() + replay() for _ in range(2)] == [0.25, 1e-6]
    replay.load([3.0])  # whatever was left of the case before
    assert -replay() + replay() == 3.0


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("impl", [*stages.names()[3:], "sdpa-cudnn"])  # earlier ones are slow, and add nothing here
@pytest.mark.parametrize("batch, seq_len", [(4, 4096), (2, 8192)])
def test_gpu_times_agree_with_triton_do_bench(impl, batch, seq_len):
    """Both after a rest and the same warm-up. Calls of a millisecond or so: do_bench hides no launch, so that the time of a
    short call is in part the CPU's there."""
    from triton.testing import do_bench

    if impl in stages.names() and (reason := stages.unavailable(impl)):
        pytest.skip(f"{impl} {reason}")
    workload = Workload("fwd", batch, 16, seq_len, 128, False, "float16")
    call = bench.timed_call(impl, workload, workload.inputs())
    timer, ours, theirs = timing.GpuTimer(), [], []
    for _ in range(3):  # in turn, because the clock drifts
        times, launch_hidden = timer.measure(call)  # begins with a rest
        assert launch_hidden
        ours += times
        time.sleep(timing.REST_S)
        theirs += do_bench(call, warmup=1e3 * timing.WARM_UP_S, return_mode="all")
    assert statistics.median(ours) >= 5e-4
    print(f"{impl} S={seq_len}: {1e3 * statistics.median(ours):.4f} ms, do_bench {statistics.median(theirs):.4f} ms")
    assert statistics.median(ours) == pytest.approx(1e-3 * statistics.median(theirs), rel=0.03)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("impl", stages.names()[3:])
@pytest.mark.parametrize("pass_", ["fwd", "fwd+bwd"])
def test_short_sequences_are_not_launch_bound_in_a_graph(impl, pass_):
    """The calls of a replayed graph take what their kernels take, without gaps between them."""
    workload = Workload(pass_, *workloads.paper_shape(512, 64), 512, 64, True, "float16")
    call, timer, calls = bench.timed_call(impl, workload, workload.inputs()), timing.GpuTimer(), 10
    alone, _ = timer.measure(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    together, _ = timer.measure(graph.replay)
    alone, each = statistics.median(alone), statistics.median(together) / calls
    print(f"{impl} {pass_}: {1e6 * alone:.0f} µs alone, {1e6 * each:.0f} µs each in a graph")
    assert each < 1.05 * alone


# --- footprint


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_footprint_on_a_gpu_is_the_peak_over_what_was_allocated():
    given = torch.ones(256, 1024, device="cuda")  # 1 MiB
    assert footprint(lambda: (given + 1) + 1) == {"peak_extra_mib": 2.0}


# --- tables

GPU = {
    "gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "commit": "abc", "date": "2026-01-02",
    "matmul_tflops": {"float16": 800.0},
}  # fmt: skip


def record(impl, ms=None, seq_len=512, **changes):
    result = {
        "impl": impl, "pass": "fwd", "batch": 32, "heads": 16, "seq_len": seq_len, "head_dim": 128, "causal": False,
        "dtype": "float16", "score_std": 1.0,
    }  # fmt: skip
    if ms is not None:
        result |= {
            "flops": 4e9, "ms": ms, "iqr_ms": 0.01, "tflops": 400.0 / ms, "launch_hidden": True, "peak_extra_mib": 64.0,
            "host_us": 33.0,
        }  # fmt: skip
    return result | changes


def cells(table, impl):
    """The rows of an implementation, each the list of its cells."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    return [row for row in rows if row[2] == impl]


def test_table_compares_with_the_stage_before_v0_cudnn_and_matmul():
    records = [record("v0_a", 8.0), record("v1_b", 4.0), record("v2_c", 1.0), record("sdpa-cudnn", 0.8)]
    table = speed_table(records, GPU)
    assert cells(table, "v2_c") == [
        ["", "", "v2_c", "1.000", "0.0100", "400.0", "4.00", "8.00", "80", "50", "64.0", "33"],
    ]  # fmt: skip
    assert cells(table, "v0_a")[0][6:9] == ["-", "1.00", "10"]
    assert cells(table, "sdpa-cudnn")[0][6:9] == ["-", "10.00", "100"]
    for fact in GPU["gpu"], "torch 2.11.0", "triton 3.6.0", "commit abc", "2026-01-02", "matmul float16 800 TFLOP/s":
        assert fact in table


def test_table_shows_a_dash_for_what_was_not_measured():
    table = speed_table([record("v3_d", 1.0), record("v1_b", 2.0)], GPU | {"matmul_tflops": {"bfloat16": 700.0}})
    assert cells(table, "v3_d")[0][6:10] == ["-", "-", "-", "-"]


def test_table_is_in_stage_order_whatever_the_order_of_the_records_and_the_speed():
    records = [record(impl, ms) for impl, ms in (("v10_k", 1.0), ("v2_c", 0.5), ("v0_a", 9.0), ("sdpa-flash", 3.0))]
    lines = speed_table(records, GPU).splitlines()
    found = [line.split("|")[3].strip() for line in lines if line.startswith("|") and "_" in line or "sdpa" in line]
    assert found == ["sdpa-flash", "v0_a", "v2_c", "v10_k"]


def test_table_marks_dead_ends_and_compares_no_stage_with_them():
    table = speed_table([record(impl, ms) for impl, ms in (("v5_c", 1.0), ("v4a_b", 8.0), ("v4_a", 2.0))], GPU)
    assert [cells(table, impl)[0][6] for impl in ("v4_a", "v4a_b (dead end)", "v5_c")] == ["-", "0.25", "2.00"]


def test_table_keeps_failures_as_rows_and_compares_nothing_with_them():
    records = [record("v1_b", 2.0), record("v2_c", failure="WRONG", note="out: error 1 > 0.1"), record("v3_d", 1.0)]
    table = speed_table([*records, record("v0_a", failure="OOM")], GPU)
    assert cells(table, "v0_a")[0][3:] == ["OOM"] + ["-"] * 8
    assert cells(table, "v2_c")[0][3:] == ["WRONG"] + ["-"] * 8
    assert cells(table, "v3_d")[0][6:8] == ["-", "-"]
    assert "v2_c at S=512: out: error 1 > 0.1" in table


def test_table_sorts_lengths_as_numbers_and_splits_by_pass_dimension_mask_dtype_and_spread():
    records = [record("v0_a", 1.0, seq_len, batch=16384 // seq_len) for seq_len in (16384, 512, 2048)]
    changes = {"pass": "bwd"}, {"causal": True}, {"dtype": "float32"}, {"score_std": 2.5}
    records += [record("v0_a", 1.0, **change) for change in changes]
    table = speed_table(records, GPU)
    assert [row[0] for row in cells(table, "v0_a")] == ["512", "2048", "16384", "512", "512", "512", "512"]
    titles = [line for line in table.splitlines() if ", D=" in line]
    assert titles == [
        "forward, D=128, full, float16",
        "forward, D=128, full, float16, scores of a standard deviation of 2.5",
        "forward, D=128, full, float32",
        "forward, D=128, causal, float16",
        "backward, D=128, full, float16",
    ]


def test_table_marks_times_with_the_launch_in_them():
    table = speed_table([record("v0_a", 1.0, launch_hidden=False)], GPU)
    assert cells(table, "v0_a")[0][3] == "1.000*"
    assert "launch could not be hidden" in table
    assert "*" not in speed_table([record("v0_a", 1.0)], GPU)


def test_table_without_a_gpu_shows_counts_and_no_times():
    counts = {"bytes_read": 3e6, "bytes_written": 1e6, "flops_executed": 8e6, "bound": "bytes", "kernel_launches": 17}
    records = [
        record("v0_a", 1234.5, launch_hidden=None, tiles="", roofline_us=6.0, **counts),
        record("v1_b", 4321.5, launch_hidden=None, tiles="128×64", roofline_us=1.5, **counts),
        record("v2_c", failure="OOM"),
    ]
    table = speed_table(records, GPU | {"gpu": None, "matmul_tflops": {}, "roofline": "some GPU, 9 TFLOP/s"})
    common = ["3.000", "1.000", "8.0", "2.0"]
    assert cells(table, "v0_a") == [
        ["512", "32 × 16", "v0_a", "-", *common, "6.000", "bytes", "-", "17", "64.000"],
    ]  # fmt: skip
    assert cells(table, "v1_b") == [["", "", "v1_b", "128×64", *common, "1.500", "bytes", "4.00", "17", "64.000"]]
    assert cells(table, "v2_c")[0][3:] == ["OOM"] + ["-"] * 9
    assert "some GPU, 9 TFLOP/s" in table and "ms" not in table and "1,234" not in table


# --- command line


def test_options_take_lists_repeated_flags_and_short_names():
    options = bench.parse_options(["--stage", "v1,v0", "--stage=v1_online_softmax", "--seq-len=64, 128", "--causal", "yes"])
    assert options.stage == ["v1_online_softmax", "v0_naive"]
    assert options.seq_len == [64, 128]
    assert options.causal == [True]
    assert options.pass_ == ["fwd", "bwd"]
    assert {workload.causal for _, workload in bench.cases(options)} == {True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "v0,v999"], "'v999'"),
        (["--pass", "forward"], "'forward' is not one of fwd, bwd, fwd+bwd"),
        (["--head-dim", "48"], "'48' is not one of 16, 32, 64, 128, 256"),
        (["--seq-len", "0"], "'0' is not a whole number of at least 1"),
        (["--seq-len", "4k"], "'4k'"),
        (["--causal", "maybe"], "'maybe' is not one of no, yes"),
        (["--dtype", "float64"], "'float64' is not one of float16, bfloat16, float32"),
        (["--batch", ""], "''"),
        (["--score-std", "0"], "'0' is not a number above 0"),
        (["--score-std", "nan"], "'nan' is not a number above 0"),
        (["--score-std", "wide"], "'wide'"),
        (["--json", "no/such/directory/run.json"], "no/such/directory"),
        (["--json", ""], "'' is not the name of a file"),
        (["--json", "."], "'.' is not the name of a file"),
    ],
)
def test_options_name_the_bad_value_and_what_is_allowed(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.parse_options(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error and arguments[0] in error


def test_one_stage_brings_its_predecessor_and_v0():
    names = stages.names()
    assert bench.chosen_stages(names[:1]) == names[:1]
    assert bench.chosen_stages([names[3]]) == [names[0], names[2], names[3]]
    assert bench.chosen_stages([names[1], names[0]]) == names[:2]
    assert bench.chosen_stages(names) == names


def test_a_dead_end_is_compared_with_what_it_branches_off_and_precedes_nothing(monkeypatch):
    names = ["v0_a", "v4_b", "v4a_c", "v5_d"]
    monkeypatch.setattr(stages, "names", lambda: names)
    assert bench.chosen_stages(["v4a_c"]) == ["v0_a", "v4_b", "v4a_c"]
    assert bench.chosen_stages(["v5_d"]) == ["v0_a", "v4_b", "v5_d"]


def test_cases_follow_the_papers_or_the_command_line():
    options = bench.parse_options(["--stage=v0", "--pass=fwd", "--seq-len=512", "--head-dim=64", "--causal=no"])
    impls, found = zip(*bench.cases(options), strict=True)
    assert impls == (*bench.BASELINES, stages.names()[0])
    shape = (32, 32) if DEVICE == "cuda" else (1, 2)
    assert set(found) == {Workload("fwd", *shape, 512, 64, False, "float16")}
    options = bench.parse_options(["--batch=4", "--heads=8", "--seq-len=64"])
    assert {(w.batch, w.heads) for _, w in bench.cases(options)} == {(4, 8)}
    options = bench.parse_options(["--score-std=1,2.5", "--seq-len=64", "--head-dim=64", "--causal=no", "--pass=fwd"])
    labels = {w.score_std: w.label for _, w in bench.cases(options)}
    assert labels[2.5] == f"{labels[1]} std=2.5" and len(labels) == 2


def test_reference_run_is_all_that_the_results_keep():
    names = stages.names()
    found = bench.cases(bench.parse_options(["--reference"]))
    assert {impl for impl, _ in found} == {*bench.BASELINES, *names}
    papers = [w for _, w in found if w.pass_ != "fwd+bwd"]
    assert {w.dtype for w in papers} == {"float16", "bfloat16"} and {w.pass_ for w in papers} == {"fwd", "bwd"}
    others = {(w.batch, w.heads, w.head_dim, w.causal, w.dtype) for _, w in found if w.pass_ == "fwd+bwd"}
    assert others == {(4, 8, 64, True, "float16")}
    assert len(set(found)) == len(found)


def test_reference_run_takes_no_selection(capsys):
    with pytest.raises(SystemExit):
        bench.parse_options(["--reference", "--stage=v0"])
    assert "--reference" in capsys.readouterr().err


# --- the whole


# Without what tells pytest-benchmark that it runs under pytest-xdist, where it measures nothing.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}


def run_bench(directory, *arguments, prepare=""):
    """Run bench.py in a process of its own, after `prepare`, Python that changes it first."""
    source = f"import sys, torch, bench\n{prepare}\nsys.exit(bench.main(sys.argv[1:]))"
    small = ["--seq-len=32", "--head-dim=16", "--causal=yes", "--batch=1", "--heads=2", "--json=run.json"]
    return subprocess.run(
        [sys.executable, "-c", source, *small, *arguments],
        cwd=directory, env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_run_prints_the_table_and_saves_the_records(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "bench.py", "--stage=v0", "--seq-len=32", "--head-dim=16", "--causal=yes", "--batch=1",
         "--heads=2", "--pass=fwd,bwd,fwd+bwd", "--json", "run.json"],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "run.json").read_text())
    saved = list(tmp_path.glob(".benchmarks/*/*.json"))
    assert len(saved) == 1
    impls = [*bench.BASELINES, "v0_naive"]
    records = [entry["extra_info"] for entry in run["benchmarks"]]
    assert [(r["pass"], r["impl"]) for r in records] == [(p, impl) for p in ("fwd", "bwd", "fwd+bwd") for impl in impls]
    for entry, extra in zip(run["benchmarks"], records, strict=True):
        assert entry["name"] == extra["impl"]
        assert entry["group"] == f"{extra['pass']} B=1 H=2 S=32 D=16 causal float16"
        expected = {"batch": 1, "heads": 2, "seq_len": 32, "head_dim": 16, "causal": True, "dtype": "float16"}
        assert {key: extra[key] for key in expected} == expected
        assert extra["ms"] == pytest.approx(1e3 * entry["stats"]["median"])
        assert extra["tflops"] == pytest.approx(extra["flops"] / extra["ms"] / 1e9)
        assert extra["peak_extra_mib"] > 0
        assert ("bytes_read" in extra) == (DEVICE == "cpu")
        assert extra.get("host_us", 0) > 0 or DEVICE == "cpu"
        assert "data" not in entry["stats"]
    assert len({entry["fullname"] for entry in run["benchmarks"]}) == len(records)
    machine = run["machine_info"]
    assert machine["torch"] == torch.__version__ and machine["triton"] and machine["commit"]
    assert (machine["gpu"] is None) == (DEVICE == "cpu")
    assert set(machine["matmul_tflops"]) == ({"float16"} if DEVICE == "cuda" else set())
    assert speed_table(records, machine) in done.stdout
    assert f"[{len(records)}/{len(records)}]" in done.stderr
    if DEVICE == "cpu":
        before, after = done.stdout.split(speed_table(records, machine))
        assert "times mean nothing" in before and "times mean nothing" in after


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_interrupted_run_keeps_what_was_measured(tmp_path, name):
    stop = f"import os, signal\ndef stop(*_, **__): os.kill(os.getpid(), signal.{name})\nbench.BASELINES['stop'] = stop"
    done = run_bench(tmp_path, "--stage=v0", "--pass=fwd", prepare=stop)
    assert done.returncode == 2
    run = json.loads((tmp_path / "run.json").read_text())
    assert [entry["name"] for entry in run["benchmarks"]] == list(bench.BASELINES) and run["failures"] == []


def test_wrong_result_is_reported_not_timed_and_fails_the_run(tmp_path):
    wrong = "bench.BASELINES['wrong'] = lambda q, k, v, *, causal: 1.01 * bench._attention('v0')(q, k, v, causal=causal)"
    done = run_bench(tmp_path, "--stage=v0", "--pass=fwd,bwd", prepare=wrong)
    assert done.returncode == 1
    run = json.loads((tmp_path / "run.json").read_text())
    assert "wrong" not in [entry["name"] for entry in run["benchmarks"]]
    assert [(r["impl"], r["pass"], r["failure"]) for r in run["failures"]] == [("wrong", p, "WRONG") for p in ("fwd", "bwd")]
    assert " > " in run["failures"][0]["note"]  # the error and its bound
    assert "WRONG" in done.stdout


def test_nan_is_wrong(tmp_path):
    prepare = "bench.BASELINES['nan'] = lambda q, k, v, *, causal: q * float('nan')"
    done = run_bench(tmp_path, "--stage=v0", "--pass=fwd", prepare=prepare)
    assert done.returncode == 1
    assert [r["failure"] for r in json.loads((tmp_path / "run.json").read_text())["failures"]] == ["WRONG"]


def test_out_of_memory_is_a_row_and_the_next_case_runs(tmp_path):
    prepare = """
def too_large(q, k, v, *, causal):
    raise torch.OutOfMemoryError("pretended")
bench.BASELINES["large"] = too_large
"""
    done = run_bench(tmp_path, "--stage=v0", "--pass=fwd", prepare=prepare)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "run.json").read_text())
    assert [(r["impl"], r["failure"]) for r in run["failures"]] == [("large", "OOM")]
    assert run["benchmarks"][-1]["name"] == "v0_naive"
    assert cells(done.stdout, "large")[0][3] == "OOM"


def test_failure_of_a_case_shows_its_traceback_and_fails_the_run(tmp_path):
    prepare = "bench.BASELINES['broken'] = lambda q, k, v, *, causal: q.no_such_method()"
    done = run_bench(tmp_path, "--stage=v0", "--pass=fwd", prepare=prepare)
    assert done.returncode == 1
    assert "no_such_method" in done.stdout
    assert cells(done.stdout, "broken")[0][3] == "ERROR"
    assert cells(done.stdout, "v0_naive")
