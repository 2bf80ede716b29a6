"""A kernel reads only its inputs. It writes all of its outputs and nothing else, and it has no race."""

import gc
import weakref

import numpy
import pytest
import torch
import triton
import triton.language as tl
from cases import LONG, asked, assert_same_bits, by_functions, check, make_inputs
from problems import Layout
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import _allocation, interpreter

import stages
from common.checks import BOTTOM_RIGHT, DTYPES
from common.runtime import DEVICE, INTERPRETED, Device, interpreted_as

MARGIN = 1 << 18  # bytes of a margin, more than any tile has


class PoisonedMemory(TorchDispatchMode):
    """Put every new tensor between two margins of NaN, or of large integers. Fill uninitialized tensors with them too."""

    def __init__(self):
        super().__init__()
        self.buffers = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        fresh = all(value.alias_info is None for value in func._schema.returns)
        if not (fresh and isinstance(result, torch.Tensor) and result.numel()):
            return result
        if not (result.is_floating_point() or "empty" in str(func) or "zeros" in str(func)):
            return result  # a mask or an index, which no kernel writes to
        span = result.untyped_storage().nbytes()
        byte = 0xFF if result.is_floating_point() else 0x7F  # if all bits are 1, a float is NaN and an integer only -1
        buffer = torch.full((MARGIN + span + MARGIN + -span % 8,), byte, dtype=torch.uint8, device=result.device)
        self.buffers.append((str(func), buffer, span, byte))
        inside = buffer[MARGIN : MARGIN + span].view(result.dtype)
        inside = inside.as_strided(result.shape, result.stride(), inside.storage_offset() + result.storage_offset())
        return inside if "empty" in str(func) else inside.copy_(result)

    def check(self):
        """Assert that no margin has been written to."""
        for name, buffer, span, byte in self.buffers:
            assert _is_full_of(byte, buffer[:MARGIN]), f"write before the start of what {name} returned"
            assert _is_full_of(byte, buffer[MARGIN + span :]), f"write past the end of what {name} returned"


def _is_full_of(byte, margin):
    """Return whether each byte of a margin, which ends at a multiple of 8 bytes, is `byte`.

    It compares words of 8 bytes, which is a hundred times as fast.
    """
    rest = len(margin) % 8
    words = margin[rest:].view(torch.int64)
    word = int.from_bytes(8 * bytes([byte]), signed=True)
    return bool((margin[:rest] == byte).all()) and torch.equal(words, torch.full_like(words, word))


def refuse_to_load_nan(monkeypatch):
    """Make the interpreter raise an error if a kernel loads a NaN.

    In these tests, NaN is only outside of inputs and in unwritten memory. On a GPU a load from outside may end the process,
    even if the kernel ignores the value.
    """
    load = interpreter.InterpreterBuilder.create_masked_load

    def checked_load(builder, pointers, mask, *args, **kwargs):
        loaded = load(builder, pointers, mask, *args, **kwargs)
        values = torch.from_numpy(loaded.data[numpy.asarray(mask.data)])
        if loaded.dtype.scalar == tl.bfloat16:  # the interpreter stores bfloat16 as uint16
            values = values.view(torch.bfloat16)
        assert not values.isnan().any(), "a kernel loads NaN: what is outside its inputs, or not written"
        return loaded

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", checked_load)


AROUND = ((0, 1), (1, 0), (128, 128), (8, 8))  # unused batch elements, heads, rows and columns before and after a tensor
# The tensors have different strides. With equal strides, a kernel that reads V with K's strides would look right.
LAYOUTS = [Layout(order, AROUND, offset=8) for order in ("bhsd", "bshd", "hbsd", "sbhd")]
PROBLEMS = [  # (queries, keys, batch, heads, K/V heads, D, Dv, causal, scale, dtype)
    (113, 203, 1, 4, 2, 64, 32, BOTTOM_RIGHT, -0.2, torch.float16),
    (203, 113, 1, 4, 2, 32, 64, True, 0.3, torch.bfloat16),
    (70, 130, 1, 4, 2, 256, 16, BOTTOM_RIGHT, -0.05, torch.bfloat16),
    (260, 150, 1, 3, 1, 128, 128, False, -0.1, torch.float16),
    (140, 70, 2, 4, 2, 16, 16, True, -0.3, torch.bfloat16),
    (70, 150, 1, 4, 2, 256, 256, False, 0.1, torch.float16),
    (1, 1, 1, 2, 2, 16, 16, False, 1.0, torch.float16),
    (203, 113, 1, 2, 1, 32, 16, True, 0.2, torch.float32),
]


