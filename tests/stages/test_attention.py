"""Outputs, gradients and log-sum-exps of every stage agree with attention in float64, for many shapes, layouts and values."""

import itertools

import pytest
import torch
from cases import FEW, FEW_SHARED, TILED, assert_same_bits, by_functions, by_operator, check, make_inputs, names_in, once

import stages
from common.measure.reference import assert_correct, plain, truth
from common.operator import DTYPES, HEAD_DIMS, diagonal
from common.runtime import DEVICE

on_gpu = DEVICE == "cuda"

LENGTHS = [(1, 1), (1, 239), (113, 203), (128, 217), (108, 256), (256, 512)]
LONG = [(1023, 1024), (1024, 1023)]
OF_THREE_TILES = [(383, 384), (384, 383)]
LENGTHS += [*LONG, (4001, 4096)] if on_gpu else [*OF_THREE_TILES, *LONG]  # without a GPU, LONG is marked long


def marks_of(number, lengths, long):
    """Return pytest's marks for problem `number` of a round (see `problems`).

    Half of the first round is marked `every_stage` (see tests/conftest.py), without lengths in `OF_THREE_TILES`.
    """
    if long:
        return [pytest.mark.long]
    return [pytest.mark.every_stage] if number % 4 in (1, 2) and lengths not in OF_THREE_TILES else []


def problems():
    """Yield problems in 15 rounds, which together have all combinations of lengths, mask, head dimension and dtype.

    A round has every length with and without a causal mask. It has each of the 15 pairs of dtype and head dimension at least
    once. In each further round, each problem gets the next pair. All rounds except the first are marked long.
    """
    # In this order, the first round's long problems get large tiles. The interpreter is fast with few tiles.
    quick = list(itertools.product((torch.float16, torch.bfloat16), HEAD_DIMS[:-1]))
    slow = [*itertools.product([torch.float32], HEAD_DIMS), (torch.bfloat16, HEAD_DIMS[-1]), (torch.float16, HEAD_DIMS[-1])]
    pairs = quick[:3] + slow + quick[3:]
    for turn in range(len(pairs)):
        for number, (lengths, causal) in enumerate(itertools.product(LENGTHS, (False, True))):
            dtype, head_dim = pairs[(number + turn) % len(pairs)]
            yield pytest.param(
                *lengths, causal, head_dim, dtype,
                id=f"{lengths[0]}x{lengths[1]}-{'causal' if causal else 'full'}-d{head_dim}-{str(dtype)[6:]}",
                marks=marks_of(number, lengths, long=turn or lengths in LONG and not on_gpu),
            )  # fmt: skip


@pytest.mark.parametrize("seq_q, seq_k, causal, head_dim, dtype", list(problems()))
def test_results_match_float64(stage, seq_q, seq_k, causal, head_dim, dtype):
    check(stage, *make_inputs(seq_q, seq_k, head_dim, dtype, **(FEW if seq_q > 100 else {})), causal=causal)


SHARED = [(1, 8, 1), (2, 3, 1), (1, 4, 2), (1, 2, 2)]  # (batch, query heads, K/V heads)
DIMENSIONS = [(256, 16), (32, 256), (64, 128), (128, 64), (64, 64)]  # (head_dim, value_dim)


def problems_of_shared_heads():
    """Yield problems with shared heads and with D ≠ Dv, in 15 rounds.

    A round has every length with and without a causal mask, all of `SHARED`, and all of `DIMENSIONS`. In each further round,
    each problem gets the next element of `SHARED` and of `DIMENSIONS`. After 15 rounds each length has had all dimensions in
    every dtype. All rounds except the first are marked long.
    """
    lengths = [*LENGTHS[:4], LONG[0] if on_gpu else (383, 384)]
    for turn in range(len(DIMENSIONS) * len(DTYPES)):
        for number, (causal, (seq_q, seq_k)) in enumerate(itertools.product((False, True), lengths)):
            batch, heads, kv_heads = SHARED[(number % len(lengths) + turn) % len(SHARED)]
            head_dim, value_dim = DIMENSIONS[(number + turn) % len(DIMENSIONS)]
            dtype = DTYPES[(number + turn - 1) % len(DTYPES)]  # - 1 gives float32 to problems with few rows or heads
            sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "value_dim": value_dim}
            shape = f"{seq_q}x{seq_k}-{'causal' if causal else 'full'}-b{batch}-h{heads}x{kv_heads}-d{head_dim}x{value_dim}"
            yield pytest.param(
                seq_q, seq_k, causal, head_dim, dtype, sizes, id=f"{shape}-{str(dtype)[6:]}",
                marks=marks_of(number, (seq_q, seq_k), long=turn or (seq_q, seq_k) == lengths[-1] and not on_gpu),
            )  # fmt: skip


