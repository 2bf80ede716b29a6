"""A stage works as a PyTorch operator, with compilation, checkpointing, autocast, streams, graphs and huge tensors."""

import concurrent.futures
import contextlib
import importlib
import itertools
import math

import pytest
import torch
import torch._dynamo.testing
from cases import FEW, FEW_SHARED, TILED, assert_right, assert_same_bits, by_functions, by_operator, check, make_inputs
from problems import Layout
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import stages
from common.layout import empty_rows
from common.measure.reference import assert_correct, plain, truth
from common.runtime import DEVICE

on_gpu = DEVICE == "cuda"
needs_gpu = pytest.mark.skipif(not on_gpu, reason="needs a GPU")

SCALE = 0.2


def gradients(function, leaves, grad_out):
    """Return the result of `function` and its gradients, under the names that `cases.by_operator` uses."""
    out = function(*leaves)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad_out)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def as_leaves(*tensors):
    return tuple(tensor.detach().requires_grad_() for tensor in tensors)


def stage_operators(stage):
    """Return the forward operator and the backward operator of a stage's attention."""
    name = stage.__name__.removeprefix("stages.")
    return (getattr(torch.ops.kernel_evolution, f"{name}_{part}").default for part in ("forward", "backward"))


def test_opcheck(stage):
    """PyTorch's own check accepts the schema, the fake tensors (shapes, dtypes, strides) and the autograd registration."""
    q, k, v, grad_out = make_inputs(9, 20, **FEW_SHARED)
    forward, backward = stage_operators(stage)
    torch.library.opcheck(forward, (*as_leaves(q, k, v), True, SCALE, 0))
    out, lse = forward(q, k, v, True, SCALE, 0)
    torch.library.opcheck(backward, (grad_out, q, k, v, out, lse, True, SCALE, 0))


