"""Measure the rates of one Hopper SM's units with microbenchmarks, in cycles of the SM's clock.

    python -m common.measure.rates --json results/rates-h200.json   # on a Hopper GPU

Each kernel has a loop that repeats one operation. The kernel reads the clock, runs n iterations of the loop, and reads the
clock again. The number n is so large that the loop's start and end hardly change the result. A rate is the median over SMs and
repetitions.
"""

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tabulate import tabulate
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import globaltimer, smid
from triton.runtime.jit import JITFunction

from common.kernels import hopper
from common.kernels.hopper import async_reduce_add, describe_rows, describe_tile, new_barriers
from common.measure import machine, terminal
from common.measure.options import json_path, list_of, one_of, write_json
from common.runtime import INTERPRETED, num_sms

ROWS = gl.constexpr(64)  # number of rows of a warpgroup's tile
COLUMNS = gl.constexpr(64)  # number of columns of a tile in registers
UNROLLED = gl.constexpr(8)  # number of instructions per iteration; each works on a whole tile
# Number of tiles that a program copies in turn. The L2 cache holds them all: 132 programs × 8 tiles × 16 KiB = 17 MB.
L2_TILES = gl.constexpr(8)
RING = gl.constexpr(4)  # number of tiles in shared memory that a loop loads in turn
FIELDS = gl.constexpr(5)  # values that a program records: begin and end in cycles, begin and end in nanoseconds, SM

TARGET_CYCLES = 300_000  # a measured loop takes about this many cycles
FIRST_TURNS = 64  # iterations in each of the first two runs; the second run's time gives the iterations of later runs
REPETITIONS = 7  # number of measured runs, after the first two runs

COPY_BYTES = 192 * 2**10  # bytes of shared memory for all tiles that are copied at the same time


@gluon.jit
def _cycle():
    return gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def _stamp(record_ptr, end: gl.constexpr):
    """Record the time in cycles and in nanoseconds, and the SM's number. `end` is 0 at a loop's begin, 1 at its end."""
    record_ptr += gl.program_id(0) * FIELDS
    gl.store(record_ptr + end, _cycle())
    gl.store(record_ptr + 2 + end, globaltimer())
    gl.store(record_ptr + 4, smid().to(gl.int64))


@gluon.jit
def _meet(barriers, number: gl.constexpr):
    """Wait until all warpgroups have arrived."""
    mbarrier.arrive(barriers.index(number), count=1)
    mbarrier.wait(barriers.index(number), 0)


@gluon.jit
def _mark(clock, end: gl.constexpr, w: gl.constexpr):
    """Record a loop's begin (`end` is 0) or end (1). The warpgroups wait for each other. Then warpgroup 0 reads the clock."""
    record_ptr, barriers, busy = clock
    _meet(barriers, end)
    if w == 0:
        _stamp(record_ptr, end)


@gluon.jit
def _stand_aside(clock):
    """In a warpgroup without work, arrive at both barriers of `_mark`, so that warpgroups with work do not wait forever."""
    record_ptr, barriers, busy = clock
    mbarrier.arrive(barriers.index(0), count=1)
    mbarrier.arrive(barriers.index(1), count=1)


@gluon.jit
def _use(x, sink_ptr):
    """Store the row sums of x, so that the compiler keeps the computation of x."""
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    gl.store(sink_ptr + gl.arange(0, x.shape[0], layout), gl.sum(x.to(gl.float32), 1))


@gluon.jit
def _warpgroup(work: gl.constexpr, arguments, w: gl.constexpr):
    work(*arguments, w)


