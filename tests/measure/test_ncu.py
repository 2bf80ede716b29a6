"""The bytes that the profiler Nsight Compute measures are compared with each kernel's counted bytes."""

import json
import os
import sys
from pathlib import Path

import pytest

import stages
from common.measure import ncu
from common.measure.traffic import GPUS
from common.runtime import INTERPRETED
from common.show import profiles

LOG = f"""==PROF== Connected to process 1
"ID","Kernel Name","Block Size","{ncu.READ}","{ncu.WRITTEN}","{ncu.SPILLED}","something.sum"
"","","","byte","byte","sector",""
"0","_case_begins_kernel","(128, 1, 1)","0","0","0","7"
"1","void fill<float>(int, float)","(128, 1, 1)","0","2,048","0","7"
"2","_forward_kernel","(128, 1, 1)","4,000,000","1000000","5000","7"
"3","_case_begins_kernel","(128, 1, 1)","0","0","0","7"
"""
METRICS = (ncu.READ, ncu.WRITTEN, ncu.SPILLED)


def case(kernels, counted, **changes):
    return {
        "impl": "v2_some", "pass": "fwd", "batch": 1, "heads": 2, "seq_len": 64, "head_dim": 16, "causal": True,
        "dtype": "float16", "tuned": {}, "kernels": kernels, "counted": counted, **changes,
    }  # fmt: skip


def launch(name, read, written, **tile):
    return {"name": name, "tile": tile, "read": read, "written": written, "flops": 0}


def test_log_is_split_into_cases():
    assert ncu.parse(LOG, METRICS) == [
        [
            {"name": "void fill<float>(int, float)", ncu.READ: 0, ncu.WRITTEN: 2048, ncu.SPILLED: 0},
            {"name": "_forward_kernel", ncu.READ: 4e6, ncu.WRITTEN: 1e6, ncu.SPILLED: 5000},
        ],
        [],
    ]


def test_table_has_a_row_for_each_kernel_and_one_for_the_operators():
    kernels, _ = ncu.parse(LOG, METRICS)
    counted = [launch("aten.new_zeros", 0, 2000), launch("_forward_kernel", 5_000_000, 800_000, BLOCK_M=128, BLOCK_N=64)]
    info = {"gpu": "X", "torch": "1", "triton": "2", "ncu": "3", "commit": "abc", "date": "2026-01-02"}
    table = profiles.traffic_table({"machine_info": info, "cases": [case(kernels, counted)]})
    rows = [[cell.strip() for cell in line.strip("|").split("|")][6:] for line in table.splitlines() if "v2_some" in line]
    assert rows == [
        ["_forward_kernel 128×64", "5.000", "4.000", "0.800", "0.800", "1.000", "0.160", "1.050"],
        ["PyTorch", "0.000", "0.000", "-", "0.002", "0.002", "0.000", "1.024"],
    ]
    assert all(fact in table for fact in info.values()) and " 2 / 2 |" in table and "memory" not in table


PROFILER = f"""#!{sys.executable}
import json, sys
if "--query-metrics" in sys.argv:
    print("{ncu.READ.removesuffix(".sum")}  Counter  byte\\ndram__bytes_read  Counter  byte")
elif "--version" in sys.argv:
    print("NVIDIA Nsight Compute\\nVersion 1.2.3")
else:
    options = dict(zip(sys.argv[1:], sys.argv[2:]))
    assert options["--metrics"] == "{ncu.READ},{ncu.WRITTEN},{ncu.SPILLED},dram__bytes_read.sum"
    assert "--stage={stages.resolve("v2")},{stages.resolve("v3")}" in sys.argv and "--head-dim=16" in sys.argv
    assert "--heads=4" in sys.argv and "--kv-heads=4,2" in sys.argv and "value-dim" not in str(sys.argv)
    with open(options["--log-file"], "w") as log, open(options["launch"], "w") as cases:
        log.write({LOG!r})
        json.dump([dict(impl="a"), dict(impl="b")], cases)
"""