LAYOUTS = {
    "transposed": Layout("bshd"),
    "expanded": Layout(expanded="h"),
    "columns": Layout("bsdh"),
    "one column": Layout("bshd", expanded="d"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_fake_results_are_laid_out_like_real_ones(stage, layout):
    """Fake results have the strides of real results, even if D ≠ Dv. Compiled code relies on these strides."""
    forward, backward = stage_operators(stage)
    for value_dim in (16, 64):
        q, k, v, grad_out = map(layout.place, make_inputs(3, 5, batch=2, heads=2, value_dim=value_dim))
        torch.library.opcheck(forward, (q, k, v, True, SCALE, 0), test_utils="test_faketensor")
        out, lse = forward(q, k, v, True, SCALE, 0)
        torch.library.opcheck(backward, (grad_out, q, k, v, out, lse, True, SCALE, 0), test_utils="test_faketensor")


def test_a_negative_scale_with_repeated_rows(stage):
    """A stage negates q. If q has a batch stride of 1, -q may have columns that are not contiguous."""
    q, k, v, grad_out = make_inputs(64, 64, 64, batch=1, heads=2)
    check(stage, q.as_strided(q.shape, (1, 64, 0, 1)), k, v, grad_out, causal=False, scale=-0.3)


@pytest.mark.parametrize("columns", [8, 32])
def test_rows_of_another_size_lie_in_the_same_order(columns):
    """`empty_rows` keeps the tensor's order of dimensions in memory, even if dimensions are expanded.

    Fake tensors get the same strides.
    """
    values, fakes = torch.zeros(2, 3, 5, 16, device=DEVICE), FakeTensorMode()
    expansions = itertools.chain.from_iterable(itertools.combinations("bhs", number) for number in range(4))
    for order, expanded in itertools.product(itertools.permutations("bhs"), expansions):
        tensor = Layout("".join(order) + "d", expanded="".join(expanded)).place(values)
        strides = [stride // 16 * columns for stride in empty_rows(tensor).stride()[:3]]
        for like in (tensor, fakes.from_tensor(tensor)):
            assert empty_rows(like, columns).stride() == (*strides, 1), (order, expanded)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size, queries, keys", [(1e-7, 400, 1), (1.0, 60, 50), (2.0**16, 4, 300)])
def test_the_gradient_of_the_lse_may_leave_the_range_of_float16(size, queries, keys, packed):
    """The gradient of the LSE times q is too small or too large for float16, but the gradient of k is not. If all are of
    ordinary size, the gradient of k is hardly less exact than rounding makes it."""
    stage, scale = stages.load("newest"), 0.2
    q, k, v = make_inputs(queries, keys, batch=1, heads=8, kv_heads=2)[:3]
    q, k = q * 0.3 + 1, k * 0.1
    q[..., 0] = 12
    grad_lse = size * (1 + torch.rand(q.shape[:3], device=DEVICE))
    weights = torch.softmax(scale * q.double() @ k.double().repeat_interleave(4, 1).mT, -1) * grad_lse[..., None]
    expected = (scale * weights.mT @ q.double()).unflatten(1, (2, 4)).sum(2)
    if packed:
        (k,) = as_leaves(k[0].transpose(0, 1))
        starts = (torch.tensor([0, length], dtype=torch.int32, device=DEVICE) for length in (queries, keys))
        _, lse = stage.attention_varlen(q[0].transpose(0, 1), k, v[0].transpose(0, 1), *starts, scale=scale, return_lse=True)
        got = torch.autograd.grad(lse, k, grad_lse[0])[0].transpose(0, 1)[None]
    else:
        (k,) = as_leaves(k)
        _, lse = stage.attention(q, k, v, scale=scale, return_lse=True)
        (got,) = torch.autograd.grad(lse, k, grad_lse)
    torch.testing.assert_close(got.double(), expected, rtol=4e-3, atol=6e-8)
    if size == 1:
        assert (got - expected).norm() < 1.2 * (expected.half() - expected).norm()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_graph_break(stage, dynamic):
    """Forward and backward run in a compiled function with other operations. Another length causes no new compilation."""
    compilations = torch._dynamo.testing.CompileCounterWithBackend("inductor" if on_gpu else "aot_eager")

    def model(q, k, v):
        return stage.attention(q * 2, k, v, causal=True) + q[..., :1]

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=compilations)
    for seq in (24, 40) if dynamic else (24,):
        q, k, v, grad_out = make_inputs(seq, seq + 9, dtype=torch.float32, **FEW_SHARED)
        leaves = as_leaves(q, k, v)
        eager = gradients(model, leaves, grad_out)
        for name, result in gradients(compiled, leaves, grad_out).items():
            torch.testing.assert_close(result, eager[name], msg=name)
    assert compilations.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("run", [by_operator, by_functions])
def test_repeated_calls_of_one_kind_are_right(stage, run):
    """On a GPU, later calls replay the second call's launches with their own tensors."""
    kept = []
    for _ in range(4):
        inputs = make_inputs(*TILED, **FEW_SHARED)
        kept.append(
            (inputs, check(stage, *inputs, causal="bottom-right", run=run))
        )  # keep the tensors, so that each call gets other memory


def test_a_profiler_sees_the_operators(stage, unordered):
    """With a profiler, a call goes through PyTorch's dispatcher. Without profiler, compiler or transform, a call bypasses the
    dispatcher. The results are equal."""
    inputs = make_inputs(*TILED, **FEW_SHARED)
    alone = by_operator(stage, *inputs, causal=True, scale=SCALE)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        profiled = by_operator(stage, *inputs, causal=True, scale=SCALE)
    names = {operator._schema.name for operator in stage_operators(stage)}
    assert names <= {event.key for event in profile.key_averages()}
    assert_same_bits(alone, profiled, unordered)
    assert_right(profiled, *inputs, causal=True, scale=SCALE)


def test_a_lazy_negation(stage, unordered):
    """PyTorch may store a negation only as a flag. The dispatcher then negates the elements for the kernel."""
    q, k, v, grad_out = make_inputs(9, 20, dtype=torch.float32, **FEW)
    turned = torch._neg_view(-k)
    assert turned.is_neg() and torch.equal(turned, k)
    expected = by_operator(stage, q, k, v, grad_out, causal=False, scale=SCALE)
    got = by_operator(stage, q, turned, v, grad_out, causal=False, scale=SCALE)
    assert_same_bits(expected, got, unordered)
    assert_right(got, q, k, v, grad_out, causal=False, scale=SCALE)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(stage, mode):
    q, k, v, _ = make_inputs(*TILED, **FEW)
    expected = stage.attention(q, k, v, causal=True)
    with mode():
        out = stage.attention(*as_leaves(q, k, v), causal=True)
    assert not out.requires_grad
    assert torch.equal(out, expected)


def test_only_the_gradients_that_are_asked_for(stage):
    q, k, v, grad_out = make_inputs(*TILED, **FEW_SHARED)
    expected = by_operator(stage, q, k, v, grad_out, causal=True, scale=SCALE)
    key = k.clone().requires_grad_()
    stage.attention(q, key, v, causal=True, scale=SCALE).backward(grad_out)
    assert torch.equal(key.grad, expected["dk"])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(stage, use_reentrant, unordered):
    """With checkpointing, the forward runs again inside the backward, and gives equal bits."""
    q, k, v, grad_out = make_inputs(*TILED, **FEW_SHARED)

    def attend(q, k, v):
        return stage.attention(q * 2, k, v, causal=True, scale=SCALE)

    leaves = as_leaves(q, k, v)
    kept = gradients(attend, leaves, grad_out)
    leaves = as_leaves(q, k, v)
    out = checkpoint(attend, *leaves, use_reentrant=use_reentrant)
    out.backward(grad_out)  # re-entrant checkpointing does not support autograd.grad
    dq, dk, dv = (leaf.grad for leaf in leaves)
    got = {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}
    assert_same_bits(kept, got, unordered)
    assert_right(got | {"dq": dq / 2}, 2 * q, k, v, grad_out, causal=True, scale=SCALE)


@pytest.mark.parametrize("dtype", [torch.bfloat16] if not on_gpu else [torch.bfloat16, torch.float16])
def test_autocast_casts_the_inputs(stage, dtype, unordered):
    """Results are as if the inputs were cast by hand. Autocast does not reach the float32 matmuls inside a stage."""
    q, k, v, grad_out = make_inputs(*TILED, dtype=torch.float32, **FEW_SHARED)
    by_hand = by_operator(stage, q.to(dtype), k.to(dtype), v.to(dtype), grad_out.to(dtype), causal=True, scale=SCALE)
    leaves = as_leaves(q, k, v)
    with torch.autocast(DEVICE, dtype):
        out, lse = stage.attention(*leaves, causal=True, scale=SCALE, return_lse=True)
        dq, dk, dv = torch.autograd.grad(out, leaves, grad_out.to(dtype))
    got = {"out": out.detach(), "lse": lse.detach(), "dq": dq.to(dtype), "dk": dk.to(dtype), "dv": dv.to(dtype)}
    assert dq.dtype == torch.float32
    assert_same_bits(by_hand, got, unordered)
    assert_right(got, *(tensor.to(dtype) for tensor in (q, k, v, grad_out)), causal=True, scale=SCALE)


def test_autocast_leaves_float64_alone(stage):
    """As with SDPA, autocast does not cast float64. The stage must refuse float64, and not read it as bfloat16."""
    q, k, v, _ = make_inputs(*TILED, **FEW)
    with torch.autocast(DEVICE, torch.bfloat16), pytest.raises(TypeError, match="float64"):
        stage.attention(q.double(), k.double(), v.double())


@pytest.mark.parametrize("seq_q, seq_k", [TILED, (1, 1)])
def test_saved_tensors_may_come_back_in_another_layout(stage, seq_q, seq_k, unordered):
    """Hooks that offload saved tensors may return them with other strides, or at addresses not aligned to 16 bytes."""

    def moved(tensor):
        shape = tensor.shape if tensor.dim() < 4 else (*tensor.shape[:-1], tensor.shape[-1] + 1)
        buffer = tensor.new_full((math.prod(shape) + 1,), float("nan"))[1:].view(shape)
        return buffer[..., : tensor.shape[-1]].copy_(tensor)

    def transposed(tensor):
        return tensor.mT.contiguous().mT

    q, k, v, grad_out = make_inputs(seq_q, seq_k, **FEW_SHARED)
    expected = by_operator(stage, q, k, v, grad_out, causal=True, scale=SCALE)
    for unpack in (moved, transposed):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
            got = check(stage, q, k, v, grad_out, causal=True, scale=SCALE)
        assert_same_bits(expected, got, unordered)


def test_a_reloaded_stage_is_the_new_one(stage):
    q, k, v, grad_out = make_inputs(20, 20, 16, torch.float16, **FEW)

    def results():
        leaves = as_leaves(q, k, v)
        out = stage.attention(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, grad_out)

    before = results()
    importlib.reload(stage)
    for old, new in zip(before, results(), strict=True):
        torch.testing.assert_close(old, new)


def test_differentiating_twice_raises(stage):
    """A second derivative raises an error instead of being silently zero."""
    q, k, v, grad_out = make_inputs(9, 20, 16, torch.float32, **FEW)
    leaves = as_leaves(q, k, v)
    out = stage.attention(*leaves)
    dq, _, _ = torch.autograd.grad(out, leaves, grad_out, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        dq.sum().backward()


@needs_gpu
@pytest.mark.parametrize("calls", [1, 3])
def test_cuda_graph_after_some_calls(stage, calls, unordered):
    """A CUDA graph reads its inputs' current values, even if the captured call is a replay (`common.recording`)."""
    static = as_leaves(*make_inputs(130, 200)[:3])
    grad_out = torch.randn_like(static[0])
    for _ in range(calls):
        by_operator(stage, *static, grad_out, causal=True, scale=SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = by_operator(stage, *static, grad_out, causal=True, scale=SCALE)
    fresh = make_inputs(130, 200)
    with torch.no_grad():
        for tensor, value in zip((*static, grad_out), fresh, strict=True):
            tensor.copy_(value)
    graph.replay()
    assert_same_bits(by_operator(stage, *fresh, causal=True, scale=SCALE), captured, unordered)
    assert_right(captured, *fresh, causal=True, scale=SCALE)


@needs_gpu
@pytest.mark.parametrize("calls", [1, 3])
def test_a_stream_that_is_not_the_default(stage, calls, unordered):
    """The call's stream is still computing the inputs. A kernel on another stream would read them too early."""
    inputs = make_inputs(130, 200)
    for _ in range(calls):
        expected = by_operator(stage, *inputs, causal=True, scale=SCALE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(tensor) for tensor in inputs]
        torch.cuda._sleep(100_000_000)
        for tensor, value in zip(late, inputs, strict=True):
            tensor.copy_(value)
        results = by_operator(stage, *late, causal=True, scale=SCALE)
    torch.cuda.current_stream().wait_stream(stream)
    assert_same_bits(expected, results, unordered)
    assert_right(results, *inputs, causal=True, scale=SCALE)


@needs_gpu
@pytest.mark.parametrize("calls", [1, 3])
def test_a_thread_that_has_not_used_the_gpu_yet(stage, calls, unordered):
    """A new thread, such as autograd's, has no CUDA context. A tensor descriptor needs a context."""
    inputs = make_inputs(130, 200)
    for _ in range(calls):
        expected = by_functions(stage, *inputs, causal=True, scale=SCALE)
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        results = pool.submit(by_functions, stage, *inputs, causal=True, scale=SCALE).result()
    assert_same_bits(expected, results, unordered)
    assert_right(results, *inputs, causal=True, scale=SCALE)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("run", [by_operator, by_functions])
def test_a_device_that_is_not_the_current_one(stage, run):
    """Triton launches on the current device, even if the tensors are on another device. The stage must switch the device."""
    for _ in range(3):
        check(stage, *make_inputs(130, 200), causal=True, run=run)
    inputs = tuple(tensor.to("cuda:1") for tensor in make_inputs(130, 200))
    with contextlib.nullcontext() if run is by_operator else torch.cuda.device(1):
        results = check(stage, *inputs, causal=True, run=run)
    assert {result.device.index for result in results.values()} == {1}


@pytest.mark.alone
@needs_gpu
@pytest.mark.parametrize("huge", ["batch", "heads", "rows"])
def test_strides_past_two_to_the_31_elements(stage, huge):
    """The product of index and stride exceeds int32.

    q, k, v and dO share one memory, and their elements are far apart.
    """
    batch, head, row = {"batch": (2**31 + 64, 256, 1024), "heads": (256, 2**30 + 64, 512), "rows": (256, 512, 2**25 + 64)}[huge]
    memory = torch.empty(2**32, dtype=torch.float16, device=DEVICE)  # 8 GiB

    def place(offset, heads, columns):
        return memory.as_strided((2, heads, 70, columns), (batch, head * 4 // heads, row, 1), offset).normal_()

    check(stage, place(0, 4, 64), place(64, 2, 64), place(128, 2, 32), place(192, 4, 32), causal=True)


@pytest.mark.alone
@needs_gpu
@pytest.mark.parametrize("shared", [1, 2])
def test_results_past_two_to_the_31_elements(stage, shared):
    """Offsets in contiguous outputs exceed int32 only with this many heads. The inputs are one head, expanded to all heads."""
    heads, seq, head_dim = 2**31 // (160 * 256) + 2, 160, 256
    torch.cuda.empty_cache()  # release memory that earlier tests have freed
    if torch.cuda.mem_get_info()[0] < 100 * 2**30:
        pytest.skip("needs 100 GiB of free GPU memory")
    inputs = make_inputs(seq, seq, head_dim, batch=1, heads=1)
    kv_heads = heads // shared

    def expanded(kv_heads):
        numbers = shared * kv_heads, kv_heads, kv_heads, shared * kv_heads
        return [tensor.expand(1, number, -1, -1) for tensor, number in zip(inputs, numbers, strict=True)]

    q, k, v, grad_out = expanded(kv_heads=1)
    exact, yardstick = (make(q, k, v, True, SCALE, grad_out) for make in (truth, plain))
    results = by_functions(stage, *expanded(kv_heads), causal=True, scale=SCALE)
    for kv_head in (0, kv_heads // 2, kv_heads - 1):
        some = {name: result.unflatten(1, (kv_heads, -1))[:, kv_head] for name, result in results.items()}
        assert_correct(some, exact, yardstick)


class Wrapped(torch.Tensor):
    """A tensor whose elements are in another tensor. Only the dispatcher finds the elements."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = [arg.inner if isinstance(arg, Wrapped) else arg for arg in args]
        return func(*inner, **(kwargs or {}))


@pytest.mark.parametrize("which", range(5), ids=["q", "k", "v", "out", "lse"])
def test_one_saved_tensor_may_come_back_as_another_class(stage, which, unordered):
    """A tensor subclass must go through the dispatcher. A kernel would look for the elements in the wrong place."""
    q, k, v, grad_out = make_inputs(9, 20, **FEW_SHARED)
    expected = by_operator(stage, q, k, v, grad_out, causal=True, scale=SCALE)
    order = itertools.count()
    hooks = (lambda tensor: (next(order), tensor), lambda saved: Wrapped(saved[1]) if saved[0] == which else saved[1])
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        got = check(stage, q, k, v, grad_out, causal=True, scale=SCALE)
    assert next(order) == 5
    assert_same_bits(expected, got, unordered)
