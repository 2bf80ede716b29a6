"""Every kernel compiles without a GPU. It has the right instructions, and spills few registers."""

import collections
import itertools
import json
import pathlib
import re

import programs
import pytest

import stages
from common.measure import aot
from common.operator import HEAD_DIMS

ROOT = pathlib.Path(__file__).parents[2]
NAMES = stages.names()
ROAD = [name for name in NAMES if not stages.is_dead_end(name)]
ANYWHERE = [name for name in ROAD if not hasattr(stages.load(name), "unavailable")]
SELECTIONS = {
    "hopper": {"archs": (90,)},  # the tiles are chosen for Hopper
    "shared-heads": {"archs": (90,), "head_dims": (128,), "kv_heads": (4,)},
    "other-values": {"archs": (90,), "value_dim": 32},
    "others": {"archs": tuple(arch for arch in aot.USUAL_ARCHS if arch != 90)},
    "every-problem": {"dtypes": ("float16", "bfloat16", "float32"), "head_dims": HEAD_DIMS, "causal": (True, False)},
    "every-configuration": {"causal": (True, False), "all_configs": True},
}


def _selections():
    """Yield pairs (stage, selection). The default run compiles only the newest stage, and the newest stage that needs no
    Hopper GPU."""
    for name, selection in itertools.product(NAMES, SELECTIONS):
        quick = {"hopper": (ROAD[-1],), "others": (ANYWHERE[-1],)}
        yield pytest.param(
            (name, selection), id=f"{name}-{selection}", marks=[] if name in quick.get(selection, ()) else [pytest.mark.long]
        )


def compiled(
    name, archs=aot.USUAL_ARCHS, dtypes=("float16",), head_dims=(64, 128), causal=(True,), kv_heads=(aot.HEADS,),
    value_dim=None, all_configs=False,
):  # fmt: skip
    """Compile a stage for each combination of the arguments. Return the kernels' rows, the errors and the unavailable cases."""
    names = "arch", "dtype", "head_dim", "causal", "kv_heads"
    cases = [
        {"stage": name, "value_dim": value_dim} | dict(zip(names, values, strict=True))
        for values in itertools.product(archs, dtypes, head_dims, causal, kv_heads)
    ]
    with pytest.MonkeyPatch.context() as environment:
        for variable in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES"):  # aot changes both variables; monkeypatch restores them
            environment.setenv(variable, "")
        rows, errors, unavailable = aot.compile_cases(cases, all_configs)
    print(*rows, *errors, sep="\n")  # shown if a test fails
    return {"rows": rows, "errors": errors, "unavailable": unavailable}


@pytest.fixture(scope="module", params=_selections())
def report(request):
    """The report of a stage's kernels for one of the `SELECTIONS`, with the stage's name."""
    name, selection = request.param
    report = compiled(name, **SELECTIONS[selection])
    if not report["rows"] and not report["errors"] and not report["unavailable"]:
        pytest.skip(f"{name} launches no Triton kernel")
    return report | {"stage": name, "archs": SELECTIONS[selection].get("archs", aot.USUAL_ARCHS)}


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_fits_gpus_with_less_shared_memory(name):
    """The kernels fit in 99 KiB of shared memory, the limit of small GPUs."""
    archs = [arch for arch in aot.SHARED_LIMIT if arch not in aot.USUAL_ARCHS]
    assert not compiled(name, archs=archs, head_dims=(64, 128, 256))["errors"]


def rows_of(report, tuned_for=False):
    """Return the report's rows. If `tuned_for`, keep only float16 rows with D = 64 or 128: the tiles were chosen for them."""
    if reasons := {case["reason"] for case in report["unavailable"] if not report["rows"]}:
        pytest.skip(f"{report['stage']} {reasons.pop()}")
    rows = report["rows"]
    if tuned_for:
        rows = [row for row in rows if row["dtype"] == "float16" and row["head_dim"] in (64, 128)]
    assert rows
    return rows