def test_measuring_saves_the_profiler_s_numbers_of_each_case(tmp_path, monkeypatch):
    path = tmp_path / "ncu"
    path.write_text(PROFILER)
    path.chmod(0o755)
    monkeypatch.setattr(ncu, "DEVICE", "cuda")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    heads = ["--heads=4", "--kv-heads=4,2"]
    ncu.main(["measure", "--stage=v2,v3", "--head-dim", "16", *heads, str(tmp_path / "traffic.json")])
    saved = json.loads((tmp_path / "traffic.json").read_text())
    assert saved["machine_info"]["ncu"] == "Version 1.2.3"
    first, second = ncu.parse(LOG, METRICS)
    assert saved["cases"] == [{"impl": "a", "kernels": first}, {"impl": "b", "kernels": second}]


@pytest.mark.parametrize("counted", [[launch("_other_kernel", 1, 1)], [launch("_forward_kernel", 1, 1)] * 2])
def test_other_kernels_than_were_counted_are_an_error(counted):
    kernels, _ = ncu.parse(LOG, METRICS)
    with pytest.raises(ValueError):
        ncu.pairs(case(kernels, counted))


@pytest.mark.skipif(not INTERPRETED, reason="counts are the interpreter's")
def test_counts_take_the_tiles_that_were_measured(tmp_path):
    name = stages.resolve("v4")
    tuned = {"_dq_kernel": [64, 64], "_dkv_kernel": [16, 32]}
    measured = case([], None, impl=name, tuned=tuned) | {"pass": "bwd"}
    path = tmp_path / "traffic.json"
    path.write_text(json.dumps({"cases": [measured]}))
    ncu.main(["count", str(path)])
    counted = json.loads(path.read_text())["cases"][0]["counted"]
    assert {entry["name"]: list(entry["tile"].values()) for entry in counted} == tuned


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter stands in for the profiler's GPU")
def test_cases_have_the_heads_and_dimensions_asked_for_and_are_counted_with_them(tmp_path, monkeypatch):
    path = tmp_path / "cases.json"
    monkeypatch.setattr(ncu, "show", lambda label, call: None)
    shape = ["--seq-len=32", "--head-dim=16", "--heads=4", "--kv-heads=4,2", "--value-dim=32"]
    ncu.main(["launch", "--stage=v3", *shape, str(path)])
    cases = json.loads(path.read_text())
    assert {(c["pass"], c["causal"], c["heads"], c["kv_heads"], c["head_dim"], c["value_dim"]) for c in cases} == {
        (pass_, causal, 4, kv_heads, 16, 32) for pass_ in ("fwd", "bwd") for causal in (False, True) for kv_heads in (4, 2)
    }
    path.write_text(json.dumps({"cases": [c for c in cases if c["pass"] == "bwd" and not c["causal"]]}))
    ncu.main(["count", str(path)])
    written = [sum(launch_["written"] for launch_ in c["counted"]) for c in json.loads(path.read_text())["cases"]]
    assert written[0] - written[1] == 2 * 32 * (16 + 32) * 2  # two heads of dK and dV


MEASURED = sorted((Path(__file__).parents[2] / "results").glob("traffic-*.json"))


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_committed_counts_of_kernels_are_within_a_tenth_of_what_was_measured(path):
    result = json.loads(path.read_text())
    assert result["cases"] and "dirty" not in result["machine_info"]["commit"]
    for case in result["cases"]:
        for label, counted, measured in ncu.pairs(case):
            if label == "PyTorch":  # only PyTorch's arguments and results are counted
                continue
            both = ncu.comparison(counted, measured)
            where = case["impl"], case["pass"], case["causal"], label
            # A program that reads only a flag of four bytes moves a sector of 32 bytes.
            sectors = 8 if both["read"] <= 4 * GPUS["h200"].num_sms else 1
            assert both["read_measured"] == pytest.approx(sectors * both["read"], rel=0.1), where
            assert both["written_measured"] - both["spilled"] == pytest.approx(both["written"], rel=0.1), where
