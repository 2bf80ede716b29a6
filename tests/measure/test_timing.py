"""The timer leaves out warm-up and the CPU time of launches, and agrees with another timer. Most tests use a fake GPU."""

import itertools
import statistics
import time
import types

import pytest
import torch

import stages
from common.measure import timing
from common.measure.baselines import timed_call
from common.measure.footprint import footprint
from common.measure.workloads import Workload
from common.runtime import DEVICE


class FakeGpu:
    """A stand-in for `torch` in common.measure.timing. Launches take no CPU time, and queued work runs in order."""

    FLUSH_S = 30e-6

    def __init__(self):
        self.cpu_s = self.queue_end_s = 0.0
        self.log = []  # queued work and waits, in order
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

    def zeros(self, size, device):
        assert (4 * size, device) == (timing.CACHE_BYTES, "cuda")
        return types.SimpleNamespace(sum=lambda: self.run(self.FLUSH_S, "flush"))

    def run(self, seconds, name="call"):
        """Queue `seconds` of work for the GPU."""
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


def test_rounds_leave_out_flush_and_launch_and_are_queued_without_a_wait_on_a_gpu_that_has_rested(gpu):
    timer = timing.GpuTimer()
    gpu.log.clear()
    times, hidden = timer.measure(call_taking(gpu, 50e-6, 2e-3))
    assert times == pytest.approx([2e-3] * len(times)) and hidden
    assert gpu.log[:4] == ["call", "wait", f"rest {timing.REST_S}", "spin"]
    last_rounds = gpu.log[-1 - 4 * len(times) :]
    assert last_rounds == ["flush", "event", "call", "event"] * len(times) + ["wait"]
    assert gpu.log.count("wait") == 3  # before the pause, for the first estimate, and at the end


def test_launch_that_takes_longer_than_its_kernels_is_hidden_or_flagged(gpu):
    timer = timing.GpuTimer()
    call = call_taking(gpu, 3e-3, 1e-3)  # if the launch were not hidden, the call would take 4 ms
    assert timer._rounds(call, 20, 0.0)[1]
    times, hidden = timer.measure(call)
    assert times == pytest.approx([1e-3] * len(times)) and hidden
    assert not timer.measure(call_taking(gpu, 10 * timing.LONGEST_SPIN_S, 1e-3))[1]  # too long to hide
    assert timer.measure(call_taking(gpu, 0, 1e-3))[1]  # the next case is not flagged


@pytest.mark.parametrize("host_s", [50e-6, 12e-3], ids=["hidden", "exposed at first"])
def test_rounds_of_the_warm_up_are_not_reported(gpu, host_s):
    """The rounds after the warm-up take 1, 2, … ms, and all other calls take 9.9 ms. An exposed case is measured again.

    Before the warm-up there are two calls: the first call, and one for the estimate.
    """
    warm_up, count = (int(seconds / 9.9e-3) for seconds in (timing.WARM_UP_S, timing.CASE_S))
    expected = [number * 1e-3 for number in range(1, count + 1)]
    gpu_s = itertools.chain([9.9e-3] * 2, itertools.cycle([9.9e-3] * warm_up + expected))
    cpu_s = itertools.chain([50e-6] * 2, itertools.repeat(host_s))
    times, hidden = timing.GpuTimer().measure(lambda: call_taking(gpu, next(cpu_s), next(gpu_s))())
    assert times == pytest.approx(expected) and hidden


@pytest.mark.parametrize(("gpu_s", "rounds"), [(1e-5, 200), (2e-3, 50), (0.04, 5), (0.06, 3)])
def test_rounds_are_bounded_in_number_and_time(gpu, gpu_s, rounds):
    times, _ = timing.GpuTimer().measure(call_taking(gpu, 0, gpu_s * 0.9999))
    assert len(times) == rounds


