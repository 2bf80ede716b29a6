"""Offsets of more than 2**31 elements are right. `tests/test_operator.py` tests this on a GPU, with whole stages.

Here a kernel runs for one program, whose elements are near the ends of huge tensors. These tensors are sparse files.
"""

import inspect
import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from cases import names_in
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

import stages
from common.interpreter import gluon as interpreted_gluon
from common.kernels.hopper import LOG2_E, describe_tile, store_clipped, store_rows
from common.kernels.pointers import head_ptr, strides, tile_ptrs
from common.runtime import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="only the interpreter can run one program of a grid")


def stages_with(kernel, pass_):
    """Return the first stage for each different text of a kernel."""
    first = {}
    for name in stages.names():
        if kernel in (names := names_in(name, pass_)):
            first.setdefault(inspect.getsource(names[kernel].fn), name)
    return list(first.values())


@pytest.fixture
def huge(tmp_path):
    """A function that makes a tensor of zeros in a sparse file. Only pages that are written to take space."""
    number = itertools.count()
    return lambda size, dtype=torch.float32: torch.from_file(f"{tmp_path}/{next(number)}", shared=True, size=size, dtype=dtype)


@pytest.fixture
def launch(monkeypatch):
    """A function that runs one program of a kernel, with the number `program`."""
    builder, program = interpreter.interpreter_builder, interpreted_gluon.Program
    # Triton's interpreter would copy all arguments back, and so touch all of their memory.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *args: None)

    def run(kernel, number, *args, **options):
        monkeypatch.setattr(builder, "set_grid_idx", lambda *_: setattr(builder, "grid_idx", (number, 0, 0)))
        monkeypatch.setattr(interpreted_gluon, "Program", lambda _: program(number))
        kernel[(1,)](*args, **options)

    return run


@pytest.mark.parametrize("name", stages_with("_finish_kernel", "backward"))
def test_offsets_of_dq(name, launch, huge):
    """The last of 65 rows, of head 64 of batch element 64, is 2**31 elements after the start in each dimension, and so is the
    accumulator's last tile."""
    heads, seq_q, head_dim, block_m, stride = 2**14, 65, 16, 64, 2**25 + 64
    batch_head = 64 * heads + 64
    tile = 2 * batch_head + 1
    sums = huge((tile + 1) * block_m * head_dim)
    dq = huge(3 * 64 * stride + head_dim, torch.float16)
    sums[-block_m * head_dim :] = 3.0
    kernel = names_in(name, "backward")["_finish_kernel"]
    sizes = {"heads": heads, "head_tiles": 2, "seq_q": seq_q, "HEAD_DIM": head_dim, "BLOCK_M": block_m}
    others = {argument: sizes.get(argument) for argument in kernel.arg_names[6:]}  # None: no work for dK and dV, no starts
    launch(kernel, tile, sums, dq, stride, stride, stride, 0.5, **others)
    assert (dq[-head_dim:] == 1.5).all()


@pytest.mark.parametrize("name", stages_with("_prepare_kernel", "backward"))
def test_offsets_of_statistics(name, launch, huge):
    """A query tile's LSE, statistics and accumulator are more than 2**31 elements after the first tile's."""
    heads, seq_q, dim, block_m = 2**11 + 1, 2**20 + 1, 16, 64
    tiles_m = seq_q // block_m + 1
    tile = heads * tiles_m - 1  # one row of the last head
    row = torch.full((1, 1, 1, dim), 0.5, dtype=torch.float16)
    rows = TensorDescriptor(row, [1, heads, seq_q, dim], [0, 0, 0, 1], [1, 1, block_m, dim])
    in_tiles = "_finish_kernel" in names_in(name, "backward")  # otherwise, dQ's accumulator has the rows of dQ
    tensors = {
        "out_desc": rows, "do_desc": rows, "lse_ptr": huge(heads * seq_q), "stats_ptr": huge((tile + 1) * 2 * block_m),
        "sums_ptr": huge(((tile + 1) * block_m if in_tiles else heads * seq_q) * dim),
        "tickets_ptr": huge(tile + 1, torch.int32), "counter_ptr": torch.ones(1, dtype=torch.int32), "dkv_sums_ptr": None,
    }  # fmt: skip
    tensors["lse_ptr"][-1] = 2.0
    tensors["sums_ptr"][-1] = tensors["tickets_ptr"][-1] = 1
    sizes = {"heads": heads, "seq_q": seq_q, "head_tiles": tiles_m, "HEAD_DIM": dim, "VALUE_DIM": dim, "BLOCK_M": block_m}
    sizes |= dict.fromkeys(("chunks", "starts_ptr", "sequences"))
    kernel = names_in(name, "backward")["_prepare_kernel"]
    launch(kernel, tile, **{argument: (tensors | sizes)[argument] for argument in kernel.arg_names})
    lse_log2, delta = tensors["stats_ptr"][-2 * block_m :].split(block_m)
    assert (lse_log2[0].item(), delta[0].item()) == (pytest.approx(2 * LOG2_E.value), 0.25 * dim)
    assert all(tensors[zeroed][-1] == 0 for zeroed in ("sums_ptr", "tickets_ptr") if zeroed in kernel.arg_names)


