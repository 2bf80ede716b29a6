"""Stages that compute with Q, K, V and P in 8 bits have an error rule of their own. With gradients, they are like others."""

import functools
import itertools

import pytest
import torch
from cases import LONG, Part, assert_same_bits, by_operator, changed, make_inputs, names_in, set_names, usual
from torch.func import grad, jacrev, vjp, vmap
from torch.utils.checkpoint import checkpoint
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import stages
from common.checks import diagonal
from common.entry import differentiable_entry, entry
from common.interpreter import asynchronous, schedule
from common.measure.counter import count
from common.measure.eight import cut_matmul
from common.measure.reference import (
    E4M3_MAX,
    EIGHT_BIT_FACTORS,
    assert_close,
    assert_correct,
    e4m3,
    error_bounds,
    plain_in_eight_bits,
    rounded_to_eight_bits,
    truth,
)
from common.runtime import DEVICE, INTERPRETED, Device, interpreted_as

HALF, BRAIN = torch.float16, torch.bfloat16
STAGES = [name for name in stages.names() if hasattr(stages.load(name), "eight_bits")]
ONE = {"batch": 1, "heads": 1}
SCALE = 0.2


def by_default() -> list[str]:
    """Return the stages for most tests: in the default run, without dead ends that have not changed."""
    everything = LONG or not INTERPRETED
    return [name for name in usual(STAGES) if everything or name in changed() or not stages.is_dead_end(name)]


@pytest.fixture(params=by_default())
def eight(request, monkeypatch):
    """A stage that computes in 8 bits, here with any length."""
    if reason := stages.unavailable(request.param):
        pytest.skip(f"{request.param} {reason}")
    set_names(monkeypatch, request.param, FEWEST={64: 0, 128: 0})
    return stages.load(request.param)


def name_of(stage):
    return stage.__name__.removeprefix("stages.")


def check(stage, q, k, v, causal=False, **others):
    """Assert that O and LSE are as right as the rule of 8 bits demands, and return them."""
    assert stage.eight_bits(q, k, v, causal)
    return Part(name_of(stage), "forward").check(q, k, v, None, causal=causal, **others)


def with_outliers(q, k, v):
    k[..., [1, 5, 9, 33]] *= 20
    q[..., 7] *= 20


def with_shared_outliers(q, k, v):
    k[..., [1, 5, 9, 33]] *= 20
    q[..., 5] *= 20


def with_mean(q, k, v):
    v += 1


def with_drift(q, k, v):
    """V's mean goes from -3 to 3, and its size from 1/8 to 8."""
    along = torch.linspace(-3, 3, v.shape[2], device=DEVICE)[:, None]
    v.copy_((v + along) * 2.0**along)


def with_sink(key):
    def change(q, k, v):
        q += 0.5
        k[:, :, key] = 4.0

    return change


def with_a_sink_over_many(q, k, v):
    """The sink's score is 10 nats more than others, and its V is 0. So O comes from P of about e^-10."""
    q[..., 0], k[..., 0] = 4.0, 0.0
    k[:, :, 150, 0] = 10 * q.shape[-1] ** 0.5 / 4
    v += 1
    v[:, :, 150] = 0


def with_wide_scores(q, k, v):
    q *= 6


def with_small_and_large_rows(q, k, v):
    q *= torch.logspace(-4, 1, q.shape[2], device=DEVICE)[:, None]


INPUTS = {
    "normal": lambda q, k, v: None,
    "outlier channels": with_outliers,
    "Q's outliers among K's": with_shared_outliers,
    "V with a mean": with_mean,
    "V that drifts": with_drift,
    "first key a sink": with_sink(0),
    "middle key a sink": with_sink(150),
    "last key a sink": with_sink(-1),
    "a sink over many": with_a_sink_over_many,
    "wide scores": with_wide_scores,
    "rows of any size": with_small_and_large_rows,
}
SIZES = list(itertools.product((64, 128), (HALF, BRAIN), (False, True)))


