"""Every kernel compiles without a GPU. It has the right instructions, and spills few registers."""

import itertools
import json
import re

import pytest
from cases import changed, changed_files, first_with, taking_lengths, taking_pages

import stages
from common.checks import HEAD_DIMS
from common.measure import aot

NAMES = stages.names()
HOPPER = [name for name in NAMES if hasattr(stages.load(name), "unavailable")]
ANYWHERE = [name for name in stages.line() if name not in HOPPER]
BOTH = (True, False)
SELECTIONS = {
    "hopper": {"arch": (90,)},
    "shared-heads": {"arch": (90,), "head_dim": (128,), "kv_heads": (4,)},
    "every-dtype-and-mask": {"arch": (90,), "dtype": ("float16", "bfloat16"), "causal": BOTH, "kv_heads": (aot.HEADS, 4)},
    "other-values": {"arch": (90,), "value_dim": (32,)},
    "others": {"arch": (80, 100)},
    "little-shared-memory": {"arch": (86, 89, 120), "head_dim": (64, 128, 256)},
    "every-problem": {"dtype": ("float16", "bfloat16", "float32"), "head_dim": HEAD_DIMS, "causal": BOTH},
}
LENGTHS = {"arch": (90,), "dtype": ("float16", "bfloat16"), "causal": BOTH, "lengths": (True,)}
PACKED = LENGTHS | {"lengths": (aot.PACKED,)}
PAGES = LENGTHS | {"lengths": (aot.PAGES,), "head_dim": (64, 128, 256)}
EIGHT_BITS = LENGTHS | {"lengths": (aot.EIGHT_BITS,)}
GLUON = first_with("@gluon.jit", "forward")
CHANGED = [name for name in HOPPER if name in changed()][-1:] or [stages.newest()] * bool(changed_files("common/kernels"))
CHOSEN = [  # the default run compiles few stages: two old ones, and one with changes
    (ANYWHERE[-1], {"arch": (80,), "head_dim": (16,)}),
    *((name, {"arch": (90,), "head_dim": (64,)}) for name in dict.fromkeys([GLUON, *CHANGED])),
    *(pytest.param(name, LENGTHS, marks=pytest.mark.long, id=f"{name}-lengths") for name in taking_lengths()),
    *(pytest.param(name, PACKED, marks=pytest.mark.long, id=f"{name}-packed") for name in taking_lengths("starts")),
    *(pytest.param(name, PAGES, marks=pytest.mark.long, id=f"{name}-pages") for name in taking_pages()),
    *(pytest.param(name, EIGHT_BITS, marks=pytest.mark.long, id=f"{name}-8-bit") for name in taking_lengths("descales")),
    *(
        pytest.param(name, SELECTIONS[key], marks=pytest.mark.long, id=f"{name}-{key}")
        for name, key in itertools.product(NAMES, SELECTIONS)
        if name in HOPPER or key != "every-dtype-and-mask"
    ),
]  # fmt: skip


def compiled(name, **values):
    """Compile a stage for each combination of the values. Return the records."""
    usual = {"arch": aot.USUAL_ARCHS, "dtype": ("float16",), "head_dim": (64, 128), "value_dim": (None,), "causal": (True,)}
    values = {"stage": (name,), **usual, "kv_heads": (aot.HEADS,), "lengths": (False,), **values}
    cases = [dict(zip(aot.CASE, case, strict=True)) for case in itertools.product(*(values[key] for key in aot.CASE))]
    with pytest.MonkeyPatch.context() as environment:
        for variable in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES"):  # aot changes both variables; monkeypatch restores them
            environment.setenv(variable, "")
        records = aot.compile_cases(cases)
    assert not [record for record in records if "error" in record]
    return records