@pytest.mark.parametrize("name", stages_with("_merge_kernel", "forward"))
def test_offsets_of_splits_and_of_the_output(name, launch, huge):
    """The second split's rows are more than 2**31 elements after the first split's. So is O's row after O's first row."""
    batch, heads, seq_q, value_dim, merged, steps = 2**13 + 1, 2**11, 65, 16, 8, (2**18 + 64, 2**25 + 64, 2**25 + 64)
    rows = batch * heads * seq_q
    tile, row = (batch - 1) * heads + 64, ((batch - 1) * heads + 64) * seq_q + 64
    part, part_lse = huge(2 * rows * value_dim), huge(2 * rows)  # with an LSE of 0, both splits have equal weights
    out, lse = huge(2**33, torch.float16), huge(rows)
    kernel, places, shares, last = names_in(name)["_merge_kernel"], [row, rows + row], [], 2
    if "shares_ptr" in kernel.arg_names:  # tile t's row in share 1 has place (t + 1) * seq_q + 64
        places, shares, last = [row + seq_q, row + 2 * seq_q], [huge(2 * batch * heads, torch.int32)], seq_q
        shares[0][2 * tile :][:2] = torch.tensor([1, 2])  # the first share, and the number of shares
    for split, place in enumerate(places):
        part[place * value_dim :][:value_dim] = 1.0 + 2 * split
    launch(
        kernel, row // merged, part, part_lse, *shares, out, lse, *steps, rows, heads, seq_q, last,
        VALUE_DIM=value_dim, ROWS=merged, AT_ONCE=4, num_warps=4,
    )  # fmt: skip
    offset = (batch - 1) * steps[0] + 64 * steps[1] + 64 * steps[2]
    assert (out[offset : offset + value_dim] == 2).all() and lse[row].item() == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    "pass_, name", [(each, name) for each in ("forward", "backward") for name in stages_with("_list_kernel", each)]
)
def test_a_list_of_more_than_2_to_the_31_tiles(pass_, name, launch):
    """If starts fall, 1024 sequences may have all tokens. The short sequence's tile comes behind all of theirs."""
    tokens, most, first = 2**29, 3, 0 if pass_ == "forward" else 1  # in the backward, part 0 has the tokens before sequence 0
    starts = torch.tensor([0, 1] + [tokens, 0] * 1024, dtype=torch.int32)
    listed = torch.full((1 + most, 8), -7, dtype=torch.int32)
    sizes = {"sequences": len(starts) - 1, "tokens_q": tokens, "tokens_k": tokens, "most": most, "unused": 0, "BLOCK_M": 128}
    tensors = {"starts_q_ptr": starts, "starts_k_ptr": starts, "list_ptr": listed}
    kernel = names_in(name, pass_)["_list_kernel"]
    for program in {0, first}:
        launch(kernel, program, **{each: (tensors | sizes | {"CAUSAL": False})[each] for each in kernel.arg_names})
    assert listed[0, 1 - first] == most and (listed[1:] == -7).all()


@gluon.jit
def _store_kernel(out_desc, out_ptr, batch, head, start):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    tile = gl.full([64, 16], 1, gl.float16, layout)
    if len(out_desc.block_shape) == 5:
        store_rows(out_ptr, out_desc, batch, head, start, tile)
    else:
        store_clipped(out_ptr, out_desc, batch, head, start, tile)


@pytest.mark.parametrize("packed", [False, True])
def test_offsets_of_rows_that_are_stored_without_tma(launch, huge, packed):
    """The last position has two rows if rows are packed. Each dimension's offset is more than 2**31 elements."""
    stride = 2**25 + 64
    out = huge(2**34, torch.float16).as_strided((65, 65, 65, 2, 16), (stride, stride, stride, 2**31 + 64, 1))
    out = out if packed else out[:, :, :, 0]
    launch(_store_kernel, 0, describe_tile(out, 32, 2) if packed else describe_tile(out, 64), out, 64, 64, 64, num_warps=4)
    assert out[64, 64, 64].all()


@triton.jit
def _write_kernel(out_ptr, strides, batch, head, start):
    rows, columns = start + tl.arange(0, 16), tl.arange(0, 16)
    head_of_out = head_ptr(out_ptr, strides.out, batch, head)
    tl.store(tile_ptrs(head_of_out, strides.out, rows, columns), tl.full([16, 16], 1, tl.float16), mask=(rows == 64)[:, None])


def test_offsets_of_pointers(launch, huge):
    stride = 2**25 + 64
    out = huge(2**33, torch.float16).as_strided((65, 65, 65, 16), (stride, stride, stride, 1))
    launch(_write_kernel, 0, out, strides(out=out), 64, 64, 64)
    assert out[64, 64, 64].all()