@pytest.mark.parametrize("kind, head_dim, dtype, causal", [
    (kind, *sizes) for place, kind in enumerate(INPUTS)
    for sizes in (SIZES if LONG or not INTERPRETED else (SIZES[2 * place % 8], SIZES[(2 * place + 5) % 8]))
], ids=str)  # fmt: skip
def test_the_error_is_that_of_plain_pytorch_in_eight_bits(eight, kind, head_dim, dtype, causal):
    seq_q, seq_k = (300, 300) if INTERPRETED else (2500, 2500)
    q, k, v, _ = make_inputs(seq_q, seq_k, head_dim, torch.float32, **ONE)
    INPUTS[kind](q, k, v)
    check(eight, *(each.to(dtype) for each in (q, k, v)), causal)


P_FROM_BITS = {"rms": 2, "largest": 4}  # O's error, over plain PyTorch's, where the errors of P from bits do not average out


def check_without_lse(stage, q, k, v, causal=False, few=False):
    """Assert that O keeps the rule of 8 bits, and that LSE is as far off as P in half of the columns may be.

    With `few` scores, LSE may also be as far off as that of plain PyTorch in 8 bits, and O as `P_FROM_BITS` says.
    """
    shift = {"diagonal": diagonal(causal, q.shape[2], k.shape[2])}
    out, lse = stage.forward(q, k, v, causal=bool(causal), scale=SCALE, **shift)
    exact, plain = (make(q, k, v, bool(causal), SCALE, **shift) for make in (truth, plain_in_eight_bits))
    if "_exp2_from_bits" in names_in(name_of(stage)):
        assert_correct({"out": out}, exact, plain, P_FROM_BITS if few else EIGHT_BIT_FACTORS)
        rounding = (plain["lse"] - exact["lse"]).abs().max().item() if few else 0
        torch.testing.assert_close(lse.double(), exact["lse"], rtol=0, atol=0.039 / 2 + rounding)
    else:
        assert_correct({"out": out, "lse": lse}, exact, plain, EIGHT_BIT_FACTORS)


@pytest.mark.parametrize("deviation", [1e-3, 0.01, 0.1, 0.3])
def test_scores_that_hardly_differ(eight, deviation):
    q, k, v, _ = make_inputs(130, 300, 64, torch.float32, **ONE)
    q *= deviation / (SCALE * 8)
    check_without_lse(eight, *(each.half() for each in (q, k, v)))


@pytest.mark.parametrize("deviation", [1e-3, 0.01, 0.1, 0.3])
def test_scores_that_hardly_differ_and_v_with_a_mean(eight, deviation):
    """P from bits may break the rule for O, as the stage's limits say."""
    q, k, v, _ = make_inputs(130, 300, 64, torch.float32, **ONE)
    q *= deviation / (SCALE * 8)
    q, k, v = (each.half() for each in (q, k, v + 1))
    out, _ = eight.forward(q, k, v, causal=False, scale=SCALE)
    exact, plain = (make(q, k, v, False, SCALE) for make in (truth, plain_in_eight_bits))
    from_bits = "_exp2_from_bits" in names_in(name_of(eight))
    assert_correct({"out": out}, exact, plain, P_FROM_BITS if from_bits else EIGHT_BIT_FACTORS)


FROM_BITS = [name for name in STAGES if "_exp2_from_bits" in names_in(name)]
_exp2_from_bits = names_in(FROM_BITS[0])["_exp2_from_bits"]


@gluon.jit
def _exp2_kernel(s_ptr, factor_ptr, m_ptr, p_ptr):
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, layout))
    offsets = rows[:, None] * 128 + gl.arange(0, 128, gl.SliceLayout(0, layout))[None, :]
    factor, m = gl.load(factor_ptr + rows), gl.load(m_ptr + rows)
    gl.store(p_ptr + offsets, _exp2_from_bits(gl.load(s_ptr + offsets), factor[:, None], m[:, None]))


def from_bits(s, factor, m):
    """Return what `_exp2_from_bits` makes of s [32, 128], with a factor and a maximum for each row."""
    p = torch.empty_like(s)
    _exp2_kernel[1,](s, factor, m, p, num_warps=4)
    return p


