"""A trace has each access of a pass, at the right place. The bytes of the accesses add up to the counter's bytes."""

import bisect
from collections import Counter
from dataclasses import replace

import pytest
from cases import first_with

import stages
from common.measure.trace import ONE_SM, trace
from common.measure.traffic import count_stage
from common.measure.workloads import Workload
from common.runtime import DEVICE

traces = pytest.importorskip("common.show.traces")
pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="watches the interpreters")
PRODUCER = first_with("def _producer(", "backward")  # the first stage whose warps have roles


def work(pass_, **changes):
    shape = {"batch": 1, "heads": 2, "kv_heads": 1, "seq_len": 200, "head_dim": 64}
    return Workload(pass_, **shape | changes, causal=True, dtype="float16")


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("name", [stages.resolve("v1"), first_with("atomic_add", "backward"), PRODUCER])
def test_accesses_add_up_to_what_is_counted(name, pass_):
    """The stages' accesses are those of PyTorch's operators, of descriptors, and of partitions."""
    recorded = trace(stages.load(name), work(pass_))
    counted = count_stage(stages.load(name), work(pass_), ONE_SM)
    assert recorded.launches == counted.launches
    for number, launch in enumerate(counted.launches):
        nbytes = dict.fromkeys(("read", "write", "add"), 0)
        for access in recorded.accesses:
            if access.launch == number:
                nbytes[access.kind] += access.nbytes
        assert sum(nbytes.values()) == launch.read + launch.written, launch.name
        assert nbytes["read"] <= launch.read and nbytes["write"] <= launch.written
    results = {"O", "LSE"} if pass_ == "fwd" else {"dO", "dQ", "dK", "dV"}
    assert {access.tensor for access in recorded.accesses} >= {"Q", "K", "V"} | results
    adds = {access.tensor for access in recorded.accesses if access.kind == "add"}
    assert ("sums" in adds) == (pass_ == "bwd" and name != stages.resolve("v1"))
    for access in recorded.accesses:
        for (first, last), size in zip((access.heads, access.rows), recorded.tensors[access.tensor][:2], strict=True):
            assert 0 <= first <= last < size


def places(recorded, kind, tensor):
    """Return the head, first row and last row of each access of this kind to a tensor."""
    return [(a.heads[0], *a.rows) for a in recorded.accesses if (a.kind, a.tensor) == (kind, tensor)]


def test_each_tile_is_where_the_kernel_has_it():
    """In v3, each program reads its query tile, then the key tiles that its queries see. It writes its tile of O once. v2
    writes its float32 O for each key tile. Neither has times or partitions."""
    v2, v3 = (trace(stages.load(name), work("fwd", heads=1, seq_len=300)) for name in ("v2", "v3"))
    assert places(v3, "read", "Q") == places(v3, "write", "O") == [(0, 0, 127), (0, 128, 255), (0, 256, 299)]
    keys = [(0, first, min(first + 63, 299)) for tiles in (2, 4, 5) for first in range(0, 64 * tiles, 64)]
    assert places(v3, "read", "K") == keys
    assert [a.program for a in v3.accesses if a.tensor == "Q"] == [0, 1, 2]
    assert all(a.start is None and a.partition == "" for a in v3.accesses)
    assert len(places(v2, "write", "o")) > 2 * len(places(v3, "write", "O"))


def test_gluon_has_partitions_and_cycles():
    recorded = trace(stages.load(PRODUCER), work("fwd"))
    assert all(a.start <= a.end for a in recorded.accesses)
    assert {a.partition for a in recorded.accesses if a.tensor in ("Q", "K", "V")} == {"_producer"}
    assert {a.partition for a in recorded.accesses if a.kind == "write"} == {"_consumer"}


def test_packed_tiles_stay_in_their_sequence_and_the_longest_comes_first():
    """Lines show where sequences start. A stage that takes lengths, but no packed sequences, gets the batch padded."""
    lengths, starts = [40, 300, 130], [0, 40, 340]
    padded, packed = (trace(stages.load(name), work("fwd", heads=1), lengths=lengths) for name in ("lengths1", "lengths2"))
    assert (padded.tensors["K"], packed.tensors["K"]) == ((3, 300, 64), (1, 470, 64))
    assert all(last < lengths[sequence] for sequence, _, last in places(padded, "read", "K"))
    for kind, tensor in [("read", "K"), ("read", "V"), ("write", "O"), ("write", "LSE")]:
        rows = [(first, last) for _, first, last in places(packed, kind, tensor)]
        sequences = [bisect.bisect(starts, first) for first, _ in rows]
        assert sequences == [bisect.bisect(starts, last) for _, last in rows], "a tile crosses a line"
        assert kind == "write" or sequences == sorted(sequences, key=[2, 3, 1].index), "the longest is not the first"
    assert traces.accesses("lengths2", packed).borders["O"] == [start / 470 for start in starts]
    assert traces.accesses("lengths1", padded).borders["O"] == [head / 3 for head in range(3)]


def test_ctas_share_caches_out_evenly():
    """Two queries of four caches. Each CTA of lengths4 takes heads, and each of lengths5 equally many key tiles."""
    lengths, gpu = [64, 1024, 320, 640], replace(ONE_SM, num_sms=4)
    for name, shared in (("lengths1", False), ("lengths4", False), ("lengths5", True)):
        recorded = trace(stages.load(name), work("fwd", heads=1), gpu, lengths, queries=2)
        assert (recorded.tensors["Q"], recorded.tensors["K"]) == ((4, 2, 64), (4, 1024, 64))
        read = Counter(a.program for a in recorded.accesses if a.tensor == "K")
        assert all(last < lengths[sequence] for sequence, _, last in places(recorded, "read", "K"))
        assert len(read) == 4 and (max(read.values()) - min(read.values()) <= 4) == shared, read
    none = trace(stages.load("v3"), work("fwd", heads=1), gpu, lengths, queries=2)
    assert max(last for _, _, last in places(none, "read", "K")) == 1023, "all queries see the last keys"


def test_the_command_draws_a_lane_for_each_tensor(tmp_path, monkeypatch, capsys):
    figures, Figure = [], traces.Figure
    monkeypatch.setattr(traces, "Figure", lambda **options: figures.append(Figure(**options)) or figures[-1])
    monkeypatch.setattr(traces, "TRACES", tmp_path)
    traces.main(["--stage", "v2,v3", "--pass", "fwd,bwd", "--seq-len", "64", "--head-dim", "16"])
    paths = [tmp_path / f"v2-v3-{pass_}-d16-causal-s64.png" for pass_ in ("fwd", "bwd")]
    assert capsys.readouterr().out.split() == list(map(str, paths)) and all(path.stat().st_size > 1000 for path in paths)
    one_head = Workload("fwd", 1, 1, 64, 16, True, "float16")
    both = [traces.accesses(name, trace(stages.load(name), one_head)) for name in ("v2", "v3")]
    for axes, each in zip(figures[0].axes, both, strict=True):
        assert [label.get_text() for label in axes.get_yticklabels()] == list(each.lanes)
        assert axes.get_xlim()[1] == max(one.end for one in both), "one scale"