@gluon.jit
def _warpgroups(work: gl.constexpr, arguments, WARPGROUPS: gl.constexpr, REGISTERS: gl.constexpr):
    """Run `work` in WARPGROUPS warpgroups, two or four. The last argument of `work` is the warpgroup's number."""
    if WARPGROUPS == 2:
        gl.warp_specialize([(_warpgroup, (work, arguments, 0)), (_warpgroup, (work, arguments, 1))], [4], [REGISTERS])
    else:
        gl.warp_specialize(
            [
                (_warpgroup, (work, arguments, 0)),
                (_warpgroup, (work, arguments, 1)),
                (_warpgroup, (work, arguments, 2)),
                (_warpgroup, (work, arguments, 3)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )


@gluon.jit(do_not_specialize=["n", "depth", "own"])
def _copy_in_kernel(record_ptr, n, desc, depth, own, STAGES: gl.constexpr):
    """Copy n tiles to shared memory, `depth` at a time.

    If `own` is 1, each program copies its own tiles. If `own` is 0, all programs copy the same tiles.
    """
    buffers = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_shape, desc.layout)
    full = new_barriers(STAGES, 1)
    first = gl.program_id(0) * own * L2_TILES
    slot = 0
    phase = 0
    _stamp(record_ptr, 0)
    for i in range(n):
        mbarrier.wait(full.index(slot), phase ^ 1)
        mbarrier.expect(full.index(slot), desc.block_type.nbytes)
        start = (first + i % L2_TILES) * desc.block_shape[2]
        tma.async_copy_global_to_shared(desc, [0, 0, start, 0], full.index(slot), buffers.index(slot))
        slot += 1
        if slot == depth:
            slot = 0
            phase ^= 1
    for _ in range(depth):
        mbarrier.wait(full.index(slot), phase ^ 1)
        slot += 1
        if slot == depth:
            slot = 0
            phase ^= 1
    _stamp(record_ptr, 1)


@gluon.jit(do_not_specialize=["n", "own"])
def _copy_out_kernel(record_ptr, n, desc, own, PENDING: gl.constexpr, ADD: gl.constexpr):
    """Copy a tile from shared to global memory n times. With ADD, add the tile to global memory instead.

    Up to PENDING earlier copies may still read the tile when the next copy is issued.
    """
    tile = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    first = gl.program_id(0) * own * L2_TILES
    _stamp(record_ptr, 0)
    for i in range(n):
        start = (first + i % L2_TILES) * desc.block_shape[-2]
        if ADD:
            async_reduce_add(desc, [start, 0], tile)
        else:
            tma.async_copy_shared_to_global(desc, [0, 0, start, 0], tile)
        tma.store_wait(PENDING)
    tma.store_wait(0)
    _stamp(record_ptr, 1)


@gluon.jit
def _multiply(clock, n, sink_ptr, tiles, A: gl.constexpr, PENDING: gl.constexpr, w: gl.constexpr):
    """Issue n matmuls on one accumulator. Up to PENDING earlier matmuls may still run when the next one is issued."""
    record_ptr, barriers, busy = clock
    a_s, b_s = tiles
    N: gl.constexpr = b_s.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    if w < busy:
        a = a_s.index(w)
        if A == "registers":
            a = a.load(a_layout)
        elif A == "transposed":
            a = a.permute([1, 0])
        acc = gl.zeros([ROWS, N], gl.float32, layout)
        _mark(clock, 0, w)
        for _ in range(n):
            acc = warpgroup_mma(a, b_s, acc, is_async=True)
            acc = warpgroup_mma_wait(PENDING, [acc])
        acc = warpgroup_mma_wait(0, [acc])
        _mark(clock, 1, w)
        _use(acc, sink_ptr)
    else:
        _stand_aside(clock)


@gluon.jit(do_not_specialize=["n", "busy"])
def _matmul_kernel(
    record_ptr, n, sink_ptr, busy, N: gl.constexpr, K: gl.constexpr, A: gl.constexpr, PENDING: gl.constexpr,
    WARPGROUPS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    a_shape: gl.constexpr = [K, ROWS] if A == "transposed" else [ROWS, K]
    b_shape: gl.constexpr = [N, K] if A == "shared" else [K, N]  # like a tile of K in Q Kᵀ, or like a tile of V in P V
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(a_shape, gl.float16)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(b_shape, gl.float16)
    a_s = gl.allocate_shared_memory(gl.float16, [WARPGROUPS] + a_shape, a_layout)
    b_s = gl.allocate_shared_memory(gl.float16, b_shape, b_layout)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for w in gl.static_range(WARPGROUPS):
        a_s.index(w).store(gl.zeros(a_shape, gl.float16, layout))
    b_s.store(gl.zeros(b_shape, gl.float16, layout))
    fence_async_shared()
    if A == "shared":
        b_s = b_s.permute([1, 0])
    clock = (record_ptr, new_barriers(2, WARPGROUPS), busy)
    _warpgroups(_multiply, (clock, n, sink_ptr, (a_s, b_s), A, PENDING), WARPGROUPS, REGISTERS)


@gluon.jit
def _instruct(clock, n, sink_ptr, ASM: gl.constexpr, w: gl.constexpr):
    """Execute an instruction on every element of two tiles in registers, x and y.

    The results replace x and y in turn.
    """
    record_ptr, barriers, busy = clock
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    if w < busy:
        columns = (n + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))).to(gl.float32)
        x = columns[None, :] + gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        y = x - 1
        _mark(clock, 0, w)
        for i in range(n):
            for _ in gl.static_range(UNROLLED // 2):
                x = gl.inline_asm_elementwise(ASM, "=f,f,f,r", [x, y, i], gl.float32, is_pure=True, pack=1)
                y = gl.inline_asm_elementwise(ASM, "=f,f,f,r", [y, x, i >> 1], gl.float32, is_pure=True, pack=1)
        _mark(clock, 1, w)
        _use(x + y, sink_ptr)
    else:
        _stand_aside(clock)


@gluon.jit(do_not_specialize=["n", "busy"])
def _instruction_kernel(record_ptr, n, sink_ptr, busy, ASM: gl.constexpr):
    clock = (record_ptr, new_barriers(2, 4), busy)
    _warpgroups(_instruct, (clock, n, sink_ptr, ASM), 4, 128)


@gluon.jit
def _load_shared(clock, n, sink_ptr, tiles_s, ROW: gl.constexpr, w: gl.constexpr):
    """Load RING tiles n times from shared memory to registers, in the layout of a matmul's first operand.

    With ROW, each tile is a single row, and the loop loads it in the layout of a matmul's result.
    """
    record_ptr, barriers, busy = clock
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiles_s.shape[2], 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma_layout, k_width=2)
    layout: gl.constexpr = mma_layout if ROW else operand
    if w < busy:
        mixed = tiles_s.index(0).load(layout)
        _mark(clock, 0, w)
        for i in range(n):
            for j in gl.static_range(RING):  # the order depends on i, so that the compiler cannot load each tile only once
                x = tiles_s.index((i + j) % RING).load(layout)
                mixed = gl.inline_asm_elementwise(
                    "xor.b32 $0, $1, $2;", "=r,r,r", [mixed, x], x.dtype, is_pure=True, pack=1 if ROW else 2
                )
        _mark(clock, 1, w)
        _use(mixed, sink_ptr)
    else:
        _stand_aside(clock)