@pytest.mark.parametrize("m", [0.0, 0.7, -5.3, 60.0, -1000.0])
def test_a_float_s_bits_give_an_exponential_that_is_4_percent_off(m):
    """The row's largest P is 448, up to the float32's last bits, and exactly 448 if m is an integer."""
    x = torch.linspace(-100, 0, 32 * 128, device=DEVICE).view(32, 128)
    factor, m = torch.full((32,), 2.0**-7, device=DEVICE), torch.full((32,), m, device=DEVICE)
    s = (x + m[:, None]) / factor[:, None]
    p = from_bits(s, factor, m)
    off = p.double() / (448 * (s.double() * factor[:, None] - m[:, None]).exp2()) - 1
    rounding = (1 + m.abs().max().item() / 128) * 2**-15
    assert -0.0391 - rounding < off.min() < -0.038 and 0.0195 < off.max() < 0.0202 + rounding
    assert off.mean().abs() < 0.001
    assert abs(p[-1, -1].item() / 448 - 1) <= (0 if m[0] == m[0].round() else rounding)


def test_bits_of_numbers_far_below_the_maximum_are_zero():
    """Masked scores, and numbers below the smallest exponent, whatever their size. NaN stays NaN."""
    s = -torch.logspace(8, 120, 32 * 128, base=2, device=DEVICE).view(32, 128)
    s[3, 5], s[4] = -torch.inf, -3e38
    s[5, 6], s[5, 7] = torch.nan, 0
    factor, m = torch.ones(32, device=DEVICE), torch.zeros(32, device=DEVICE)
    p = from_bits(s, factor, m)
    assert p[5, 6].isnan() and p[5, 7] == 448
    p[5, 6:8] = 0
    assert p.equal(torch.zeros_like(p)) and not p.signbit().any()
    assert from_bits(s, torch.full_like(factor, 1e-37), m + 200)[[0, 3, 4], 5].equal(s.new_zeros(3))


@pytest.mark.parametrize("nats", [80, 150, 1e4])
def test_keys_far_below_the_maximum_have_no_weight(eight, nats):
    """A key has all of the attention, in an even or an odd column; the others' V is large."""
    q, k, v, _ = make_inputs(40, 300, 64, BRAIN, **ONE)
    q[:], k[:] = 0, 0
    q[..., 0], k[..., 0] = 1, -nats
    for key in (130, 131):
        some = k.clone()
        some[:, :, key, 0] = 0
        out, lse = eight.forward(q, some, v, causal=False, scale=1.0)
        torch.testing.assert_close(out, v[:, :, key : key + 1].expand_as(out), rtol=1 / 16, atol=v.abs().max().item() / 448)
        assert not lse.any()


LENGTHS = [(1, 1), (5, 17), (64, 128), (130, 257), (129, 383), (200, 90)]


@pytest.mark.parametrize("head_dim, dtype", [(64, BRAIN), (128, HALF)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_any_lengths(eight, lengths, head_dim, dtype):
    for causal in (False, True, "bottom-right") if lengths[0] <= lengths[1] else (False, True):
        few = lengths[0] * lengths[1] < 100  # in the mean over few scores, the exponentials' errors may not vanish
        check_one = functools.partial(check_without_lse, few=True) if few else check
        check_one(eight, *make_inputs(*lengths, head_dim, dtype, **ONE)[:3], causal)


GUESSING = [name for name in STAGES if "FIRST_KEYS" in names_in(name)]


@pytest.fixture(params=usual(GUESSING))
def guessing(request, monkeypatch):
    """A stage in 8 bits that guesses the maximum, with any length, and the tiles whose guess failed in each of its calls."""
    if reason := stages.unavailable(request.param):
        pytest.skip(f"{request.param} {reason}")
    set_names(monkeypatch, request.param, FEWEST={64: 0, 128: 0})
    stage, failed = stages.load(request.param), []
    kernel = names_in(request.param)["_forward_kernel"]

    class Watched:
        """The kernel's launches, after which the state says which tiles failed."""

        def __getitem__(self, grid):
            def launch(*args, **options):
                kernel[grid](*args, **options)
                if not options["AGAIN"]:
                    state = next(each for each in args if isinstance(each, torch.Tensor) and each.dtype == torch.int32)
                    assert state[1] == state[2:].max()
                    failed.append(state[2:].tolist())

            return launch

    set_names(monkeypatch, request.param, _forward_kernel=Watched())
    return stage, failed


def narrow(seq_q=200, seq_k=700, head_dim=64):
    q, k, v, _ = make_inputs(seq_q, seq_k, head_dim, torch.float32, **ONE)
    q /= SCALE * head_dim**0.5  # scores with a standard deviation of 1
    return q, k, v


def check_guess(stage, q, k, v, causal=False):
    check(stage, *(each.half() for each in (q, k, v)), causal, scale=SCALE)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, "bottom-right"])
