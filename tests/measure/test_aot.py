"""Every kernel, compiled for GPUs that need not be there: that it compiles, and what it compiles to."""

import collections
import json
import pathlib
import subprocess
import sys

import pytest

import stages
from common.measure import aot

ROOT = pathlib.Path(__file__).parents[2]
SELECTIONS = {
    "usual": [],
    "every-problem": ["--dtype=float16,bfloat16,float32", "--head-dim=16,32,64,128,256", "--causal=yes,no"],
    "every-configuration": ["--causal=yes,no", "--all-configs"],
}


def _param(name):
    """A stage; a dead end, on which nothing is built, in the long run."""
    return pytest.param(name, marks=[pytest.mark.long] if stages.is_dead_end(name) else [])


@pytest.fixture(scope="module", params=map(_param, stages.names()))
def stage(request):
    return request.param


@pytest.fixture(
    scope="module",
    params=["usual", *(pytest.param(name, marks=pytest.mark.long) for name in ("every-problem", "every-configuration"))],
)
def report(request, stage, tmp_path_factory):
    """Rows and errors of `common.measure.aot`, from a process of its own: the kernels of this one may be the interpreter's."""
    path = tmp_path_factory.mktemp("aot") / "report.json"
    command = [sys.executable, "-m", "common.measure.aot", f"--stage={stage}", *SELECTIONS[request.param], f"--json={path}"]
    run = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    print(run.stdout, run.stderr)  # the table, where a test fails
    assert path.exists(), run.stderr
    report = json.loads(path.read_text())
    if not report["rows"] and not report["errors"] and not report["unavailable"]:
        pytest.skip(f"{stage} launches no Triton kernel")
    return report


@pytest.fixture(params=aot.USUAL_ARCHS, ids=lambda arch: f"sm_{arch}")
def arch(request):
    return request.param


