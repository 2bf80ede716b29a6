"""The bytes that the profiler Nsight Compute measures are compared with each kernel's counted bytes."""

import json
import os
import sys
from pathlib import Path

import pytest

from common.measure import ncu
from common.measure.traffic import GPUS
from common.runtime import INTERPRETED

LOG = f"""==PROF== Connected to process 1
"ID","Kernel Name","Block Size","{ncu.READ}","{ncu.WRITTEN}","{ncu.SPILLED}","something.sum"
"","","","byte","byte","sector",""
"0","_case_begins_kernel","(128, 1, 1)","0","0","0","7"
"1","void fill<float>(int, float)","(128, 1, 1)","0","2,048","0","7"
"2","_forward_kernel","(128, 1, 1)","4,000,000","1000000","5000","7"
"3","_case_begins_kernel","(128, 1, 1)","0","0","0","7"
"""
METRICS = (ncu.READ, ncu.WRITTEN, ncu.SPILLED)


PROFILER = f"""#!{sys.executable}
import json, sys
if "--query-metrics" in sys.argv:
    print("{ncu.READ.removesuffix(".sum")}  Counter  byte\\ndram__bytes_read  Counter  byte")
elif "--version" in sys.argv:
    print("NVIDIA Nsight Compute\\nVersion 1.2.3")
else:
    options = dict(zip(sys.argv[1:], sys.argv[2:]))
    assert options["--metrics"] == "{ncu.READ},{ncu.WRITTEN},{ncu.SPILLED},dram__bytes_read.sum"
    again = sys.argv[sys.argv.index("common.measure.ncu") + 1 :]
    assert again[:3] == ["measure", "--stage=v2,v3", "--kv-heads=2"]
    with open(options["--log-file"], "w") as log, open(again[-1].removeprefix("--in-profiler="), "w") as cases:
        log.write({LOG!r})
        json.dump([dict(impl="a"), dict(impl="b")], cases)
"""


def test_measuring_saves_the_profiler_s_numbers_of_each_case(tmp_path, monkeypatch):
    path = tmp_path / "ncu"
    path.write_text(PROFILER)
    path.chmod(0o755)
    monkeypatch.setattr(ncu, "DEVICE", "cuda")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    ncu.main(["measure", "--stage=v2,v3", "--kv-heads=2", str(tmp_path / "traffic.json")])
    saved = json.loads((tmp_path / "traffic.json").read_text())
    assert saved["machine_info"]["ncu"] == "Version 1.2.3"
    first, second = ncu.parse(LOG, METRICS)
    assert first == [
        {"name": "void fill<float>(int, float)", ncu.READ: 0, ncu.WRITTEN: 2048, ncu.SPILLED: 0},
        {"name": "_forward_kernel", ncu.READ: 4e6, ncu.WRITTEN: 1e6, ncu.SPILLED: 5000},
    ]
    assert second == [] and saved["cases"] == [{"impl": "a", "kernels": first}, {"impl": "b", "kernels": second}]


def counted(*names):
    return [{"name": name, "tile": {}, "read": 1, "written": 1} for name in names]


def test_other_kernels_than_were_counted_are_an_error():
    kernels, _ = ncu.parse(LOG, METRICS)
    found = ncu.comparisons({"counted": counted("_forward_kernel", "aten.a"), "kernels": kernels})
    assert [(label, both[ncu.WRITTEN]) for label, both in found] == [("_forward_kernel ", 1e6), ("PyTorch", 2048)]
    for names in (["_other_kernel"], ["_forward_kernel"] * 2):
        with pytest.raises(ValueError):
            ncu.comparisons({"impl": "v1", "counted": counted(*names), "kernels": kernels})


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter stands in for the profiler's GPU")
def test_cases_are_counted_with_their_heads_and_the_tiles_that_were_measured(tmp_path, monkeypatch):
    found, path = tmp_path / "found.json", tmp_path / "cases.json"
    monkeypatch.setattr(ncu, "show", lambda label, call: None)
    shape = ["--seq-len=32", "--head-dim=16", "--heads=4", "--kv-heads=4,2", "--value-dim=32"]
    ncu.main(["measure", "--stage=v4", *shape, str(path), f"--in-profiler={found}"])
    cases = [case for case in json.loads(found.read_text()) if case["pass"] == "bwd" and not case["causal"]]
    tuned = {"_dq_kernel": [64, 64], "_dkv_kernel": [16, 32]}
    path.write_text(json.dumps({"cases": [case | {"tuned": tuned} for case in cases]}))
    ncu.main(["count", str(path)])
    launches = [case["counted"] for case in json.loads(path.read_text())["cases"]]
    assert {entry["name"]: list(entry["tile"].values()) for entry in launches[0]} == tuned
    four, two = (sum(entry["written"] for entry in each) for each in launches)
    assert four - two == 2 * 32 * (16 + 32) * 2  # two heads of dK and dV


MEASURED = sorted((Path(__file__).parents[2] / "results").glob("traffic-*.json"))


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_committed_counts_of_kernels_are_within_a_tenth_of_what_was_measured(path):
    result = json.loads(path.read_text())
    assert result["cases"] and "dirty" not in result["machine_info"]["commit"]
    for case in result["cases"]:
        for label, both in ncu.comparisons(case):
            if label == "PyTorch":  # only PyTorch's arguments and results are counted
                continue
            where = case["impl"], case["pass"], case["causal"], label
            # A program that reads only a flag of four bytes moves a sector of 32 bytes.
            sectors = 8 if both["read"] <= 4 * GPUS["h200"].num_sms else 1
            assert both[ncu.READ] == pytest.approx(sectors * both["read"], rel=0.1), where
            spilled = both[ncu.SPILLED] * ncu.SECTOR
            assert both[ncu.WRITTEN] - spilled == pytest.approx(both["written"], rel=0.1), where
