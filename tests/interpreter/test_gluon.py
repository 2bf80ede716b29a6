"""The Gluon interpreter runs small kernels in many orders of events. It finds a planted mistake in every order.

A kernel with `MISTAKE` = "none" is correct.
"""

import itertools
import linecache
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
from common.kernels.hopper import new_barriers, new_ring, stored_wait
from common.runtime import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the interpreter is not in use here")

SEEDS = range(20)
FEW = SEEDS[:5]
SIZE = gl.constexpr(16)  # number of rows and of columns of a tile
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0]))
SHARED = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)


def tiles(number):
    """Return a tensor of `number` tiles, one below the other. The elements are small integers, so all arithmetic is exact."""
    return torch.randint(-4, 5, (number * SIZE.value, SIZE.value)).half()


def describe(tensor):
    return TensorDescriptor.from_tensor(tensor, [SIZE.value, SIZE.value], SHARED)


def launch(kernel, *arguments, seed, programs=1):
    restart_seeds(seed)
    kernel[(programs,)](*arguments)


def error(kernel, *arguments, seed, programs=1):
    """Return the interpreter's message for a kernel with a mistake. A line's text replaces the line's number."""
    with pytest.raises(InterpreterError) as caught:
        launch(kernel, *arguments, seed=seed, programs=programs)
    return re.sub(
        r"interpreter/test_gluon\.py:(\d+)", lambda found: linecache.getline(__file__, int(found[1])).strip(), str(caught.value)
    )


def check(expected, kernel, *arguments, seeds=SEEDS[:10]):
    """Launch in several orders. Assert that each gives an error which the regular expression `expected` matches.

    If `expected` is None, assert that no order gives an error.
    """
    for seed in SEEDS if expected is None else seeds:
        if expected is None:
            launch(kernel, *arguments, seed=seed)
        else:
            message = error(kernel, *arguments, seed=seed)
            assert re.search(expected, message), message
            assert message.endswith(f"\n{VARIABLE}={seed} replays this order"), message


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


