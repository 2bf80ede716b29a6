"""Stages that take caches in 8 bits compute attention to what the 8 bits stand for, at every length and page size."""

import dataclasses
import functools
import inspect

import pytest
import torch
from cases import LONG, available, make_inputs, names_in, set_names, taking_lengths, usual
from test_lengths import SCALE, Unread, on_device
from test_paged_caches import Cache
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

import stages
from common.checks import EIGHT_BITS
from common.eight_bits import LARGEST, quantized
from common.entry import Descales, Lengths, entry
from common.interpreter import schedule
from common.measure.counter import count
from common.measure.reference import assert_correct, plain, truth
from common.runtime import DEVICE, INTERPRETED, Device, interpreted_as

CAPACITY = 320
EDGES = (0, 1, 63, 64, 65, 127, 128, 129, CAPACITY)  # key tiles have 64 keys
HALF, BRAIN = torch.float16, torch.bfloat16


OF_TRACKS = [name for name in taking_lengths("descales") if stages.track(name)]
FIRST = OF_TRACKS[0]


@pytest.fixture(params=usual(OF_TRACKS))
def taking(request):
    """A stage that takes caches in 8 bits."""
    return available(request.param)


@dataclasses.dataclass
class Eight:
    """A cache in 8 bits, k and v [B, Hkv, S, D], with NaN behind each sequence."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: tuple[int, ...]
    descales: list[torch.Tensor]  # of k and v

    @classmethod
    def of(cls, seq_q, lengths, head_dim=64, dtype=HALF, capacity=CAPACITY, rounded=False, **heads):
        """Draw a cache. Its factors are powers of two, or, if `rounded`, those of `quantized`."""
        q, k, v, _ = make_inputs(seq_q, capacity, head_dim, dtype, batch=len(lengths), **heads)
        (k, of_k), (v, of_v) = quantized(k.float()), quantized(v.float())
        if not rounded:  # q · factor and a product of a factor and 8 bits are then exact in 16 bits
            of_k, of_v = (2.0 ** torch.randint(-8, -4, of_k.shape, device=DEVICE) for _ in range(2))
        for tensor in (k, v):
            for sequence, length in zip(tensor, lengths, strict=True):
                sequence.view(torch.int8)[:, max(length, 0) :] = 0x7F  # NaN
        return cls(q, k, v, lengths, [of_k, of_v])

    def wide(self, dtype):
        """Return k and v as the 8 bits and the factors mean them."""
        return [
            (tensor.float() * factor[..., None, None]).to(dtype)
            for tensor, factor in zip((self.k, self.v), self.descales, strict=True)
        ]

    def attention(self, stage, causal=True, **others):
        options = {"causal": causal, "scale": SCALE, "return_lse": True, **others}
        options |= dict(zip(("k_descale", "v_descale"), self.descales, strict=True))
        if "cache_seqlens" not in options:
            options["cache_seqlens"] = on_device(self.lengths)
        return stage.attention(self.q, self.k, self.v, **options)

    def check(self, stage, causal=True, **others):
        """Assert that the results are as right as plain attention to k and v in q's dtype. Return `out`."""
        out, lse = self.attention(stage, causal, **others)
        self.assert_right(out, lse, causal)
        return out

    def assert_right(self, out, lse, causal):
        seq_q, exact, rounded = self.q.shape[2], self.wide(torch.float64), self.wide(self.q.dtype)
        for at, length in enumerate(self.lengths):
            blind = max(seq_q - length, 0) if causal or length == 0 else 0  # the first queries see no key
            assert (out[at, :, :blind] == 0).all() and (lse[at, :, :blind] == -torch.inf).all(), length
            if blind < seq_q:
                options = {"causal": bool(causal), "scale": SCALE, "diagonal": length - seq_q + blind}
                q = self.q[at : at + 1, :, blind:]
                right, usual = ((each[at : at + 1, :, :length] for each in wide) for wide in (exact, rounded))
                results = {"out": out[at : at + 1, :, blind:], "lse": lse[at : at + 1, :, blind:]}
                assert_correct(results, truth(q, *right, **options), plain(q, *usual, **options))


# (queries, heads, K/V heads, D, Dv, dtype, causal)
PROBLEMS = [
    (1, 8, 1, 64, 64, BRAIN, False),
    (1, 4, 4, 128, 128, HALF, True),  # one query sees all keys, with a mask or without
    (4, 8, 2, 128, 64, BRAIN, True),
    (4, 8, 2, 64, 128, HALF, True),
    (16, 3, 1, 128, 128, BRAIN, True),
    (2, 2, 2, 256, 64, BRAIN, True),
    (5, 16, 1, 64, 32, HALF, True),
    (7, 3, 1, 128, 16, BRAIN, True),  # three heads are not packed
    (17, 4, 1, 32, 128, HALF, True),
    (64, 4, 2, 16, 64, HALF, False),
    (200, 2, 1, 64, 64, HALF, True),  # more than a tile holds
]


