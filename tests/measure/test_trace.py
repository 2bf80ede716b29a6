"""A trace has each access of a pass, at the right place. The bytes of the accesses add up to the counter's bytes."""

import pytest

import stages
from common.measure.trace import ONE_SM, trace
from common.measure.traffic import count_stage
from common.measure.workloads import Workload
from common.runtime import DEVICE

traces = pytest.importorskip("common.show.traces")
pytestmark = [pytest.mark.every_stage, pytest.mark.skipif(DEVICE == "cuda", reason="watches the interpreters")]


def work(pass_, **changes):
    shape = {"batch": 1, "heads": 2, "kv_heads": 1, "seq_len": 200, "head_dim": 64}
    return Workload(pass_, **shape | changes, causal=True, dtype="float16")


# v1 has PyTorch's operators, v3 pointers, v6 descriptors, v25 partitions. The newest stage has all that its parents have.
SHOWN = {"v1", "v3", "v6", "v25", stages.version(stages.names()[-1])}
TRACED = [pytest.param(name, marks=[] if stages.version(name) in SHOWN else [pytest.mark.long]) for name in stages.names()]


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("name", TRACED)
def test_accesses_add_up_to_what_is_counted(name, pass_):
    recorded = trace(stages.load(name), work(pass_))
    counted = count_stage(stages.load(name), work(pass_), ONE_SM)
    assert [launch.name for launch in recorded.launches] == [launch.name for launch in counted.launches]
    for number, launch in enumerate(counted.launches):
        nbytes = dict.fromkeys(("read", "write", "add"), 0)
        for access in recorded.accesses:
            if access.launch == number:
                nbytes[access.kind] += access.nbytes
        assert sum(nbytes.values()) == launch.read + launch.written, launch.name
        assert nbytes["read"] <= launch.read and nbytes["write"] <= launch.written
    assert recorded.launches == counted.launches
    results = {"fwd": {"O", "LSE"}, "bwd": {"dQ", "dK", "dV"}}[pass_]
    assert {access.tensor for access in recorded.accesses} >= {"Q", "K", "V"} | results
    for access in recorded.accesses:
        for (first, last), size in zip(
            (access.heads, access.rows, access.columns), recorded.tensors[access.tensor], strict=True
        ):
            assert 0 <= first <= last < size


def places(recorded, kind, tensor):
    """Return the head, first row and last row of each access of this kind to a tensor."""
    return [(a.heads[0], *a.rows) for a in recorded.accesses if (a.kind, a.tensor) == (kind, tensor)]


def test_each_tile_is_where_the_kernel_has_it():
    """In v3, each program reads its query tile, then the key tiles that its queries see. It writes its tile of O once."""
    recorded = trace(stages.load("v3"), work("fwd", heads=1, seq_len=300))
    reads, writes = places(recorded, "read", "Q"), places(recorded, "write", "O")
    assert reads == writes == [(0, 0, 127), (0, 128, 255), (0, 256, 299)]
    keys = places(recorded, "read", "K")
    assert keys == [(0, first, min(first + 63, 299)) for tiles in (2, 4, 5) for first in range(0, 64 * tiles, 64)]
    assert [a.program for a in recorded.accesses if a.tensor == "Q"] == [0, 1, 2]


def test_v2_rewrites_what_v3_writes_once():
    rewritten, written = (trace(stages.load(name), work("fwd", seq_len=300, heads=1)) for name in ("v2", "v3"))
    assert len(places(rewritten, "write", "o")) > 2 * len(places(written, "write", "O"))


def test_gluon_has_partitions_and_cycles_and_triton_has_not():
    recorded = trace(stages.load("v13"), work("fwd"))
    assert all(a.start <= a.end for a in recorded.accesses)
    assert {a.partition for a in recorded.accesses if a.tensor in ("Q", "K", "V")} == {"_producer"}
    assert {a.partition for a in recorded.accesses if a.kind == "write"} == {"_consumer"}
    recorded = trace(stages.load("v3"), work("fwd"))
    assert all(a.start is None and a.partition == "" for a in recorded.accesses)


def test_additions_in_memory_are_told_from_writes():
    for name in ("v7", "v12"):
        added = {a.tensor for a in trace(stages.load(name), work("bwd")).accesses if a.kind == "add"}
        assert added == {"sums"}


def test_a_picture_has_a_lane_for_each_tensor(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(traces.plt, "close", figures.append)
    path = tmp_path / "picture.png"
    recorded = traces.draw([stages.resolve("v2"), stages.resolve("v3")], work("fwd", heads=1), path)
    assert path.stat().st_size > 1000
    for axes, each in zip(figures[0].axes, recorded, strict=True):
        assert [label.get_text() for label in axes.get_yticklabels()] == traces.lanes(each)
        assert axes.get_xlim()[1] == max(end for one in recorded for _, end in traces.moments(one)), "one scale"
    monkeypatch.undo()
    traces.plt.close(figures[0])


def test_the_command_writes_where_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(traces, "TRACES", tmp_path)
    traces.main(["--stage", "v3", "--pass", "fwd,bwd", "--seq-len", "64", "--head-dim", "16"])
    shown = capsys.readouterr().out.split()
    assert shown == [str(tmp_path / f"v3-{pass_}-d16-causal-s64.png") for pass_ in ("fwd", "bwd")]
