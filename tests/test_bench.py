"""The benchmark parses its command line, chooses its cases, checks results, and completes whole runs."""

import contextlib
import itertools
import json
import re
from dataclasses import replace

import programs
import pytest
import torch

import bench
import stages
from common.measure import digest
from common.measure.workloads import Workload
from common.runtime import DEVICE
from common.show import counts
from common.show.tables import speed_table
from common.show.tracks import TRACKS, stages_of

ROOT = programs.ROOT


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
        (["--kv-heads", "3", "--heads", "6,8"], "3 K/V heads do not divide 8 heads"),
        (["--kv-heads", "0"], "'0' is not a whole number of at least 1"),
        (["--kv-len", "0", "--causal=no"], "'0' is not a whole number of at least 1"),
        (["--kv-len", "64", "--seq-len=64,128"], "argument --kv-len: a causal workload has as many keys as queries"),
        (["--value-dim", "48"], "'48' is not one of 16, 32, 64, 128, 256"),
        (["--reference", "all"], "'all' (choose from "),
        (["--reference"], "--reference {forward-d64,forward-d128,"),
        (["--score-std", "0"], "'0' is not a number above 0"),
        (["--score-std", "nan"], "'nan' is not a number above 0"),
        (["--score-std", "wide"], "'wide'"),
        (["--sink", "-1"], "'-1' is not a sink such as"),
        (["--sink", "16@99999"], "argument --sink: there is no key 99999"),
        (["--json", "no/such/directory/run.json"], "no/such/directory"),
        (["--json", ""], "'' is not the name of a file"),
        (["--json", "."], "'.' is not the name of a file"),
        (["--json", "/dev/null"], "'/dev/null' is not the name of a file"),
        (["--json", "/proc/run.json"], "'/proc/run.json' cannot be written: "),
        (["--benchmark-warmup"], "argument --benchmark-warmup: common.measure.timing chooses rounds and warm-up"),
        (["--benchmark-json", "x"], "argument --benchmark-json: --json FILE saves the run"),
        (["--again", "v999"], "'v999'"),
        (["--hed-dim", "64"], "unrecognized arguments: --hed-dim"),
    ],
)
def test_options_name_the_bad_value_and_what_is_allowed(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.parse_options(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error and arguments[0] in error


def test_pytest_benchmark_s_options_are_handed_over_or_refused_with_a_reason(capsys):
    options = bench.parse_options(["--stage=v0", "--benchmark-compare", "0001", "--benchmark-columns=median,iqr"])
    assert options.for_pytest == ["--benchmark-compare", "0001", "--benchmark-columns=median,iqr"]
    assert options.stage == ["v0_naive"]
    for words in (["--benchmark-columns=iqr", "--nonsense"], ["0001"]):
        with pytest.raises(SystemExit):
            bench.parse_options(words)
        assert f"unrecognized arguments: {words[-1]}" in capsys.readouterr().err


def test_one_stage_brings_its_predecessor_and_v0():
    names = stages.names()
    assert bench.chosen_stages(names[:1]) == names[:1]
    assert bench.chosen_stages([names[3]]) == [names[0], names[2], names[3]]
    assert bench.chosen_stages([names[1], names[0]]) == names[:2]
    assert bench.chosen_stages(names) == names


def test_a_dead_end_is_compared_with_its_parent_and_precedes_nothing(monkeypatch):
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
    options = bench.parse_options(["--sink=0,16,8@7,24@9/1", "--seq-len=64", "--head-dim=64", "--causal=no", "--pass=bwd"])
    labels = {w.sink: w.label for _, w in bench.cases(options)}
    assert labels == {0: labels[0]} | {
        nats: f"{labels[0]} sink={sink}" for nats, sink in ((16, "16"), (8, "8@7"), (24, "24@9 in head 1"))
    }


def test_cases_with_shared_heads_follow_those_with_all():
    options = bench.parse_options(["--heads=8", "--kv-heads=8,2", "--value-dim=32,128", "--head-dim=32", "--causal=no"])
    found = dict.fromkeys(workload for _, workload in bench.cases(options))
    assert [(w.pass_, w.kv_heads, w.value_dim) for w in found][:8] == [
        (pass_, kv_heads, dim) for kv_heads in (8, 2) for dim in (32, 128) for pass_ in ("fwd", "bwd")
    ]
    assert {w.heads for w in found} == {8} and {w.head_dim for w in found} == {32}


def test_cases_with_other_numbers_of_keys_follow_each_other():
    options = bench.parse_options(["--seq-len=1,2", "--kv-len=64,128", "--causal=no", "--head-dim=32", "--pass=fwd"])
    found = dict.fromkeys(workload for _, workload in bench.cases(options))
    assert [(w.seq_len, w.kv_len) for w in found] == [(1, 64), (1, 128), (2, 64), (2, 128)]
    options = bench.parse_options(["--seq-len=64", "--kv-len=64", "--head-dim=32"])  # equal lengths, so causal cases exist too
    assert {(w.kv_len, w.causal) for _, w in bench.cases(options)} == {(64, False), (64, True)}


def test_kv_heads_divide_the_papers_heads_of_each_dimension(monkeypatch, capsys):
    monkeypatch.setattr(bench.workloads, "paper_shape", lambda seq_len, head_dim: (1, 2048 // head_dim))
    options = bench.parse_options(["--head-dim=64,128", "--kv-heads=8,4", "--seq-len=64"])
    ratios = {(w.head_dim, w.heads // w.kv_heads) for _, w in bench.cases(options)}
    assert ratios == {(64, 4), (64, 8), (128, 2), (128, 4)}
    with pytest.raises(SystemExit):
        bench.parse_options(["--head-dim=64,128", "--kv-heads=32"])
    assert "argument --kv-heads: 32 K/V heads do not divide 16 heads" in capsys.readouterr().err


def reference_cases(name, again=False):
    """Return the cases of a part of the reference; leave out the second time of the stage that is measured twice."""
    found = bench.cases(bench.parse_options(["--reference", name]))
    return [(impl, work) for impl, work in found if again or not impl.endswith(bench.AGAIN)]


@pytest.mark.parametrize("name", ["forward-d64", "wide", "decode-d128"])
def test_reference_run_measures_a_stage_twice_as_far_apart_as_it_can(name):
    by_workload = {}
    for impl, work in reference_cases(name, again=True):
        by_workload.setdefault(work, []).append(impl)
    for work, impls in by_workload.items():
        twice = impls[0].removesuffix(bench.AGAIN)
        if bench.LINE[-1] in impls:
            assert impls[0] == bench.LINE[-1] + bench.AGAIN and impls.count(twice) == 1
            assert bench.source(impls[0], work.pass_) == bench.source(twice, work.pass_)
        else:
            assert not any(impl.endswith(bench.AGAIN) for impl in impls)
    assert name != "forward-d64" or bench.repeats(bench.LINE[-1], "fwd") or bench.LINE[-1] in impls


def saved_run(path, pairs, gpu=None):
    records = [{"impl": impl, **work.record(), "source": bench.source(impl, work.pass_)} for impl, work in pairs]
    run = {"benchmarks": [{"extra_info": record} for record in records], "failures": [], "machine_info": {"gpu": gpu}}
    path.write_text(json.dumps(run))
    return run


def test_a_reference_is_stale_where_a_row_is_missing_or_measured_other_code(tmp_path, monkeypatch, capsys):
    path, pairs, newest = tmp_path / "run.json", reference_cases("newest-d64"), bench.LINE[-1]
    every = [f"{stages.version(impl)} {pass_}" for impl in bench.NEWEST[len(bench.BASELINES) :] for pass_ in ("fwd", "bwd")]
    assert sorted(bench.stale("newest-d64", path)) == sorted(every)
    run = saved_run(path, pairs)
    assert bench.stale("newest-d64", path) == []
    monkeypatch.setattr(bench, "DEVICE", "cuda")  # a run on the same GPU, here on none, would measure nothing new
    assert bench.main(["--reference=newest-d64", f"--json={path}"]) == 0
    assert "Nothing was measured" in capsys.readouterr().out and json.loads(path.read_text()) == run
    record = next(entry["extra_info"] for entry in run["benchmarks"] if entry["extra_info"]["impl"] == newest)
    record["source"] = "other"
    path.write_text(json.dumps(run))
    assert bench.stale("newest-d64", path) == [f"{stages.version(newest)} {record['pass']}"]
    saved_run(path, [(impl, work) for impl, work in pairs if impl != newest])
    assert bench.stale("newest-d64", path) == [f"{stages.version(newest)} {pass_}" for pass_ in ("fwd", "bwd")]


def test_stale_parts_are_shown_as_commands(tmp_path, monkeypatch, capsys):
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(bench.results, "ROOT", tmp_path)
    saved_run(tmp_path / "results" / "wide-h100.json", reference_cases("wide"))
    saved_run(tmp_path / "results" / "newest-d64-h200.json", [])
    assert bench.main(["--stale"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("make reference GRID=newest-d64 FILE=results/newest-d64-h200.json  # ")


def test_a_pass_that_a_stage_has_from_its_parent_is_a_repeat():
    for version, same in {"v4b": ["bwd"], "v5": ["fwd"], "v6": [], "v9": ["bwd"], "v49": ["fwd"]}.items():
        assert [pass_ for pass_ in ("fwd", "bwd", "fwd+bwd") if bench.repeats(stages.resolve(version), pass_)] == same
    assert not bench.repeats("v0_naive", "fwd") and not bench.repeats("sdpa-cudnn", "fwd")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_reference_run_of_the_stages_has_one_pass_and_head_dimension(pass_, head_dim):
    found = reference_cases(f"{bench.CODE[pass_]}-d{head_dim}")
    seen = [(impl, w.pass_, w.head_dim, w.causal, w.dtype, w.seq_len) for impl, w in found]
    every = itertools.product(
        (*bench.BASELINES, *stages.names()), (pass_,), (head_dim,), (False, True), ("float16",), bench.MEAN_OVER
    )
    assert sorted(seen) == sorted(case for case in every if not bench.repeats(*case[:2]))
    assert all(w.kv_heads == w.heads and w.value_dim == w.head_dim for _, w in found)


@pytest.mark.parametrize("key", TRACKS)
def test_a_track_has_its_stages_and_their_parents_in_its_benchmark(key):
    track, line = TRACKS[key], stages_of(key)

    for grid in track.grids:
        measured = {impl for impl, work in reference_cases(grid) if work.pass_ == track.pass_ and track.counts(work)}
        for name in (*map(stages.parent, line), *line):
            while name not in measured and bench.repeats(name, track.pass_):
                name = stages.parent(name)
            assert name in measured


# Number of cases that a GPU measures in ten minutes. A case takes 0.9 s, with compilation and tuning.
TEN_MINUTES = 650


@pytest.mark.parametrize("name", [name for name in bench.GRIDS if name != "shared"])
def test_a_part_of_the_reference_ends_within_ten_minutes(name, monkeypatch):
    monkeypatch.setattr(bench.workloads, "SEQ_LENS", range(512, 512 + 6))  # as many lengths as on a GPU
    found = reference_cases(name)
    installed = 3 if name.startswith("decode") else 4  # maximum number of other installed implementations
    peers = installed * len({workload for _, workload in found})
    assert peers + sum(impl not in bench.BASELINES for impl, _ in found) <= TEN_MINUTES


@pytest.mark.parametrize("head_dim", [64, 128])
def test_reference_run_of_decoding_has_few_queries_and_as_many_keys_as_fit(head_dim):
    found = reference_cases(f"decode-d{head_dim}")
    others = {name for name in bench.BASELINES if name != "flash-4"}
    line = bench.LADDER[-1], *stages_of("decoding")
    assert {impl for impl, _ in found} == {*others, *line} and len(set(found)) == len(found)
    mine = [w for impl, w in found if impl == line[-1]]
    assert {(w.pass_, w.head_dim, w.value_dim, w.causal, w.dtype) for w in mine} == {
        ("fwd", head_dim, head_dim, False, "bfloat16")
    }
    points = {(w.batch, w.kv_heads, w.kv_len) for w in mine}
    assert points == {
        (batch, kv_heads, kv_len)
        for batch, kv_heads, kv_len in itertools.product((1, 8, 64), (16, 8), (1024, 16384, 65536, 524288))
        if (batch, kv_len) != (64, 524288)
    }
    assert {(w.heads, w.kv_heads) for w in mine} == {(16, 16), (32, 8)}
    assert sorted((w.batch, w.kv_heads, w.kv_len, w.seq_len) for w in mine) == sorted(
        (*point, seq_len) for point in points for seq_len in (1, 16)
    )
    assert max(4 * w.batch * w.kv_heads * w.kv_len * head_dim for w in mine) <= 40e9


# --- how long it takes


# --- the check


WHERE = {  # indices of wrong elements in [batch, heads, rows, D]; the first and the last head have none
    "head": (1, 2),
    "batch element": (1,),
    "tile of rows": (1, 2, slice(16, 32)),
}


@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_check_finds_errors_in_the_middle(monkeypatch, pass_, where):
    name, right = next(iter(bench.BASELINES.items()))

    def wrong(q, k, v, *, causal):
        factor = torch.ones_like(q)
        factor[where] = 1.1
        return factor * right(q, k, v, causal=causal)

    monkeypatch.setitem(bench.BASELINES, "wrong", wrong)
    workload = Workload(pass_, 3, 4, 48, 32, True, "float16")
    inputs, *_ = bench._problem(workload)
    bench.check(name, bench.timed_call(name, workload, inputs)(), workload)
    with pytest.raises(bench.WrongResult, match=r"worst at \(1, "):
        bench.check("wrong", bench.timed_call("wrong", workload, inputs)(), workload)


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
@pytest.mark.parametrize("wrong", ["out", "lse"])
def test_results_of_the_forward_that_the_timed_call_does_not_return_are_checked(monkeypatch, pass_, wrong):
    stage = stages.load("v0")
    right, workload = stage.attention, Workload(pass_, 1, 2, 48, 32, True, "float16")

    def attention(q, k, v, **options):
        out, lse = right(q, k, v, **options)
        return (1.1 * out, lse) if wrong == "out" else (out, lse + 0.01)

    bench.check_forward("v0", workload)
    monkeypatch.setattr(stage, "attention", attention)
    with pytest.raises(bench.WrongResult, match=f"{wrong}: "):
        bench.check_forward("v0", workload)


@pytest.fixture
def some_heads(monkeypatch):
    """A workload whose batch has six K/V heads. The benchmark checks heads 2 and 5."""
    bench._problem.cache_clear()
    workload = Workload("fwd", 2, 6, 8, 16, False, "float16", kv_heads=3, kv_len=64)
    monkeypatch.setattr(bench, "CHECKED_SCORES", 2 * 6 * 64 * (16 + 16) // 2)
    yield workload
    bench._problem.cache_clear()


def test_as_many_heads_are_compared_as_there_is_time_for(some_heads):
    k = torch.arange(6).view(2, 3, 1)
    assert bench._checked(k, some_heads).flatten().tolist() == [2, 5]
    q = torch.arange(12).view(2, 6, 1)
    assert bench._checked(q, some_heads).squeeze(-1).tolist() == [[4, 5], [10, 11]]  # the query heads of these two K/V heads
    for pass_ in ("fwd", "bwd"):
        *_, truth, bounds = bench._problem(replace(some_heads, pass_=pass_))
        assert truth["out"].shape == (2, 2, 8, 16) and ("dk" in bounds) == (pass_ == "bwd")
    assert truth["dk"].shape == (2, 1, 64, 16)


def test_every_head_of_the_papers_workloads_is_compared():
    for seq_len, head_dim in itertools.product((512, 1024, 2048, 4096, 8192, 16384), (64, 128)):
        shape = bench.workloads.TOKENS // seq_len, bench.workloads.HIDDEN // head_dim
        tensor = torch.empty(*shape, 1)
        assert bench._checked(tensor, Workload("bwd", *shape, seq_len, head_dim, False, "float16")) is tensor


@pytest.mark.parametrize(("head", "factor", "said"), [
    ((0, 5), 1.1, r"worst at \(0, 1, "), ((1, 4), 1.1, r"worst at \(1, 0, "),
    ((0, 0), float("nan"), "NaN or infinity in a head that is not compared"), ((0, 0), 1.1, None),
])  # fmt: skip
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_check_of_some_heads_sees_errors_there_and_nan_everywhere(some_heads, pass_, head, factor, said, monkeypatch):
    workload = replace(some_heads, pass_=pass_)
    inputs, *_ = bench._problem(workload)
    result = bench.timed_call(next(iter(bench.BASELINES)), workload, inputs)()
    bench.check(next(iter(bench.BASELINES)), result, workload)
    changed = result if pass_ == "fwd" else result[0]
    changed[head] *= factor
    with pytest.raises(bench.WrongResult, match=said) if said else contextlib.nullcontext():
        bench.check(next(iter(bench.BASELINES)), result, workload)


# --- whole runs


def run_bench(directory, *arguments, prepare="", lengths=("--seq-len=32", "--causal=yes")):
    """Run bench.py in a process of its own. `prepare` is Python code that runs first, to change `bench`."""
    source = f"import sys, torch, bench\n{prepare}\nsys.exit(bench.main(sys.argv[1:]))"
    small = [*lengths, "--head-dim=16", "--batch=1", "--heads=2", "--json=run.json", "--wide"]
    return programs.python("-c", source, *small, *arguments, cwd=directory)


def test_run_prints_the_table_and_saves_the_records(tmp_path):
    done = run_bench(tmp_path, "--stage=v0", "--pass=fwd,bwd,fwd+bwd", "--again=v0")
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "run.json").read_text())
    assert len(list(tmp_path.glob(".benchmarks/*/*.json"))) == 1
    impls = ["v0_naive" + bench.AGAIN, *bench.BASELINES, "v0_naive"]
    records = [entry["extra_info"] for entry in run["benchmarks"]]
    assert [(r["pass"], r["impl"]) for r in records] == [(p, impl) for p in ("fwd", "bwd", "fwd+bwd") for impl in impls]
    for entry, extra in zip(run["benchmarks"], records, strict=True):
        assert entry["name"] == extra["impl"]
        assert entry["group"] == f"{extra['pass']} B=1 H=2 S=32 D=16 causal float16" + bench.GROUP
        expected = {"batch": 1, "heads": 2, "seq_len": 32, "head_dim": 16, "causal": True, "dtype": "float16"}
        assert {key: extra[key] for key in expected} == expected
        shown = extra["ms"] / 1e3 if DEVICE == "cuda" else (extra["bytes_read"] + extra["bytes_written"]) / 1e9
        assert shown == pytest.approx(entry["stats"]["median"])
        assert DEVICE == "cpu" or extra["tflops"] == pytest.approx(extra["flops"] / extra["ms"] / 1e9)
        assert extra["peak_extra_mib"] > 0 and "data" not in entry["stats"]
        assert extra.get("host_us", 0) > 0 and extra["host_iqr_us"] >= 0 or DEVICE == "cpu"
        assert extra.get("in_a_row_us", 0) > 0 or DEVICE == "cpu"
        code = [digest.current("v0_naive", pass_) for pass_ in ("forward", "backward")]
        of_pass = {"fwd": code[0], "bwd": code[1], "fwd+bwd": "+".join(code)}[extra["pass"]]
        assert extra.get("source") == (None if extra["impl"] in bench.BASELINES else of_pass)
    assert len({entry["fullname"] for entry in run["benchmarks"]}) == len(records)
    machine = run["machine_info"]
    assert machine["torch"] == torch.__version__ and machine["triton"] and machine["commit"]
    assert (machine["gpu"] is None) == (DEVICE == "cpu")
    assert set(machine["matmul_tflops"]) == ({"float16"} if DEVICE == "cuda" else set())
    assert tables(records, machine) in done.stdout and done.stdout.startswith(f"{len(records)} cases, about ")


def tables(records, machine):
    return speed_table(records, machine) if DEVICE == "cuda" else counts.tables(records, machine, wide=True)


def test_run_with_shared_heads_and_another_dimension_of_v_is_checked_counted_and_shown(tmp_path):
    done = run_bench(tmp_path, "--stage=v0", "--pass=fwd,bwd", "--kv-heads=1", "--value-dim=32")
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "run.json").read_text())
    records = [entry["extra_info"] for entry in run["benchmarks"]]
    assert len([r for r in records if r["impl"] in ("sdpa", "v0_naive")]) == (4 if DEVICE == "cpu" else 2)
    assert {r["failure"] for r in run["failures"]} <= {"n/a"}  # not every library supports this workload
    assert {(r["heads"], r["kv_heads"], r["head_dim"], r["value_dim"]) for r in records} == {(2, 1, 16, 32)}
    assert {r["pass"]: r["flops"] for r in records} == {"fwd": 32**2 * 2 * (16 + 32), "bwd": 32**2 * 2 * (3 * 16 + 2 * 32)}
    assert {entry["group"] for entry in run["benchmarks"]} == {
        f"{pass_} B=1 H=2 Hkv=1 S=32 D=16 Dv=32 causal float16{bench.GROUP}" for pass_ in ("fwd", "bwd")
    }
    assert "B=1 H=2 Hkv=1 S=32" in done.stdout or DEVICE == "cuda"


def test_run_with_more_keys_than_queries_is_checked_counted_and_shown(tmp_path):
    lengths = ("--seq-len=1", "--kv-len=64", "--causal=no")
    done = run_bench(tmp_path, "--stage=v0", "--pass=fwd,bwd", "--kv-heads=1", lengths=lengths)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "run.json").read_text())
    records = [entry["extra_info"] for entry in run["benchmarks"]]
    assert {(r["impl"], r["pass"]) for r in records} >= {("v0_naive", "fwd"), ("v0_naive", "bwd")}
    assert {(r["seq_len"], r["kv_len"]) for r in records} == {(1, 64)}
    assert {r["pass"]: r["flops"] for r in records} == {"fwd": 2 * 2 * 64 * 2 * 16, "bwd": 2 * 2 * 64 * 5 * 16}
    assert {entry["group"] for entry in run["benchmarks"]} == {
        f"{pass_} B=1 H=2 Hkv=1 S=1 Sk=64 D=16 full float16{bench.GROUP}" for pass_ in ("fwd", "bwd")
    }
    assert tables(records, run["machine_info"]) in done.stdout


def test_ceilings_are_measured_once_and_a_copy_s_only_if_keys_and_queries_differ(monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "_gpu_timer", lambda: "timer")
    monkeypatch.setattr(bench.timing, "matmul_tflops", lambda timer, dtype: asked.append(dtype) or 800.0)
    monkeypatch.setattr(bench.timing, "copy_gbps", lambda timer: asked.append("copy") or 4000.0)
    run = bench.Bench(bench.parse_options(["--stage=v0"]))
    for kv_len, expected in ((64, [torch.float16]), (128, [torch.float16, "copy"]), (256, [torch.float16, "copy"])):
        run._measure_ceilings(Workload("fwd", 1, 2, 64, 16, False, "float16", kv_len=kv_len))
        assert asked == expected and ("copy_gbps" in run.machine) == ("copy" in asked)
    assert (run.machine["matmul_tflops"], run.machine["copy_gbps"]) == ({"float16": 800.0}, 4000.0)


@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.long)])
def test_interrupted_run_keeps_what_was_measured(tmp_path, name):
    stop = f"import os, signal\ndef stop(*_, **__): os.kill(os.getpid(), signal.{name})\nbench.BASELINES['stop'] = stop"
    done = run_bench(tmp_path, "--stage=v0", "--pass=fwd", prepare=stop)
    assert done.returncode == 2
    run = json.loads((tmp_path / "run.json").read_text())
    assert [entry["name"] for entry in run["benchmarks"]] == list(bench.BASELINES) and run["failures"] == []


