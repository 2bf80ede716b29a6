"""The table of the newest stage's lead shows the losses, and each workload in its row. The runs are invented."""

import math

import pytest
from test_documents import cells
from test_results import V3, records, run, twice, write

from common.measure.workloads import Workload
from common.show import lead, results


def record(impl, ms, pass_="fwd", head_dim=64, **shape):
    work = Workload(pass_, 1, 4, head_dim=head_dim, causal=False, **{"dtype": "float16", "seq_len": 4096} | shape)
    return {"impl": impl, **work.record(), **({"ms": ms} if ms else {"failure": "n/a"})}


def test_a_cell_has_the_mean_the_lowest_and_how_many_are_slower():
    found = run("one", "2026-01-01", records(V3, 1.0, passes=["fwd"], head_dims=[64]),
                records("flash-3", 4.0, passes=["fwd"], head_dims=[64]))  # fmt: skip
    assert lead.cell([found], V3, found.works) == "×4.00 (4.00)"
    mixed = run("two", "2026-01-01", [record(V3, 1.0, seq_len=length) for length in (64, 128, 256)],
                [record("flash-3", ms, seq_len=length) for length, ms in ((64, 0.5), (128, 8.0), (256, None))])  # fmt: skip
    assert lead.cell([mixed], V3, mixed.works) == "×2.00 (0.50), 1 of 2"
    assert lead.cell([found, mixed], V3, found.works + mixed.works).endswith(", 1 of 8")
    assert lead.cell([mixed], "flash-3", mixed.works[2:]) == "-"


def test_a_mean_within_the_noise_is_an_equal_sign_and_no_lead(root):
    """Pairs of times of the same code differ by 3 %, so a mean over six workloads that is off by 2.44 % is noise."""
    first, again = twice(V3, 0.03)
    ours = first + [record | {"impl": f"{V3} (again)"} for record in again]

    def saved(ms):
        return records("flash-3", ms, passes=["fwd"], head_dims=[64])

    for ms, cell in ((4 * math.exp(0.0244), "= (1.02)†"), (4 * math.exp(-0.0244), "= (0.98)†, 6 of 6"), (4.2, "×1.05 (1.05)†")):
        found = run("x", "2026-01-01", ours, saved(ms))
        assert lead.cell([found], V3, found.works) == cell
    write(root / "newest-d64-x.json", "2026-01-01", ours + saved(4.0))
    write(root / "newest-d128-x.json", "2026-01-01", [record(V3, 1.0, head_dim=128), record("flash-3", 2.0, head_dim=128)])
    table, ends, *_ = lead.lead(V3)
    assert ends == {"forward, D = 64": ["1024 tokens", "4096 tokens", "16384 tokens"]}
    assert cells(table, "4096 tokens")[:2] == ["= (1.00)†", "×2.00 (2.00)"]  # the second run has not measured its noise


def test_a_library_may_miss_in_one_column(root):
    shapes = {"head_dim": 64}, {"head_dim": 128}
    found = [record(impl, 1.0, **shape) for impl in (V3, "flash-3") for shape in shapes] + [record("flash-4", 2.0)]
    write(root / "random-x.json", "2026-01-01", found)
    assert lead.lead(V3).without == {"FlashAttention-4": ["random shapes, forward, D = 128"]}


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(lead.results, "GPUS", ("x",))
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def test_each_workload_is_in_its_row_and_column(root):
    write(root / "newest-d64-x.json", "2026-01-01", records(V3, 1.0, head_dims=[64]) + records("flash-3", 2.0, head_dims=[64]))
    kinds = {"a sink at the first key": {"sink": 8.0}, "a sink in the middle": {"sink": 8.0, "sink_key": 7},
             "a sink in the middle, in one head": {"sink": 8.0, "sink_key": 7, "sink_head": 0}, None: {}}  # fmt: skip
    write(root / "sinks-x.json", "2026-01-01", [
        record(impl, ms, "bwd", 128, **shape) for place, shape in enumerate(kinds.values(), start=1)
        for impl, ms in ((V3, 1.0), ("flash-4", float(place)))
    ])  # fmt: skip
    stds = [record(impl, ms, score_std=std) for std in (1.0, 2.0, 8.0) for impl, ms in ((V3, 2.0), ("flash-3", std))]
    write(root / "wide-scores-x.json", "2026-01-01", stds)
    write(root / "random-x.json", "2026-01-01", records("flash-3", 2.0))  # without the stage
    table, ends, without, runs = lead.lead(V3)
    assert [*runs] == ["newest-d64-x", "wide-scores-x", "sinks-x"] and "random" not in table
    assert ends == {"forward, D = 64": ["scores of σ = 2"], "backward, D = 128": ["a sink at the first key"]}
    sinks = ["a sink at the first key", "a sink in the middle", "a sink in the middle, in one head"]
    others = ["1024 tokens", "4096 tokens", "16384 tokens", "scores of σ = 2", "scores of σ = 8"]
    assert without == {"FlashAttention-4": others, "FlashAttention-3": sinks}
    columns = ["forward, D = 64", "forward, D = 128", "backward, D = 64", "backward, D = 128"]
    assert cells(table, "v3 / fastest library") == columns
    assert cells(table, "4096 tokens") == ["×2.00 (2.00)", "-", "×2.00 (2.00)", "-"] and "512 tokens" not in table
    assert cells(table, "a sink in the middle")[3] == "×2.00 (2.00)"
    assert cells(table, "a sink in the middle, in one head")[3] == "×3.00 (3.00)"
    assert cells(table, "a sink at the first key") == ["-", "-", "-", "×1.00 (1.00)"]
    assert cells(table, "scores of σ = 2") == ["×1.00 (1.00)", "-", "-", "-"] and "σ = 4" not in table
    assert cells(table, "scores of σ = 8") == ["×4.00 (4.00)", "-", "-", "-"]


def test_a_loss_is_marked_and_so_is_code_that_has_changed(root):
    write(root / "random-x.json", "2026-01-01", [record(V3, 2.0) | {"source": "0"}, record("flash-3", 1.0)])
    table, ends, *_ = lead.lead(V3)
    assert ends == {"forward, D = 64": ["random shapes"]}
    assert cells(table, "random shapes") == ["×0.50 (0.50)†, 1 of 1", "-"]


def test_the_gpu_with_most_libraries_counts_then_the_newest(root, monkeypatch):
    monkeypatch.setattr(results, "GPUS", ("x", "y", "z"))
    both = [record(V3, 1.0), record("flash-3", 3.0), record("flash-4", 4.0)]
    for gpu, ended, found in (("x", "2026-01-01", both), ("y", "2026-01-03", both[:2]), ("z", "2026-01-02", both)):
        write(root / f"random-{gpu}.json", ended, found if gpu != "z" else [*found[:2], record("flash-4", 2.0)])
    assert cells(lead.lead(V3).table, "random shapes") == ["×2.00 (2.00)", "-"]
