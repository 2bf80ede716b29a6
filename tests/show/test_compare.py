"""`make compare` shows two saved runs side by side, and refuses two runs that have nothing to compare."""

import json
import os
import re

import pytest

import stages
from common.measure.workloads import Workload
from common.show import compare, results

V0, V1 = map(stages.resolve, ("v0", "v1"))
COUNTS = {
    "bytes_read": 3e6, "bytes_written": 1e6, "flops_executed": 2e6, "kernel_launches": 1, "peak_extra_mib": 1.0, "tiles": "",
}  # fmt: skip


def record(impl, seq_len=64, **values):
    return {"impl": impl, **Workload("fwd", 1, 2, seq_len, 16, True, "float16").record(), **values}


def rows(out, impl=""):
    """Return the rows of the tables, or the rows of one implementation. A row is a list of cells."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("| ")]
    return [row for row in found if not row[1].startswith("A:") and impl in row[0]]


def timed(impl, ms, **values):
    return record(impl, ms=ms, iqr_ms=0.01, **values)


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A function that saves runs in a directory, which is empty at first. Each run is newer than the runs saved before it."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / ".benchmarks" / "Linux"
    directory.mkdir(parents=True)

    def save(records, failures=(), gpu=None, text=None, name="abc", commit=None, backwards=False):
        number = len(list(directory.iterdir())) + 1
        machine = {"gpu": gpu, "torch": "1", "triton": "2", "commit": commit or f"c{number}", "date": "2026-01-02"}
        run = {"benchmarks": [{"extra_info": r} for r in records], "failures": list(failures), "machine_info": machine}
        run["datetime"] = f"2026-01-02T00:00:{60 - number if backwards else number:02}"
        path = directory / f"{number:04}_{name}.json"
        path.write_text(json.dumps(run) if text is None else text)
        os.utime(path, (1e9 - number, 1e9 - number))  # file times must not matter: a copy has a new time
        return path

    return save


def test_times_of_a_gpu_are_compared_by_workload(saved, capsys):
    saved([timed(V0, 9.0), timed(V1, 9.0)], gpu="X")
    saved([timed(V1, 3.0), timed("sdpa", 1.0), timed(V0, 2.0, seq_len=32)], gpu="X")
    saved([timed(V1, 2.0), timed("sdpa", 1.0)], [record(V0, failure="OOM")], gpu="X")
    compare.main([])
    out = capsys.readouterr().out
    assert "0002_abc.json: X, torch 1, triton 2, commit c2" in out and "commit c3" in out
    assert [row[0] for row in rows(out)] == ["sdpa", V0, V1]
    assert rows(out, V1) == [[V1, "3 ± 0.01", "2 ± 0.01", "1.50"]]
    assert rows(out, V0) == [[V0, "-", "OOM", "-"]]
    assert "1 workloads are left out, because only one of the runs has them." in out and "different GPUs" not in out


def test_without_a_gpu_counts_are_compared_and_no_times(saved, capsys):
    saved([timed(V0, 123.0, **COUNTS)])
    saved([timed(V0, 456.0, **COUNTS | {"bytes_read": 1e6})])
    compare.main([])
    out = capsys.readouterr().out
    assert "the runs have counts and no times" in out and "123" not in out and "456" not in out
    assert rows(out, V0) == [[V0, "4", "2", "2", "2"]]


def test_a_file_that_is_no_whole_run_is_named_and_left_out(saved, capsys):
    saved([timed(V0, 3.0)], gpu="X")
    broken = [saved([], text=text) for text in ('{"benchmarks": [', "{}", "[]")]
    saved([timed(V0, 2.0)], gpu="X")
    compare.main([])
    captured = capsys.readouterr()
    assert rows(captured.out) == [[V0, "3 ± 0.01", "2 ± 0.01", "1.50"]]
    assert all(f"{path.name} is no complete run" in captured.err for path in broken)


@pytest.mark.parametrize(("second", "argv", "message"), [
    ({"records": [timed(V0, 3.0, **COUNTS)]}, [], "one had none"),
    ({"records": [timed(V0, 3.0, seq_len=32)], "gpu": "X"}, [], "no workload"),
    ({"records": [], "text": ""}, [], "needs two saved runs, but .benchmarks has 1"),
    ({"records": [], "text": ""}, ["a.json"], "a comparison needs two runs, not 1"),
    ({"records": [], "text": ""}, ["a.json", "b.json"], "a.json is no complete run of the benchmark: FileNotFoundError"),
    ({"records": [], "text": ""}, ["7", "8"], "no saved run is called '7'; there are 0001_abc"),
    ({"records": [], "text": ""}, ["--stage", "v999"], "no stage is called 'v999'"),
])  # fmt: skip
def test_what_cannot_be_compared_is_an_error_of_one_line(second, argv, message, saved, capsys):
    saved([timed(V0, 3.0)], gpu="X")
    saved(**second)
    with pytest.raises(SystemExit) as error:
        compare.main(argv)
    assert message in f"{error.value}{capsys.readouterr().err}"


def test_two_files_and_one_stage_make_one_table(saved, capsys):
    files = [saved([timed("v1_online_softmax", ms), timed("sdpa", 1.0)], gpu=gpu) for gpu, ms in (("X", 3.0), ("Y", 2.0))]
    saved([timed("v1_online_softmax", 9.0)], gpu="Z")
    compare.main([*map(str, files), "--stage", "v1"])
    out = capsys.readouterr().out
    assert "different GPUs" in out
    assert rows(out) == [["fwd B=1 H=2 S=64 D=16 causal float16", "3 ± 0.01", "2 ± 0.01", "1.50"]]


def test_a_pass_that_a_run_skipped_has_its_parents_times(capsys):
    """The run of results/ skips v5's forward, because it is v4's."""
    file = str(results.run_file("forward-d128"))
    compare.main([file, file, "--stage", "v5"])
    v5 = rows(capsys.readouterr().out)
    compare.main([file, file, "--stage", "v4"])
    assert v5 == rows(capsys.readouterr().out) and len(v5) == 6 and all(row[3] == "1.00" for row in v5)


def test_runs_have_ids_and_names(saved, capsys):
    """Without names, the last two runs are those with the latest dates inside, and not those with the highest ids."""
    for ms, name, commit in ((4.0, "before", "c"), (2.0, "after", "c"), (1.0, "last", "d")):
        saved([timed(V1, ms)], gpu="X", name=name, commit=commit, backwards=True)
    compare.main([])
    assert rows(capsys.readouterr().out, V1) == [[V1, "2 ± 0.01", "4 ± 0.01", "0.50"]]
    compare.main(["before", "2"])
    out = capsys.readouterr().out
    assert rows(out, V1)[0][-1] == "2.00" and re.search(r"\| +A: ms ± IQR \| +B: ms ± IQR \|", out)
    assert "A: .benchmarks/Linux/0001_before.json: X" in out and "B: .benchmarks/Linux/0002_after.json: X" in out
    compare.main(["0003_last", "0001"])
    assert rows(capsys.readouterr().out, V1)[0][-1] == "0.25"
