"""Every stage as a PyTorch operator: compilation, checkpointing, autocast, streams, graphs, devices, huge tensors."""

import concurrent.futures
import contextlib
import importlib
import math

import pytest
import torch
import torch._dynamo.testing
from cases import FEW, TILED, assert_same_bits, by_functions, by_operator, check, make_inputs
from torch.utils.checkpoint import checkpoint

from common.measure.reference import assert_correct, plain, truth
from common.runtime import DEVICE

on_gpu = DEVICE == "cuda"
needs_gpu = pytest.mark.skipif(not on_gpu, reason="needs a GPU")

SCALE = 0.2


def gradients(function, leaves, grad_out):
    """The result of `function` and its gradients, by the names that the other helpers use."""
    out = function(*leaves)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad_out)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def as_leaves(*tensors):
    return tuple(tensor.detach().requires_grad_() for tensor in tensors)


def stage_operators(stage):
    """The forward and the backward operator that a stage's attention is made of."""
    name = stage.__name__.removeprefix("stages.")
    return (getattr(torch.ops.kernel_evolution, f"{name}_{part}").default for part in ("forward", "backward"))


@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck(stage, transposed):
    """PyTorch's own check of schema, fake tensors (shapes, dtypes and strides) and autograd registration."""
    q, k, v, grad_out = make_inputs(9, 20, 16, **FEW)
    if transposed:
        q, k, v, grad_out = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v, grad_out))
    forward, backward = stage_operators(stage)
    torch.library.opcheck(forward, (*as_leaves(q, k, v), True, SCALE))
    out, lse = forward(q, k, v, True, SCALE)
    torch.library.opcheck(backward, (grad_out, q, k, v, out, lse, True, SCALE))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_graph_break(stage, dynamic):
    """Forward and backward inside a compiled function with work before and after; no second compilation for another length."""
    compilations = torch._dynamo.testing.CompileCounterWithBackend("inductor" if on_gpu else "aot_eager")

    def model(q, k, v):
        return stage.attention(q * 2, k, v, causal=True) + q

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=compilations)
    for seq in (24, 40) if dynamic else (24,):
        q, k, v, grad_out = make_inputs(seq, seq + 9, 16, torch.float32, **FEW)
        leaves = as_leaves(q, k, v)
        eager = gradients(model, leaves, grad_out)
        for name, result in gradients(compiled, leaves, grad_out).items():
            torch.testing.assert_close(result, eager[name], msg=name)
    assert compilations.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(stage, mode):
    q, k, v, _ = make_inputs(*TILED, **FEW)
    expected = stage.attention(q, k, v, causal=True)
    with mode():
        out = stage.attention(*as_leaves(q, k, v), causal=True)
    assert not out.requires_grad
    assert torch.equal(out, expected)


def test_only_the_gradients_that_are_asked_for(stage):
    q, k, v, grad_out = make_inputs(*TILED, **FEW)
    expected = by_operator(stage, q, k, v, grad_out, causal=True, scale=SCALE)
    key = k.clone().requires_grad_()
    stage.attention(q, key, v, causal=True, scale=SCALE).backward(grad_out)
    assert torch.equal(key.grad, expected["dk"])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(stage, use_reentrant, unordered):
    """The forward runs again inside the backward: it must do so with the same bits."""
    q, k, v, grad_out = make_inputs(*TILED, **FEW)

    def attend(q, k, v):
        return stage.attention(q * 1.5, k, v, causal=True)

    leaves = as_leaves(q, k, v)
    kept = gradients(attend, leaves, grad_out)
    leaves = as_leaves(q, k, v)
    out = checkpoint(attend, *leaves, use_reentrant=use_reentrant)
    out.backward(grad_out)  # autograd.grad is what re-entrant checkpointing does not support
    dq, dk, dv = (leaf.grad for leaf in leaves)
    assert_same_bits(kept, {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}, unordered)


@pytest.mark.parametrize("dtype", [torch.bfloat16] if not on_gpu else [torch.bfloat16, torch.float16])
def test_autocast_casts_the_inputs(stage, dtype, unordered):
    """As if cast by hand, forward and backward: autocast does not reach the float32 products inside a stage."""
    q, k, v, grad_out = make_inputs(*TILED, dtype=torch.float32, **FEW)
    by_hand = by_operator(stage, q.to(dtype), k.to(dtype), v.to(dtype), grad_out.to(dtype), causal=True, scale=SCALE)
    leaves = as_leaves(q, k, v)
    with torch.autocast(DEVICE, dtype):
        out, lse = stage.attention(*leaves, causal=True, scale=SCALE, return_lse=True)
        dq, dk, dv = torch.autograd.grad(out, leaves, grad_out.to(dtype))
    got = {"out": out.detach(), "lse": lse.detach(), "dq": dq.to(dtype), "dk": dk.to(dtype), "dv": dv.to(dtype)}
    assert dq.dtype == torch.float32
    assert_same_bits(by_hand, got, unordered)