def test_run_that_cannot_be_saved_is_refused_in_one_line():
    run = programs.python(ROOT / "bench.py", "--stage=v0", cwd="/proc")
    assert run.returncode == 1 and len(run.stderr.splitlines()) == 1 and ".benchmarks" in run.stderr and not run.stdout


FAILING = """
v0 = bench.stages.load("v0").attention
def refuse(grad):
    raise RuntimeError("dV is 32")
def refusing(q, k, v, *, causal):
    if q.requires_grad:
        q.register_hook(refuse)
    return v0(q, k, v, causal=causal)
def too_large(q, k, v, *, causal):
    raise torch.OutOfMemoryError("pretended")
bench.BASELINES |= {
    "wrong": lambda q, k, v, *, causal: 1.05 * v0(q, k, v, causal=causal),
    "wrong-forward": lambda q, *kv, causal: v0(q, *kv, causal=causal) + 0.05 * v0(q, *kv, causal=causal).detach(),
    "nan": lambda q, k, v, *, causal: q * float("nan"),
    "flash-x": refusing,
    "large": too_large,
    "broken": lambda q, k, v, *, causal: q.no_such_method(),
}
"""


def test_cases_that_fail_are_rows_and_the_others_are_measured(tmp_path):
    """A wrong result is not timed. The gradients of wrong-forward are right. A library may refuse a workload."""
    done = run_bench(tmp_path, "--stage=v0", "--pass=fwd,bwd", prepare=FAILING)
    assert done.returncode == 1 and "no_such_method" in done.stdout
    run = json.loads((tmp_path / "run.json").read_text())
    failed = {(r["impl"], r["pass"]): (r["failure"], r.get("note", "")) for r in run["failures"]}
    for pass_ in ("fwd", "bwd"):
        for name in ("wrong", "wrong-forward"):
            assert failed[name, pass_][0] == "WRONG" and " exceeds " in failed[name, pass_][1]
        assert failed["large", pass_] == ("OOM", "") and failed["broken", pass_][0] == "ERROR"
    assert failed["nan", "fwd"][0] == "WRONG"
    assert failed["flash-x", "bwd"] == ("n/a", "dV is 32") and len(failed) == 11
    assert [entry["name"] for entry in run["benchmarks"] if entry["name"] in ("flash-x", "v0_naive")] == [
        "flash-x", "v0_naive", "v0_naive"
    ]  # fmt: skip
    assert "dV is 32" in done.stdout
    for name, failure in (("large", "OOM"), ("broken", "ERROR"), ("nan", "WRONG")):
        assert re.search(rf"\| {name} +\| +{failure} \|", done.stdout)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU measures times")