def by_kernel(rows):
    """Group the configurations' rows by kernel and problem."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row["kernel"], row["arch"], row["head_dim"], row["causal"]].append(row)
    return groups


def test_compiles(report):
    assert report["errors"] == []
    rows = rows_of(report)
    assert {row["arch"] for row in rows + report["unavailable"]} == set(report["archs"])
    for row in rows:
        assert row["registers"] > 0, row


def test_shared_memory_fits(report):
    for row in rows_of(report):
        assert row["shared_bytes"] <= aot.SHARED_LIMIT[row["arch"]], row


def test_no_spills(report):
    """For each problem, a configuration of the kernel spills at most the stage's `SPILLED_BYTES` bytes, by default 0."""
    allowed = getattr(stages.load(report["stage"]), "SPILLED_BYTES", 0)
    for problem, rows in by_kernel(rows_of(report, tuned_for=True)).items():
        assert min(row["spilled_bytes"] for row in rows) <= allowed, problem


def test_descriptors_become_tma_and_matmuls_wgmma(report):
    """Kernels that take descriptors use Hopper's TMA, and their matmuls are wgmma."""
    rows = [row for row in rows_of(report, tuned_for=True) if row["arch"] == 90 and row["descriptors"]]
    if not rows:
        pytest.skip("no kernel takes a tensor descriptor, or none is compiled for Hopper")
    for row in rows:
        assert "TMA" in row["instructions"], row
    for problem, configs in by_kernel(row for row in rows if row["dots"]).items():
        assert any("wgmma" in row["instructions"] for row in configs), problem
        # ptxas warns of a "Performance Loss" if matmuls wait for each other. Its other warnings are allowed.
        assert any(not [text for text in row["warnings"] if "Performance Loss" in text] for row in configs), problem


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ROAD if name not in ANYWHERE])
def test_matmuls_of_a_hopper_stage_are_not_serialised(name):
    """ptxas gives no warning. For example, C7510 says that asynchronous matmuls wait for each other."""
    report = compiled(name, archs=(90,), dtypes=("float16", "bfloat16"), causal=(True, False), kv_heads=(aot.HEADS, 4))
    assert not report["errors"]
    rows = report["rows"]
    problems = {(row["dtype"], row["head_dim"], row["causal"]) for row in rows if row["dots"]}
    assert len(problems) == 8
    for row in rows:
        assert not row["warnings"], row
        assert row["spilled_bytes"] <= stages.load(name).SPILLED_BYTES, row


def test_the_command_prints_a_table_and_saves_it(tmp_path):
    path = tmp_path / "report.json"
    run = programs.python("-m", "common.measure.aot", "--stage=v2", "--arch=90", "--head-dim=64", f"--json={path}")
    assert run.returncode == 0, run.stderr
    report = json.loads(path.read_text())
    assert len(report["rows"]) == 2 and not report["errors"]
    for row in report["rows"]:
        assert re.search(
            rf"v2 +{row['kernel'].strip('_').removesuffix('_kernel')} .* {row['shared_bytes']}/232448 +wgmma", run.stdout
        ), run.stdout


def test_registers_of_partitions_begin_with_the_default_one():
    ttgir = "ttg.warp_specialize(%q) attributes {requestedRegisters = array<i32: 240, 24>}"
    ptx = "\n".join(f"\tsetmaxnreg.{name}.sync.aligned.u32 \t{n};" for name, n in (("inc", 256), ("dec", 232), ("dec", 24)))
    assert aot.partition_registers(ttgir, ptx) == [232, 240, 24]
    assert aot.partition_registers("scf.for", "") == []


def test_partitions_share_the_registers_of_their_kernel(report):
    """Partitions of one warp ask for 24 registers. All of them together take the registers of four warps."""
    rows = [row for row in rows_of(report) if row["partition_registers"]]
    rows = [row for row in rows if "num_stages" not in row["config"]]  # otherwise the compiler has made the partitions
    if not rows:
        pytest.skip("the stage makes no partitions")
    for row in rows:
        wide = sum(number for number in row["partition_registers"] if number > 24)
        num_warps = int(re.search(r"num_warps=(\d+)", row["config"])[1])
        assert 4 * (wide + 24) <= row["registers"] * num_warps, row


ROW = {
    "stage": "v16_q_in_registers", "kernel": "_backward_kernel", "arch": 90, "dtype": "float16", "head_dim": 64,
    "value_dim": None, "causal": True, "kv_heads": 16, "config": "BLOCK_M=128 BLOCK_N=128 STAGES=2 Q_STAGES=2 num_warps=12",
    "registers": 168, "partition_registers": [24], "spilled_bytes": 0, "shared_bytes": 200000,
    "instructions": ["mma.sync", "cp.async"], "warnings": [],
}  # fmt: skip