def test_autocast_leaves_float64_alone(stage):
    """As SDPA's autocast does: here float64 is refused, and must not pass as bfloat16."""
    q, k, v, _ = make_inputs(*TILED, **FEW)
    with torch.autocast(DEVICE, torch.bfloat16), pytest.raises(TypeError, match="float64"):
        stage.attention(q.double(), k.double(), v.double())


@pytest.mark.parametrize("seq_q, seq_k", [TILED, (1, 1)])
def test_saved_tensors_may_come_back_in_another_layout(stage, seq_q, seq_k, unordered):
    """As from hooks that offload them: at an address that is no multiple of 16 bytes, with other strides."""

    def moved(tensor):
        shape = tensor.shape if tensor.dim() < 4 else (*tensor.shape[:-1], tensor.shape[-1] + 1)
        buffer = tensor.new_full((math.prod(shape) + 1,), float("nan"))[1:].view(shape)
        return buffer[..., : tensor.shape[-1]].copy_(tensor)

    def transposed(tensor):
        return tensor.mT.contiguous().mT

    q, k, v, grad_out = make_inputs(seq_q, seq_k, **FEW)
    expected = by_operator(stage, q, k, v, grad_out, causal=True, scale=SCALE)
    for unpack in (moved, transposed):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
            got = by_operator(stage, q, k, v, grad_out, causal=True, scale=SCALE)
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


def test_differentiating_twice_says_that_it_cannot(stage):
    """A second derivative of zero, without a word, would be the worse answer."""
    q, k, v, grad_out = make_inputs(9, 20, 16, torch.float32, **FEW)
    leaves = as_leaves(q, k, v)
    out = stage.attention(*leaves)
    dq, _, _ = torch.autograd.grad(out, leaves, grad_out, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        dq.sum().backward()


@needs_gpu
def test_cuda_graph_after_one_call(stage, unordered):
    """A replay reads what has been copied into the captured inputs since."""
    static = as_leaves(*make_inputs(130, 200)[:3])
    grad_out = torch.randn_like(static[0])
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


@needs_gpu
def test_a_stream_that_is_not_the_default(stage, unordered):
    """Inputs that are still being computed on that stream: a kernel launched elsewhere would read them too early."""
    inputs = make_inputs(130, 200)
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


@needs_gpu
def test_a_thread_that_has_not_used_the_gpu_yet(stage, unordered):
    """A new thread has no CUDA context, and a tensor descriptor cannot be encoded without; autograd's thread was the first."""
    inputs = make_inputs(130, 200)
    expected = by_functions(stage, *inputs, causal=True, scale=SCALE)
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        results = pool.submit(by_functions, stage, *inputs, causal=True, scale=SCALE).result()
    assert_same_bits(expected, results, unordered)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("run", [by_operator, by_functions])
def test_a_device_that_is_not_the_current_one(stage, run):
    """Triton launches on the current device, wherever the tensors are."""
    inputs = tuple(tensor.to("cuda:1") for tensor in make_inputs(130, 200))
    with contextlib.nullcontext() if run is by_operator else torch.cuda.device(1):
        results = check(stage, *inputs, causal=True, run=run)
    assert {result.device.index for result in results.values()} == {1}


@pytest.mark.alone
@needs_gpu
@pytest.mark.parametrize("huge", ["batch", "heads", "rows"])
def test_strides_past_two_to_the_31_elements(stage, huge):
    """An int32 product of index and stride wraps around and reads somewhere else: q, k, v and dO interleaved, far apart."""
    strides = {"batch": (2**31 + 64, 256, 768), "heads": (256, 2**31 + 64, 512), "rows": (256, 512, 2**25 + 64)}[huge]
    shape = (2, 2, 70, 64)
    memory = torch.empty(2**32, dtype=torch.float16, device=DEVICE)  # 8 GiB
    inputs = [memory.as_strided(shape, (*strides, 1), offset).normal_() for offset in (0, 64, 128, 192)]
    check(stage, *inputs, causal=True)


@pytest.mark.alone
@needs_gpu
def test_results_past_two_to_the_31_elements(stage):
    """Outputs are contiguous, so only that many of them get so far: one head's inputs, expanded over all heads."""
    heads, seq, head_dim = 2**31 // (160 * 256) + 2, 160, 256
    torch.cuda.empty_cache()  # what earlier tests have freed
    if torch.cuda.mem_get_info()[0] < 100 * 2**30:
        pytest.skip("needs 100 GiB of free GPU memory")
    inputs = make_inputs(seq, seq, head_dim, batch=1, heads=1)
    exact = truth(*inputs[:3], True, SCALE, inputs[3])
    yardstick = plain(*inputs[:3], True, SCALE, inputs[3])
    results = by_functions(stage, *(tensor.expand(1, heads, -1, -1) for tensor in inputs), causal=True, scale=SCALE)
    for head in (0, heads // 2, heads - 1):
        assert_correct({name: result[:, head : head + 1] for name, result in results.items()}, exact, yardstick)