@gluon.jit
def _double(out_desc, x_s, out_s, full, empty, count, MISTAKE: gl.constexpr):
    for i in range(count):
        slot = i % 2
        mbarrier.wait(full.index(i if MISTAKE == "barrier outside" else slot), i // 2 & 1)
        mbarrier.arrive(empty.index(slot), count=1, pred=MISTAKE == "arrives early")
        x = x_s.index(i if MISTAKE == "buffer outside" else slot).load(LAYOUT)
        if MISTAKE != "no arrival" and MISTAKE != "arrives early":
            mbarrier.arrive(empty.index(slot), count=2 if MISTAKE == "two arrivals" else 1)
        tma.store_wait(0)
        out_s.store(x * 2)
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


WAIT_FULL, WAIT_EMPTY = (rf"mbarrier.wait\({row}.*, in " for row in ("full", "empty"))
COPY, LOAD, SAVE = (re.escape(start) + r".*, in " for start in ("tma.async_copy_global", "x = x_s.", "tma.async_copy_shared"))
FILL, DOUBLE = r"_fill \(program 0, partition 2: _fill\)", r"_double \(program 0, partition 1: _double\)"
DEADLOCK = rf"^deadlock\n.*\n.*{WAIT_FULL}{DOUBLE} waits for full\[0\], phase 0: 0 of 1 arrivals and "
IN_COPIES = {
    "no copy": rf"{DEADLOCK}512 bytes are missing\n.*{WAIT_EMPTY}{FILL} waits for empty\[0\]",
    "no arrival": rf"{WAIT_EMPTY}{FILL} waits for empty\[0\], phase 0: 1 of 1 arrivals and 0 bytes are missing\n",
    "more bytes": rf"{DEADLOCK}32 bytes are missing\n",
    "fewer bytes": rf"{COPY}{FILL}: a copy brings 512 bytes to full\[0\], which expects 480 more\n",
    "two arrivals": rf"mbarrier.arrive.*, in {DOUBLE}: empty\[0\] gets 2 more arrivals, but its phase had all 1 already\n",
    "no init": rf"(mbarrier.expect.*, in {FILL}|{WAIT_FULL}{DOUBLE}): full\[0\] has had no mbarrier.init\n",
    "barrier outside": rf"{WAIT_FULL}{DOUBLE}: index 2 is out of range: full has 2 entries\n",
    "buffer outside": rf"{LOAD}{DOUBLE}: index 2 is out of range: x_s has 2 entries\n",
    "arrives early": rf"{COPY}{FILL}: race: a copy writes x_s\[0\], and a load may still read it: {LOAD}{DOUBLE}\n|"
    rf"{LOAD}{DOUBLE}: race: a load reads x_s\[0\], and a copy may still write it: {COPY}{FILL}\n",
    "store before": rf"{SAVE}{DOUBLE}: a store to `out_desc` at \[-\d+, 0\]: TMA cannot store before a tensor\n",
    "no last wait": rf": _double ends before out_s has been read, with no store_wait after {SAVE}{DOUBLE}\n",
}


@pytest.mark.parametrize("mistake", IN_COPIES)
def test_mistakes_in_copies_are_found(mistake):
    x = tiles(5)
    check(IN_COPIES[mistake], _double_kernel, describe(x), describe(x.clone()), 5, mistake)


@pytest.mark.parametrize("mistake", ["no copy", "arrives early", "no last wait"])
def test_launch_that_fails_leaves_nothing_behind(mistake):
    """Afterwards no thread is left, and a correct kernel copies through a ring of buffers, in every order."""
    before, x = set(threading.enumerate()), tiles(5)
    for seed in SEEDS:
        error(_double_kernel, describe(x), describe(x.clone()), 5, mistake, seed=seed, programs=3)
        out = torch.empty_like(x)
        launch(_double_kernel, describe(x), describe(out), 5, "none", seed=seed)
        assert torch.equal(out, x * 2)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


# --- two partitions that use parts of one buffer, one after the other


@gluon.jit
def _operate(desc, part, full, done, OPERATION: gl.constexpr, EARLY: gl.constexpr, FENCE: gl.constexpr):
    """Use a part of a buffer, and arrive at `done` afterwards. If EARLY, arrive before the operation is over."""
    mbarrier.arrive(done, count=1, pred=EARLY and OPERATION not in ASYNCHRONOUS)
    if OPERATION == "a load":
        part.load(LAYOUT)
    elif OPERATION == "a store":
        part.store(gl.zeros(part.shape, part.dtype, LAYOUT))
    elif OPERATION == "a matmul":
        matmul = warpgroup_mma(part, part.permute([1, 0]), gl.zeros([8, 8], gl.float32, LAYOUT), is_async=True)
    elif OPERATION == "a copy out":
        tma.async_copy_shared_to_global(desc, [0, 0], part)
    elif OPERATION == "a copy in":
        mbarrier.expect(full, desc.block_type.nbytes)
        tma.async_copy_global_to_shared(desc, [0, 0], full, part)
    mbarrier.arrive(done, count=1, pred=EARLY and OPERATION in ASYNCHRONOUS)
    if OPERATION == "a matmul":
        warpgroup_mma_wait(0, [matmul])
    elif OPERATION == "a copy in":
        mbarrier.wait(full, 0)
    tma.store_wait(0)
    if FENCE == "by the first":
        fence_async_shared()
    mbarrier.arrive(done, count=1, pred=not EARLY)


@gluon.jit
def _operate_second(desc, part, full, first_done, done, OPERATION: gl.constexpr, FENCE: gl.constexpr):
    if FENCE == "before the wait":
        fence_async_shared()
    mbarrier.wait(first_done, 0)
    if FENCE == "by the second":
        fence_async_shared()
    _operate(desc, part, full, done, OPERATION, False, "none")


@gluon.jit
def _share_kernel(
    desc, FIRST: gl.constexpr, SECOND: gl.constexpr, EARLY: gl.constexpr, FENCE: gl.constexpr,
    START: gl.constexpr = 8, DIM: gl.constexpr = 0,
):  # fmt: skip
    """Use 8 rows or columns from START on, and then those from 8 on. If FIRST reads, another partition reads the latter."""
    x_s = gl.allocate_shared_memory(gl.float16, [SIZE, SIZE], desc.layout)
    x_s.store(gl.zeros([SIZE, SIZE], gl.float16, LAYOUT))
    fence_async_shared()
    full, done, last = new_barriers(2, 1), new_barriers(1, 2), new_barriers(1, 1)
    first, second = x_s.slice(START, 8, dim=DIM), x_s.slice(8, 8, dim=DIM)
    other = "a load" if FIRST in READS else "nothing"
    gl.warp_specialize(
        [
            (_operate, (desc, first, full.index(0), done.index(0), FIRST, EARLY, FENCE)),
            (_operate, (desc, second, full.index(0), done.index(0), other, False, "none")),
            (_operate_second, (desc, second, full.index(1), done.index(0), last.index(0), SECOND, FENCE)),
        ],
        [4, 4], [24, 24],
    )  # fmt: skip


READS, WRITES = ("a load", "a matmul", "a copy out"), ("a store", "a copy in")
ASYNCHRONOUS = "a matmul", "a copy out", "a copy in"
HALF = TensorDescriptor.from_tensor(torch.zeros(8, SIZE.value).half(), [8, SIZE.value], SHARED)


def race(first, second, part="x_s[8:16]", second_part="x_s[8:16]"):
    """Return the pattern of the message that two operations race. Either operation may come first."""
    one, other = (re.sub(" (in|out)$", "", operation) for operation in (first, second))
    return (
        rf"race: ({other} \w+ {re.escape(second_part)}, and {one} may still \w+ it"
        rf"|{one} \w+ {re.escape(part)}, and {other} may still \w+ it): .*, in _operate"
    )


@pytest.mark.parametrize("second", READS + WRITES)
@pytest.mark.parametrize("first", READS + WRITES)
def test_partitions_use_a_buffer_one_after_the_other(first, second):
    check(None, _share_kernel, HALF, first, second, False, "by the first")
    both_read = first in READS and second in READS
    check(None if both_read else race(first, second), _share_kernel, HALF, first, second, True, "by the first")


@pytest.mark.parametrize("start", [0, 1, 4])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_only_parts_that_overlap_race(dim, start):
    parts = (f"x_s[{':, ' * dim}{at}:{at + 8}]" for at in (start, 8))
    expected = race("a load", "a store", *parts) if start else None
    check(expected, _share_kernel, HALF, "a load", "a store", True, "none", start, dim)


@pytest.mark.parametrize("fence", ["by the first", "by the second", "before the wait", "none"])
@pytest.mark.parametrize("user", ASYNCHRONOUS)
def test_stores_need_a_fence_before_asynchronous_operations(user, fence):
    unseen = r" \w+ x_s\[8:16\] after a store, with no fence_async_shared in between: part.store.*, in _operate"
    expected = rf", in _operate \(.*\): {re.sub(' (in|out)$', '', user)}{unseen}"
    check(None if fence.startswith("by") else expected, _share_kernel, HALF, "a store", user, False, fence)


# --- waits that leave the last operations pending


USES = {
    "operator": lambda matmul, buffer: 1.0 / matmul,
    "index": lambda matmul, buffer: matmul[:, None],
    "method": lambda matmul, buffer: matmul.to(gl.float16),
    "store": lambda matmul, buffer: buffer.store(matmul.to(gl.float16)),
    "buffer": lambda matmul, buffer: buffer.store(buffer.load() * 2),
}


@gluon.jit
def _wait_for_matmuls_kernel(x_desc, OUTSTANDING: gl.constexpr, USE: gl.constexpr, USED: gl.constexpr):
    x_s = gl.allocate_shared_memory(x_desc.dtype, [3, SIZE, SIZE], x_desc.layout)
    x_s.store(gl.full([3, SIZE, SIZE], 1, x_s.dtype))
    fence_async_shared()
    no = gl.zeros([SIZE, SIZE], gl.float32, LAYOUT)
    first = warpgroup_mma(x_s.index(0), x_s.index(0), no, is_async=True)
    second = warpgroup_mma(x_s.index(1), x_s.index(1), no, is_async=True)
    third = warpgroup_mma(x_s.index(2), x_s.index(2), no, is_async=True)
    matmuls = warpgroup_mma_wait(OUTSTANDING, [first, second, third])
    USE(matmuls[USED], x_s.index(USED))
    warpgroup_mma_wait(0, [no])


@gluon.jit
def _wait_for_stores_kernel(out_desc, out_ptr, seen_ptr, PENDING: gl.constexpr, USED: gl.constexpr):
    x_s = gl.allocate_shared_memory(out_desc.dtype, [3, SIZE, SIZE], out_desc.layout)
    x_s.store(gl.full([3, SIZE, SIZE], 1, x_s.dtype))
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


@pytest.mark.parametrize("used", range(3))
@pytest.mark.parametrize("use", [*USES, "buffer of a store"])
def test_wait_leaves_only_the_last_operations_pending(use, used):
    """Of three operations, all but the last `pending` are over after the wait. Only then may the kernel use what they used."""
    x = tiles(3)
    if use == "buffer of a store":
        kernel, arguments, last = _wait_for_stores_kernel, (describe(x), x, torch.empty(3)), (used,)
    else:
        kernel, arguments, last = _wait_for_matmuls_kernel, (describe(x),), (USES[use], used)
    early = r"matmuls\[USED\].*a matmul's value is used before warpgroup_mma_wait\n"
    if "buffer" in use:
        early = rf"race: a store writes x_s\[{used}\], and a (matmul|copy) may still read it: .*x_s.index\(({used}|i)\)"
    for pending in range(5):
        check(None if used < 3 - pending else early, kernel, *arguments, pending, *last, seeds=FEW)


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


# --- other mistakes


@gluon.jit
def _some_mistakes_kernel(x_desc, n, MISTAKE: gl.constexpr):
    x_s = gl.allocate_shared_memory(gl.float16, [SIZE, SIZE], x_desc.layout)
    full = new_barriers(1, 1)
    x_s.slice(0, 8).store(gl.zeros([8, SIZE], gl.float16, LAYOUT))
    x_s.slice(8, 8, dim=1).store(gl.zeros([SIZE, 8], gl.float16, LAYOUT))
    x_s.slice(8 if MISTAKE == "never written" else 0, 8).load(LAYOUT)
    if MISTAKE == "slice outside":
        x_s.slice(8, 9).load(LAYOUT)
    if MISTAKE == "other shape":
        x_s.store(gl.zeros([SIZE, 8], gl.float16, LAYOUT))
    if MISTAKE == "other tile":
        tma.async_copy_shared_to_global(x_desc, [0, 0], x_s.slice(0, 8))
    if MISTAKE == "coordinates":
        tma.async_copy_global_to_shared(x_desc, [0], full.index(0), x_s)
    if MISTAKE == "bytes that never come":
        mbarrier.expect(full.index(0), 512)
    if MISTAKE == "unknown function":
        mbarrier.invalidate(full.index(0))
    if MISTAKE == "unknown attribute":
        gl.zeros([16], gl.float32).cumsum(0)
    if MISTAKE == "other sizes" or MISTAKE == "no wait":
        fence_async_shared()
        columns: gl.constexpr = SIZE if MISTAKE == "other sizes" else 8
        a, acc = gl.zeros([SIZE, columns], gl.float16), gl.zeros([SIZE, SIZE], gl.float32)
        warpgroup_mma(a, x_s.slice(0, 8), acc, is_async=True)
    if MISTAKE == "Python's":
        n // 0


OTHERS = {
    "never written": r"a load reads x_s\[8:16\], which was not fully written",
    "slice outside": r"8 to 17 is out of range: dimension 0 of x_s has 16 elements",
    "other shape": r"fp16 \[16, 8\] is stored to x_s, which is fp16 \[16, 16\]",
    "other tile": r"but x_s\[0:8\] is fp16 \[8, 16\] and a tile of `x_desc` is fp16 \[16, 16\]",
    "coordinates": r"1 coordinates for `x_desc`, which has 2 dimensions",
    "bytes that never come": r"full\[0\] expects 512 more bytes: mbarrier.expect\(full.index\(0\), 512\), in _some",
    "unknown function": r"does not know triton\S*.mbarrier.invalidate: add it to common.interpreter.gluon",
    "unknown attribute": r"the interpreter does not know a tensor's `cumsum`: add it to common.interpreter.values",
    "other sizes": r"cannot multiply fp16 \[16, 16\] and fp16 \[8, 16\], and add the result to \[16, 16\]",
    "no wait": r": the kernel ends before a matmul does, with no warpgroup_mma_wait after warpgroup_mma\(a, .*, in _some",
    "Python's": r"n // 0, in _some_mistakes_kernel \(program 0\): ZeroDivisionError",
}


@pytest.mark.parametrize("mistake", OTHERS)
def test_other_mistakes_are_found(mistake):
    check(None, _some_mistakes_kernel, describe(tiles(1)), 1, "none")
    check(OTHERS[mistake], _some_mistakes_kernel, describe(tiles(1)), 1, mistake, seeds=SEEDS[:3])


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
    one, other = (takers_ptr, counter_ptr, tickets, first), (takers_ptr, counter_ptr, tickets, first + 1)
    gl.warp_specialize([(_take_tickets, one), (_take_tickets, other)], [4], [24])


def takers(seed, programs=2):
    """Return who took each of sixteen tickets, as 10 · program + partition."""
    taken, counter = torch.full((16,), -1), torch.zeros(1, dtype=torch.int32)
    launch(_take_tickets_kernel, taken, counter, len(taken), seed=seed, programs=programs)
    assert counter == len(taken) + 2 * programs
    return tuple(taken.tolist())


def test_seed_decides_the_order_and_replays_it(monkeypatch):
    orders = [takers(seed) for seed in SEEDS]
    assert len(set(orders)) > len(SEEDS) / 2
    of_three_programs = [{who // 10 for who in takers(seed, programs=3)} for seed in SEEDS]
    assert max(map(len, of_three_programs)) == 2  # two programs run at a time: the third waits until another ends
    assert set().union(*of_three_programs) == {0, 1, 2}
    mistake = describe(tiles(5)), describe(tiles(5)), 5, "arrives early"
    messages = [error(_double_kernel, *mistake, seed=seed) for seed in SEEDS]
    assert len({message.rpartition("\n")[0] for message in messages}) > 1
    for seed in SEEDS:
        monkeypatch.setenv(VARIABLE, str(seed))
        assert takers(1000) == orders[seed]
        assert error(_double_kernel, *mistake, seed=1000) == messages[seed]


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
    threads = [threading.Thread(target=launch_some, args=(launches,), daemon=True) for launches in (range(3), range(3, 6))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted((each, len(list(notes))) for each, notes in itertools.groupby(_noted)) == [(each, 20) for each in range(6)]