@pytest.mark.parametrize("seq_q, seq_k, causal, head_dim, dtype, sizes", list(problems_of_shared_heads()))
def test_results_of_shared_heads_match_float64(stage, seq_q, seq_k, causal, head_dim, dtype, sizes):
    check(stage, *make_inputs(seq_q, seq_k, head_dim, dtype, **sizes), causal=causal)


def test_shared_heads_equal_repeated_heads(stage, unordered):
    """Shared K/V heads give the same bits as repeated ones, because a query's results depend on no other query.

    Stages that call PyTorch's matmul need only give close results: for other shapes, this matmul may add in another order.
    Stages with two orders of query tiles use both orders here.
    """
    seq_q, seq_k, kv_heads = (1000, 1100, 32) if on_gpu else (280, 150, 2)
    q, k, v, grad_out = make_inputs(seq_q, seq_k, batch=1, heads=2 * kv_heads, kv_heads=kv_heads, value_dim=128)
    shared, repeated = (
        check(stage, q, *keys_and_values, grad_out, causal=True, scale=0.2, run=by_functions)
        for keys_and_values in ((k, v), (k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    )
    for name in ("dk", "dv"):
        total = repeated.pop(name).float().unflatten(1, (kv_heads, 2)).sum(2)
        tolerance = 2 * torch.finfo(q.dtype).eps * total.abs().max().item()
        torch.testing.assert_close(shared.pop(name).float(), total, rtol=0, atol=tolerance)
    by_library = "matmul_float32" in stage.forward.__globals__
    assert_same_bits(shared, repeated, ("out", "lse", "dq") if by_library else unordered)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_are_rounded_to_nearest(stage, dtype):
    """Results are rounded to nearest. A cast that truncates would shrink them by about a third of eps on average.

    The usual error bound allows this error. So this test checks the mean error, in which errors of rounding to nearest cancel.
    """
    q, k, v, grad_out = make_inputs(64, 100, dtype=dtype)
    results = by_operator(stage, q, k, v, grad_out, causal=False, scale=0.2)
    exact = truth(q, k, v, False, 0.2, grad_out)
    for name in ("out", "dq", "dk", "dv"):
        shrinkage = ((exact[name] - results[name]) * exact[name].sign()).mean() / exact[name].abs().mean()
        assert abs(shrinkage) < 0.1 * torch.finfo(dtype).eps, name


def as_bshd(tensor):
    """Return `tensor` stored as [B, S, H, D], as model code stores it before transpose(1, 2)."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def as_slice_of_packed(tensor):
    """Return one of three tensors that are packed as [B, S, 3, H, D]."""
    batch, heads, seq, head_dim = tensor.shape
    packed = tensor.new_full((batch, seq, 3, heads, head_dim), float("nan"))
    packed[:, :, 1] = tensor.transpose(1, 2)
    return packed[:, :, 1].transpose(1, 2)


def as_every_other_row(tensor):
    batch, heads, seq, head_dim = tensor.shape
    return tensor.new_full((batch, heads, 2 * seq, head_dim), float("nan"))[:, :, ::2].copy_(tensor)


def as_expanded_heads(tensor):
    """Return a tensor whose heads share the first head's memory (stride 0)."""
    return tensor[:, :1].expand_as(tensor)


def as_odd_rows(tensor):
    """Return a tensor whose row stride is no multiple of 16 bytes. TMA cannot address it."""
    return tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 1), float("nan"))[..., :-1].copy_(tensor)


def as_odd_base(tensor):
    """Return a tensor whose first element is not aligned to 16 bytes. TMA cannot address it."""
    return tensor.new_full((tensor.numel() + 1,), float("nan"))[1:].view(tensor.shape).copy_(tensor)


def as_columns(tensor):
    """Return a tensor whose last dimension is not contiguous."""
    return tensor.mT.contiguous().mT


def as_expanded_scalar(tensor):
    """Return a gradient like that of out.sum().backward(): one element, and every stride 0."""
    return tensor[0, 0, 0, 0].expand_as(tensor)


def as_expanded_rows(tensor):
    return tensor[:, :, :1].expand_as(tensor)


layouts = (as_bshd, as_slice_of_packed, as_every_other_row, as_expanded_heads, as_odd_rows, as_odd_base)


@pytest.mark.parametrize("layout", layouts)
def test_inputs_of_any_strides(stage, layout):
    inputs = make_inputs(*TILED, heads=4, kv_heads=2, value_dim=16)
    check(stage, *map(layout, inputs), causal=True, run=by_functions)


