"""The Gluon interpreter runs small kernels in many orders of events. It finds a planted mistake in every order.

A kernel with `MISTAKE` = "none" is correct.
"""

import itertools
import linecache
import os
import re
import threading
import time

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.interpreter import InterpreterError

from common.interpreter.schedule import VARIABLE, restart_seeds
from common.interpreter.shared import _inside, _overlap, _Part
from common.kernels.hopper import async_reduce_add, new_barriers, new_ring, reduce_add, stored_wait
from common.measure.counter import count
from common.runtime import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the interpreter is not in use here")

SEEDS = range(20)
SIZE = gl.constexpr(16)  # number of rows and of columns of a tile
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0]))
SHARED = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)


@pytest.fixture(autouse=True)
def _no_seed_for_all(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def tiles(number):
    """Return a tensor of `number` tiles, one below the other. The elements are small integers, so all arithmetic is exact."""
    return torch.randint(-4, 5, (number * SIZE.value, SIZE.value)).half()


def describe(tensor, padding="zero"):
    return TensorDescriptor.from_tensor(tensor, [SIZE.value, SIZE.value], SHARED, padding=padding)


def launch(kernel, *arguments, seed, programs=1):
    restart_seeds(seed)
    kernel[(programs,)](*arguments)


def error(kernel, *arguments, seed):
    """Return the interpreter's message for a kernel with a mistake. A line's text replaces the line's number."""
    with pytest.raises(InterpreterError) as caught:
        launch(kernel, *arguments, seed=seed)
    message = str(caught.value)
    place = r"test_gluon\.py:(\d+), in _\w+ \(program 0(?:, partition \d: _\w+)?\)"
    assert re.search(place, message), message
    assert message.endswith(f"\n{VARIABLE}={os.environ.get(VARIABLE, seed)} replays this order"), message
    return re.sub(
        r"interpreter/test_gluon\.py:(\d+)", lambda found: linecache.getline(__file__, int(found[1])).strip(), message
    )


def check_errors(expected, kernel, *arguments, seeds=SEEDS[:10]):
    """Assert that every seed gives an error, and that the regular expression `expected` matches the error's message."""
    for seed in seeds:
        message = error(kernel, *arguments, seed=seed)
        assert re.search(expected, message), message


# --- copies into a ring of buffers, and copies back to memory


@gluon.jit
def _fill(x_desc, x_s, full, empty, count, MISTAKE: gl.constexpr):
    nbytes: gl.constexpr = x_desc.block_type.nbytes
    more: gl.constexpr = 32 if MISTAKE == "more bytes" else -32 if MISTAKE == "fewer bytes" else 0
    for i in range(count):
        slot = i % 2
        mbarrier.wait(empty.index(slot), (i // 2 & 1) ^ 1)
        mbarrier.expect(full.index(slot), nbytes + more)
        if MISTAKE != "no copy":
            tma.async_copy_global_to_shared(x_desc, [i * SIZE, 0], full.index(slot), x_s.index(slot))
        if MISTAKE == "store beside a copy":
            x_s.index(slot).store(gl.zeros([SIZE, SIZE], x_s.dtype, LAYOUT))


@gluon.jit
def _double(out_desc, x_s, out_s, full, empty, count, MISTAKE: gl.constexpr):
    for i in range(count):
        slot = i % 2
        if MISTAKE != "no wait for the copy":
            mbarrier.wait(full.index(i if MISTAKE == "barrier outside" else slot), i // 2 & 1)
        if MISTAKE == "arrives early":
            mbarrier.arrive(empty.index(slot), count=1)
        x = x_s.index(i if MISTAKE == "buffer outside" else slot).load(LAYOUT)
        if MISTAKE != "no arrival" and MISTAKE != "arrives early":
            mbarrier.arrive(empty.index(slot), count=2 if MISTAKE == "two arrivals" else 1)
        if MISTAKE != "no wait for the store":
            tma.store_wait(0)
        out_s.store(x * 2)
        if MISTAKE != "no fence":
            fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [(i - 1 if MISTAKE == "store before" else i) * SIZE, 0], out_s)
    if MISTAKE != "no last wait":
        tma.store_wait(0)


@gluon.jit
def _double_kernel(x_desc, out_desc, count, MISTAKE: gl.constexpr):
    x_s = gl.allocate_shared_memory(x_desc.dtype, [2, SIZE, SIZE], x_desc.layout)
    out_s = gl.allocate_shared_memory(x_desc.dtype, [SIZE, SIZE], x_desc.layout)
    full, empty = new_ring(2, 1, 1)
    if MISTAKE == "no init":
        full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    reader = (out_desc, x_s, out_s, full, empty, count, MISTAKE)
    gl.warp_specialize([(_double, reader), (_fill, (x_desc, x_s, full, empty, count, MISTAKE))], [1], [24])


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_through_a_ring_of_buffers(seed):
    x = tiles(5)
    out = torch.empty_like(x)
    launch(_double_kernel, describe(x), describe(out), 5, "none", seed=seed)
    assert torch.equal(out, x * 2)


WAIT_FULL, WAIT_EMPTY = (rf"mbarrier.wait\({row}.*, in " for row in ("full", "empty"))
COPY, LOAD, SAVE = (re.escape(start) + r".*, in " for start in ("tma.async_copy_global", "x = x_s.", "tma.async_copy_shared"))
FILL, DOUBLE = r"_fill \(program 0, partition 2: _fill\)", r"_double \(program 0, partition 1: _double\)"
IN_COPIES = {
    "no copy": rf"{WAIT_FULL}{DOUBLE} waits for full\[0\], phase 0: 0 of 1 arrivals and 512 bytes are missing\n",
    "no arrival": rf"{WAIT_EMPTY}{FILL} waits for empty\[0\], phase 0: 1 of 1 arrivals and 0 bytes are missing\n",
    "more bytes": rf"{WAIT_FULL}{DOUBLE} waits for full\[0\], phase 0: 0 of 1 arrivals and 32 bytes are missing\n",
    "fewer bytes": rf"{COPY}{FILL}: a copy brings 512 bytes to full\[0\], which expects 480 more\n",
    "two arrivals": rf"mbarrier.arrive.*, in {DOUBLE}: empty\[0\] gets 2 more arrivals, but its phase had all 1 already\n",
    "no init": rf"(mbarrier.expect.*, in {FILL}|{WAIT_FULL}{DOUBLE}): full\[0\] has had no mbarrier.init\n",
    "barrier outside": rf"{WAIT_FULL}{DOUBLE}: index 2 is out of range: full has 2 entries\n",
    "buffer outside": rf"{LOAD}{DOUBLE}: index 2 is out of range: x_s has 2 entries\n",
    "no wait for the copy": rf"{LOAD}{DOUBLE}: (a load reads x_s\[0\], which was not fully written|"
    rf"race: a load reads x_s\[0\], and a copy may still write it: {COPY}{FILL})\n",
    "store beside a copy": rf"x_s.*, in {FILL}: race: a store writes x_s\[0\], and a copy may still write it: {COPY}{FILL}\n",
    "arrives early": rf"{COPY}{FILL}: race: a copy writes x_s\[0\], and a load may still read it: {LOAD}{DOUBLE}\n|"
    rf"{LOAD}{DOUBLE}: race: a load reads x_s\[0\], and a copy may still write it: {COPY}{FILL}\n",
    "no wait for the store": rf"out_s.*{DOUBLE}: race: a store writes out_s, and a copy may still read it: {SAVE}{DOUBLE}\n",
    "no fence": rf"{SAVE}{DOUBLE}: a copy reads out_s after a store, with no fence_async_shared in between: out_s.*{DOUBLE}\n",
    "store before": rf"{SAVE}{DOUBLE}: a store to `out_desc` at \[-\d+, 0\]: TMA cannot store before a tensor\n",
    "no last wait": rf": _double ends before out_s has been read, with no store_wait after {SAVE}{DOUBLE}\n",
}


@pytest.mark.parametrize("mistake", IN_COPIES)
def test_mistakes_in_copies_are_found(mistake):
    x = tiles(5)
    check_errors(IN_COPIES[mistake], _double_kernel, describe(x), describe(x.clone()), 5, mistake)


def test_deadlock_names_what_each_partition_waits_for():
    message = error(_double_kernel, describe(tiles(5)), describe(tiles(5)), 5, "no copy", seed=0)
    waits = re.findall(r"^  .*, in (\w+) \(.*\) waits for (.*)$", message, re.MULTILINE)
    assert message.startswith("deadlock\n")
    assert [(function, what.split(",")[0]) for function, what in waits] == [
        ("_double_kernel", "its partitions"),
        ("_double", "full[0]"),
        ("_fill", "empty[0]"),
    ]


# --- one buffer, with each kind of read followed by each kind of write


@gluon.jit
def _save(values, out_s, out_desc):
    out_s.store(values.to(out_s.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [0, 0], out_s)
    tma.store_wait(0)


@gluon.jit
def _read(out_desc, x_s, out_s, full, empty, READER: gl.constexpr, EARLY: gl.constexpr):
    mbarrier.wait(full.index(0), 0)
    mbarrier.arrive(empty.index(0), count=1, pred=EARLY and READER == "a load")
    if READER == "a load":
        x = x_s.load(LAYOUT)
    elif READER == "a matmul":
        no = gl.zeros([SIZE, SIZE], gl.float32, LAYOUT)
        x = warpgroup_mma(x_s, x_s, no, use_acc=False, is_async=True)
    else:
        tma.async_copy_shared_to_global(out_desc, [0, 0], x_s)
    mbarrier.arrive(empty.index(0), count=1, pred=EARLY and READER != "a load")
    if READER == "a matmul":
        x = warpgroup_mma_wait(0, [x])
    if READER == "a copy":
        tma.store_wait(0)
    mbarrier.arrive(empty.index(0), count=1, pred=not EARLY)
    if READER != "a copy":
        _save(x, out_s, out_desc)


@gluon.jit
def _rewrite(x_desc, x_s, full, empty, WRITER: gl.constexpr):
    mbarrier.expect(full.index(0), x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [0, 0], full.index(0), x_s)
    mbarrier.wait(empty.index(0), 0)
    if WRITER == "a copy":
        mbarrier.expect(full.index(0), x_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(x_desc, [SIZE, 0], full.index(0), x_s)
        mbarrier.wait(full.index(0), 1)
    else:
        x_s.store(gl.zeros([SIZE, SIZE], x_s.dtype, LAYOUT))


@gluon.jit
def _rewrite_kernel(x_desc, out_desc, READER: gl.constexpr, WRITER: gl.constexpr, EARLY: gl.constexpr):
    x_s = gl.allocate_shared_memory(x_desc.dtype, [SIZE, SIZE], x_desc.layout)
    out_s = gl.allocate_shared_memory(x_desc.dtype, [SIZE, SIZE], x_desc.layout)
    full, empty = new_ring(1, 1, 1)
    reader = (out_desc, x_s, out_s, full, empty, READER, EARLY)
    gl.warp_specialize([(_read, reader), (_rewrite, (x_desc, x_s, full, empty, WRITER))], [1], [24])


@pytest.mark.parametrize("writer", ["a copy", "a store"])
@pytest.mark.parametrize("reader", ["a load", "a matmul", "a copy"])
def test_buffer_is_written_again_only_after_it_was_read(reader, writer):
    x = tiles(2)
    first = x[: SIZE.value]
    for seed in SEEDS:
        out = torch.empty_like(first)
        launch(_rewrite_kernel, describe(x), describe(out), reader, writer, False, seed=seed)
        assert torch.equal(out, first @ first if reader == "a matmul" else first)
    race = rf"in _rewrite \(.*\): race: {writer} writes x_s, and {reader} may still read it: .*, in _read \(.*\)\n"
    if reader == "a load":  # in some orders the load comes after the write, and finds the race
        race += rf"|in _read \(.*\): race: a load reads x_s, and {writer} may still write it: .*, in _rewrite \(.*\)\n"
    check_errors(race, _rewrite_kernel, describe(x), describe(out), reader, writer, True)


@gluon.jit
def _read_part(x_s, read, FIRST: gl.constexpr, DIM: gl.constexpr, SAYS: gl.constexpr):
    x_s.slice(FIRST, 8, dim=DIM).load(LAYOUT)
    mbarrier.arrive(read.index(0), count=1, pred=SAYS)


@gluon.jit
def _write_part(x_s, read, DIM: gl.constexpr):
    mbarrier.wait(read.index(0), 0)
    x_s.slice(8, 8, dim=DIM).store(gl.zeros([SIZE, 8] if DIM else [8, SIZE], x_s.dtype, LAYOUT))


@gluon.jit
def _parts_kernel(x_desc, FIRST: gl.constexpr, DIM: gl.constexpr, SAYS: gl.constexpr):
    x_s = gl.allocate_shared_memory(x_desc.dtype, [SIZE, SIZE], x_desc.layout)
    x_s.store(gl.zeros([SIZE, SIZE], x_s.dtype, LAYOUT))
    read = new_barriers(1, 1 + SAYS)
    gl.warp_specialize(
        [
            (_read_part, (x_s, read, FIRST, DIM, SAYS)),
            (_read_part, (x_s, read, 8, DIM, True)),
            (_write_part, (x_s, read, DIM)),
        ],
        [4, 4],
        [24, 24],
    )


@pytest.mark.parametrize("first, says", [(8, True), (0, False), (8, False), (4, False), (1, False)])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_write_waits_for_every_reader_of_the_same_part(dim, first, says):
    """Two readers each read 8 rows, or columns, of a buffer. Then a third partition writes rows 8 to 15.

    The first reader reads rows 8 to 15 and arrives at the barrier. The second reader reads from row `first` on, and arrives
    only if `says`. If `first` is 0, the second reader need not arrive: nobody writes its rows.
    """
    if says or first == 0:
        for seed in SEEDS:
            launch(_parts_kernel, describe(tiles(1)), first, dim, says, seed=seed)
    else:
        read, written = (rf"x_s\[{':, ' * dim}{start}:{start + 8}\]" for start in (first, 8))
        race = (
            f"race: (a store writes {written}, and a load may still read|a load reads {read}, and a store may still write) it"
        )
        check_errors(race, _parts_kernel, describe(tiles(1)), first, dim, says)


# --- asynchronous reads of data that ordinary stores wrote


@gluon.jit
def _write(x_s, ready, FENCE: gl.constexpr):
    if FENCE == "before the store":
        fence_async_shared()
    x_s.store(gl.full([SIZE, SIZE], 2, x_s.dtype, LAYOUT))
    if FENCE == "by the writer":
        fence_async_shared()
    mbarrier.arrive(ready.index(0), count=1)


@gluon.jit
def _use(out_desc, x_s, out_s, ready, FENCE: gl.constexpr, USER: gl.constexpr):
    if FENCE == "before the wait":
        fence_async_shared()
    mbarrier.wait(ready.index(0), 0)
    if FENCE == "by the reader":
        fence_async_shared()
    if USER == "a matmul":
        no = gl.zeros([SIZE, SIZE], gl.float32, LAYOUT)
        _save(warpgroup_mma(x_s, x_s, no, use_acc=False), out_s, out_desc)
    else:
        tma.async_copy_shared_to_global(out_desc, [0, 0], x_s)
        tma.store_wait(0)


@gluon.jit
def _hand_over_kernel(out_desc, FENCE: gl.constexpr, USER: gl.constexpr, ALONE: gl.constexpr):
    x_s = gl.allocate_shared_memory(out_desc.dtype, [SIZE, SIZE], out_desc.layout)
    out_s = gl.allocate_shared_memory(out_desc.dtype, [SIZE, SIZE], out_desc.layout)
    ready = new_barriers(1, 1)
    user = (out_desc, x_s, out_s, ready, FENCE, USER)
    if ALONE:
        _write(x_s, ready, FENCE)
        _use(out_desc, x_s, out_s, ready, FENCE, USER)
    else:
        gl.warp_specialize([(_use, user), (_write, (x_s, ready, FENCE))], [4], [24])


@pytest.mark.parametrize("alone", [True, False], ids=["one partition", "two partitions"])
@pytest.mark.parametrize("user", ["a matmul", "a copy"])
def test_stores_need_a_fence_before_asynchronous_reads(user, alone):
    out = torch.empty(SIZE.value, SIZE.value).half()
    for seed in SEEDS:
        for fence in ("by the writer", "by the reader", *(["before the wait"] if alone else [])):
            launch(_hand_over_kernel, describe(out.zero_()), fence, user, alone, seed=seed)
            assert (out == (4 * SIZE.value if user == "a matmul" else 2)).all()
    unseen = rf", in _use \(.*\): {user} reads x_s after a store, with no fence_async_shared in between: x_s.store.*, in _write"
    for fence in ("none", "before the store", *(["before the wait"] if not alone else [])):
        check_errors(unseen, _hand_over_kernel, describe(out), fence, user, alone)


# --- matmuls


@gluon.jit
def _use_too_early(matmul, x_s, USE: gl.constexpr):
    if USE == "operator":
        return matmul + 1.0
    elif USE == "operator, swapped":
        return 1.0 / matmul
    elif USE == "comparison":
        return matmul > 0.0
    elif USE == "sign":
        return -matmul
    elif USE == "condition":
        return 1 if matmul else 0
    elif USE == "index":
        return matmul[:, None]
    elif USE == "exp2":
        return gl.exp2(matmul)
    elif USE == "max":
        return gl.max(matmul, 1)
    elif USE == "maximum":
        return gl.maximum(matmul, 0.0)
    elif USE == "where":
        return gl.where(True, matmul, 0.0)
    elif USE == "convert_layout":
        return gl.convert_layout(matmul, LAYOUT)
    elif USE == "to":
        return matmul.to(gl.float16)
    elif USE == "reshape":
        return matmul.reshape([SIZE * SIZE])
    elif USE == "permute":
        return matmul.permute([1, 0])
    elif USE == "type":
        return matmul.type.layout
    elif USE == "dtype":
        return matmul.dtype
    elif USE == "store":
        x_s.store(matmul)
    elif USE == "operand":
        return warpgroup_mma(matmul, x_s, gl.zeros([SIZE, SIZE], gl.float32, LAYOUT))


@gluon.jit
def _multiply_kernel(x_desc, out_desc, MISTAKE: gl.constexpr):
    x_s = gl.allocate_shared_memory(x_desc.dtype, [2, SIZE, SIZE], x_desc.layout)
    out_s = gl.allocate_shared_memory(x_desc.dtype, [SIZE, SIZE], x_desc.layout)
    full = new_barriers(1, 1)
    mbarrier.expect(full.index(0), 2 * x_desc.block_type.nbytes)
    for i in gl.static_range(2):
        tma.async_copy_global_to_shared(x_desc, [i * SIZE, 0], full.index(0), x_s.index(i))
    mbarrier.wait(full.index(0), 0)
    matmul = warpgroup_mma(
        x_s.index(0), x_s.index(1).permute([1, 0]), gl.zeros([SIZE, SIZE], gl.float32, LAYOUT), is_async=True
    )
    matmul = warpgroup_mma(x_s.index(1), x_s.index(0), matmul, is_async=True)
    if MISTAKE != "none" and MISTAKE != "no wait":
        _use_too_early(matmul, out_s, MISTAKE)
    if MISTAKE != "no wait":
        _save(warpgroup_mma_wait(0, [matmul]), out_s, out_desc)


@pytest.mark.parametrize("seed", SEEDS)
def test_matmuls_are_added_up(seed):
    x = tiles(2)
    a, b = x.split(SIZE.value)
    out = torch.empty_like(a)
    launch(_multiply_kernel, describe(x), describe(out), "none", seed=seed)
    assert torch.equal(out, a @ b.T + b @ a)


@pytest.mark.parametrize(
    "use",
    ["operator", "operator, swapped", "comparison", "sign", "condition", "index", "exp2", "max", "maximum", "where"]
    + ["convert_layout", "to", "reshape", "permute", "type", "dtype", "store", "operand"],
)
def test_matmul_that_was_not_waited_for_has_no_value(use):
    early = r"^.*matmul.*, in _use_too_early \(program 0\): a matmul's value is used before warpgroup_mma_wait\n"
    check_errors(early, _multiply_kernel, describe(tiles(2)), describe(tiles(1)), use, seeds=SEEDS[:5])


def test_partition_waits_for_its_matmuls():
    ends = r": the kernel ends before a matmul does, with no warpgroup_mma_wait after matmul = .*, in _multiply_kernel \("
    check_errors(ends, _multiply_kernel, describe(tiles(2)), describe(tiles(1)), "no wait")


@gluon.jit
def _wait_for_matmuls_kernel(x_desc, OUTSTANDING: gl.constexpr, USE: gl.constexpr, USED: gl.constexpr):
    x_s = gl.allocate_shared_memory(x_desc.dtype, [3, SIZE, SIZE], x_desc.layout)
    full = new_barriers(1, 1)
    mbarrier.expect(full.index(0), 3 * x_desc.block_type.nbytes)
    for i in gl.static_range(3):
        tma.async_copy_global_to_shared(x_desc, [i * SIZE, 0], full.index(0), x_s.index(i))
    mbarrier.wait(full.index(0), 0)
    no = gl.zeros([SIZE, SIZE], gl.float32, LAYOUT)
    first = warpgroup_mma(x_s.index(0), x_s.index(0), no, is_async=True)
    second = warpgroup_mma(x_s.index(1), x_s.index(1), no, is_async=True)
    third = warpgroup_mma(x_s.index(2), x_s.index(2), no, is_async=True)
    matmuls = warpgroup_mma_wait(OUTSTANDING, [first, second, third])
    if USE == "value":
        matmuls[USED] + 1.0
    else:
        x_s.index(USED).store(gl.zeros([SIZE, SIZE], x_s.dtype, LAYOUT))
    warpgroup_mma_wait(0, [no])


@pytest.mark.parametrize("used", range(3))
@pytest.mark.parametrize("use", ["value", "buffer"])
def test_wait_leaves_only_the_last_matmuls_pending(use, used):
    x = describe(tiles(3))
    early = {
        "value": r"matmuls\[USED\].*a matmul's value is used before warpgroup_mma_wait\n",
        "buffer": rf"race: a store writes x_s\[{used}\], and a matmul may still read it: .*x_s.index\({used}\)",
    }[use]
    for outstanding in range(5):
        if used < 3 - outstanding:
            for seed in SEEDS:
                launch(_wait_for_matmuls_kernel, x, outstanding, use, used, seed=seed)
        else:
            check_errors(early, _wait_for_matmuls_kernel, x, outstanding, use, used, seeds=SEEDS[:5])


# --- stores by TMA


@gluon.jit
def _wait_for_stores_kernel(out_desc, out_ptr, seen_ptr, PENDING: gl.constexpr, USED: gl.constexpr):
    x_s = gl.allocate_shared_memory(out_desc.dtype, [3, SIZE, SIZE], out_desc.layout)
    for i in gl.static_range(3):
        x_s.index(i).store(gl.full([SIZE, SIZE], 1, x_s.dtype, LAYOUT))
    fence_async_shared()
    for i in gl.static_range(3):
        tma.async_copy_shared_to_global(out_desc, [i * SIZE, 0], x_s.index(i))
    if PENDING is None:
        stored_wait()
    else:
        tma.store_wait(PENDING)
    for i in gl.static_range(3):
        gl.store(seen_ptr + i, gl.load(out_ptr + i * SIZE * SIZE))
    x_s.index(USED).store(gl.zeros([SIZE, SIZE], x_s.dtype, LAYOUT))
    tma.store_wait(0)


@pytest.mark.parametrize("pending", range(5))
def test_wait_leaves_only_the_last_stores_pending(pending):
    """After the wait, TMA has read all tiles in shared memory except the last `pending` tiles."""
    waited_for = max(0, 3 - pending)
    out, seen = torch.empty(3 * SIZE.value, SIZE.value).half(), torch.empty(3)
    for seed in SEEDS if waited_for else ():
        launch(_wait_for_stores_kernel, describe(out.zero_()), out, seen, pending, waited_for - 1, seed=seed)
        assert out.all()
    for used in range(waited_for, 3):
        race = rf"race: a store writes x_s\[{used}\], and a copy may still read it: tma.async"
        check_errors(race, _wait_for_stores_kernel, describe(out), out, seen, pending, used, seeds=SEEDS[:5])


@pytest.mark.parametrize("pending", [0, None])
def test_only_stored_wait_waits_until_stores_arrive_in_memory(pending):
    """After `tma.store_wait(0)`, TMA has read the tiles, but each tile may or may not have arrived in global memory."""
    out, seen, seen_after_the_wait = torch.empty(3 * SIZE.value, SIZE.value).half(), torch.empty(3), []
    for seed in SEEDS:
        launch(_wait_for_stores_kernel, describe(out.zero_()), out, seen, pending, 0, seed=seed)
        seen_after_the_wait.append(seen.tolist())
        assert out.all()
    expected = {1} if pending is None else {0, 1}
    assert [set(of_tile) for of_tile in zip(*seen_after_the_wait, strict=True)] == [expected] * 3


@gluon.jit
def _move_kernel(x_desc, out_desc, x_row, x_column, out_row, out_column, ADDS: gl.constexpr):
    x_s = gl.allocate_shared_memory(x_desc.dtype, [SIZE, SIZE], x_desc.layout)
    full = new_barriers(1, 1)
    mbarrier.expect(full.index(0), x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [x_row, x_column], full.index(0), x_s)
    mbarrier.wait(full.index(0), 0)
    if ADDS:
        async_reduce_add(out_desc, [out_row, out_column], x_s)
    else:
        tma.async_copy_shared_to_global(out_desc, [out_row, out_column], x_s)
    tma.store_wait(0)


@gluon.jit
def _add_kernel(sums_ptr, x_ptr):
    offs = gl.arange(0, SIZE, gl.BlockedLayout([4], [32], [4], [0]))
    reduce_add(sums_ptr + offs // 2, gl.load(x_ptr + offs))


def test_registers_are_added_to_memory_without_a_read():
    """The kernel adds two elements to each address. Only the added elements count as read, not the sums."""
    sums, x = torch.randn(SIZE.value // 2), torch.randn(SIZE.value)
    expected = sums + x[::2] + x[1::2]
    (counted,) = count(lambda: launch(_add_kernel, sums, x, seed=0)).launches
    torch.testing.assert_close(sums, expected)
    assert (counted.read, counted.written) == (4 * SIZE.value, 4 * SIZE.value)


CORNERS = [(0, 0), (8, 8), (16, 16), (-8, 16), (-40, 0), (24, 0), (0, 40)]  # first row and column of a tile in a 24 × 24 tensor
MARGIN = 48


def tile_at(corner, padded):
    """Return a view of the tile at `corner`. `padded` is the tensor with `MARGIN` more elements on each side."""
    row, column = corner
    return padded[MARGIN + row :, MARGIN + column :][: SIZE.value, : SIZE.value]


@pytest.mark.parametrize("padding", ["zero", "nan"])
@pytest.mark.parametrize("corner", CORNERS, ids=str)
def test_load_is_padded_outside_of_a_tensor(corner, padding):
    x, out = torch.randn(24, 24).half(), torch.empty(SIZE.value, SIZE.value).half()
    launch(_move_kernel, describe(x, padding), describe(out), *corner, 0, 0, False, seed=0)
    padded = torch.nn.functional.pad(x, [MARGIN] * 4, value=float("nan") if padding == "nan" else 0)
    torch.testing.assert_close(out, tile_at(corner, padded), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("adds", [False, True], ids=["stores", "adds"])
@pytest.mark.parametrize("corner", [corner for corner in CORNERS if min(corner) >= 0], ids=str)
def test_store_is_clipped_past_the_end_of_a_tensor(corner, adds):
    """A store past a tensor's end leaves other memory unchanged. A store before a tensor is an error."""
    tile, memory = torch.randn(SIZE.value, SIZE.value).half(), torch.randn(40, 40).half()
    expected, padded = memory.clone(), torch.nn.functional.pad(memory[8:32, 8:32], [MARGIN] * 4)
    launch(_move_kernel, describe(tile), describe(memory[8:32, 8:32]), 0, 0, *corner, adds, seed=0)
    tile_at(corner, padded).copy_(tile_at(corner, padded) + tile if adds else tile)
    expected[8:32, 8:32] = padded[MARGIN:-MARGIN, MARGIN:-MARGIN]
    assert torch.equal(memory, expected)


# --- other mistakes


@gluon.jit
def _some_mistakes_kernel(x_ptr, x_desc, n, MISTAKE: gl.constexpr):
    x_s = gl.allocate_shared_memory(gl.float16, [SIZE, SIZE], x_desc.layout)
    full = new_barriers(1, 1)
    x_s.slice(0, 8).store(gl.zeros([8, SIZE], gl.float16, LAYOUT))
    x_s.slice(8, 8, dim=1).store(gl.zeros([SIZE, 8], gl.float16, LAYOUT))
    x_s.slice(8 if MISTAKE == "never written" else 0, 8).load(LAYOUT)
    if MISTAKE == "slice outside":
        x_s.slice(8, 9).load(LAYOUT)
    if MISTAKE == "other shape":
        x_s.store(gl.zeros([SIZE, 8], gl.float16, LAYOUT))
    if MISTAKE == "other type":
        x_s.store(gl.zeros([SIZE, SIZE], gl.float32, LAYOUT))
    if MISTAKE == "other tile":
        tma.async_copy_shared_to_global(x_desc, [0, 0], x_s.slice(0, 8))
    if MISTAKE == "coordinates":
        tma.async_copy_global_to_shared(x_desc, [0], full.index(0), x_s)
    if MISTAKE == "bytes that never come":
        mbarrier.expect(full.index(0), 512)
    if MISTAKE == "unknown function":
        gl.histogram(x_s, 16)
    if MISTAKE == "unknown function of a module":
        mbarrier.invalidate(full.index(0))
    if MISTAKE == "unknown attribute":
        gl.zeros([16], gl.float32).cumsum(0)
    if MISTAKE == "assembly":
        gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.zeros([16], gl.int32)], gl.int32, is_pure=True, pack=1)
    if MISTAKE == "overflow":
        n * n
    if MISTAKE == "overflow in a loop":
        for i in range(2):
            i * 2 + 2147483647
    if MISTAKE == "Python's":
        n // 0
    if MISTAKE == "static_assert":
        gl.static_assert(MISTAKE == "none", "of this kernel")


OTHERS = {
    "never written": r"a load reads x_s\[8:16\], which was not fully written",
    "slice outside": r"8 to 17 is out of range: dimension 0 of x_s has 16 elements",
    "other shape": r"fp16 \[16, 8\] is stored to x_s, which is fp16 \[16, 16\]",
    "other type": r"fp32 \[16, 16\] is stored to x_s, which is fp16 \[16, 16\]",
    "other tile": r"but x_s\[0:8\] is fp16 \[8, 16\] and a tile of `x_desc` is fp16 \[16, 16\]",
    "coordinates": r"1 coordinates for `x_desc`, which has 2 dimensions",
    "bytes that never come": r"full\[0\] expects 512 more bytes: mbarrier.expect\(full.index\(0\), 512\), in _some",
    "unknown function": r"the interpreter does not know triton.experimental.gluon.language.histogram: "
    r"add it to common.interpreter.gluon",
    "unknown function of a module": r"the interpreter does not know triton\S*.mbarrier.invalidate: "
    r"add it to common.interpreter.gluon",
    "unknown attribute": r"the interpreter does not know a tensor's `cumsum`: add it to common.interpreter.values",
    "assembly": r"inline assembly must begin with a comment",
    "overflow": r"n \* n, in _some_mistakes_kernel \(program 0\): 2147488281 does not fit an int32",
    "overflow in a loop": r"2147483649 does not fit an int32",
    "Python's": r"n // 0, in _some_mistakes_kernel \(program 0\): ZeroDivisionError",
    "static_assert": r"static_assert: of this kernel",
}


@pytest.mark.parametrize("mistake", OTHERS)
def test_other_mistakes_are_found(mistake):
    check_errors(OTHERS[mistake], _some_mistakes_kernel, torch.zeros(4), describe(tiles(1)), 46341, mistake, seeds=SEEDS[:3])


def test_kernel_without_a_mistake_passes():
    for seed in SEEDS:
        launch(_some_mistakes_kernel, torch.zeros(4), describe(tiles(1)), 46340, "none", seed=seed)
    launch(_some_mistakes_kernel, torch.zeros(4), describe(tiles(1)), 46340, "overflow", seed=0)


# --- orders, programs and threads


@gluon.jit
def _take_tickets(takers_ptr, counter_ptr, tickets, who):
    ticket = gl.atomic_add(counter_ptr, 1)
    while ticket < tickets:
        gl.store(takers_ptr + ticket, who)
        ticket = gl.atomic_add(counter_ptr, 1)


@gluon.jit
def _take_tickets_kernel(takers_ptr, counter_ptr, tickets):
    first = 10 * gl.program_id(0)
    gl.warp_specialize(
        [
            (_take_tickets, (takers_ptr, counter_ptr, tickets, first)),
            (_take_tickets, (takers_ptr, counter_ptr, tickets, first + 1)),
        ],
        [4],
        [24],
    )


def takers(seed, programs=2):
    """Return who took each of sixteen tickets, as 10 · program + partition."""
    taken, counter = torch.full((16,), -1), torch.zeros(1, dtype=torch.int32)
    launch(_take_tickets_kernel, taken, counter, len(taken), seed=seed, programs=programs)
    assert counter == len(taken) + 2 * programs
    return tuple(taken.tolist())


def test_seed_decides_the_order():
    orders = [takers(seed) for seed in SEEDS]
    assert orders[:5] == [takers(seed) for seed in SEEDS[:5]]
    assert len(set(orders)) > len(SEEDS) / 2
    assert any(set(order) == {0, 1, 10, 11} for order in orders)


def test_two_programs_run_at_a_time():
    programs = [{who // 10 for who in takers(seed, programs=3)} for seed in SEEDS]
    assert max(map(len, programs)) == 2  # the third program waits until another program ends
    assert set().union(*programs) == {0, 1, 2}  # every program takes tickets with at least one seed


def test_seed_in_the_environment_replays(monkeypatch):
    first, second = takers(3), takers(4)
    assert first != second
    monkeypatch.setenv(VARIABLE, "3")
    assert takers(4) == takers(5) == first


def test_seed_in_the_message_replays_the_error(monkeypatch):
    arguments = describe(tiles(5)), describe(tiles(5)), 5, "arrives early"
    messages = {seed: error(_double_kernel, *arguments, seed=seed) for seed in SEEDS}
    assert len({message.replace(f"={seed} ", " ") for seed, message in messages.items()}) > 1
    for message in messages.values():
        variable, seed = re.search(rf"^({VARIABLE})=(\d+) ", message, re.MULTILINE).groups()
        monkeypatch.setenv(variable, seed)
        assert error(_double_kernel, *arguments, seed=1000) == message


def test_launch_that_fails_leaves_nothing_behind():
    before = set(threading.enumerate())
    x = tiles(5)
    for mistake in ("no copy", "arrives early", "no last wait"):
        with pytest.raises(InterpreterError):
            launch(_double_kernel, describe(x), describe(x.clone()), 5, mistake, seed=0, programs=5)
        out = torch.empty_like(x)
        launch(_double_kernel, describe(x), describe(out), 5, "none", seed=0)
        assert torch.equal(out, x * 2)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


_noted = []


def _note(what):
    _noted.append(what)
    time.sleep(1e-4)  # lets another thread run


@gluon.jit
def _note_kernel(launch):
    for _ in range(10):
        _note(launch)
        fence_async_shared()


def test_launches_from_two_threads_wait_for_each_other():
    def launch_some(launches):
        for each in launches:
            _note_kernel[(2,)](each)

    _noted.clear()
    threads = [threading.Thread(target=launch_some, args=(launches,)) for launches in (range(3), range(3, 6))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted((each, len(list(notes))) for each, notes in itertools.groupby(_noted)) == [(each, 20) for each in range(6)]


@gluon.jit
def _fail_after_a_while():
    for _ in range(3):
        fence_async_shared()
    _note("fails")
    gl.static_assert(False)


@gluon.jit
def _fail_kernel():
    gl.warp_specialize([(_note_kernel, ("goes on",)), (_fail_after_a_while, ())], [1], [24])


def test_nothing_goes_on_after_an_error():
    for seed in SEEDS:
        _noted.clear()
        error(_fail_kernel, seed=seed)
        assert _noted[-1] == "fails"


# --- parts of a buffer


def test_a_part_with_gaps_has_nothing_of_what_lies_between():
    tile = torch.zeros(4, 16)
    right, cell, row = (_Part.of(view) for view in (tile[:, 8:], tile[2, :8], tile[2]))
    assert not _inside(cell, right) and not _overlap(cell, right)
    assert _overlap(row, right) and _inside(cell, row) and not _inside(row, cell)
