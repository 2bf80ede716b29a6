"""The kernels that measure an SM's rates compile, and their measurements become a table."""

import re
from pathlib import Path

import programs
import pytest
import torch

import stages
from common.measure import rates
from common.runtime import INTERPRETED

ROOT = Path(stages.__path__[0]).parent
COMPILE = """
import sys
import torch, triton
from common.measure import aot, rates

def compiled(src, metadata, metadata_group, times, cache_hit):
    ptx = next(path for name, path in metadata_group.items() if name.endswith(".ptx"))
    print(unit, src.fn.__name__, ptx)

triton.runtime.driver.set_active(aot.StandInDriver(90, lambda metadata: None, None))
triton.knobs.compilation.listener = compiled
triton.knobs.compilation.always_compile = True
triton.knobs.nvidia.dump_ptxas_log = True
launched = set()
for unit, cases in rates.UNITS.items():
    for case in cases("meta", 132):
        if sys.argv[1] == "every" or case.kernel not in launched:
            case.launch(torch.empty(case.programs, rates.FIELDS.value, dtype=torch.int64, device="meta"), 1000)
        launched.add(case.kernel)
"""
INSTRUCTIONS = {  # unit -> instructions; each kernel of the unit contains at least one of them
    "copy-in": ["cp.async.bulk.tensor"],
    "copy-out": ["cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor"],
    "tensor-cores": ["wgmma.mma_async"],
    "instructions": ["ex2", "fma", "mul", "add", "max", "selp", "cvt.rn", "cvt.f32", "mad", "lop3", "shfl"],
    "shared-memory": ["ldmatrix", "ld.shared", "stmatrix", "st.shared"],
    "barriers": ["mbarrier", "fence.proxy.async"],
}


@pytest.fixture(scope="module", params=["first", pytest.param("every", marks=pytest.mark.long)])
def log(request):
    """Compile the first case of each kernel, or every case. Return the compiling process's output, with ptxas' log."""
    run = programs.python("-c", COMPILE, request.param, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("unit", rates.UNITS)
def test_kernels_compile_to_what_they_measure(log, unit):
    texts = [Path(line.split()[2]).read_text() for line in log.splitlines() if line.startswith(f"{unit} ")]
    assert texts and all(any(name in text for name in INSTRUCTIONS[unit]) and "%clock64" in text for text in texts)


def test_nothing_spills_or_is_serialised(log):
    spills = re.findall(r"\d+ bytes spill stores, \d+ bytes spill loads", log)
    assert spills and set(spills) == {"0 bytes spill stores, 0 bytes spill loads"}
    assert "C75" not in log  # ptxas warns with a code C75… if matmuls wait for each other


def test_every_step_of_an_instruction_is_compiled(log):
    path = next(line.split()[2] for line in log.splitlines() if line.startswith("instructions "))
    steps = 4 * rates.ROWS.value * rates.COLUMNS.value // 128 * rates.UNROLLED.value  # instructions of each thread
    assert Path(path).read_text().count("ex2.approx.ftz.f32") == steps


def one_case(per):
    return rates.Case("some", None, (), {}, 128, per, 132, 2)


@pytest.mark.parametrize(("per", "rate"), [("cycles", 0.25), ("bytes a cycle", 4.0)])
def test_a_rate_covers_all_turns(per, rate):
    assert one_case(per).rate(cycles=3200, turns=100) == rate


class FakeKernel:
    """A kernel that takes 50 cycles plus 10 per iteration, at 2 GHz. Its last `shared` + 1 programs run on one SM."""

    def __init__(self, shared=0):
        self.shared = shared

    def __getitem__(self, grid):
        def launch(record, turns):
            for program in range(*grid):
                cycles = 50 + 10 * turns
                record[program] = torch.tensor([7, 7 + cycles, 1, 1 + cycles // 2, min(program, grid[0] - 1 - self.shared)])

        return launch


@pytest.fixture
def on_cpu(monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, **options: zeros(*shape, **options))


def test_loops_are_long_and_their_ends_do_not_count(on_cpu):
    measured = rates.measure(rates.Case("some", FakeKernel(), (), {}, 1, "cycles", 3))
    assert measured["turns"] * 10 > rates.TARGET_CYCLES * 0.9
    assert measured["value"] == pytest.approx(10, rel=0.001)
    assert measured["low"] <= measured["value"] <= measured["high"] and measured["ghz"] == 2
    assert "10" in rates.table([{"unit": "any", **measured}]).splitlines()[-1].split()


def test_programs_on_one_sm_are_refused(on_cpu):
    with pytest.raises(RuntimeError, match="two programs shared an SM"):
        rates.measure(rates.Case("some", FakeKernel(shared=1), (), {}, 1, "cycles", 3))


def test_table_shows_a_rate_its_unit_and_its_spread():
    rate = {
        "unit": "instructions", "name": "exp2", "num_sms": 132, "warpgroups": 3,
        "value": 15.98765, "per": "results a cycle", "low": 15.5, "high": 16.01, "ghz": 1.755, "turns": 99,
    }  # fmt: skip
    row = rates.table([rate]).splitlines()[-1].split("  ")
    assert [cell.strip() for cell in row if cell.strip()] == [
        "instructions", "exp2", "132", "3", "15.99", "results a cycle", "15.5 to 16.01", "1.75",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"), [(["--unit", "tensor"], "'tensor' is not one of"), (["--json", "/none/x.json"], "does not exist")]
)
def test_bad_options_are_refused(options, said, capsys):
    with pytest.raises(SystemExit) as stop:
        rates.main(options)
    assert stop.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs():
    with pytest.raises(SystemExit, match="needs a Hopper GPU"):
        rates.main([])