def test_guesses_hold_for_narrow_scores(guessing, causal, head_dim):
    stage, failed = guessing
    check_guess(stage, *narrow(head_dim=head_dim), causal)
    assert failed == [[0, 0]]


@pytest.mark.parametrize("nats", [3, 4, 5, 6, 8, 12, 30, 90, 1000] if LONG else [3, 6, 12, 90])
@pytest.mark.parametrize("key", [30, 31, 200, 201] if LONG else [31, 200])
def test_a_key_that_a_guess_misses(guessing, key, nats):
    """Key 30 is in the key tile visited last, and 200 in the one before. An odd key's P comes from bits."""
    stage, failed = guessing
    q, k, v = narrow()
    q[..., 0], k[..., 0] = 4, 0
    k[:, :, key, 0] = nats / (4 * SCALE)
    check_guess(stage, q, k, v)
    assert failed == [[nats > 8, nats > 8]] or nats in (4, 5, 6, 8)


def test_only_tiles_that_fail_are_computed_again(guessing):
    stage, failed = guessing
    q, k, v = narrow(seq_q=512)
    q[..., 0], k[..., 0] = 0, 0
    q[:, :, 140, 0], k[:, :, 300, 0] = 8, 8
    check_guess(stage, q, k, v)
    assert failed == [[0, 0, 1, 0]]


def test_wide_scores_are_not_guessed(guessing):
    stage, failed = guessing
    q, k, v = narrow()
    check_guess(stage, 4 * q, k, v)
    assert failed == [[0, 0]]


def with_a_moderate_sink(q, k, v):
    k[201, 0] = 5 / (4 * SCALE)
    v[:] = 1


def with_lower_keys(q, k, v):
    k[:-128, 0] = -7 / (4 * SCALE)
    v += 1


def with_large_values_below(q, k, v):
    k[256:384, 0] = -7 / (4 * SCALE)
    v[256:384] *= 3000


@pytest.mark.parametrize("change, seq_q, seq_k, deviation, ratio", [
    (with_a_moderate_sink, 64, 2048, 0.6, 1.6), (with_lower_keys, 64, 4096, 0.7, 3.1),
    (with_large_values_below, 128, 700, 0.3, 13),
])  # fmt: skip
def test_a_guess_breaks_the_rule(guessing, change, seq_q, seq_k, deviation, ratio):
    """Inputs whose errors the stage's limits name: no check sees them."""
    stage, failed = guessing
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, 64, generator=generator) for rows in (seq_q, seq_k, seq_k))
    q *= deviation / (SCALE * 8)
    q[:, 0], k[:, 0] = 4, 0
    change(q, k, v)
    tensors = [each.half().to(DEVICE)[None, None] for each in (q, k, v)]
    out, _ = stage.forward(*tensors, causal=False, scale=SCALE)
    exact, plain = (make(*tensors, False, SCALE)["out"].double() for make in (truth, plain_in_eight_bits))
    found, usual = ((each.double() - exact).square().mean().sqrt() for each in (out, plain))
    assert not any(failed[0]) and 0.9 * ratio < found / (EIGHT_BIT_FACTORS["rms"] * usual) < 1.1 * ratio


def test_heads_that_share_keys_in_a_batch(eight):
    q, k, v, _ = make_inputs(70, 140, 64, heads=6, kv_heads=2)
    k[1] *= 5
    v[:, 1] *= 0.01
    check(eight, q, k, v, True)


@pytest.mark.parametrize("scale", [0.0, -0.2, 1e-30, 3.0])
def test_any_scale(eight, scale):
    check(eight, *make_inputs(40, 150, 64, **ONE)[:3], True, scale=scale)


@pytest.mark.parametrize("num_sms, seed", [(1, 0), (2, 1), *([(3, seed) for seed in range(2, 12)] if LONG else [])])
def test_any_number_of_ctas(eight, num_sms, seed):
    """A CTA takes several tiles. Threads run in other orders with other seeds."""
    schedule.restart_seeds(seed)
    with interpreted_as(Device(num_sms=num_sms)):
        check(eight, *make_inputs(300, 300, 64, batch=1, heads=2)[:3], True)