@pytest.mark.parametrize("problem, rounded", [
    (problem, rounded) for place, problem in enumerate(PROBLEMS)
    for rounded in ((False, True) if LONG or not INTERPRETED else [place % 2 == 1])
], ids=str)  # fmt: skip
def test_every_length_is_right_in_one_batch(taking, problem, rounded):
    seq_q, heads, kv_heads, head_dim, value_dim, dtype, causal = problem
    sizes = {"heads": heads, "kv_heads": kv_heads, "value_dim": value_dim}
    Eight.of(seq_q, EDGES, head_dim, dtype, rounded=rounded, **sizes).check(taking, causal)


@pytest.mark.parametrize("seed", range(6 if LONG else 1))
@pytest.mark.parametrize("num_sms", [1, 3, 24])
def test_any_number_of_ctas(taking, num_sms, seed):
    """A CTA takes several heads, or several CTAs share one. Threads run in other orders with other seeds."""
    schedule.restart_seeds(seed)
    with interpreted_as(Device(num_sms=num_sms)):
        Eight.of(2, (1000, 3, 0, 129), capacity=1024, heads=2, kv_heads=1).check(taking)


@pytest.mark.parametrize("lengths", [(200,), (0,), (5, 7, 3)])
def test_one_sequence_and_more_than_a_kernel_takes(taking, lengths, monkeypatch):
    set_names(monkeypatch, taking.__name__.removeprefix("stages."), MOST_SEQUENCES=2)
    Eight.of(1, lengths, heads=4, kv_heads=2).check(taking)


def paged(cache: Cache, factors):
    """Put a cache in pages into 8 bits. Return k and v, and those that they stand for, with zeros behind each sequence."""
    wide = cache.unpaged()
    cache.k, cache.v = (tensor.to(EIGHT_BITS) for tensor in (cache.k, cache.v))
    for at, factor in enumerate(factors):
        wide[at] = (wide[at].to(EIGHT_BITS).float() * factor[..., None, None]).to(wide[at].dtype)
    return wide


SIZES = (16, 32, 64, 128, 256)
OF_PAGES = [(3, 128, 128, BRAIN), (2, 256, 256, HALF), (8, 128, 128, HALF), (150, 64, 64, BRAIN), (1, 64, 32, HALF)]


@pytest.mark.parametrize("page_size, problem", [
    (size, problem) for place, size in enumerate(SIZES)
    for problem in (OF_PAGES if LONG or not INTERPRETED else OF_PAGES[place : place + 1])
], ids=str)  # fmt: skip
def test_pages(taking, page_size, problem):
    """Sequences share their first page, and have other factors."""
    seq_q, head_dim, value_dim, dtype = problem
    lengths = [page_size, 3 * page_size - 1, page_size + 70, 2 * page_size + 1]
    sizes = {"heads": 4, "kv_heads": 2, "value_dim": value_dim}
    cache = Cache(page_size, lengths, seq_q, head_dim, dtype, shared=1, **sizes)
    factors = [2.0 ** torch.randint(-2, 2, (len(lengths), 2), device=DEVICE) for _ in range(2)]
    wide = paged(cache, factors)
    out, lse = cache.attention(taking, k_descale=factors[0], v_descale=factors[1])
    whole = Eight(cache.q, *(each.to(EIGHT_BITS) for each in wide), cache.lengths, [torch.ones_like(each) for each in factors])
    whole.wide = lambda dtype: [each.to(dtype) for each in wide]
    whole.assert_right(out, lse, True)


def test_without_factors_they_are_1(taking):
    eight = Eight.of(1, (100, 30), heads=2, kv_heads=1)
    ones = [torch.ones_like(each) for each in eight.descales]
    for k_descale, v_descale in ((None, None), (ones[0], None), (None, ones[1])):
        out, lse = eight.attention(taking, k_descale=k_descale, v_descale=v_descale, scale=SCALE / 100)
        expected = eight.attention(taking, k_descale=ones[0], v_descale=ones[1], scale=SCALE / 100)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("which", [0, 1])
def test_a_factor_of_nan_spoils_its_heads_alone(taking, which):
    eight = Eight.of(1, (100, 30), heads=2, kv_heads=2)
    expected = eight.attention(taking)[0]
    eight.descales[which][0, 1] = torch.nan
    out, lse = eight.attention(taking)
    assert out[0, 1].isnan().all() and lse[0, 1].isnan().all() == (which == 0)
    out[0, 1] = expected[0, 1]
    assert torch.equal(out, expected)