@gluon.jit(do_not_specialize=["n", "busy"])
def _load_shared_kernel(record_ptr, n, sink_ptr, busy, N: gl.constexpr, ROW: gl.constexpr):
    dtype: gl.constexpr = gl.float32 if ROW else gl.float16
    shape: gl.constexpr = [1 if ROW else ROWS, N]
    plain: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    layout: gl.constexpr = plain if ROW else gl.NVMMASharedLayout.get_default_for(shape, dtype)
    tiles_s = gl.allocate_shared_memory(dtype, [RING] + shape, layout)
    for i in gl.static_range(RING):
        tiles_s.index(i).store(gl.zeros(shape, dtype, gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])))
    clock = (record_ptr, new_barriers(2, 4), busy)
    _warpgroups(_load_shared, (clock, n, sink_ptr, tiles_s, ROW), 4, 128)


@gluon.jit
def _store_shared(clock, n, first_s, second_s, FENCE: gl.constexpr, w: gl.constexpr):
    """Store a tile from registers to two places in shared memory, n times. The tile has the layout of a matmul's result.

    A float32 tile is stored in register order, as some stages store dQ. With FENCE, a fence follows each store.
    """
    record_ptr, barriers, busy = clock
    N: gl.constexpr = first_s.shape[1] * first_s.shape[2] // ROWS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    if w < busy:
        x = gl.zeros([ROWS, N], first_s.dtype, layout)
        if first_s.dtype == gl.float32:
            x = x.reshape([4, 2, 8, N // 8, 4, 2]).permute([0, 3, 2, 4, 1, 5]).reshape([first_s.shape[1], first_s.shape[2]])
        _mark(clock, 0, w)
        for _ in range(n):
            first_s.index(w).store(x)
            if FENCE:
                fence_async_shared()
            second_s.index(w).store(x)
            if FENCE:
                fence_async_shared()
        _mark(clock, 1, w)
    else:
        _stand_aside(clock)


@gluon.jit(do_not_specialize=["n", "busy"])
def _store_shared_kernel(record_ptr, n, busy, N: gl.constexpr, SUMS: gl.constexpr, FENCE: gl.constexpr):
    dtype: gl.constexpr = gl.float32 if SUMS else gl.float16
    shape: gl.constexpr = [ROWS * N // 256, 256] if SUMS else [ROWS, N]
    plain: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    layout: gl.constexpr = plain if SUMS else gl.NVMMASharedLayout.get_default_for(shape, dtype)
    first_s = gl.allocate_shared_memory(dtype, [4] + shape, layout)
    second_s = gl.allocate_shared_memory(dtype, [4] + shape, layout)
    clock = (record_ptr, new_barriers(2, 4), busy)
    _warpgroups(_store_shared, (clock, n, first_s, second_s, FENCE), 4, 128)


@gluon.jit
def _idle():
    """Do nothing. The default partition, which has no work, runs this function."""


@gluon.jit
def _call(record_ptr, n, there, back):
    _stamp(record_ptr, 0)
    for i in range(n):
        mbarrier.arrive(there.index(0), count=1)
        mbarrier.wait(back.index(0), i & 1)
    _stamp(record_ptr, 1)


@gluon.jit
def _answer(n, there, back):
    for i in range(n):
        mbarrier.wait(there.index(0), i & 1)
        mbarrier.arrive(back.index(0), count=1)


@gluon.jit(do_not_specialize=["n"])
def _barrier_kernel(record_ptr, n, CALLER: gl.constexpr, ANSWERER: gl.constexpr):
    """Let CALLER warps and ANSWERER warps wait for each other in turn, n times each."""
    there = new_barriers(1, 1)
    back = new_barriers(1, 1)
    gl.warp_specialize(
        [(_idle, ()), (_call, (record_ptr, n, there, back)), (_answer, (n, there, back))], [CALLER, ANSWERER], [64, 64]
    )


@gluon.jit(do_not_specialize=["n"])
def _synchronise_kernel(record_ptr, n, WHAT: gl.constexpr):
    """Execute one synchronization instruction n times. The instruction never has to wait."""
    barriers = new_barriers(2, 1)
    _stamp(record_ptr, 0)
    for _ in range(n):
        if WHAT == "arrive":
            mbarrier.arrive(barriers.index(0), count=1)
        elif WHAT == "wait":
            mbarrier.wait(barriers.index(1), 1)
        else:
            fence_async_shared()
    _stamp(record_ptr, 1)


INSTRUCTIONS = {  # name -> (PTX, number of results); $0 is the result, $1 and $2 are registers, $3 is an integer that changes
    "exp2": ("ex2.approx.ftz.f32 $0, $1;", 1),
    "multiply-add": ("fma.rn.f32 $0, $1, $2, $1;", 1),
    "multiply": ("mul.f32 $0, $1, $2;", 1),
    "add": ("add.f32 $0, $1, $2;", 1),
    "max": ("max.f32 $0, $1, $2;", 1),
    "select": ("{ .reg .pred p; setp.ne.b32 p, $3, 0; selp.f32 $0, $1, $2, p; }", 1),
    "compare and select": ("{ .reg .pred p; setp.gt.f32 p, $1, $2; selp.f32 $0, $2, $1, p; }", 1),
    "to float16": ("{ .reg .b32 t; cvt.rn.f16x2.f32 t, $1, $2; mov.b32 $0, t; }", 2),
    "to bfloat16": ("{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $1, $2; mov.b32 $0, t; }", 2),
    "from float16": ("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.f32.f16 $0, lo; }", 1),
    # A register holds two bfloat16 elements. A multiplication unpacks the low one, and a mask unpacks the high one. $2 is an
    # input only so that the compiler cannot merge several such instructions into one.
    "from bfloat16, low": (
        "{ .reg .b32 t, u; mov.b32 t, $1; mov.b32 u, $2; mad.lo.u32 t, t, $3, u; mov.b32 $0, t; }", 1,
    ),
    "from bfloat16, high": (
        "{ .reg .b32 t, u; mov.b32 t, $1; mov.b32 u, $2; lop3.b32 t, t, 0xffff0000, u, 0x6a; mov.b32 $0, t; }", 1,
    ),
    "shuffle": ("shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;", 1),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A rate to measure. `amount` says how much an iteration of the kernel's loop does, such as the number of copied bytes."""

    name: str
    kernel: JITFunction  # its arguments are the record, the number of iterations, and `arguments`
    arguments: tuple
    options: dict
    amount: float
    per: str  # the rate's unit: "cycles" means cycles / amount, and "… a cycle" means amount / cycles
    programs: int  # number of programs; each runs on its own SM
    warpgroups: int | None = None  # number of warpgroups with work, or None if the kernel has no such argument

    def launch(self, record: torch.Tensor, turns: int):
        """Run `turns` iterations of the loop in each program. `record`, an int64 tensor [programs, FIELDS], gets the times."""
        self.kernel[(self.programs,)](record, turns, *self.arguments, **self.options)

    def rate(self, cycles: float, turns: int) -> float:
        """Return the rate if `turns` iterations of the loop took `cycles`."""
        return cycles / (self.amount * turns) if self.per == "cycles" else self.amount * turns / cycles


def _copies_in(device, programs) -> Iterator[Case]:
    for rows, columns in ((64, 64), (128, 64), (64, 128), (128, 128), (64, 256)):
        tensor = torch.zeros(1, 1, programs * L2_TILES.value * rows, columns, dtype=torch.float16, device=device)
        desc = describe_tile(tensor, rows)
        nbytes = rows * columns * tensor.element_size()
        most = min(16, COPY_BYTES // nbytes)
        what, options = f"{rows}x{columns}", {"STAGES": most, "num_warps": 1}
        yield Case(f"{what}, from issue to barrier", _copy_in_kernel, (desc, 1, 1), options, 1, "cycles", 1)
        for depth, own, on in ((2, 1, 1), (most, 1, 1), (most, 1, programs), (most, 0, programs)):
            name = f"{what}, {depth} at a time, {'own tiles' if own else 'the same tiles'}"
            yield Case(name, _copy_in_kernel, (desc, depth, own), options, nbytes, "bytes a cycle", on)


def _copies_out(device, programs) -> Iterator[Case]:
    for rows, columns, add in ((64, 64, False), (64, 128, False), (16, 256, True)):
        if add:
            tensor = torch.zeros(programs * L2_TILES.value * rows, columns, device=device)
            desc = describe_rows(tensor, rows)
        else:
            tensor = torch.zeros(1, 1, programs * L2_TILES.value * rows, columns, dtype=torch.float16, device=device)
            desc = describe_tile(tensor, rows)
        nbytes = rows * columns * tensor.element_size()
        what, options = f"{rows}x{columns}{' float32, added' if add else ''}", {"ADD": add, "num_warps": 1}
        one, two = options | {"PENDING": 0}, options | {"PENDING": 1}
        yield Case(f"{what}, from issue to its last byte read", _copy_out_kernel, (desc, 1), one, 1, "cycles", 1)
        for own, on in ((1, 1), (1, programs), (0, programs)):
            name = f"{what}, 2 at a time, {'own tiles' if own else 'the same tiles'}"
            yield Case(name, _copy_out_kernel, (desc, own), two, nbytes, "bytes a cycle", on)


def _matmuls(device, programs) -> Iterator[Case]:
    sink = torch.zeros(ROWS.value, device=device)
    shapes = {  # where the first operand A is -> (N, K) of the measured matmuls
        "shared": ((64, 16), (64, 64), (64, 128), (64, 256), (128, 16), (128, 64), (128, 128)),
        "registers": ((64, 64), (64, 128), (128, 64), (128, 128), (256, 64)),
        "transposed": ((64, 64),),
    }
    for a, n, k in ((a, n, k) for a, of_a in shapes.items() for n, k in of_a):
        most, registers = (2, 240) if n == 256 else (4, 128)
        shape = {"N": n, "K": k, "A": a, "WARPGROUPS": most, "REGISTERS": registers, "num_warps": 4, "maxnreg": registers}
        name = f"64x{n}x{k}, A {'in registers' if a == 'registers' else a}"
        options = shape | {"PENDING": 0}
        yield Case(f"{name}, from issue to its end", _matmul_kernel, (sink, 1), options, 1, "cycles", programs, 1)
        for busy in (1, 2, 4)[: most // 2 + 1]:
            options = shape | {"PENDING": 1}
            yield Case(name, _matmul_kernel, (sink, busy), options, busy, "cycles", programs, busy)


def _instructions(device, programs) -> Iterator[Case]:
    sink = torch.zeros(ROWS.value, device=device)
    for (name, (asm, results)), busy in itertools.product(INSTRUCTIONS.items(), (1, 2, 3, 4)):
        options = {"ASM": asm, "num_warps": 4, "maxnreg": 128}
        amount = busy * ROWS.value * COLUMNS.value * UNROLLED.value * results
        yield Case(name, _instruction_kernel, (sink, busy), options, amount, "results a cycle", programs, busy)


def _shared_memory(device, programs) -> Iterator[Case]:
    sink = torch.zeros(ROWS.value, device=device)
    loops = []  # (name, kernel, arguments, options, bytes per iteration of one warpgroup)
    for n in (64, 128):
        nbytes = RING.value * ROWS.value * n * 2
        loops.append((f"load an operand, 64x{n}", _load_shared_kernel, (sink,), {"N": n, "ROW": False}, nbytes))
        nbytes = RING.value * 4 * n * 4  # each of the four warps loads the whole row, in float32
        loops.append((f"load a row, {n}", _load_shared_kernel, (sink,), {"N": n, "ROW": True}, nbytes))
    for n, sums, fence in ((64, False, False), (64, False, True), (128, False, False), (128, False, True), (64, True, False)):
        nbytes = 2 * ROWS.value * n * (4 if sums else 2)
        name = f"store {'sums' if sums else 'a result'}, 64x{n}{', and a fence' if fence else ''}"
        loops.append((name, _store_shared_kernel, (), {"N": n, "SUMS": sums, "FENCE": fence}, nbytes))
    for (name, kernel, arguments, options, nbytes), busy in itertools.product(loops, (1, 2, 4)):
        options = options | {"num_warps": 4, "maxnreg": 128}
        arguments = *arguments, busy
        yield Case(name, kernel, arguments, options, busy * nbytes, "bytes a cycle", programs, busy)


def _barriers(device, programs) -> Iterator[Case]:
    for caller, answerer in ((1, 1), (4, 1), (4, 4)):
        options = {"CALLER": caller, "ANSWERER": answerer, "num_warps": 4, "maxnreg": 64}
        name = f"from an arrival to the end of a wait, {caller} and {answerer} warps in turn"
        yield Case(name, _barrier_kernel, (), options, 2, "cycles", programs)
    for what, warps in itertools.product(("arrive", "wait", "fence"), (1, 4)):
        options = {"WHAT": what, "num_warps": warps}
        yield Case(f"{what}, {warps} at once, nothing to wait for", _synchronise_kernel, (), options, 1, "cycles", programs)


UNITS = {
    "copy-in": _copies_in,
    "copy-out": _copies_out,
    "tensor-cores": _matmuls,
    "instructions": _instructions,
    "shared-memory": _shared_memory,
    "barriers": _barriers,
}


def measure(case: Case) -> dict:
    """Measure a case. Return the case's entry of the results file, without the key "unit"."""
    record = torch.zeros(case.programs, FIELDS.value, dtype=torch.int64, device="cuda")
    turns = FIRST_TURNS
    rates, clocks = [], []
    for repetition in range(-2, REPETITIONS):  # run -2 compiles, and run -1 finds the number of iterations
        case.launch(record, turns)
        begins, ends, begins_ns, ends_ns, on = record.cpu().unbind(1)
        if len(set(on.tolist())) != case.programs:
            raise RuntimeError(f"{case.name}: two programs shared an SM")
        cycles = (ends - begins).tolist()
        if repetition == -1:
            turns = max(FIRST_TURNS, math.ceil(TARGET_CYCLES * FIRST_TURNS / max(cycles)))
        if repetition >= 0:
            rates += [case.rate(each, turns) for each in cycles]
            clocks += ((ends - begins) / (ends_ns - begins_ns)).tolist()
    low, *_, high = statistics.quantiles(rates, n=10, method="inclusive")
    return {
        "name": case.name, "num_sms": case.programs, "warpgroups": case.warpgroups,
        "value": statistics.median(rates), "per": case.per, "low": low, "high": high, "ghz": statistics.median(clocks),
        "turns": turns,
    }  # fmt: skip


def table(rates: list[dict]) -> str:
    """Format the results of `measure` as a table with one row per rate."""
    headers = "unit", "what", "SMs", "warpgroups", "rate", "", "10 % to 90 %", "GHz"
    rows = [
        [
            rate["unit"], rate["name"], rate["num_sms"], rate["warpgroups"], f"{rate['value']:.4g}", rate["per"],
            f"{rate['low']:.4g} to {rate['high']:.4g}", f"{rate['ghz']:.2f}",
        ]
        for rate in rates
    ]  # fmt: skip
    return tabulate(rows, headers=headers, disable_numparse=True)


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    parser = argparse.ArgumentParser(
        prog="python -m common.measure.rates",
        description="Measure the rates of a Hopper SM's units. LIST is comma-separated.",
    )
    names = {name: name for name in UNITS}
    parser.add_argument(
        "--unit",
        type=list_of(one_of(names)),
        default=",".join(names),
        metavar="LIST",
        help="units to measure (default: %(default)s)",
    )
    parser.add_argument("--json", type=json_path, metavar="FILE", help="also write the rates to FILE")
    options = parser.parse_args(argv)
    if reason := "needs a Hopper GPU (sm_90)" if INTERPRETED else hopper.unavailable():
        raise SystemExit(f"common.measure.rates {reason}")
    rates = []
    for name in options.unit:
        for case in UNITS[name]("cuda", num_sms()):
            print(f"\r{name}: {case.name}\033[K", end="", file=sys.stderr, flush=True)
            rates.append({"unit": name, **measure(case)})
    print(file=sys.stderr)
    print(table(rates))
    if options.json:
        write_json(options.json, {"machine_info": machine.facts(), "rates": rates})


if __name__ == "__main__":
    main(sys.argv[1:])