def test_zeros(eight):
    """A block of zeros has no largest number to scale by."""
    q, k, v, _ = make_inputs(70, 300, 64, **ONE)
    k[:, :, :128], v[:, :, 100:] = 0, 0
    check(eight, q, k, v)
    results = check(eight, torch.zeros_like(q), k, torch.zeros_like(v))
    assert not results["out"].any()


def test_numbers_that_are_not_finite_are_not_hidden(eight):
    """An infinite V makes its column NaN, and no other column less exact. An infinite K makes all rows that see it NaN."""
    q, k, v, _ = make_inputs(70, 300, 64, **ONE)
    v[0, 0, 150, 3], finite = torch.inf, v.clone()
    out, _ = eight.forward(q, k, v, causal=False, scale=SCALE)
    assert out[..., 3].isnan().all()
    others = [column for column in range(64) if column != 3]
    exact, plain = (make(q, k, finite[..., others], False, SCALE) for make in (truth, plain_in_eight_bits))
    assert_correct({"out": out[..., others]}, exact, plain, EIGHT_BIT_FACTORS)
    for key in (60, 61):
        infinite = k.clone()
        infinite[0, 0, key, 0] = torch.inf
        out, _ = eight.forward(q, infinite, finite, causal=True, scale=SCALE)
        assert out[:, :, key:].isnan().all() and out[:, :, :key].isfinite().all()


@pytest.mark.parametrize("size", [2.0**-30, 2.0**30, 1e18])
def test_the_range_of_v(eight, size):
    """Numbers for which V's scale has no room become NaN."""
    q, k, v, _ = make_inputs(70, 300, 64, BRAIN, **ONE)
    v *= size
    if size < 1e15:
        check(eight, q, k, v)
    else:
        assert eight.forward(q, k, v, causal=False, scale=SCALE)[0].isnan().all()


def test_k_and_v_are_rounded_in_blocks(eight):
    """The kernel's 8-bit K and V are those of the rule. V's keys are permuted in groups of 16."""
    names = names_in(name_of(eight))
    k, v = (torch.randn(2, 3, length, 64, device=DEVICE).half() for length in (300, 300))
    k[0, 1, 200:] *= 100
    quantized = names["quantized"]
    k8, v8, scales = quantized(k, v, names["TILES"][64].keys)
    of_keys = scales.repeat_interleave(128, 2)[:, :, :300]
    assert_nearly_equal(k8.float() * of_keys[..., :1], rounded_to_eight_bits(k, 128))
    places = torch.arange(384)
    keys = places // 16 * 16 + places // 2 % 2 * 8 + places // 4 % 4 * 2 + places % 2  # the key at each place
    values = torch.zeros(2, 3, 384, 64, device=DEVICE)
    values[:, :, keys] = v8.float().mT
    assert_nearly_equal(values[:, :, :300] * of_keys[..., 1:2].exp2(), rounded_to_eight_bits(v, 128))
    assert not values[:, :, 300:].any()


def assert_nearly_equal(found, expected):
    """Assert that few numbers differ, each by one step of e4m3: their quotients by the scale lie at a tie."""
    differ = ~torch.isclose(found, expected, atol=0)
    assert differ.float().mean() < 1e-3
    torch.testing.assert_close(found, expected, rtol=1 / 8, atol=expected.abs().max().item() / 448 / 64)


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter counts")
def test_all_matmuls_have_8_bits(eight):
    q, k, v, _ = make_inputs(128, 256, 64, **ONE)
    counted = count(lambda: eight.forward(q, k, v, causal=False, scale=SCALE))
    columns = 2 * 256 + names_in(name_of(eight)).get("FIRST_KEYS", 0)  # for a guess, first keys' scores are computed twice
    assert counted.flops == sum(launch.eight_bit_flops for launch in counted.launches) == 2 * 128 * columns * 64


@pytest.fixture
def tensor_core(monkeypatch):
    """Let the interpreter add the products of 8-bit matmuls as a tensor core does."""

    def take_place(self):
        a, b = (one.view if isinstance(one, asynchronous.Buffer) else one for one in self._operands)
        assert a.dtype == torch.float8_e4m3fn and not self._use_acc
        self._value = cut_matmul(a.float(), b.float())

    monkeypatch.setattr(asynchronous.Matmul, "take_place", take_place)


def of_v_with_a_mean(keys):
    q, k, v, _ = make_inputs(64, keys, 64, **ONE)
    v += 1
    return q, k, v, truth(q, k, v, False, SCALE), plain_in_eight_bits(q, k, v, False, SCALE)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has tensor cores")