@pytest.mark.parametrize(("name", "values"), CHOSEN)
def test_kernels_compile_fit_and_have_the_right_instructions(name, values):
    records = compiled(name, **values)
    assert {record["arch"] for record in records} == {*values.get("arch", aot.USUAL_ARCHS)} or name == NAMES[0]
    allowed = getattr(stages.load(name), "SPILLED_BYTES", 0)
    for row in (record for record in records if "kernel" in record):
        assert row["registers"] > 0 and row["shared_bytes"] <= aot.SHARED_LIMIT[row["arch"]], row
        dtypes = ("float16", "bfloat16") if name in HOPPER else ("float16",)
        if row["arch"] not in aot.USUAL_ARCHS or row["dtype"] not in dtypes or row["head_dim"] not in (64, 128):
            continue  # tiles were chosen for the others
        assert row["spilled_bytes"] <= allowed, row
        if row["arch"] == 90 and row["descriptors"]:
            assert "TMA" in row["instructions"] and ("wgmma" in row["instructions"] or not row["dots"]), row
            # ptxas warns of a "Performance Loss" if matmuls wait for each other. Stages for Hopper have no other warning.
            assert "Performance Loss" not in str(row["warnings"]) and not (name in HOPPER and row["warnings"]), row


CASE = dict(zip(aot.CASE, (NAMES[1], 90, "float16", 64, None, True, 16, False), strict=True))


def row(kernel="_a", **changed):
    compiled = {
        "kernel": kernel, "config": "num_warps=4", "registers": 64, "spilled_bytes": 0, "shared_bytes": 200000,
        "instructions": ["wgmma"], "warnings": [], "ptx": {"add.s32": 2, "ret": 1}, "code": "0",
    }  # fmt: skip
    return CASE | compiled | changed


@pytest.mark.parametrize(("against", "found", "status", "message"), [
    ((), [row()], 0, r"v1 .* 64 +0 +4 +wgmma +200000/232448"), ((), [row(error="broken")], 1, "broken"),
    ((), [CASE | {"reason": "needs a Hopper GPU"}], 2, "needs a Hopper GPU\nnothing was compiled"),
    ((), [row(arch=120)], 1, "needs 200000 bytes of shared memory, but a CTA has 101376"),
    (("--against=rows.json",), [row()], 0, "1 kernels compared: 0 differ"),
    (("--against=rows.json",), [row(registers=65)], 1, "registers 64 -> 65"),
])  # fmt: skip
def test_the_command_says_whether_all_compiles_and_fits_and_is_the_same(
    against, found, status, message, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.json").write_text(json.dumps({"rows": [row()]}))
    monkeypatch.setattr(aot, "compile_cases", lambda cases: found)
    assert aot.main(["--stage=v1", *against]) == status
    assert re.search(message, "".join(capsys.readouterr()))


def test_spills_are_stores_and_loads():
    log = "16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\ninfo : Used 40 registers\nwarning (C7510) slow"
    assert aot.resources(log) == {"registers": 40, "spilled_bytes": 32, "warnings": ["(C7510) slow"]}


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


def test_code_is_the_instructions_with_their_operands():
    assert aot.opcodes(PTX) == [
        "ld.param.b64", "ld.global.v2.b32", "bra", "mbarrier.try_wait.parity.shared.b64",
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16", "ret",
    ]  # fmt: skip
    moved = PTX.replace(".loc\t1 23 19", ".loc\t4 5 6") + "\t.section\t.debug_loc\t{\n.b8 7\n\t}\n"
    assert moved.count("\t4 5 6") == 1
    assert aot.code(moved) == aot.code(PTX) and aot.code(PTX.replace("%rd4", "%rd5")) != aot.code(PTX)


def test_differences_name_the_kernel_and_what_changed():
    before = [row(), row(registers=80), row("_b"), row("_gone")]
    assert aot.differences(before, before) == []
    after = [row(), row(registers=81), row("_b", ptx={"add.s32": 1, "mul.f32": 1, "ret": 1}), row("_new")]
    assert [re.sub(" .*:", ":", line) for line in aot.differences(before, after)] == [
        "_a: registers 80 -> 81", "_b: -1 add.s32, +1 mul.f32", "_gone: only before", "_new: only after"
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", taking_lengths("descales"))
def test_8_bits_become_bfloat16_without_slow_conversions(name):
    """ptxas makes one F2F instruction of each cvt.bf16.f16, and F2FP, two numbers at a time, of cvt.rn.bf16x2.f32."""
    records = compiled(name, arch=(90,), dtype=("bfloat16",), head_dim=(16,), lengths=(aot.EIGHT_BITS,))
    (kernel,) = (row for row in records if row["ptx"]["cvt.rn.f16x2.e4m3x2"])
    assert kernel["ptx"]["cvt.bf16.f16"] == 0
