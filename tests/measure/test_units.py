"""The profiler's numbers about busy units and stalled warps become a table."""

from common.measure import units
from common.show import profiles

INFO = {"gpu": "X", "torch": "1", "triton": "2", "ncu": "3", "commit": "abc", "date": "2026-01-02"}


def kernel(name, ns, **stalls):
    percents = {metric: 10.0 * number for number, metric in enumerate(units.UNITS.values(), start=1)}
    return {"name": name, units.TIME: ns, units.CLOCK: 1.5e9, units.REGISTERS: 168, **percents} | {
        units.STALL.format(reason): value for reason, value in stalls.items()
    }


def test_table_has_a_row_for_each_kernel_that_takes_time():
    kernels = [
        kernel("void at::native::fill<float>(int)", 1e3, wait=1),
        kernel("_forward_kernel", 2.5e6, wait=2.0, barrier=5.0, long_scoreboard=3.0),
    ]
    case = {"impl": "v6_some", "pass": "fwd", "seq_len": 4096, "head_dim": 64, "causal": True, "kernels": kernels}
    table = profiles.units_table({"machine_info": INFO, "cases": [case]})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "v6_some" in line]
    busy = ["10", "20", "30", "40", "50", "60"]
    waiting = "barrier 50 %, long scoreboard 30 %"
    assert rows == [["forward", "64", "causal", "v6_some", "_forward_kernel", "2.500", "1.50", "168", *busy, waiting]]
    assert all(fact in table for fact in INFO.values())
