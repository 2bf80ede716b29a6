"""The benchmark parses its command line, chooses its cases, checks results, and completes whole runs."""

import collections
import contextlib
import itertools
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import programs
import pytest
import torch

import bench
import stages
from common.entry import Unavailable
from common.measure import digest
from common.measure.random_shapes import draw
from common.measure.workloads import Workload
from common.runtime import DEVICE
from common.show import counts, tracks
from common.show.tables import speed_table

ROOT = programs.ROOT


# --- command line


def test_options_take_lists_repeated_flags_and_short_names():
    options = bench.parse_options(["--stage", "v1,v0", "--stage=v1_online_softmax", "--seq-len=64, 128", "--causal", "yes"])
    assert options.stage == ["v1_online_softmax", "v0_naive"]
    assert (options.seq_len, options.causal, options.pass_) == ([64, 128], [True], ["fwd", "bwd"])


@pytest.mark.parametrize(("arguments", "message"), [
    (["--stage", "v0,v999"], "'v999'"), (["--again", "v999"], "'v999'"),
    (["--again=v9", "--stage=v3"], "v9 is not one of the stages to measure"),
    (["--pass", "forward"], "'forward' is not one of fwd, bwd, fwd+bwd"),
    (["--head-dim", "48"], "'48' is not one of 16, 32, 64, 128, 256"),
    (["--seq-len", "4k"], "'4k' is not a whole number of at least 1"),
    (["--kv-heads", "3", "--heads", "6,8"], "3 K/V heads do not divide 8 heads"),
    (["--kv-len", "64", "--seq-len=64,128"], "argument --kv-len: a causal workload has as many keys as queries"),
    (["--score-std", "wide"], "'wide'"),
    (["--sink", "-1"], "'-1' is not a sink such as"), (["--sink", "16@99999"], "argument --sink: there is no key 99999"),
    (["--random", "x"], "'x' is not a whole number"), (["--check=only", "--json=run.json"], "--check=only measures nothing"),
    (["--shapes", "3"], "argument --shapes: only --random draws shapes"),
    (["--random", "1", "--dtype=float16"], "--random draws all shapes itself"),
    (["--random", "1", "--reference=newest-d64"], "--random draws all shapes itself"),
    (["--json", "no/such/directory/run.json"], "no/such/directory"),
    (["--json", "/dev/null"], "'/dev/null' is not the name of a file"),
    (["--benchmark-warmup"], "argument --benchmark-warmup: common.measure.timing chooses rounds and warm-up"),
    (["--hed-dim", "64"], "unrecognized arguments: --hed-dim"), (["0001"], "unrecognized arguments: 0001"),
    (["--benchmark-columns=iqr", "--nonsense"], "unrecognized arguments: --nonsense"),
])  # fmt: skip
def test_options_name_the_bad_value_and_what_is_allowed(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.parse_options(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_one_stage_brings_its_parent_and_v0(monkeypatch):
    monkeypatch.setattr(stages, "names", lambda: ["v0_a", "v4_b", "v4a_c", "v5_d"])
    assert bench.chosen_stages(["v0_a"]) == ["v0_a"]
    assert bench.chosen_stages(["v4a_c"]) == ["v0_a", "v4_b", "v4a_c"]
    assert bench.chosen_stages(["v5_d"]) == ["v0_a", "v4_b", "v5_d"]
    assert bench.chosen_stages(["v5_d", "v4_b"]) == ["v4_b", "v5_d"]


def found(*arguments):
    """Return the distinct workloads of a command, in order."""
    return [*dict.fromkeys(workload for _, workload in bench.cases(bench.parse_options([*arguments])))]


def test_cases_follow_the_papers_or_the_command_line(monkeypatch):
    options = bench.parse_options(["--stage=v0", "--pass=fwd", "--seq-len=512", "--head-dim=64", "--causal=no"])
    shape = (32, 32) if DEVICE == "cuda" else (1, 2)
    workload = Workload("fwd", *shape, 512, 64, False, "float16")
    assert bench.cases(options) == [(impl, workload) for impl in (*bench.BASELINES, stages.names()[0])]
    one = ("--pass=fwd", "--seq-len=64", "--head-dim=64", "--causal=no")
    assert {(w.batch, w.heads) for w in found(*one, "--batch=4", "--heads=8")} == {(4, 8)}
    sinks = [(0, 0, None), (16, 0, None), (8, 7, None), (24, 9, 1)]
    assert [w.score_std for w in found(*one, "--score-std=1,2.5")] == [1, 2.5]
    assert [(w.sink, w.sink_key, w.sink_head) for w in found(*one, "--sink=0,16,8@7,24@9/1")] == sinks
    heads = found("--heads=8", "--kv-heads=8,2", "--value-dim=32,128", "--head-dim=32", "--causal=no", "--seq-len=64")
    assert [(w.pass_, w.kv_heads, w.value_dim) for w in heads] == [
        (pass_, kv_heads, dim) for kv_heads in (8, 2) for dim in (32, 128) for pass_ in ("fwd", "bwd")
    ]
    lengths = found("--seq-len=1,2", "--kv-len=64,128", "--causal=no", "--head-dim=32", "--pass=fwd")
    assert [(w.seq_len, w.kv_len) for w in lengths] == [(1, 64), (1, 128), (2, 64), (2, 128)]
    monkeypatch.setattr(bench.workloads, "paper_shape", lambda seq_len, head_dim: (1, 2048 // head_dim))
    ratios = {(w.head_dim, w.heads // w.kv_heads) for w in found("--head-dim=64,128", "--kv-heads=8,4", "--seq-len=64")}
    assert ratios == {(64, 4), (64, 8), (128, 2), (128, 4)}


def test_random_shapes_are_measured_for_the_newest_stage_or_the_chosen_ones_beside_fast_libraries():
    libraries = [name for name in bench.BASELINES if name != "sdpa-flash"]
    assert found("--random") == draw(bench.SEED, bench.SHAPES)
    options = bench.parse_options(["--random=5", "--shapes=2"])
    assert bench.cases(options) == [(impl, w) for w in draw(5, 2) for impl in (*libraries, stages.newest())]
    options = bench.parse_options(["--random=5", "--shapes=1", "--stage=v3"])
    assert bench.cases(options) == [(impl, w) for w in draw(5, 1) for impl in (*libraries, stages.resolve("v3"))]
    drawn = itertools.product(draw(bench.SEED, bench.SHAPES), (*libraries, stages.newest()))
    assert reference_cases("random") == [(impl, work) for work, impl in drawn]


def reference_cases(name, again=False):
    """Return the cases of a part of the reference; leave out the second time of the stage that is measured twice."""
    found = bench.cases(bench.parse_options(["--reference", name]))
    return [(impl, work) for impl, work in found if again or not impl.endswith(bench.AGAIN)]


def test_reference_run_measures_a_stage_twice_as_far_apart_as_it_can_and_no_code_twice():
    by_workload = {}
    for impl, work in reference_cases("forward-d64", again=True):
        by_workload.setdefault(work, []).append(impl)
    every = [name for name in bench.EVERYTHING if not bench.repeats(name, "fwd")]
    for work, impls in by_workload.items():
        twice = [stages.newest() + bench.AGAIN] if stages.newest() in every else []
        assert impls == twice + every and (work.pass_, work.head_dim, work.dtype) == ("fwd", 64, "float16")
    assert {(work.causal, work.seq_len) for work in by_workload} == {*itertools.product((False, True), bench.MEAN_OVER)}


def saved_run(path, pairs, gpu=None):
    records = [{"impl": impl, **work.record(), "source": bench.source(impl, work.pass_)} for impl, work in pairs]
    run = {"benchmarks": [{"extra_info": record} for record in records], "failures": [], "machine_info": {"gpu": gpu}}
    path.write_text(json.dumps(run))
    return run


def test_a_reference_is_stale_where_a_row_is_missing_or_measured_other_code(tmp_path, monkeypatch, capsys):
    path, pairs, newest = tmp_path / "results" / "newest-d64-h200.json", reference_cases("newest-d64"), stages.newest()
    path.parent.mkdir()
    monkeypatch.setattr(bench.results, "ROOT", tmp_path)
    every = [f"{stages.version(impl)} {work.pass_}" for impl, work in pairs if impl not in bench.BASELINES]
    assert bench.stale("newest-d64", path) == [*dict.fromkeys(every)]
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
    assert bench.main(["--stale"]) == 0
    rows = ", ".join(row for row in dict.fromkeys(every) if row.startswith(f"{stages.version(newest)} "))
    assert capsys.readouterr().out == f"make reference GRID=newest-d64 FILE=results/{path.name}  # {rows}\n"


def test_a_pass_that_a_stage_has_from_its_parent_is_a_repeat():
    for version, same in {"v4": [], "v4b": ["bwd"], "v5": ["fwd"]}.items():
        assert [pass_ for pass_ in ("fwd", "bwd", "fwd+bwd") if bench.repeats(stages.resolve(version), pass_)] == same
    assert not bench.repeats("v0_naive", "fwd") and not bench.repeats("sdpa-cudnn", "fwd")


def in_the_run(name, pass_, measured):
    """Return whether a run measures a stage's pass, or the same pass of a stage above it."""
    while name not in measured and bench.repeats(name, pass_):
        name = stages.parent(name)
    return name in measured


def test_a_track_s_runs_measure_its_stages_where_it_starts_and_the_newest():
    for key, track in tracks.known().items():
        wanted = stages.parent(stages.line(key)[0]), *stages.line(key), stages.newest()
        for run in track.runs:
            measured = {impl for impl, work in reference_cases(run) if work.pass_ == track.pass_}
            assert not [name for name in wanted if not in_the_run(name, track.pass_, measured)], run


BENCHMARK = """
title = "Short rows"
pass = "bwd"
words = "one batch"
at = "B = 1"
without = ["sdpa-flash"]

[runs]
some = ["--pass=bwd --batch=1 --seq-len=64"]
"""


@pytest.fixture
def branch(tmp_path, monkeypatch):
    """A tree with the track `made`: it starts from v3, and has two stages, a dead end and an experiment."""
    for name, line in {"made1_a": 'PARENT = "v3"', "made1a_x": "", "made2_b": "", "made3_mine": "EXPERIMENT = True"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(line + "\n")
    monkeypatch.setattr(stages, "__path__", [*stages.__path__, str(tmp_path)])
    (tmp_path / "made1_a" / "benchmark.toml").write_text(BENCHMARK)
    return tmp_path / "made1_a" / "benchmark.toml"


def test_a_track_s_benchmark_stands_in_its_first_stage(branch):
    libraries = [name for name in bench.BASELINES if name != "sdpa-flash"]
    ours = ["v3_fa2_causal", "made1_a", "made1a_x", "made2_b", stages.newest()]
    assert bench._track_runs()["some"] == [(["--pass=bwd", "--batch=1", "--seq-len=64"], libraries + ours)]
    assert tracks.read("made").title == "Short rows" and tracks.read(None) is None


@pytest.mark.parametrize(("old", "new", "message"), [
    ('pass = "bwd"', "", "benchmark.toml: .* argument: 'pass_'"), ('at = "B = 1"', "", "benchmark.toml: .* argument: 'at'"),
    ("title =", "tilte =", "benchmark.toml: .* argument 'tilte'"), ("[runs]", "[runs", "benchmark.toml: Expected"),
])  # fmt: skip
def test_an_incomplete_benchmark_is_named_in_one_line(branch, old, new, message):
    branch.write_text(BENCHMARK.replace(old, new))
    with pytest.raises(SystemExit, match=message) as stopped:
        tracks.known()
    assert "\n" not in str(stopped.value)


def test_a_choice_is_printed_for_each_workload_and_nothing_is_measured(monkeypatch, capsys):
    def choice(batch, seq_k, causal, dtype):
        """A choice need not take all facts of a workload."""
        assert (batch, causal, dtype) == (1, False, torch.float16)
        return Choice("v2_fa1_tiling" if seq_k < 64 else "v3_fa2_causal", "v4_autotune_descriptor", "3 tiles")

    Choice = collections.namedtuple("Choice", ["forward", "backward", "forward_work"])
    monkeypatch.setattr(stages.load("v5"), "choice", choice, raising=False)
    shape = ["--seq-len=32", "--kv-len=32,64", "--causal=no", "--head-dim=16", "--batch=1", "--pass=fwd,fwd+bwd"]
    assert bench.main(["--choice", "--stage=v5", *shape]) == 0
    rows = [line.strip("|").split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if "|" in line]
    both, (short, long) = "; v4_autotune_descriptor", (f"{name}: 3 tiles" for name in ("v2_fa1_tiling", "v3_fa2_causal"))
    assert rows[2:] == [short, short + both, long, long + both]
    with pytest.raises(SystemExit, match="v3_fa2_causal chooses nothing"):
        bench.main(["--choice", "--stage=v3"])


@pytest.mark.parametrize("where", [(1, 2), (1,), (1, 2, slice(16, 32))], ids=["head", "batch element", "tile of rows"])
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_check_finds_errors_in_the_middle(monkeypatch, pass_, where):
    """`where` has the wrong elements of [batch, heads, rows, D]. The first and the last head have none."""
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


@pytest.mark.parametrize(("pass_", "wrong"), [("fwd", "lse"), ("bwd", "out"), ("fwd+bwd", "lse")])
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
    assert bench._checked(torch.arange(6).view(2, 3, 1), some_heads).flatten().tolist() == [2, 5]
    queries = bench._checked(torch.arange(12).view(2, 6, 1), some_heads)
    assert queries.squeeze(-1).tolist() == [[4, 5], [10, 11]]  # the query heads of these two K/V heads


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


def run_bench(directory, *arguments, prepare="", lengths=("--seq-len=32", "--causal=yes"), save=("--json=run.json",)):
    """Run bench.py in a process of its own. `prepare` is Python code that runs first, to change `bench`."""
    source = f"{prepare}\nsys.exit(bench.main(sys.argv[1:]))"
    small = [*lengths, "--head-dim=16", "--batch=1", "--heads=2", *save, "--wide"]
    return programs.python("-c", source, *small, *arguments, cwd=directory, prepare="import sys, torch, bench")


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


def test_anchors_are_measured_in_turns_and_leave_out_what_the_gpu_lacks(monkeypatch):
    cudnn, trunk, newest = bench.ANCHORS
    order, seconds = [], iter([1.0, 2.0, 3.0, 40.0, 5.0, 6.0] * 2)

    def timed_call(impl, workload, inputs):
        if impl == trunk:
            raise Unavailable("needs a Hopper GPU")
        return lambda: impl

    def measure(call):
        order.append(call())
        return [next(seconds)], True

    monkeypatch.setattr(bench.Workload, "inputs", lambda work: ())
    monkeypatch.setattr(bench, "timed_call", timed_call)
    monkeypatch.setattr(bench, "_gpu_timer", lambda: SimpleNamespace(measure=measure))
    run = bench.Bench(bench.parse_options(["--reference=newest-d64"]))
    run._measure_anchors()
    assert order == [cudnn, newest] * 6
    assert run.machine["anchors"] == {pass_: {cudnn: 3000.0, newest: 6000.0} for pass_ in ("fwd", "bwd")}
    assert run.anchors and not bench.Bench(bench.parse_options(["--reference=newest-d64", "--check=only"])).anchors


def tables(records, machine):
    return speed_table(records, machine) if DEVICE == "cuda" else counts.tables(records, machine, wide=True)


@pytest.mark.parametrize("causal", [True, False])
def test_the_host_s_time_is_that_of_lengths_that_no_call_had(causal, monkeypatch):
    lengths = []
    monkeypatch.setattr(bench, "timed_call", lambda impl, work, inputs: tuple(tensor.shape[2] for tensor in inputs))
    monkeypatch.setattr(bench.timing, "host_seconds_of_each", lambda calls: lengths.extend(calls) or [float(len(lengths))])
    work = Workload("bwd", 1, 2, 32 if causal else 1, 16, causal, "float16", kv_len=None if causal else 64)
    times = bench._host_of_new_lengths("v0_naive", work)
    assert len({*lengths}) == bench.NEW_LENGTHS and (work.seq_len, work.kv_len, work.kv_len, work.seq_len) not in lengths
    assert all(q == grad_out and k == v and (q == k or not causal) for q, k, v, grad_out in lengths)
    assert times == [*range(bench.NEW_LENGTHS // 4 + 1, bench.NEW_LENGTHS + 1)]  # without the first, which may compile


@pytest.mark.long
def test_a_check_alone_measures_and_saves_nothing_and_a_run_without_checks_finds_no_error(tmp_path):
    wrong = "v0 = bench.stages.load('v0').attention\n"
    wrong += "bench.BASELINES['wrong'] = lambda q, k, v, *, causal: 2 * v0(q, k, v, causal=causal)"
    done = run_bench(tmp_path, "--stage=v0", "--pass=fwd", "--check=only", prepare=wrong, save=())
    count = len(bench.BASELINES)
    assert done.returncode == 1 and f"{count + 1} of {count + 2} cases are right, wrong WRONG (1)" in done.stdout
    assert not [*tmp_path.glob(".benchmarks/*/*.json")]
    done = run_bench(tmp_path, "--stage=v0", "--pass=fwd", "--check=no", prepare=wrong)
    assert done.returncode == 0 and "| wrong" in done.stdout
    assert json.loads((tmp_path / "run.json").read_text())["machine_info"]["checked"] is False


@pytest.mark.long
def test_run_with_shared_heads_and_other_lengths_and_dimensions_is_checked_counted_and_shown(tmp_path):
    shape = ("--kv-heads=1", "--value-dim=32", "--kv-len=64")
    done = run_bench(tmp_path, "--stage=v0", "--pass=fwd,bwd", *shape, lengths=("--seq-len=1", "--causal=no"))
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "run.json").read_text())
    records = [entry["extra_info"] for entry in run["benchmarks"]]
    assert {(r["impl"], r["pass"]) for r in records} >= {("v0_naive", "fwd"), ("v0_naive", "bwd")}
    assert {r["failure"] for r in run["failures"]} <= {"n/a"}  # not every library supports this workload
    assert {(r["kv_heads"], r["value_dim"], r["kv_len"]) for r in records} == {(1, 32, 64)}
    pairs = 2 * 2 * 64
    assert {r["pass"]: r["flops"] for r in records} == {"fwd": pairs * (16 + 32), "bwd": pairs * (3 * 16 + 2 * 32)}
    assert {entry["group"] for entry in run["benchmarks"]} == {
        f"{pass_} B=1 H=2 Hkv=1 S=1 Sk=64 D=16 Dv=32 full float16{bench.GROUP}" for pass_ in ("fwd", "bwd")
    }
    assert tables(records, run["machine_info"]) in done.stdout


@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.long)])
def test_interrupted_run_keeps_what_was_measured(tmp_path, name):
    stop = f"import os, signal\ndef stop(*_, **__): os.kill(os.getpid(), signal.{name})\nbench.BASELINES['stop'] = stop"
    done = run_bench(tmp_path, "--stage=v0", "--pass=fwd", prepare=stop)
    assert done.returncode == 2
    run = json.loads((tmp_path / "run.json").read_text())
    assert [entry["name"] for entry in run["benchmarks"]] == list(bench.BASELINES) and run["failures"] == []


@pytest.mark.parametrize(("interpreted", "place", "message"), [
    (True, "/proc", "cannot save the run in .benchmarks"), (False, ".", "with TRITON_INTERPRET=1, as in `make bench`"),
])  # fmt: skip
@pytest.mark.skipif(DEVICE == "cuda", reason="needs a machine without a GPU")
def test_a_run_that_cannot_be_measured_or_saved_is_refused(interpreted, place, message, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr(bench, "INTERPRETED", interpreted)
    with pytest.raises(SystemExit, match=message):
        bench.main(["--stage=v0"])


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


@pytest.mark.long
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
