"""Each way computes right results, in the tiles that it is for. The fit finds the constants behind times."""

import json
import re

import pytest
from cases import assert_right, available
from numpy.testing import assert_allclose

import stages
from common.kernels.order import busiest
from common.measure import ways
from common.measure.counter import count
from common.measure.random_shapes import draw
from common.measure.workloads import Workload
from common.runtime import INTERPRETED, Device, interpreted_as

RESULTS = {"fwd": ("out", "lse"), "bwd": ("dq", "dk", "dv")}


def work_of(pass_, head_dim, causal=True):
    return Workload(pass_, 1, 2, 300 if pass_ == "fwd" else 200, head_dim, causal, "float16", kv_heads=1)


@pytest.mark.parametrize(("pass_", "head_dim"), [
    ("fwd", 64), pytest.param("fwd", 128, marks=pytest.mark.long), ("fwd", 256),
    ("bwd", 64), pytest.param("bwd", 128, marks=pytest.mark.long), pytest.param("bwd", 256, marks=pytest.mark.long),
])  # fmt: skip
def test_every_way_is_right(pass_, head_dim):
    available(stages.newest())
    work = work_of(pass_, head_dim)
    inputs = work.inputs()
    for function, _ in ways.ways(pass_, head_dim).values():
        results = ways.call_of(function, work, inputs)()
        assert_right(dict(zip(RESULTS[pass_], results, strict=True)), *inputs, causal=True, scale=head_dim**-0.5)


@pytest.mark.skipif(not INTERPRETED, reason="launches are counted in the interpreter only")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_way_has_its_tiles_and_launches(head_dim):
    work, launches, tiles = work_of("fwd", head_dim, causal=False), {}, {}  # tiles of 32 keys have no causal mask
    for name, (function, tile) in ways.ways("fwd", head_dim).items():
        with interpreted_as(Device(num_sms=1)):
            launches[name] = count(ways.call_of(function, work, work.inputs())).launches
        tiles[name] = next((*launch.tile.values(),) for launch in launches[name] if launch.name == "_forward_kernel")
        assert tile in (None, tiles[name]), name
    # With the samples and the failed tiles; alone; with the counter's zero.
    for kind, number in {"guess": 3, "running": 1, "counter": 2}.items():
        assert {len(launches[name]) for name in launches if re.match("[a-z]+", name)[0] == kind} == {number}, kind
    if head_dim == 64:
        assert tiles["running"] == tiles["decode"] == tiles["decode1"] == (256, 64)
        assert tiles["running128"] == tiles["decode128"] == tiles["decode128n1"] == (128, 128)


def test_the_newest_stage_s_choice_is_a_way():
    for work in draw(2, 100):
        assert ways.choice(work, 132) in ways.ways(work.pass_, work.head_dim)


def times(works, launches, *of_tiles):
    """Return the times of forwards whose tiles have 128 queries and 64 keys, on 132 SMs."""
    sizes = [(work.batch * work.heads, work.seq_len, work.kv_len, 0, work.causal) for work in works]
    return [launches + busiest(*size, 128, 64, 132, *of_tiles) for size in sizes]


@pytest.mark.parametrize("constants", [(16, 2.2, 0.8), (2, 6, 0.1), (40, 0.3, 3)])
def test_the_fit_finds_the_constants_behind_times(constants):
    works = draw(1, 25)[::2]
    found, deviation = ways.fit(works, times(works, *constants), (128, 64), 132)
    assert_allclose(found, constants, rtol=1e-3)
    assert deviation < 1e-3


def test_a_file_s_fit_is_printed(tmp_path, capsys):
    """The choices take twice as long as other ways. A shape of `JUDGED`, whose choice was not measured, changes nothing."""
    works = [work for work in draw(1, 60) if (work.pass_, work.head_dim) == ("fwd", 256)]
    records = [
        work.record() | {"us": dict.fromkeys(ways.ways("fwd", 256), us) | {ways.choice(work, 132): 2 * us, "guess": us}}
        for work, us in zip(works, times(works, 16, 6, 1.4), strict=True)
    ]
    judged = next(work for work in draw(100, 100) if (work.pass_, work.head_dim) == ("fwd", 256))
    others = ways.ways("fwd", 256).keys() - {ways.choice(judged, 132)}
    records.append(judged.record() | {"us": dict.fromkeys(others, 1e6)})
    path = tmp_path / "ways.json"
    path.write_text(json.dumps({"machine_info": {"gpu": "NVIDIA H100 80GB HBM3"}, "records": records}))
    ways.main([str(path), "--fit"])
    shown = capsys.readouterr().out
    assert "fwd D=256 guess: [16.   6.   1.4] µs (launches, tile, key tile), ±0.0%" in shown
    assert (
        f"fwd D=256: {len(works)} of {len(works) + 1} choices take ×2.000 of the fastest way's time, and ×2.000 for " in shown
    )


def test_only_some_workloads_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(ways, "require_hopper", lambda module: None)
    monkeypatch.setattr(ways, "GpuTimer", lambda: None)
    monkeypatch.setattr(ways, "measure", lambda work, timer: {"wide": 1.0})
    path = tmp_path / "ways.json"
    ways.main([str(path), "--count", "20", "--pass", "bwd", "--head-dim", "256,64"])
    records = json.loads(path.read_text())["records"]
    drawn = [work for work in draw(1, 20) if work.pass_ == "bwd" and work.head_dim != 128]
    assert [Workload.of(record) for record in records] == drawn and drawn
