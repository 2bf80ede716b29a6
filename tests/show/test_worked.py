"""The examples worked by hand in the READMEs of v0 to v3 agree with what the kernels do."""

import math
from dataclasses import asdict

import pytest
import torch

import stages
from common.measure.trace import ONE_SM, trace
from common.measure.traffic import count_stage
from common.measure.workloads import Workload
from common.runtime import DEVICE
from common.show import results, worked

watches = pytest.mark.skipif(DEVICE == "cuda", reason="watches the interpreters")
V0, V1, V2, V3 = map(stages.resolve, ("v0", "v1", "v2", "v3"))


@watches
@pytest.mark.parametrize("pass_", worked.STEPS)
def test_v0_runs_the_steps_that_are_listed(pass_):
    work = Workload(pass_, 1, 1, 512, 16, False, "float16")
    counted = count_stage(stages.load(V0), work, ONE_SM)
    launches = {"seq_len": 512, "kv_len": 512, "launches": [asdict(launch) for launch in counted.launches]}
    found = worked.bytes_per_score(launches)
    assert [name for name, *_ in found] == [name for name, *_ in worked.STEPS[pass_]]
    for (operator, what, _), (_, read, written) in zip(worked.STEPS[pass_], found, strict=True):
        assert ("matmul" in what) == (operator == "bmm_float32")
        assert read + written in (2, 4, 6, 8, 10)
    matmuls, total = {"fwd": (2, 52), "bwd": (5, 68)}[pass_]
    assert sum("matmul" in what for _, what, _ in worked.STEPS[pass_]) == matmuls
    assert sum(read + written for _, read, written in found) == total
    assert f"**{total}**" in worked.steps(V0)


@pytest.mark.parametrize(("pass_", "total"), [("fwd", 16), ("bwd", 28)])
def test_v1_moves_the_bytes_per_score_of_its_table(pass_, total):
    counted = results.counted(V1, pass_, 64, False)
    assert sum(read + written for _, read, written in worked.bytes_per_score(counted)) == total
    assert f"**{total}**" in (stages.directory(V1) / "README.md").read_text()


def test_another_step_is_noticed(monkeypatch):
    monkeypatch.setitem(worked.STEPS, "fwd", worked.STEPS["fwd"][:-1])
    with pytest.raises(ValueError, match="other launches"):
        worked.steps(V0)


def test_v1_gets_the_numbers_of_the_row():
    """v1's kernel takes the row's scores in tiles of two. After the first tile alone, its LSE is m + log l of that tile."""
    from stages.v1_online_softmax.forward import _softmax_kernel

    after = worked.online_softmax(worked.TILES)
    scores = [score for tile in worked.TILES for score in tile]
    for number, (m, _, _, l) in enumerate(after, 1):
        s = torch.tensor(scores[: 2 * number], dtype=torch.float32, device=DEVICE)
        p, lse = torch.empty_like(s), torch.empty(1, device=DEVICE)
        _softmax_kernel[1,](s, p, lse, 1.0, 1, len(s), 0, BLOCK_M=1, BLOCK_N=2, CAUSAL=False)
        torch.testing.assert_close(lse.item(), m + math.log(l), rtol=1e-6, atol=0)
        torch.testing.assert_close(p, s.softmax(0), rtol=1e-5, atol=0)
    assert ", ".join(f"{each:.3f}" for each in p.tolist()) in worked.softmax_by_hand(V1)


def visited(recorded, outer, inner):
    """Return (first row of the tile of `outer`, first row of the tile of `inner`) for each read of `inner`, in a trace's order.
    The tile of `outer` is the one that was read last."""
    found, last = [], None
    for access in recorded.accesses:
        if access.kind == "read" and access.tensor == outer:
            last = access.rows[0]
        if access.kind == "read" and access.tensor == inner:
            found.append((last, access.rows[0]))
    return found


@watches
def test_the_grids_have_the_order_of_the_kernels():
    work = Workload("fwd", 1, 1, worked.TOKENS, 64, True, "float16")
    v2, v3 = (trace(stages.load(name), work) for name in (V2, V3))
    assert [(m, n) for n, m in visited(v2, "K", "Q")] == worked.visits_by_keys()
    assert visited(v3, "Q", "K") == worked.visits_by_queries()
    assert set(worked.visits_by_keys()) == set(worked.visits_by_queries())


def test_tiles_before_full_need_no_mask():
    for start_m, start_n in worked.visits_by_queries():
        full, end = worked.limits(start_m)
        seen = {key <= query for query in (start_m, start_m + worked.BLOCK_M - 1)
                for key in (start_n, start_n + worked.BLOCK_N - 1)}  # fmt: skip
        assert (start_n < full) == (seen == {True}) and start_n < end