def test_runs_are_saved_and_compared_as_pytest_benchmark_is_asked_to(tmp_path):
    """Without a GPU, the numbers stand for bytes, and the titles say so."""
    assert run_bench(tmp_path, "--stage=v0", "--pass=fwd", "--benchmark-save=mine", "--benchmark-storage=kept").returncode == 0
    assert [path.name for path in tmp_path.glob("kept/*/*.json")] == ["0001_mine.json"]
    options = ["--benchmark-storage=kept", "--benchmark-compare", "0001", "--benchmark-columns=median", "--benchmark-save-data"]
    done = run_bench(tmp_path, "--stage=v0", "--pass=fwd", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    titles = [line for line in done.stdout.splitlines() if "benchmark '" in line]
    assert len(titles) == 1 and bench.GROUP in titles[0]
    assert re.search(r"v0_naive \(NOW\)", done.stdout) and re.search(r"v0_naive \(0001_mine\)", done.stdout)
    entry = json.loads((tmp_path / "run.json").read_text())["benchmarks"][-1]
    assert entry["stats"]["data"] and "ms" not in entry["extra_info"] and "tflops" not in entry["extra_info"]


@pytest.mark.skipif(DEVICE == "cuda", reason="the grid of the CPU")
def test_the_cpu_s_workloads_are_few_and_several_tiles_long():
    found = bench.cases(bench.parse_options(["--stage=v3"]))
    assert len(found) <= 40 and {(w.head_dim, w.causal) for _, w in found} == {(64, False), (64, True)}
    assert min(w.seq_len for _, w in found) >= 4 * 128
    assert sum(bench.expected_seconds(impl, w) for impl, w in found) < 60


@pytest.mark.skipif(DEVICE == "cuda", reason="needs a machine without a GPU")
def test_without_a_gpu_or_an_interpreter_one_line_says_what_to_do():
    run = programs.python("bench.py", "--stage=v0", TRITON_INTERPRET="0")
    assert run.returncode == 1 and len(run.stderr.splitlines()) == 1 and "TRITON_INTERPRET=1" in run.stderr