@pytest.mark.parametrize("turn", range(4))
def test_inputs_of_different_strides(stage, turn):
    """The tensors have different strides. With equal strides, a kernel that reads v with k's strides would look right."""
    in_turn = (layouts[turn], as_columns, layouts[turn + 1], layouts[turn + 2])
    inputs = make_inputs(*TILED, **({"heads": 4, "kv_heads": 2} if turn % 2 else {}))
    tensors = (layout(tensor) for layout, tensor in zip(in_turn, inputs, strict=True))
    check(stage, *tensors, causal=True)


@pytest.mark.parametrize("layout", [*layouts, as_columns, as_expanded_scalar, as_expanded_rows])
def test_gradient_of_the_output_may_have_any_strides(stage, layout):
    """dO may have any strides. A kernel that assumes O's strides would silently read wrong elements."""
    q, k, v, grad_out = make_inputs(*TILED, value_dim=64)
    check(stage, q, k, v, layout(grad_out), causal=True, run=by_functions)


def test_gradient_of_a_sum(stage):
    """out.sum().backward() makes a gradient whose strides are all 0. Autograd must pass it to the stage."""
    q, k, v, grad_out = make_inputs(*TILED, **FEW)
    check(stage, q, k, v, torch.ones((), dtype=q.dtype, device=DEVICE).expand_as(grad_out), causal=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_any_finite_scale(stage, scale, causal):
    """Scales may be 0 or negative.

    A masked score of -inf, times a scale of 0, is NaN. A negative scale makes the largest q·k the smallest score.
    """
    check(stage, *make_inputs(*TILED, **FEW), causal=causal, scale=scale)


@pytest.mark.every_stage
def test_a_negative_scale_with_query_groups(stage):
    """Each K/V head has the gradients of its own query group, and a negative scale is right in both passes."""
    check(stage, *make_inputs(40, 70, 16, batch=1, heads=4, kv_heads=2), causal="bottom-right", scale=-0.3)


def has_wide_kernels(name):
    """Return whether a stage's backward has other kernels for D = 256."""
    return any(variable.startswith("_wide_") for variable in names_in(name, "backward"))


@pytest.mark.parametrize("wide", once([name for name in stages.names() if has_wide_kernels(name)], "backward"))
def test_a_negative_scale_with_query_groups_in_wide_kernels(wide):
    if reason := stages.unavailable(wide):
        pytest.skip(f"{wide} {reason}")
    inputs = make_inputs(40, 70, 256, batch=1, heads=4, kv_heads=2, value_dim=16)
    check(stages.load(wide), *inputs, causal="bottom-right", scale=-0.05)


@pytest.mark.parametrize("scale", [1e-30, -1e-30, 1e6, -1e6])
def test_scales_at_the_ends_of_their_range(stage, scale):
    """With a scale of ±1e-30, all keys have equal weights. With ±1e6, only a row's largest score (1e7 to 1e8) counts."""
    q, k, v, _ = make_inputs(*TILED, head_dim=128, **FEW)
    out, lse = stage.forward(q, k, v, causal=False, scale=scale)
    exact, yardstick = (make(q, k, v, False, scale) for make in (truth, plain))
    assert_correct({"out": out, "lse": lse}, exact, yardstick)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_scale_of_zero_makes_all_scores_equal(stage, dtype):
    """A scale of 0 makes all scores equal, even if q·k is about 1e30. float16 cannot hold such inputs."""
    q, k, v, grad_out = make_inputs(*TILED, dtype=dtype, **FEW)
    check(stage, 1e15 * q, 1e15 * k, v, grad_out, causal=True, scale=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign, causal", [("all large", True), ("all small", True), ("all small", False), ("both", True)])
def test_scores_of_ten_thousand(stage, sign, causal, dtype):
    """Large scores do not overflow.

    exp(x) overflows float32 if x exceeds 88. The unscaled q·k is 80 000 here, and float16 ends at 65504.
    """
    head_dim = 64
    q, k, v, grad_out = make_inputs(*TILED, head_dim, dtype, **FEW)
    direction = torch.randn(head_dim, device=DEVICE).sign() * 35.4  # 35.4² · 64 / √64 = 10⁴
    signs = {"all large": k.new_ones(()), "all small": -k.new_ones(()), "both": torch.randn_like(k[..., :1]).sign()}
    q = (direction + 0.02 * q).to(dtype)
    k = (direction * signs[sign] + 0.02 * k).to(dtype)
    results = check(stage, q, k, v, grad_out, causal=causal)
    assert results["lse"].abs().mean() > 9_000


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("growth", [200.0, 40.0, -200.0])
def test_scores_that_grow_along_the_keys(stage, growth, causal, dtype):
    """Scores grow or fall along the keys. So a maximum guessed from the first or last keys is far too small.

    exp(x) overflows float16 if x exceeds 11, and float32 and bfloat16 if x exceeds 88. Only the later half of one head's rows
    has such scores. The other rows must stay right.
    """
    seq_q, seq_k, head_dim = (1100, 1000, 64) if on_gpu else (110, 100, 16)
    q, k, v, grad_out = make_inputs(seq_q, seq_k, head_dim, dtype, **FEW)
    q[..., 0] = 0
    q[-1, -1, seq_q // 2 :, 0] = 10.0
    k[..., 0] = torch.linspace(0, growth * head_dim**0.5 / 10, seq_k, device=DEVICE)
    results = check(stage, q, k, v, grad_out, causal=causal)
    assert abs(results["lse"][-1, -1, -1] - max(growth, 0)) < 15


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_infinite_value_stays_in_its_column(stage, dtype):
    q, k, v, _ = make_inputs(*TILED, dtype=dtype, **FEW)
    v[0, 1, 70, 3] = float("inf")
    out, _ = stage.forward(q, k, v, causal=False, scale=0.2)
    infinite = torch.zeros_like(out, dtype=torch.bool)
    infinite[0, 1, :, 3] = True
    assert torch.equal(out.isinf(), infinite) and torch.equal(~out.isfinite(), infinite)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_scores_give_the_mean_of_v(stage, dtype):
    q, k, v, grad_out = make_inputs(*TILED, dtype=dtype, **FEW)
    k = k[:, :, :1].expand_as(k)
    results = check(stage, q, k, v, grad_out, causal=False)
    mean = v.double().mean(2, keepdim=True).expand_as(q)
    torch.testing.assert_close(results["out"], mean.to(dtype))


@pytest.mark.parametrize("size", [2.0**30, 2.0**-30])
def test_bfloat16_keeps_its_range(stage, size):
    """V may be about 2**30 or 2**-30. A kernel that uses float16 inside would make infinities or zeros."""
    q, k, v, grad_out = make_inputs(*TILED, dtype=torch.bfloat16, **FEW)
    results = check(stage, q, k, v * size, grad_out, causal=False)
    assert results["out"].abs().mean() > 0.01 * size


@pytest.mark.parametrize("seq_q, seq_k", [(1, 150), (70, 203), (203, 70), (150, 1)])
def test_causal_is_aligned_top_left(stage, seq_q, seq_k):
    """Query i sees keys 0 … i. A key that no query sees has a gradient of zero."""
    q, k, v, grad_out = make_inputs(seq_q, seq_k, **FEW)
    results = check(stage, q, k, v, grad_out, causal=True)
    assert torch.equal(results["out"][:, :, 0], v[:, :, 0])
    assert not results["dk"][:, :, seq_q:].any() and not results["dv"][:, :, seq_q:].any()


@pytest.mark.every_stage
@pytest.mark.parametrize(
    "seq_q, seq_k, sizes",
    [
        (1, 150, {}),
        (40, 41, {"head_dim": 128}),  # the diagonal in the middle of a tile
        (64, 320, {"head_dim": 64, "kv_heads": 1}),
        (70, 203, {"kv_heads": 1, "value_dim": 64}),
        (130, 257, {"head_dim": 64, "dtype": torch.bfloat16}),
        (150, 150, {}),
        pytest.param(300, 700, {"head_dim": 128, "value_dim": 64}, marks=pytest.mark.long),
        pytest.param(390, 400, {"head_dim": 256, "kv_heads": 1}, marks=pytest.mark.long),
        pytest.param(3, 1000, {"dtype": torch.float32}, marks=pytest.mark.long),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_causal_may_be_aligned_bottom_right(stage, seq_q, seq_k, sizes):
    """The last query sees all keys. Each earlier query sees one key less than the query after it."""
    results = check(stage, *make_inputs(seq_q, seq_k, **FEW | sizes), causal="bottom-right")
    assert results["dk"][:, :, -1].any() and results["dv"][:, :, -1].any()


@pytest.mark.every_stage
def test_float32_aligned_bottom_right(stage):
    """For float32, a Hopper stage calls another stage. The other stage must get the scale and the diagonal."""
    inputs = make_inputs(7, 20, 16, torch.float32, batch=1, heads=2, kv_heads=1, value_dim=32)
    check(stage, *inputs, causal="bottom-right", scale=-0.3)


def test_chunks_of_queries(stage):
    """Each chunk of queries gets the keys up to the chunk's end, as if keys were added to a cache."""
    q, k, v, grad_out = make_inputs(200, 200, **FEW)
    for first, end in ((0, 70), (70, 113), (113, 114), (114, 200)):
        chunk = q[:, :, first:end], k[:, :, :end], v[:, :, :end], grad_out[:, :, first:end]
        check(stage, *chunk, causal="bottom-right")


@pytest.mark.parametrize("causal", [False, True])
def test_merging_halves_of_the_keys_by_their_lse(stage, causal):
    """Results for two halves of the keys can be merged: out = Σ exp(lse_i - lse) out_i, with lse = logsumexp(lse_i).

    In the causal case, every query here sees all keys of the first half. So the call with this half is not causal.
    """
    q, k, v, _ = make_inputs(70, 140, dtype=torch.float32, **FEW)
    keys = torch.split(k, 70, dim=2)
    values = torch.split(v, 70, dim=2)
    halves = [
        stage.attention(q, key, value, causal=causal and half == 1, return_lse=True)
        for half, (key, value) in enumerate(zip(keys, values, strict=True))
    ]
    lse = torch.stack([half_lse for _, half_lse in halves])
    weights = torch.exp(lse - lse.logsumexp(0))[..., None]
    merged = sum(weight * half for weight, (half, _) in zip(weights, halves, strict=True))
    # Rows 70 to 139 are the queries under test. They see all of the first 70 keys.
    q_of_all = torch.cat([q, q], dim=2) if causal else q
    expected = truth(q_of_all, k, v, causal, q.shape[-1] ** -0.5)
    magnitudes = {name: magnitude[:, :, -70:] for name, magnitude in expected.pop("magnitudes").items()}
    whole = {name: result[:, :, -70:] for name, result in expected.items()}
    rounded = {name: result.float() for name, result in whole.items()}
    assert_correct({"out": merged, "lse": lse.logsumexp(0)}, whole | {"magnitudes": magnitudes}, rounded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True, "bottom-right"])
def test_gradient_through_the_lse(stage, causal, dtype):
    """The gradient through the LSE is right, alone and together with the output's gradient."""
    q, k, v, grad_out = make_inputs(*TILED, dtype=dtype, **FEW_SHARED)
    grad_lse = torch.randn(q.shape[:3], device=DEVICE)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out, lse = stage.attention(*leaves, causal=causal, scale=-0.2, return_lse=True)
    for used in (grad_out, torch.zeros_like(grad_out)):
        loss = (lse * grad_lse).sum() + ((out * used).sum() if used is grad_out else 0)
        got = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
        problem = (q, k, v, bool(causal), -0.2, used, diagonal(causal, q.shape[2], k.shape[2]), grad_lse)
        assert_correct(dict(zip(("dq", "dk", "dv"), got, strict=True)), truth(*problem), plain(*problem))


@pytest.mark.parametrize("dtype, sizes", [*zip(DTYPES, 3 * [FEW], strict=True), (torch.float16, FEW_SHARED)])
def test_same_inputs_give_the_same_bits(stage, dtype, sizes, unordered):
    """Two calls give equal bits. PyTorch's deterministic mode is on for stages that add up in no fixed order (`UNORDERED`)."""
    torch.use_deterministic_algorithms(bool(unordered))
    inputs = make_inputs(*((1000, 1100) if on_gpu else TILED), 64, dtype, **sizes)
    first = by_operator(stage, *inputs, causal=True, scale=0.125)
    for _ in range(20 if on_gpu else 1):
        assert_same_bits(first, by_operator(stage, *inputs, causal=True, scale=0.125))


@pytest.mark.skipif(not on_gpu, reason="the interpreter runs programs one after another: 65 536 of them take minutes")
@pytest.mark.parametrize("shared", [1, 2])
def test_more_heads_than_a_grid_axis_holds(stage, shared):
    """Many heads work, although the second and third axes of a CUDA grid end at 65535."""
    inputs = make_inputs(3, 5, 16, batch=2, heads=shared * 33_000, kv_heads=33_000)
    results = by_functions(stage, *inputs, causal=True, scale=0.25)

    def some(tensor):  # a few heads, because the truth for all heads takes minutes
        return tensor.unflatten(1, (33_000, -1))[:, ::10_999].flatten(1, 2)

    q, k, v, grad_out = map(some, inputs)
    results = {name: some(result) for name, result in results.items()}
    assert_correct(results, truth(q, k, v, True, 0.25, grad_out), plain(q, k, v, True, 0.25, grad_out))
