"""Define the baselines to compare stages with: PyTorch's attention, and FlashAttention-3 and -4 if installed."""

import contextlib
import functools
import importlib
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import stages
from common.entry import Unavailable
from common.measure.workloads import Workload
from common.runtime import DEVICE


def _sdpa(q, k, v, *, causal, backend):
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=k.shape[1] != q.shape[1])


class _Flash3(torch.autograd.Function):
    """The autograd function of FlashAttention-3, which works on [B, S, H, D] tensors."""

    @staticmethod
    def forward(ctx, q, k, v, causal):
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, is_causal=causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx, grad_out):
        dq, dk, dv, *_ = torch.ops.flash_attn_3.bwd(grad_out, *ctx.saved_tensors, is_causal=ctx.causal)
        return dq, dk, dv, None


def _transposed(attention):
    """Return a function of [B, H, S, D] tensors that calls a function of [B, S, H, D] tensors."""

    def transposed(q, k, v, *, causal):
        return attention(*(tensor.transpose(1, 2) for tensor in (q, k, v)), causal).transpose(1, 2)

    return transposed


def _installed() -> dict[str, Callable]:
    """Return the attention functions of FlashAttention-3 and FlashAttention-4 by name. Leave out missing libraries.

    FlashAttention-3 comes from its own package or from xformers.
    """
    found = {}
    for module in ("flash_attn_3._C", "xformers.flash_attn_3._C"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
            found["flash-3"] = _transposed(_Flash3.apply)
            break
    with contextlib.suppress(ImportError):
        from flash_attn.cute import flash_attn_func

        def first_result(q, k, v, causal):
            return flash_attn_func(q, k, v, causal=causal, return_lse=True)[0]

        found["flash-4"] = _transposed(first_result)
    return found


# To compare with another library, add its attention here, as a function `attention(q, k, v, *, causal)`.
if DEVICE == "cuda":
    BASELINES = {
        "sdpa-flash": functools.partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION),
        "sdpa-cudnn": functools.partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
        **_installed(),
    }
else:
    BASELINES = {"sdpa": functools.partial(_sdpa, backend=[SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])}


def refusal(impl: str, error: BaseException) -> str | None:
    """Return the reason if the error means that an implementation does not support a workload. Otherwise return None."""
    if isinstance(error, Unavailable):
        return str(error)
    if impl.startswith("flash-") and isinstance(error, (AssertionError, NotImplementedError, RuntimeError, ValueError)):
        return str(error)
    if impl.startswith("sdpa") and isinstance(error, RuntimeError):
        if "No available kernel" in str(error):
            return "this backend of SDPA does not support this workload"
        if "cuDNN Frontend error" in str(error):  # cuDNN does not support the workload
            return str(error)
    return None


def attention_of(impl: str) -> Callable:
    return BASELINES[impl] if impl in BASELINES else stages.load(impl).attention


def timed_call(impl: str, workload: Workload, inputs) -> Callable:
    """Return the function to time for an implementation, from `call_of`."""
    return call_of(functools.partial(attention_of(impl), causal=workload.causal), workload, inputs)


def call_of(attention: Callable, workload: Workload, inputs) -> Callable:
    """Return a function that runs the workload's pass of `attention(q, k, v)`. It returns `out` or (dq, dk, dv).

    If the pass is the backward, `call_of` itself runs the forward once.
    """
    *qkv, grad_out = inputs
    if workload.pass_ == "fwd":
        return lambda: attention(*qkv)
    leaves = [tensor.detach().requires_grad_() for tensor in qkv]
    if workload.pass_ == "fwd+bwd":
        return lambda: torch.autograd.grad(attention(*leaves), leaves, grad_out)
    out = attention(*leaves)
    return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