def test_factors_may_have_any_strides(taking):
    eight = Eight.of(2, (100, 30), heads=4, kv_heads=2)
    expected = eight.check(taking)
    eight.descales = [each.T.contiguous().T for each in eight.descales]
    assert torch.equal(eight.attention(taking)[0], expected)


def test_16_bits_are_as_in_the_parent(taking):
    name = taking.__name__.removeprefix("stages.")
    eight = Eight.of(2, (100, 30), heads=4, kv_heads=2)
    inputs = eight.q, *(each.nan_to_num() for each in eight.wide(HALF))
    results = [
        stage.attention(*inputs, causal=True, cache_seqlens=on_device(eight.lengths))
        for stage in (taking, stages.load(stages.parent(name)))
    ]
    assert torch.equal(*results)


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter counts the bytes")
def test_half_the_bytes_are_read(taking):
    eight = Eight.of(1, (CAPACITY, 64), heads=2, kv_heads=1)
    options = {"causal": True, "scale": SCALE, "lengths": Lengths(on_device(eight.lengths))}
    function = entry(taking.forward)
    with interpreted_as(Device(num_sms=2)):
        counted = count(lambda: function(eight.q, eight.k, eight.v, **options, descales=Descales(*eight.descales)))
    (launch,) = [launch for launch in counted.launches if launch.name == "_forward_kernel"]
    assert [each.read for each in launch.operands if each.nbytes == eight.k.nbytes] == [(CAPACITY + 64) * 64] * 2


def test_the_host_never_reads_the_factors(taking):
    with Unread():
        Eight.of(1, (100, 30), heads=2, kv_heads=1).attention(taking)