@pytest.mark.parametrize("turn", range(1) if INTERPRETED and not (LONG or asked()) else range(len(PROBLEMS)))
def test_nothing_outside_is_read_or_written(part, turn, monkeypatch):
    """The problems have query groups, negative scales, views of different strides, and several work tiles for each CTA.

    The interpreter's default run has one problem for each pass, in turn. It has all problems for a stage that is asked for.
    """
    if INTERPRETED:
        refuse_to_load_nan(monkeypatch)
    if INTERPRETED and not (LONG or asked()):
        turn = part.place % (len(PROBLEMS) - 1)  # not the last one: for float32, Hopper stages call another stage
    seq_q, seq_k, batch, heads, kv_heads, head_dim, value_dim, causal, scale, dtype = PROBLEMS[turn]
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "value_dim": value_dim}
    values = make_inputs(seq_q, seq_k, head_dim, dtype, **sizes)
    inputs = [layout.place(tensor) for layout, tensor in zip(LAYOUTS, values, strict=True)]
    before = [tensor.clone() for tensor in inputs]

    def run(*args, **options):
        with PoisonedMemory() as memory, interpreted_as(Device(num_sms=1)):
            results = part(*args, **options)
        memory.check()
        return results

    check(stages.load(part.name), *inputs, causal=causal, scale=scale, run=run)
    for tensor, copy in zip(inputs, before, strict=True):
        assert torch.equal(tensor, copy), "an input was written to"


def test_a_call_leaves_nothing_behind(stage):
    """A stage keeps no input alive, and does not change the user's allocator."""

    def mine(size, alignment, stream):
        return torch.empty(size, dtype=torch.int8, device=DEVICE)

    before = _allocation._allocator.get()
    triton.set_allocator(mine)
    inputs = make_inputs(40, 100)
    by_functions(stage, *inputs, causal=True, scale=0.25)
    alive = [weakref.ref(tensor) for tensor in inputs]
    del inputs
    gc.collect()
    assert [tensor() for tensor in alive] == [None] * 4
    assert _allocation._allocator.get() is mine
    triton.set_allocator(before)


@pytest.mark.skipif(not INTERPRETED, reason="the order of programs can be chosen in the interpreter only")
@pytest.mark.parametrize("dtype, kv_heads", list(zip(DTYPES, (2, 1, 2), strict=True)))
def test_programs_in_reverse_order_give_the_same_bits(stage, dtype, kv_heads, unordered, monkeypatch):
    """Results do not depend on the order of programs. Otherwise two programs write to one address.

    The usual order also hides stores past the end of a head, because the next program overwrites these elements.
    """
    inputs = make_inputs(150, 170, 16, dtype, batch=1, heads=2, kv_heads=kv_heads)
    options = {"causal": True, "scale": 0.25, "run": by_functions}
    forwards = check(stage, *inputs, **options)
    reverse_programs(monkeypatch)
    assert_same_bits(forwards, check(stage, *inputs, **options), unordered)


def reverse_programs(monkeypatch):
    """Make the interpreter run the programs of a grid from the last to the first."""
    builder = interpreter.interpreter_builder
    set_index = builder.set_grid_idx

    def reversed_index(*index):
        set_index(*(size - 1 - i for size, i in zip(builder.grid_dim, index, strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", reversed_index)


# The next tests show that the checks above find mistakes in kernels.


@triton.jit
def _copy_kernel(x_ptr, y_ptr, size, extra_read, extra_write, BLOCK: tl.constexpr):
    """Copy rows of `size` elements, one program per row. Also read and write some elements past a row's end."""
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * size + offs, mask=offs < size + extra_read, other=0.0)
    total = tl.sum(x, 0)
    tl.store(y_ptr + tl.program_id(0) * size + offs, x + 0 * total, mask=offs < size + extra_write)


def copy_rows(x, extra_read=0, extra_write=0):
    y = torch.empty_like(x)
    _copy_kernel[(x.shape[0],)](x, y, x.shape[1], extra_read, extra_write, BLOCK=128)
    return y


@pytest.mark.parametrize("extra_read, extra_write", [(0, 0), (0, 1), (0, -1), (1, 0)])
def test_poisoned_memory_reveals_mistakes(extra_read, extra_write):
    with PoisonedMemory() as memory:
        x = torch.ones(3, 100, device=DEVICE)
        y = copy_rows(x, extra_read, extra_write)
    if extra_write == 1:
        with pytest.raises(AssertionError, match="write past the end"):
            memory.check()
    else:
        memory.check()
    assert y.isnan().any().item() == (extra_read == 1 or extra_write == -1)


@pytest.mark.skipif(not INTERPRETED, reason="the order of programs can be chosen in the interpreter only")
def test_reverse_order_shows_a_store_into_the_next_row(monkeypatch):
    x = torch.arange(300.0, device=DEVICE).view(3, 100)
    with PoisonedMemory():  # the last row's extra elements are written to a margin of this memory
        assert torch.equal(copy_rows(x, extra_write=5), x)
        reverse_programs(monkeypatch)
        assert not torch.equal(copy_rows(x, extra_write=5), x)


@pytest.mark.skipif(not INTERPRETED, reason="loads can be watched in the interpreter only")
def test_refused_load_shows_a_read_past_the_end(monkeypatch):
    refuse_to_load_nan(monkeypatch)
    with PoisonedMemory():
        x = torch.ones(3, 100, device=DEVICE)
        copy_rows(x)
        with pytest.raises(interpreter.InterpreterError, match="loads NaN"):
            copy_rows(x, extra_read=1)


@pytest.mark.skipif(not INTERPRETED, reason="stores can be watched in the interpreter only")
def test_store_outside_all_arguments_is_refused():
    x = torch.ones(3, 100, device=DEVICE)
    copy_rows(x, extra_write=0)
    with pytest.raises(interpreter.InterpreterError, match="writes outside"):
        copy_rows(x, extra_write=1)
