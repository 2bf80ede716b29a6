"""Measure a Hopper GPU's rates, with which `common.measure.traffic` predicts times.

    make ceilings FILE=results/ceilings-h100.json   # on a Hopper GPU

The four rates are those of a large matmul, of a large copy in memory, of reads from the L2 cache, and of empty kernels.
"""

import statistics
import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from common.kernels.hopper import describe_tile, new_barriers
from common.measure import machine
from common.measure.options import command, require_hopper, write_json
from common.measure.timing import GpuTimer, copy_gbps, matmul_tflops
from common.runtime import DEVICE, num_sms

ROWS, COLUMNS = 128, 64  # the shape of a tile, 16 KiB
TILES = gl.constexpr(8)  # number of tiles that a program reads in turn; the L2 cache holds those of all programs, 17 MB
STAGES = gl.constexpr(12)  # number of copies at the same time; their 192 KiB of shared memory leave room for one CTA an SM
COPIES = 2**14  # number of copies of a program
LAUNCHES = 20  # number of kernels in a row


@gluon.jit(do_not_specialize=["n"])
def _read_kernel(desc, n):
    """Copy n tiles to shared memory, STAGES at a time. Each program copies its own TILES tiles in turn."""
    buffers = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_shape, desc.layout)
    full = new_barriers(STAGES, 1)
    slot = 0
    phase = 0
    for i in range(n):
        mbarrier.wait(full.index(slot), phase ^ 1)  # the slot's earlier copy is done
        mbarrier.expect(full.index(slot), desc.block_type.nbytes)
        start = (gl.program_id(0) * TILES + i % TILES) * desc.block_shape[2]
        tma.async_copy_global_to_shared(desc, [0, 0, start, 0], full.index(slot), buffers.index(slot))
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    for _ in range(STAGES):
        mbarrier.wait(full.index(slot), phase ^ 1)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1


def read_l2(programs: int, copies: int):
    """Return a call that reads tiles from the L2 cache, and the number of bytes that the call reads."""
    tiles = torch.randn(1, 1, programs * TILES.value * ROWS, COLUMNS, device=DEVICE).to(torch.float16)
    desc = describe_tile(tiles, ROWS)
    return lambda: _read_kernel[(programs,)](desc, copies, num_warps=1), programs * copies * ROWS * COLUMNS * 2


def l2_gbps(timer: GpuTimer) -> float:
    """Measure the GB/s at which all SMs together read from the L2 cache. No tile is read by two SMs."""
    call, nbytes = read_l2(num_sms(), COPIES)
    return nbytes / statistics.median(timer.measure(call)[0]) / 1e9


def launch_us(timer: GpuTimer) -> float:
    """Measure the microseconds that one more nearly empty kernel adds to a queue of kernels."""
    x = torch.zeros(1, device="cuda")

    def seconds(launches):
        def call():
            for _ in range(launches):
                x.add_(1)

        return statistics.median(timer.measure(call)[0])

    return 1e6 * (seconds(2 * LAUNCHES) - seconds(LAUNCHES)) / LAUNCHES


def main(argv: list[str]):
    """Run the command line."""
    options = command("common.measure.ceilings", __doc__, "the JSON file to write").parse_args(argv)
    require_hopper("common.measure.ceilings")
    timer = GpuTimer()
    found = {
        "matmul_tflops": {name: matmul_tflops(timer, getattr(torch, name)) for name in ("float16", "bfloat16")},
        "hbm_gbps": copy_gbps(timer),
        "l2_gbps": l2_gbps(timer),
        "launch_us": launch_us(timer),
    }
    print(found)
    write_json(options.file, {"machine_info": machine.facts(), **found})


if __name__ == "__main__":
    main(sys.argv[1:])