@pytest.mark.parametrize(("found", "status", "message"), [
    (([], [], [ROW | {"reason": "needs a Hopper GPU"}]), 2, "nothing was compiled"), (([ROW], [], []), 0, ""),
    (([ROW | {"arch": 120}], [], []), 1, "needs 200000 bytes of shared memory, but a CTA has 101376"),
    (([], [ROW | {"error": "broken"}], []), 1, "broken"),
])  # fmt: skip
def test_exit_status_says_whether_all_compiles_and_fits(found, status, message, monkeypatch, capsys):
    monkeypatch.setattr(aot, "compile_cases", lambda cases, all_configs: found)
    assert aot.main(["--stage=v16"]) == status
    assert message in capsys.readouterr().err


PTX = """
.visible .entry kernel(.param .u64 a)
{
	.reg .b32 	%r<9>;
$L__BB0_1:  // a loop
	.loc	1 23 19                         // ends with its line
	ld.param.b64 	%rd1, [a];
	@%p1 ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];
	@!%p2 bra 	$L__BB0_1;
	{
	waitLoop:
	mbarrier.try_wait.parity.shared.b64 complete, [%r3], %r4;
	}
	wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%f1,%f2}, %rd3, %rd4, p, 1, 1, 0, 1;
	ret;
}
"""


def test_opcodes_are_found_behind_predicates_and_in_blocks():
    assert aot.opcodes(PTX) == [
        "ld.param.b64", "ld.global.v2.b32", "bra", "mbarrier.try_wait.parity.shared.b64",
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16", "ret",
    ]  # fmt: skip


def row(kernel, **changed):
    case = dict.fromkeys(aot.CASE) | {"stage": NAMES[1], "arch": 90, "dtype": "float16", "head_dim": 64, "causal": True}
    compiled = dict.fromkeys(aot.COMPARED) | {
        "registers": 64,
        "shared_bytes": 1024,
        "ptx": {"add.s32": 2, "ret": 1},
        "warnings": [],
    }
    return case | {"kv_heads": 16, "kernel": kernel} | compiled | changed


def test_code_is_the_instructions_with_their_operands():
    moved = PTX.replace(".loc\t1 23 19", ".loc\t4 5 6") + "\t.section\t.debug_loc\t{\n.b8 7\n\t}\n"
    assert moved.count("\t4 5 6") == 1
    assert aot.code(moved) == aot.code(PTX) and aot.code(PTX.replace("%rd4", "%rd5")) != aot.code(PTX)


def test_differences_name_the_kernel_and_what_changed():
    before = [row("_a"), row("_a", registers=80), row("_b"), row("_gone")]
    assert aot.differences(before, before) == []
    after = [row("_a"), row("_a", registers=81), row("_b", ptx={"add.s32": 1, "mul.f32": 1, "ret": 1}), row("_new")]
    where = "v1 {} sm_90 float16 D=64 causal 16 K/V heads: {}"
    assert aot.differences(before, after) == [
        where.format("_a", "registers 80 -> 81"), where.format("_b", "+1 mul.f32, -1 add.s32"),
        where.format("_gone", "only before"), where.format("_new", "only after"),
    ]  # fmt: skip


def test_against_compares_with_the_same_cases(monkeypatch, capsys):
    argv = ["--stage", "v1", "--against", "HEAD", "--arch", "90"]
    monkeypatch.setattr(aot, "compile_cases", lambda *_: ([row("_a", registers=65)], [], []))
    monkeypatch.setattr(aot, "_at_revision", lambda *given: {"rows": [row("_a")]} if given == ("HEAD", argv) else None)
    assert aot.main(argv) == 1
    assert "registers 64 -> 65" in capsys.readouterr().out


@pytest.mark.long
def test_a_revision_has_its_own_code(capsys):
    """The command also compiles HEAD's kernels. It returns 1 if uncommitted changes change a kernel."""
    assert aot.main(["--stage", "v1", "--arch", "90", "--head-dim", "64", "--against", "HEAD"]) in (0, 1)
    assert re.search(r"[1-9]\d* kernels compared with HEAD", capsys.readouterr().out)