def test_the_tensor_core_s_sum_is_right_for_v_with_a_mean(eight, tensor_core):
    q, k, v, exact, plain = of_v_with_a_mean(2048)
    results = dict(zip(("out", "lse"), eight.forward(q, k, v, causal=False, scale=SCALE), strict=True))
    assert_correct(results, exact, plain, EIGHT_BIT_FACTORS)


def test_one_accumulator_for_all_keys_would_be_wrong():
    """The mean of V shows what the tensor core cuts off: all terms have one sign. Without it, errors cancel."""
    q, k, v, exact, plain = of_v_with_a_mean(2048)
    bounds = error_bounds(exact, plain, EIGHT_BIT_FACTORS)["out"]
    s = q.double() @ k.double().mT * SCALE
    p = (s - s.amax(-1, keepdim=True)).exp().float() * 2**8
    v_scale = v.float().abs().max() / E4M3_MAX
    whole = cut_matmul(e4m3(p)[0, 0], e4m3(v / v_scale)[0, 0]) * v_scale / p.sum(-1, keepdim=True)
    with pytest.raises(AssertionError, match="rms error .* of a head exceeds"):
        assert_close("out", whole, exact["out"], {"rms": bounds["rms"], "largest": torch.full_like(bounds["rms"], torch.inf)})
    assert (whole / exact["out"]).mean() < 0.98


def problem():
    return make_inputs(40, 150, 64, heads=2, kv_heads=1)


def parent_of(stage):
    return stages.load(stages.parent(name_of(stage)))


def test_gradients_are_the_parents(eight):
    """Through the short cut, and through PyTorch's dispatcher."""
    inputs = problem()
    expected = by_operator(parent_of(eight), *inputs, causal=True, scale=SCALE)
    assert_same_bits(by_operator(eight, *inputs, causal=True, scale=SCALE), expected, eight.UNORDERED)
    operator = getattr(torch.ops.kernel_evolution, f"{name_of(eight)}_forward").default
    leaves = [each.clone().requires_grad_() for each in inputs[:3]]
    out, lse = operator(*leaves, True, SCALE, 0, None, None, None, None, False)
    assert_same_bits({"out": out.detach(), "lse": lse.detach()}, {name: expected[name] for name in ("out", "lse")})
    gradients = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, inputs[3]), strict=True))
    assert_same_bits(gradients, {name: expected[name] for name in gradients}, eight.UNORDERED)
    by_functions = differentiable_entry(eight.forward)(*inputs[:3], causal=True, scale=SCALE)
    assert torch.equal(by_functions[0], expected["out"])


def test_without_gradients_there_are_8_bits(eight):
    """Under no_grad, through the operator, with vmap, and if the loss leaves attention's inputs out."""
    q, k, v, _ = problem()
    out, lse = entry(eight.forward)(q, k, v, causal=True, scale=SCALE)
    sixteen = stages.load(stages.parent(STAGES[0]))  # the stage from which the track starts
    assert not torch.equal(out, sixteen.attention(q, k, v, causal=True, scale=SCALE))

    def attend(*tensors):
        return eight.attention(*tensors, causal=True, scale=SCALE)

    with torch.no_grad():
        assert torch.equal(attend(*(each.clone().requires_grad_() for each in (q, k, v))), out)
    assert torch.equal(eight.attention(q, k, v, causal=True, scale=SCALE, return_lse=True)[1], lse)
    assert torch.equal(vmap(attend)(*(each[None] for each in (q, k, v)))[0], out)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), out)
    torch._dynamo.reset()
    q = q.clone().requires_grad_()
    assert torch.equal(attend(q.detach(), k, v), out)


TRANSFORMS = {
    "grad": lambda f: grad(lambda q: f(q).sum()),
    "vjp": lambda f: lambda q: vjp(f, q)[1](torch.ones_like(q))[0],
    "jacrev": lambda f: lambda q: jacrev(lambda q: f(q)[:, :, ::13].sum((2, 3)))(q)[0, 0],
    "vmap of grad": lambda f: lambda q: vmap(grad(lambda q: f(q[None]).sum()))(q),
    "grad of vmap": lambda f: grad(lambda q: vmap(lambda q: f(q[None])[0])(q).sum()),
    "checkpoint": lambda f: lambda q: of_leaf(lambda q: checkpoint(f, q, use_reentrant=False), q),
    "compiled": lambda f: lambda q: of_leaf(torch.compile(f, backend="aot_eager"), q),
    "compiled grad": lambda f: torch.compile(grad(lambda q: f(q).sum()), backend="aot_eager"),
}


