"""Outputs, gradients and log-sum-exps of every stage agree with attention in float64, for many shapes, layouts and values."""

import itertools

import cases
import pytest
import torch
from cases import FEW, FEW_SHARED, TILED, assert_same_bits, by_functions, by_operator, check, make_inputs

import stages
from common.checks import DTYPES, HEAD_DIMS, diagonal
from common.measure.reference import assert_correct, plain, truth
from common.runtime import DEVICE, INTERPRETED, Device, interpreted_as

on_gpu = DEVICE == "cuda"

LENGTHS = [(1, 1), (1, 239), (113, 203), (128, 217), (108, 256), (256, 512), (383, 384), (384, 383)]
LONG_ROWS = [(1023, 1024), (1024, 1023), *([(4001, 4096)] if on_gpu else [])]
PAIRS = list(itertools.product(HEAD_DIMS, DTYPES))
EACH = 1  # number of problems of each pass in the default run


def problems():
    """Return problems (queries, keys, causal, head dimension, dtype).

    The first round has all lengths with and without a mask, and most pairs of head dimension and dtype. 15 rounds, which only
    long tests have, combine everything.
    """
    found = []
    for turn in range(len(PAIRS) if cases.LONG else 1):
        lengths = LENGTHS + LONG_ROWS if cases.LONG or on_gpu else LENGTHS
        for number, (pair, causal) in enumerate(itertools.product(lengths, (False, True))):
            found.append((*pair, causal, *PAIRS[(4 * number + turn) % len(PAIRS)]))
    return found


PROBLEMS = problems()


@pytest.mark.every_part
@pytest.mark.parametrize("turn", range(len(PROBLEMS) if cases.LONG or on_gpu else EACH))
def test_results_match_float64(part, turn):
    """Each pass gets other problems than the next. A Hopper stage gets no float32, for which it calls another stage."""
    seq_q, seq_k, causal, head_dim, dtype = PROBLEMS[(EACH * part.place + turn) % len(PROBLEMS)]
    dtype = torch.float16 if dtype == torch.float32 and cases.needs_hopper(part.name) else dtype
    part.check(*make_inputs(seq_q, seq_k, head_dim, dtype, **(FEW if seq_q > 100 else {})), causal=causal)


def test_shared_heads_equal_repeated_heads(stage, unordered):
    """Shared K/V heads give the same bits as repeated ones, because a query's results depend on no other query.

    Stages that call PyTorch's matmul need only give close results: for other shapes, this matmul may add in another order. The
    newest stage may choose another track's kernels if heads share keys. `check` compares its results with float64, as all.
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
    if stage is not stages.load("newest"):
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
    """A negative scale makes the largest q·k the smallest score."""
    check(stage, *make_inputs(*TILED, **FEW), causal=causal, scale=scale)


def test_a_scale_of_zero_with_a_mask(part):
    """In every pass, a masked score of -inf is not multiplied by a scale of 0."""
    part.check(*make_inputs(*TILED, **FEW), causal=True, scale=0.0)


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


GROWTHS = list(itertools.product((200.0, 40.0, -200.0), (False, True), (torch.float16, torch.bfloat16)))


@pytest.mark.parametrize("turn", range(len(GROWTHS) if cases.LONG else 1))
def test_scores_that_grow_along_the_keys(part, turn):
    """Scores grow or fall along the keys. So a maximum guessed from the first or last keys is far too small.

    exp(x) overflows float16 if x exceeds 11, and float32 and bfloat16 if x exceeds 88. Only the later half of one head's rows
    has such scores. The other rows must stay right. In the default run, each pass gets another case than the next.
    """
    growth, causal, dtype = GROWTHS[(part.place + turn) % len(GROWTHS)]
    seq_q, seq_k, head_dim = (1100, 1000, 64) if on_gpu else (110, 100, 16)
    q, k, v, grad_out = make_inputs(seq_q, seq_k, head_dim, dtype, **FEW)
    q[..., 0] = 0
    q[-1, -1, seq_q // 2 :, 0] = 10.0
    k[..., 0] = torch.linspace(0, growth * head_dim**0.5 / 10, seq_k, device=DEVICE)
    part.check(q, k, v, grad_out, causal=causal)


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


BOTTOM_RIGHT = [
    (1, 150, {}),
    (40, 41, {"head_dim": 128}),  # the diagonal in the middle of a tile
    (64, 320, {"head_dim": 64, "kv_heads": 1}),
    (70, 203, {"kv_heads": 1, "value_dim": 64}),
    (130, 257, {"head_dim": 64, "dtype": torch.bfloat16}),
    (150, 150, {}),
]
if cases.LONG:
    BOTTOM_RIGHT += [
        (300, 700, {"head_dim": 128, "value_dim": 64}),
        (390, 400, {"head_dim": 256, "kv_heads": 1}),
        (3, 1000, {"dtype": torch.float32}),
    ]


@pytest.mark.parametrize("turn", range(len(BOTTOM_RIGHT) if cases.LONG or on_gpu else 1))
def test_causal_may_be_aligned_bottom_right(part, turn):
    """The last query sees all keys. Each earlier query sees one key less than the query after it."""
    seq_q, seq_k, sizes = BOTTOM_RIGHT[(part.place + turn) % len(BOTTOM_RIGHT)]
    part.check(*make_inputs(seq_q, seq_k, **FEW | sizes), causal="bottom-right")


@pytest.mark.parametrize("stage", cases.usual(stages.names()), indirect=True)
def test_float32_aligned_bottom_right(stage):
    """For float32, a Hopper stage calls another stage. The other stage must get the scale and the diagonal."""
    inputs = make_inputs(7, 20, 16, torch.float32, batch=1, heads=2, kv_heads=1, value_dim=32)
    check(stage, *inputs, causal="bottom-right", scale=-0.3)


@pytest.mark.skipif(not INTERPRETED, reason="only interpreted stages can be told another architecture")
def test_a_forward_that_compiles_only_for_hopper_falls_back(monkeypatch):
    """The other stage must get the scale and the diagonal."""
    stage = stages.load("v4b")
    monkeypatch.setitem(stage.forward.__globals__, "_forward_kernel", None)
    with interpreted_as(Device(architecture=100)):
        check(stage, *make_inputs(7, 20, 16, batch=1, heads=2, kv_heads=1, value_dim=32), causal="bottom-right", scale=-0.3)


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
