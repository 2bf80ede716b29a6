"""The command reads compute-sanitizer's reports correctly. It fails on every report except known false reports."""

import itertools
import re
import subprocess
from pathlib import Path

import pytest
from cases import first_with, sources

import stages
from common.measure import sanitize
from common.measure.sanitize import Report
from common.runtime import INTERPRETED


def place(part, text):
    """Return (path, number) of the first line that contains `text` in `forward_{part}.py` of the first stage with a counter."""
    return place_of(first_with("next_tiles.number", "forward"), f"forward_{part}.py", text)


def place_of(stage, file, text):
    path = stages.directory(stages.resolve(stage)) / file
    return str(path), next(number for number, line in enumerate(path.read_text().splitlines(), start=1) if text in line)


STORE, LOAD = (place("scheduler", f"next_tiles.number.index(slot).{what}(") for what in ("store", "load"))
SUM = place("softmax", "l = _sums(p)")

MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at _forward_kernel+0x100 in /there/forward.py:34
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7cc43aa00001 is misaligned
=========     and is inside the nearest allocation at 0x7cc43aa00000 of size 4 bytes
=========
========= Target application returned an error
========= ERROR SUMMARY: 4 errors
========= ERROR SUMMARY: 1 error was not printed. Use --print-limit option to adjust the number of printed errors
"""
INITCHECK = """========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at _dq_kernel+0x70
=========     by thread (31,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000fc
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::fill<int>(int *)+0x70 in Fill.cu:41
=========     by thread (31,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000fc
=========
========= ERROR SUMMARY: 2 errors
"""
KNOWN_RACE = f"""========= Error: Race reported between Write access at _forward_kernel+0x90 in {STORE[0]}:{STORE[1]}
=========     and Read access at _forward_kernel+0x100 in {LOAD[0]}:{LOAD[1]} [508 hazards]
=========     and Read access at _forward_kernel+0x150 in {LOAD[0]}:{LOAD[1]} [4 hazards]
=========
"""
NEW_RACE = KNOWN_RACE.replace(f"{LOAD[0]}:{LOAD[1]} [4", f"{SUM[0]}:{SUM[1]} [4").replace("Error", "Warning")
RACECHECK = f"""========= COMPUTE-SANITIZER
{KNOWN_RACE}{KNOWN_RACE}{NEW_RACE}========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"


def test_reports_are_parsed_and_explained():
    kind = "Uninitialized __global__ memory read"
    reports = [Report(kind, "_dq_kernel"), Report(kind, "void at::native::fill<int>", (("Fill.cu", 41),))]
    assert sanitize.parse(INITCHECK) == (reports, 2)
    known = Report("race", "_forward_kernel", (STORE, LOAD))
    new = Report("race", "_forward_kernel", (STORE, LOAD, SUM))
    assert sanitize.parse(RACECHECK) == ([known, known, new], 3)
    entry = sanitize.KNOWN[0]
    for report in (new, Report("race", "_other_kernel", known.lines), Report("race", "_forward_kernel")):
        assert entry.explains(known) and not entry.explains(report)
    copied = next(entry for entry in sanitize.KNOWN if entry.reason == sanitize.COPIED)
    loads = (place_of(stage, "forward.py", "q_desc.load(") for stage in ("v4b", "v5"))
    found = [copied.explains(Report("race", "_forward_kernel", (load,))) for load in loads]
    assert found == [True, False]  # only v4b's compiler splits the warps
    for log in ("", "========= COMPUTE-SANITIZER\n"):  # no summary, so the tool has not finished
        assert sanitize.parse(log) == ([], None)


@pytest.mark.parametrize("entry", sanitize.KNOWN, ids=lambda entry: f"{entry.tool}-{entry.kernel}-{entry.lines}")
def test_known_reports_are_of_lines_that_are_there(entry):
    texts = [text for stage in stages.names() for text in sources(stage, entry.kernel.split("_")[1]).values()]
    assert any(re.search(entry.lines, line) for text in texts for line in text.splitlines())


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs the command as if the tools wrote `logs`. It returns the exit status and the output."""

    def run(*arguments, fails=False, **logs):
        def sanitizer(command, env, **options):
            given = dict(itertools.pairwise(command))
            assert env["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1" and "run_stage('v" in given["-c"]
            Path(given["--log-file"]).write_text(logs[given["--tool"]])
            return subprocess.CompletedProcess(command, int(fails), "", "the program says why")

        monkeypatch.setattr(sanitize.subprocess, "run", sanitizer)
        return sanitize.main(arguments), capsys.readouterr().out

    monkeypatch.setattr(sanitize, "DEVICE", "cuda")
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: name)
    monkeypatch.setattr(stages, "unavailable", lambda name: None)
    return run


def test_unknown_reports_fail_and_known_ones_pass_with_their_reasons(run):
    status, shown = run("--stage=v3", "--tool=memcheck,initcheck", memcheck=MEMCHECK, initcheck=INITCHECK)
    assert status == 1 and shown.count("FAILED") == 2
    assert "NEW, 1 x Invalid __global__ write in _forward_kernel\n    /there/forward.py:34" in shown
    assert "NEW, 1 x 2 reports that were not printed" in shown
    assert "_dq_kernel" in shown and "at::native" not in shown, "reads of PyTorch's own kernels are allowed"
    only_known = RACECHECK.replace(NEW_RACE, "").replace("3 hazards", "2 hazards")
    status, shown = run("--stage=v5", "--tool=racecheck", racecheck=only_known)
    assert status == 0 and f"passed\n  known, 2 x _forward_kernel: {sanitize.TILE}" in shown
    status, shown = run("--stage=v5", "--tool=racecheck", racecheck=CLEAN)
    assert status == 0 and shown.endswith("passed\n")


@pytest.mark.parametrize("log", ["", CLEAN])
def test_a_program_that_fails_is_not_clean(run, log):
    status, shown = run("--stage=v3", "--tool=memcheck", fails=True, memcheck=log)
    assert status == 1 and "the program says why" in shown


@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU")
def test_the_program_inside_the_tool_runs(monkeypatch):
    monkeypatch.setattr(sanitize, "PROBLEMS", [("float16", 16, True, (20, 9))])
    monkeypatch.setattr(sanitize.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        sanitize.Autotuner, "prune_configs", sanitize.Autotuner.prune_configs
    )  # run_stage replaces this method; monkeypatch restores it
    sanitize.run_stage("v5_tuned")
