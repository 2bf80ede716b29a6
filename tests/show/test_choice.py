"""The table that recommends a stage for each GPU has the right cells."""

import json

import pytest

import stages
from common.measure.aot import SHARED_LIMIT
from common.show import choice
from common.show.results import CHOICE

V2, V3, V7, V12 = map(stages.resolve, ("v2", "v3", "v7", "v12"))


def rows(table):
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    return {line[0]: line[1:] for line in lines[1:]}


def made(us, problems=()):
    compiled = [
        {"stage": name, "arch": arch, "problem": "does not fit" if (name, arch) in problems else None}
        for arch in choice.FAMILIES for name in (V2, V3, V7, V12)
    ]  # fmt: skip
    counted = [{"stage": n, "gpu": g, "head_dim": d, "pass": p, "us": t} for (n, g, d, p), t in us.items()]
    machine = {"triton": "9", "commit": "abc", "date": "2026-01-02"}
    return {"compiled": compiled, "counted": counted, "seq_len": 7, "machine_info": machine}


def test_cells_are_times_of_tuned_tiles_over_fixed_ones():
    us = {
        (V7, "a100", 64, "fwd"): 6.0,
        (V3, "a100", 64, "fwd"): 2.0,
        (V7, "a100", 128, "bwd"): 1.0,
        (V3, "a100", 128, "bwd"): 4.0,
    }
    table = choice.choice_table(made(us, problems={(V12, arch) for arch in choice.FAMILIES if arch != 90}))
    assert rows(table)["sm_80"][1:] == ["v2 to v7", "v3", "3.00, -", "-, 0.25"]
    assert rows(table)["sm_90"][1:3] == ["v2 to v12", "v12"]
    assert rows(table)["sm_86"][1:] == ["v2 to v7", "v3", "-, -", "-, -"]
    assert "v7's time divided by v3's" in table and "S = 7" in table


@pytest.mark.parametrize(("arch", "version"), [(80, "v3"), (86, "v3"), (89, "v3"), (100, "v7"), (120, "v7")])
def test_the_recommended_stage_runs_there(arch, version):
    assert stages.version(choice.recommended(arch)) == version
    found = [
        r for r in json.loads(CHOICE.read_text())["compiled"] if r["arch"] == arch and r["stage"] == stages.resolve(version)
    ]
    assert {record["head_dim"] for record in found} == {64, 128}
    assert all(record["problem"] is None and record["shared_bytes"] <= SHARED_LIMIT[arch] for record in found)


def test_the_recommended_stage_is_faster_at_peak_than_the_other():
    """On GPUs before Hopper, v4 to v7 have small tiles, so they move more bytes than v3. `common.kernels.tuning` says why."""
    us = {(r["stage"], r["gpu"], r["head_dim"], r["pass"]): r["us"] for r in json.loads(CHOICE.read_text())["counted"]}
    for head_dim, pass_ in ((64, "fwd"), (64, "bwd"), (128, "fwd"), (128, "bwd")):
        assert us[V7, "a100", head_dim, pass_] > 1.5 * us[V3, "a100", head_dim, pass_]
        assert us[V7, "h200", head_dim, pass_] < 1.5 * us[V3, "h200", head_dim, pass_]