@pytest.mark.long
def test_fits_gpus_with_less_shared_memory(stage, tmp_path):
    """A tile made for a data-centre GPU asked the others for more shared memory than their 99 KiB, at D = 128."""
    archs = [arch for arch in aot.SHARED_LIMIT if arch not in aot.USUAL_ARCHS]
    command = [sys.executable, "-m", "common.measure.aot", f"--stage={stage}", "--head-dim=64,128,256"]
    run = subprocess.run(
        [*command, f"--arch={','.join(map(str, archs))}"], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


def rows_of(report, arch, tuned_for=False):
    """The report's rows for an architecture; with `tuned_for`, those of the problems that the tiles were chosen for."""
    for case in report["unavailable"]:
        if case["arch"] == arch:
            pytest.skip(f"{case['stage']} {case['reason']}")
    rows = [row for row in report["rows"] if row["arch"] == arch]
    if tuned_for:
        rows = [row for row in rows if row["dtype"] == "float16" and row["head_dim"] in (64, 128)]
    assert rows
    return rows


def by_kernel(rows):
    """The configurations of each kernel and problem."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row["kernel"], row["head_dim"], row["causal"]].append(row)
    return groups


def test_compiles(report, arch):
    assert [error for error in report["errors"] if error["arch"] == arch] == []
    for row in rows_of(report, arch):
        assert row["registers"] > 0, row


def test_shared_memory_fits(report, arch):
    for row in rows_of(report, arch):
        assert row["shared_bytes"] <= aot.SHARED_LIMIT[arch], row


def test_no_spills(report, stage, arch):
    """Each kernel has a tile that keeps to its registers, or to what its stage says that it spills, `SPILLED_BYTES`. An
    autotuner may also try some that do not: one of those, with 200 bytes spilled, was the fastest forward for D = 128 on an
    H200."""
    allowed = getattr(stages.load(stage), "SPILLED_BYTES", 0)
    for problem, rows in by_kernel(rows_of(report, arch, tuned_for=True)).items():
        assert min(row["spilled_bytes"] for row in rows) <= allowed, problem


def test_descriptors_become_tma_and_products_wgmma(report):
    """A stage that hands its kernels descriptors does so for Hopper's copy engine and warp-group products: both are there."""
    rows = [row for row in rows_of(report, 90, tuned_for=True) if row["descriptors"]]
    if not rows:
        pytest.skip("no kernel takes a tensor descriptor")
    for row in rows:
        assert "TMA" in row["instructions"], row
    for problem, configs in by_kernel(row for row in rows if row["dots"]).items():
        assert any("wgmma" in row["instructions"] for row in configs), problem
        assert any(not row["warnings"] for row in configs), problem  # such as of products that wait for each other


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in stages.names() if hasattr(stages.load(name), "unavailable")])
def test_products_of_a_hopper_stage_are_not_serialised(name, tmp_path):
    """ptxas says so (C7510 and its neighbours) where it makes asynchronous products wait for each other after all. One half
    type may do where the other does not: with bfloat16 a backward once spilled a kilobyte."""
    path = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "common.measure.aot",
        f"--stage={name}",
        "--arch=90",
        "--dtype=float16,bfloat16",
        "--causal=yes,no",
    ]
    run = subprocess.run([*command, f"--json={path}"], check=False, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = json.loads(path.read_text())["rows"]
    problems = {(row["dtype"], row["head_dim"], row["causal"]) for row in rows if row["dots"]}
    assert len(problems) == 8
    for row in rows:
        assert not row["warnings"], row
        assert row["spilled_bytes"] <= stages.load(name).SPILLED_BYTES, row


SPECIALIZED = {
    "source": """
    ttg.warp_specialize(%q, %k) attributes {requestedRegisters = array<i32: 240, 24>}
    default {
      tt.call @stages.v6_some.forward._consumer__TTDfp16S1_1_64_c0_cTrue(%q) : () -> () loc(#loc1)
      ttg.warp_yield loc(#loc1)
    }
    partition0(%arg1: !tt.tensordesc<tensor<64xf16, #shared>> loc(unknown)) num_warps(4) {
      tt.call @"stages.v6_some.forward._consumer__TTDfp16S1_1_64_c1_cTrue.x"(%arg1) : () -> () loc(#loc1)
      ttg.warp_return loc(#loc1)
    }
    partition1(%arg1: !tt.tensordesc<tensor<64xf16, #shared>> loc(unknown)) num_warps(1) {
      tt.call @stages.v6_some.forward._producer__TTDfp16S1(%arg1) : () -> () loc(#loc1)
      ttg.warp_return loc(#loc1)
    }
""",
    "ttgir": "ttg.warp_specialize(%q) attributes {requestedRegisters = array<i32: 240, 24>}",
    "ptx": "\n".join(f"\tsetmaxnreg.{name}.sync.aligned.u32 \t{n};" for name, n in (("inc", 256), ("dec", 232), ("dec", 24))),
}


def test_roles_of_a_specialized_kernel_are_named_after_its_functions():
    assert aot.roles(**SPECIALIZED) == [("_consumer", 232), ("_consumer", 240), ("_producer", 24)]
    by_compiler = aot.roles(**SPECIALIZED | {"source": "scf.for %i = %a to %b {\n tt.call @f__i32()\n}"})
    assert by_compiler == [("default", 232), ("partition0", 240), ("partition1", 24)]
    assert aot.roles("default {\n", "scf.for", "") == []


def test_registers_are_shown_by_role():
    roles = [("_consumer", 120), ("_consumer", 112), ("_consumer", 112), ("_producer", 24)]
    row = {"registers": 96, "roles": roles}
    assert aot._registers(row) == "96: _consumer 120, 2 × _consumer 112, _producer 24"
    assert aot._registers(row | {"roles": []}) == 96


def test_roles_share_the_registers_of_their_kernel(report, stage):
    """And they pass tiles on through rings, whose depths are shown; the compiler's num_stages would mean nothing there."""
    rows = [row for row in rows_of(report, 90) if row["roles"] and row["roles"][0][0] != "default"]  # that the compiler made
    if not rows:
        pytest.skip("no kernel's warps have roles of their own")
    module = stages.load(stage)
    functions = module.forward.__globals__ | module.backward.__globals__
    for row in rows:
        config = dict(setting.split("=") for setting in row["config"].split())
        names, registers = zip(*row["roles"], strict=True)
        assert set(names) <= functions.keys(), row
        assert 4 * sum(registers) <= row["registers"] * int(config["num_warps"]), row  # a role has whole groups of four warps
        assert any("STAGES" in name for name in config) and "num_stages" not in config, row
