"""The report on random shapes has the right means, and the right worst shapes."""

import pytest
from test_results import run

from common.measure.workloads import Workload
from common.show import shapes


def record(impl, pass_, seq_len, ms, head_dim=64):
    work = Workload(pass_, 1, 1, seq_len, head_dim, False, "float16")
    return {"impl": impl, **work.record(), "flops": 1.0, **({"ms": ms} if ms else {"failure": "n/a"})}


def rows(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@pytest.fixture
def found():
    """A run in which the stage takes `ratio` times as long as the faster of two libraries, where there is one."""
    records = [record("v1_online_softmax", "fwd", 64 * n, n) for n in range(1, 11)]
    records += [record("sdpa-cudnn", "fwd", 64 * n, 2 * n if n < 10 else n / 2) for n in range(1, 11)]
    records += [record("flash-3", "fwd", 64 * n, 4 * n if n < 9 else None) for n in range(1, 11)]
    records += [record("v1_online_softmax", "bwd", 64, 1, 128), record("sdpa-cudnn", "bwd", 64, None, 128)]
    return run("one", "2026-01-01", records)


def test_overview_has_the_mean_and_the_tail_of_each_pass_and_head_dimension(found):
    mean = f"{(2**9 / 2) ** 0.1:.2f}"
    assert rows(shapes.overview(found, "v1_online_softmax")) == [["forward", "64", "10", mean, "0.50", "0.50", "1"]]
    assert shapes.percentile([*range(100)], 0.05) == 5 and shapes.percentile([3.0], 0.05) == 3


def test_worst_shapes_come_first_with_the_fastest_library_and_the_choice(found):
    table = rows(shapes.worst(found, "v1_online_softmax", lambda work: f"S{work.seq_len}"))
    assert len(table) == shapes.WORST
    assert table[0] == ["fwd B=1 H=1 S=640 D=64 full float16", "0.50", "10000.0", "5000.0", "sdpa-cudnn", "S640"]
    assert table[1][1] == "2.00"


def test_the_host_s_time_has_both_kinds_of_calls(found):
    assert shapes.host(found, "v1_online_softmax") == ""
    times = [record("v1_online_softmax", "fwd", 64 * n, 1) | {"host_us": n, "host_new_us": 10 * n} for n in (1, 2, 4)]
    text = shapes.host(run("one", "2026-01-01", times), "v1_online_softmax")
    assert text == "The host's time, median: forward 2 µs, with new lengths 20 µs"


def test_a_report_has_all_parts(found):
    text = shapes.report(found.records, found.machine, "v1_online_softmax", lambda work: "chosen")
    assert text.startswith("v1 over the fastest of sdpa-cudnn, flash-3, for each shape:") and "chosen" in text
    assert shapes.overview(found, "v1_online_softmax") in text