@pytest.mark.parametrize(("gpu_s", "rounds"), [(1e-5, 100), (2.1e-3, 9), (0.2, 3)])
def test_host_time_is_the_cpus_alone_without_the_first_rounds(gpu, monkeypatch, gpu_s, rounds):
    """The CPU waits for the GPU before each round, so that the queue of launches is empty.

    In a full queue, a launch would wait for the GPU, and the CPU's time would include GPU time.
    """
    monkeypatch.setattr(timing.time, "perf_counter", lambda: gpu.cpu_s)
    first, expected = timing.HOST_WARM_UP_ROUNDS, [number * 1e-6 for number in range(1, rounds + 1)]
    host_s = iter([1.0] * first + expected)
    assert timing.host_seconds(lambda: call_taking(gpu, next(host_s), gpu_s)(), gpu_s) == pytest.approx(expected)
    assert gpu.log == ["wait", "call"] * (first + rounds)


@pytest.mark.parametrize(("host_s", "gpu_s", "expected"), [(30e-6, 5e-6, 30.5e-6), (5e-6, 30e-6, 30.5e-6)])
def test_calls_in_a_row_take_the_longer_of_cpu_and_gpu_time(gpu, host_s, gpu_s, expected):
    """CPU and GPU overlap. 10 calls take 10 times the longer time, plus the shorter once: 10 · 30 + 5 = 305 µs. The first
    rounds are not reported."""
    first = itertools.chain([1.0] * timing.IN_A_ROW * timing.HOST_WARM_UP_ROUNDS, itertools.repeat(gpu_s))
    times = timing.seconds_in_a_row(lambda: call_taking(gpu, host_s, next(first))(), gpu_s)
    assert times == pytest.approx([expected] * timing.MOST_ROWS)
    one = ["wait", "event", *["call"] * timing.IN_A_ROW, "event", "wait"]
    assert gpu.log == one * (timing.HOST_WARM_UP_ROUNDS + timing.MOST_ROWS)


@pytest.mark.alone
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_copy_is_as_fast_as_the_memory_of_some_gpu():
    assert 100 < timing.copy_gbps(timing.GpuTimer()) < 20_000


DECODING = Workload("fwd", 8, 32, 1, 128, False, "float16", kv_heads=8, kv_len=2**17)
FEW_HEADS = Workload("fwd", 1, 16, 4096, 128, False, "float16")


@pytest.mark.alone
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("impl", "workload"), [(stages.resolve("v1"), FEW_HEADS), (stages.newest(), DECODING), ("sdpa-flash", DECODING)]
)
def test_gpu_times_agree_with_triton_do_bench(impl, workload, monkeypatch):
    """The timer agrees with Triton's do_bench.

    Both timers let the GPU rest and warm up for the same time. Both clear the L2 cache with the same reads. The calls take
    more than a millisecond. For shorter calls, do_bench would include CPU time. No call makes the GPU reach its power limit,
    because then its clock, and so the time, depends on what the GPU did before.
    """
    from triton.runtime import driver
    from triton.testing import do_bench

    if impl in stages.names() and (reason := stages.unavailable(impl)):
        pytest.skip(f"{impl} {reason}")
    call = timed_call(impl, workload, workload.inputs())
    timer, ours, theirs = timing.GpuTimer(), [], []
    monkeypatch.setattr(type(driver.active), "clear_cache", lambda self, cache: timer.clear_cache())
    for _ in range(3):  # the two timers take turns, because the GPU's clock drifts
        times, launch_hidden = timer.measure(call)  # begins with a rest
        assert launch_hidden
        ours += times
        time.sleep(timing.REST_S)
        theirs += do_bench(call, warmup=1e3 * timing.WARM_UP_S, return_mode="all")
    assert statistics.median(ours) >= 1e-3
    print(f"{impl}: {1e3 * statistics.median(ours):.4f} ms, do_bench {statistics.median(theirs):.4f} ms")
    assert statistics.median(ours) == pytest.approx(1e-3 * statistics.median(theirs), rel=0.01)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_footprint_on_a_gpu_is_the_peak_over_what_was_allocated():
    given = torch.ones(256, 1024, device="cuda")  # 1 MiB
    assert footprint(lambda: (given + 1) + 1) == {"peak_extra_mib": 2.0}