def test_compiled_mapped_and_as_an_operator(taking):
    """torch.compile, vmap, autocast and the dispatcher give the same."""
    eight = Eight.of(1, (100, 30), heads=4, kv_heads=2)
    expected = eight.check(taking)
    operator = getattr(torch.ops.kernel_evolution, f"{taking.__name__.removeprefix('stages.')}_forward").default
    lengths = on_device(eight.lengths)
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"  # others need arithmetic of 8 bits
    arguments = eight.q, eight.k, eight.v, True, SCALE, 0, lengths, None, *eight.descales
    torch.library.opcheck(operator, arguments, test_utils=checks)

    def model(q, k, v, lengths, k_descale, v_descale):
        options = {"cache_seqlens": lengths, "k_descale": k_descale, "v_descale": v_descale}
        return taking.attention(q, k, v, causal=True, scale=SCALE, **options)

    given = eight.q, eight.k, eight.v, lengths, *eight.descales
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    torch.testing.assert_close(compiled(*given), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(vmap(model)(*(each.unsqueeze(1) for each in given)).squeeze(1), expected)
    with torch.autocast(DEVICE, HALF):
        assert torch.equal(model(eight.q.float(), *given[1:]), expected)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_a_captured_graph_is_right_for_later_factors(taking):
    eight, other = (Eight.of(2, lengths, heads=8, kv_heads=2) for lengths in ((100, 30, 7), (5, 300, 64)))
    lengths = on_device(eight.lengths)
    for _ in range(3):
        eight.attention(taking, cache_seqlens=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = eight.attention(taking, cache_seqlens=lengths)
    tensors = ((one.q, one.k, one.v, *one.descales) for one in (eight, other))
    for own, new in zip(*tensors, strict=True):
        own.copy_(new)
    lengths.copy_(on_device(other.lengths))
    graph.replay()
    other.assert_right(out, lse, True)


def given():
    """Return arguments of a call that is right."""
    q, k, v, _ = make_inputs(1, 64, 16, batch=2, heads=4, kv_heads=2)
    factors = {name: torch.ones(2, 2, device=DEVICE) for name in ("k_descale", "v_descale")}
    return {"q": q, "k": k.to(EIGHT_BITS), "v": v.to(EIGHT_BITS), "cache_seqlens": on_device([1, 5])} | factors


halved, other_bits = torch.Tensor.half, functools.partial(torch.Tensor.to, dtype=torch.float8_e5m2)
BAD = {
    "float32 queries": ({"q": torch.Tensor.float}, TypeError, "q must be float16 or bfloat16, with k and v in 8 bits, got"),
    "v in 16 bits": ({"v": halved}, TypeError, "v must be torch.float8_e4m3fn, as the other of k and v is"),
    "k in 16 bits": ({"k": halved}, TypeError, "k must be torch.float8_e4m3fn, as the other of k and v is"),
    "e5m2": ({"k": other_bits, "v": other_bits}, TypeError, "k must be float16,"),
    "no lengths": ({"cache_seqlens": lambda _: None}, ValueError, "k and v in 8 bits need cache_seqlens"),
    "factors of 16 bits": ({"k": halved, "v": halved}, TypeError, "k_descale needs k and v in torch.float8_e4m3fn"),
    "half factors": ({"k_descale": halved}, TypeError, "k_descale must be float32, got torch.float16"),
    "a number": ({"v_descale": lambda _: 2.0}, TypeError, "v_descale must be a torch.Tensor, got float"),
    "one a sequence": ({"v_descale": lambda v: v[:, 0]}, ValueError, r"v_descale must have the shape \(2, 2\), .* got \(2,\)"),
    "elsewhere": ({"k_descale": lambda k: k.to("meta")}, ValueError, "k_descale must be on the device of q"),
}


@pytest.mark.parametrize("changes, error, message", BAD.values(), ids=BAD.keys())
def test_bad_inputs_are_refused(taking, changes, error, message):
    call = given()
    with pytest.raises(error, match=message):
        taking.attention(**call | {name: change(call[name]) for name, change in changes.items()})


def test_other_stages_and_gradients_are_refused(taking):
    for name in (stages.names()[0], stages.parent(FIRST)):
        with pytest.raises(NotImplementedError, match=f"{name} takes no k and v in 8 bits"):
            stages.load(name).attention(**given())
        with pytest.raises(NotImplementedError, match=f"{name} takes no k and v in 8 bits"):
            stages.load(name).attention(**given() | {each: given()[each].half() for each in "kv"})
    with pytest.raises(NotImplementedError, match="cache_seqlens has no gradients"):
        taking.attention(**given() | {"q": given()["q"].requires_grad_()})


@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
def test_gradients_of_factors_are_refused(taking, name):
    """They would be missing without a word. Without gradients, a factor may be a Parameter."""
    call = given()
    call[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"{name} has no gradients"):
        taking.attention(**call)
    with torch.no_grad():
        assert not taking.attention(**call).requires_grad


def test_quantized():
    """The relative error is at most 1/16, except for numbers that are tiny beside their head's largest."""
    x = torch.randn(2, 3, 50, 16, device=DEVICE)
    x[0, 1] *= 1e4
    x[1, 2] = 0
    bits, factor = quantized(x)
    assert bits.dtype == EIGHT_BITS and factor.shape == (2, 3) and bits.float().abs().amax((2, 3))[0, 1] == LARGEST
    found = bits.float() * factor[..., None, None]
    tiny = factor[..., None, None] * 2**-6
    assert ((found - x).abs() <= torch.maximum(x.abs(), tiny) / 16).all() and not found.isnan().any()
    assert quantized(x.half())[0].float().isfinite().all()


def test_quantized_with_lengths_and_with_factors():
    """What is behind a sequence does not count, NaN or not. Tokens that join a cache keep its factors."""
    x = torch.randn(2, 3, 50, 16, device=DEVICE)
    padded, lengths = x.clone(), on_device([50, 20])
    padded[1, :, 20:], expected = torch.nan, quantized(x[1:, :, :20])
    bits, factor = quantized(padded, lengths)
    assert torch.equal(bits[1:, :, :20].float(), expected[0].float()) and torch.equal(factor[1:], expected[1])
    assert not bits[1, :, 20:].float().any()
    joined, same = quantized(1000 * x[:, :, :1], factor=factor)
    assert same is factor and joined.float().abs().max() == LARGEST


def test_few_registers_refuse_wide_heads(taking):
    """At D = 256, the cache is widened in memory, and a stage without 8 bits computes the results."""
    takes = names_in(taking.__name__.removeprefix("stages."))["takes"]
    masked = {"masked": False} if "masked" in inspect.signature(takes).parameters else {}
    sizes = {width: torch.empty(2, 4, 1, width, dtype=HALF) for width in (64, 128, 256)}
    assert [takes(q, 100, width, 4, **masked) for width, q in sizes.items()] == [True, True, False]


class NoFloat32(TorchDispatchMode):
    """Fail if an operator returns a large tensor in float32."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        assert result.dtype != torch.float32 or result.numel() < CAPACITY, func
        return result


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_a_cache_is_widened_in_memory_in_16_bits(dtype):
    """A copy in float32 would take four times the memory of the cache. The rounding is as in float32."""
    eight = Eight.of(1, (CAPACITY, CAPACITY), heads=2, kv_heads=1, rounded=True)
    widened_in_memory = names_in(FIRST)["widened_in_memory"]
    with NoFloat32():
        found = [widened_in_memory(*each, dtype, None) for each in zip((eight.k, eight.v), eight.descales, strict=True)]
    assert all(map(torch.equal, found, eight.wide(dtype)))