def of_leaf(function, q):
    leaf = q.clone().requires_grad_()
    return torch.autograd.grad(function(leaf).sum(), leaf)[0]


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_transforms_that_differentiate_get_the_parents_forward(eight, transform, monkeypatch):
    q, k, v, _ = make_inputs(20, 40, 64, batch=2, heads=1)

    def gradients(stage):
        def attend(q):
            keys = [each[: len(q)] for each in (k, v)]
            return stage.attention(q, *keys, causal=True, scale=SCALE)

        return transform(attend)(q)

    expected = gradients(parent_of(eight))
    monkeypatch.setitem(eight.forward.__globals__, "_forward_kernel", None)  # fails if it is launched
    torch.testing.assert_close(gradients(eight), expected)
    torch._dynamo.reset()


def test_checkpoints_that_are_reentrant_differentiate_the_parents_forward(eight):
    """Such a checkpoint first runs its function without gradients. The gradients come from the second run."""
    q, k, v, grad_out = problem()
    leaf = q.clone().requires_grad_()
    out = checkpoint(lambda q: eight.attention(q, k, v, causal=True, scale=SCALE), leaf, use_reentrant=True)
    out.backward(grad_out)
    expected = by_operator(parent_of(eight), q, k, v, grad_out, causal=True, scale=SCALE)
    assert_same_bits({"dq": leaf.grad}, {"dq": expected["dq"]}, eight.UNORDERED)


def test_the_gradient_of_the_lse_is_the_parents(eight):
    """It takes another forward, inside of the backward."""
    q, k, v, _ = problem()

    def gradients(stage):
        leaves = [each.clone().requires_grad_() for each in (q, k, v)]
        _, lse = stage.attention(*leaves, scale=SCALE, return_lse=True)
        return torch.autograd.grad(lse.square().sum(), leaves)

    torch.testing.assert_close(gradients(eight), gradients(parent_of(eight)))


FALLS_BACK = {
    "float32": {"head_dim": 64, "dtype": torch.float32},
    "D = 32": {"head_dim": 32},
    "Dv is not D": {"head_dim": 64, "value_dim": 128},
    "D = 256": {"head_dim": 256},
}


@pytest.mark.parametrize("sizes", FALLS_BACK.values(), ids=FALLS_BACK.keys())
def test_what_falls_back(eight, sizes):
    q, k, v, _ = make_inputs(20, 40, **ONE | sizes)
    assert not eight.eight_bits(q, k, v)
    options = {"causal": "bottom-right", "scale": -SCALE}
    assert torch.equal(eight.attention(q, k, v, **options), parent_of(eight).attention(q, k, v, **options))


@pytest.mark.parametrize("name", STAGES)
def test_short_sequences_fall_back(name):
    stage = stages.load(name)
    shapes = [(2047, 4096, 128), (4096, 2047, 128), (2048, 2048, 128), (4095, 4096, 128), (4096, 4096, 128), (4096, 4096, 64)]
    tensors = [
        [torch.empty(1, 1, rows, head_dim, dtype=HALF, device="meta") for rows in (seq_q, seq_k, seq_k)]
        for seq_q, seq_k, head_dim in shapes
    ]
    of_64 = 64 in names_in(name)["FEWEST"]
    assert [stage.eight_bits(*each) for each in tensors] == [False, False, True, True, True, of_64]
    assert [stage.eight_bits(*each, causal=True) for each in tensors] == [False, False, False, False, True, of_64]


def test_the_newest_stage_never_chooses_8_bits():
    newest = stages.load("newest")
    assert not hasattr(newest, "eight_bits")
    for forward in newest.forward.__globals__["FORWARDS"].values():
        assert not hasattr(stages.load(forward.__module__.split(".")[1]), "eight_bits")


def test_diagonals_of_other_multiples(eight):
    """A query tile may start before the first query."""
    q, k, v, _ = make_inputs(100, 187, 128, **ONE)
    assert diagonal("bottom-right", 100, 187) % 64
    check(eight, q, k, v, "bottom-right")
