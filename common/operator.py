"""Turn a stage into a PyTorch operator, with input checks and autograd."""

import functools
import inspect
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from common.checks import (
    EIGHT_BITS,
    check_cache_seqlens,
    check_descales,
    check_inputs,
    check_packed,
    check_paged,
    checked_causal,
    checked_flag,
    checked_scale,
)
from common.entry import Descales, Lengths, Starts, autocast_device, entry
from common.layout import empty_rows

OF_SDPA = {  # arguments of PyTorch's scaled_dot_product_attention that a user may try
    "is_causal": "is_causal: this function's name for it is causal",
    "enable_gqa": "enable_gqa: k and v may always have fewer heads than q",
    "attn_mask": "attn_mask: not supported; there is only causal=True and causal='bottom-right'",
    "dropout_p": "dropout_p: not supported",
}
OF_VARLEN = {  # arguments of FlashAttention's flash_attn_varlen_func
    "max_seqlen_q": "max_seqlen_q: not needed; leave it out",
    "max_seqlen_k": "max_seqlen_k: not needed; leave it out",
    "softmax_scale": "softmax_scale: this function's name for it is scale",
    "return_attn_probs": "return_attn_probs: not supported; return_lse=True returns the log-sum-exp",
    "block_table": "block_table: not supported for packed sequences; attention takes a page_table for caches",
}
NO_GRADIENTS = "{} has no gradients, but q, k or v requires gradients; call {} under torch.no_grad()"
OF_CACHE = NO_GRADIENTS.format("cache_seqlens", "attention")
OF_FACTORS = "{} has no gradients, but requires gradients; detach it, or call attention under torch.no_grad()"
OF_PACKED = NO_GRADIENTS.format("attention_varlen", "attention_varlen")
OF_WIDE = NO_GRADIENTS.format("attention_varlen with a head dimension above 128", "attention_varlen")
PAGE_TABLE = 7  # number of a forward's argument `page_table`; a backward has a float there
DIFFERENTIABLE = 10  # number of a forward's argument `differentiable`, its last; other operators have fewer arguments
NAMESPACE = "kernel_evolution"  # the namespace of the stages' PyTorch operators
_PLAIN = {Tensor, torch.nn.Parameter}
_libraries: dict[str, torch.library.Library] = {}  # PyTorch removes an operator when its library is freed


def autocast(*tensors) -> tuple:
    """If autocast is on, cast floating-point tensors to its dtype, as PyTorch does, except float64 and those of 8 bits."""
    device = autocast_device(tensors[0])
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and 1 < t.itemsize < 8 else t for t in tensors)


def _unwatched(*tensors: Tensor) -> bool:
    """Return whether a call needs only ordinary autograd from PyTorch.

    If so, no compiler, tracer, transform, mode or profiler is active. Every tensor is a plain tensor or a Parameter. No tensor
    belongs to a transform, or to the older vmap behind `is_grads_batched`, or has PyTorch's negative bit.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack()
        or forward_ad._current_level >= 0
        or torch.autograd.profiler._is_profiler_enabled
        or torch._C._is_tracing()
    ):
        return False
    return (  # loops in C
        _PLAIN.issuperset(map(type, tensors))
        and not any(map(Tensor.is_neg, tensors))
        and not any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))
        and not any(map(torch._C._functorch.is_legacy_batchedtensor, tensors))
    )


def _autograd_kernel(name: str, operator: Callable, gradients: Callable, setup_context: Callable) -> Callable:
    """Return the function that PyTorch's dispatcher calls to differentiate an operator.

    Unlike the function that `torch.library.register_autograd` makes, this function also works inside torch.func's transforms.
    It runs once for each transform.
    """

    class Differentiable(torch.autograd.function._SingleLevelFunction):
        @staticmethod
        def forward(ctx, keys, *inputs):
            # PyTorch switches reverse-mode and forward-mode gradients off around a forward. Outer transforms need both kinds of
            # gradients, so switch both on again.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                output = below(keys, *inputs)
            setup_context(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx, *grads):
            return None, *gradients(ctx, *grads)

    def below(keys, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *inputs)

    def kernel(keys, *inputs):
        tensors = [one for one in inputs if isinstance(one, Tensor)]
        if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(one).tangent is not None for one in tensors):
            raise NotImplementedError(  # because the result would lack a tangent
                f"{name} has no forward-mode derivatives (torch.func.jvp, jacfwd, hessian, torch.autograd.forward_ad); "
                "use reverse mode: torch.func.vjp, jacrev or torch.autograd.grad"
            )
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)):
            return below(keys, *inputs)
        # The caller may not know of these gradients, as `grad` outside of `vmap` hides them. Without its last argument, an
        # operator takes its results for `differentiable`.
        with enable_single_level_autograd_function():
            return Differentiable.apply(keys, *inputs[:DIFFERENTIABLE])

    return kernel


def _under_vmap(operator: Callable, info, in_dims: tuple, *inputs) -> tuple[tuple, tuple]:
    """Call an operator under `torch.vmap`: fold the mapped dimension into the batch dimension."""
    size = info.batch_size
    mapped = [_mapped(one, dim, size) if isinstance(one, Tensor) else one for one, dim in zip(inputs, in_dims, strict=False)]
    if len(mapped) > PAGE_TABLE and isinstance(mapped[PAGE_TABLE], Tensor):  # each element has pages of its own
        pages, table = mapped[1].shape[1], mapped[PAGE_TABLE]
        first = pages * torch.arange(size, dtype=torch.int32, device=table.device)[:, None, None]
        mapped[PAGE_TABLE] = torch.where((table >= 0) & (table < pages), table + first, -1)
    results = operator(*(one.flatten(0, 1) if isinstance(one, Tensor) else one for one in mapped))
    return tuple(result.unflatten(0, (size, -1)) for result in results), (0,) * len(results)


def _mapped(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """Return a tensor of `vmap` with the mapped dimension, which has this size, as the first."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _packed_under_vmap(operator: Callable, info, in_dims: tuple, *inputs) -> tuple[tuple, tuple]:
    """Call an operator of packed sequences under `torch.vmap`: let the packed batches follow each other.

    The tokens of no sequence become sequences of queries alone, and of keys alone, at both ends of each batch.
    """
    size, others = info.batch_size, [one for one in inputs if not isinstance(one, Tensor)]
    mapped = [_mapped(one, dim, size) for one, dim in zip(inputs, in_dims, strict=False) if isinstance(one, Tensor)]
    *tensors, starts_q, starts_k = mapped  # the first tensor has the tokens of q, and the third has those of k
    tokens_q, tokens_k = tensors[0].shape[1], tensors[2].shape[1]
    of_q, of_k = starts_q.clamp(0, tokens_q), starts_k.clamp(0, tokens_k)
    zero, one = torch.zeros_like(of_q[:, :1]), torch.ones_like(of_q[:, :1])
    of_q = torch.cat((zero, of_q[:, :1], of_q, one * tokens_q, one * tokens_q), 1)
    of_k = torch.cat((zero, zero, of_k, of_k[:, -1:], one * tokens_k), 1)
    number = torch.arange(size, dtype=torch.int32, device=of_q.device)[:, None]
    starts = (of_q + number * tokens_q).flatten(), (of_k + number * tokens_k).flatten()
    # All have their tokens first, except LSE, which is [size, H, tokens].
    rows = (each.flatten(0, 1) if each.dim() == 4 else each.transpose(0, 1).flatten(1) for each in tensors)
    results = operator(*rows, *starts, *others)
    dims = tuple(0 if result.dim() == 3 else 1 for result in results)
    return tuple(result.unflatten(dim, (size, -1)) for result, dim in zip(results, dims, strict=True)), dims


def _outside(starts: Tensor, tokens: int) -> Tensor:
    """Return which tokens lie before the first or behind the last sequence, [tokens, 1, 1]."""
    token = torch.arange(tokens, device=starts.device)[:, None, None]
    return (token < starts[0]) | (token >= starts[-1])


def _into_range(rows: Tensor, kv_heads: int, queries: int) -> tuple[Tensor, Tensor]:
    """Multiply float32 rows by a power of 2 for each K/V head, so that float16 can hold the products.

    If rows are small, the power of 2 is large, but float16 can still hold each sum of products with weights of at most 1. If a
    row is too large for float16, the power of 2 is below 1. Rows that are not finite stay so, and do not count: they may belong
    to another packed sequence.

    Args:
        rows: [B, H, Sq, D] or [tokens, H, D].
        kv_heads: Hkv.
        queries: the number of the dimension of queries.

    Returns:
        The products, and the powers of 2, [B, Hkv, 1, 1] or [1, Hkv, 1].
    """
    limit, least = 2.0**15, 2.0**-100
    of_rows = rows.abs().amax(-1, keepdim=True)
    of_rows = of_rows.masked_fill(~of_rows.isfinite(), 0)
    shape = rows.shape[0] if queries else 1, kv_heads, -1, *[1] * (rows.dim() - 2)  # of query heads that share a K/V head
    largest = of_rows.amax(queries, keepdim=True).reshape(shape).amax(2)
    total = of_rows.sum(queries, keepdim=True).reshape(shape).sum(2)
    factors = torch.minimum((limit / total.clamp(min=least)).clamp(min=1), limit / largest.clamp(min=least))
    factors = factors.log2().floor().exp2()
    return rows * factors.repeat_interleave(rows.shape[1] // kv_heads, 1), factors


def _register(
    name: str, function: Callable, fake: Callable, gradients: Callable, setup_context: Callable, under_vmap: Callable
) -> Callable:
    """Register a function as the PyTorch operator `kernel_evolution::{name}`, and return the operator.

    `torch.library.custom_op` does the same, but each call then takes some 5 µs more CPU time. If a reloaded module registers a
    name again, the new function replaces the old function.

    Args:
        function: a function with type annotations that returns new tensors.
        fake: a function with the arguments of `function`. It returns tensors with any values, and with the shapes, strides and
            dtypes of the results of `function`.
        gradients, setup_context: the two functions that `torch.library.register_autograd` would take.
        under_vmap: calls the operator under `torch.vmap`, `(operator, info, in_dims, *inputs) -> (results, out_dims)`.
    """
    if name in _libraries:
        _libraries.pop(name)._destroy()
    library = _libraries[name] = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(name + torch.library.infer_schema(function, mutates_args=()))
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    library.impl(name, _autograd_kernel(name, operator, gradients, setup_context), "Autograd", with_keyset=True)
    torch.library.register_vmap(f"{NAMESPACE}::{name}", functools.partial(under_vmap, operator), lib=library)
    return operator


def _differentiable(
    name: str, parts: tuple[str, str], tensors: int, run_forward: Callable, fake_forward: Callable, run_backward: Callable,
    fake_backward: Callable, check: Callable, under_vmap: Callable,
) -> tuple[Callable, Callable]:  # fmt: skip
    """Register a stage's forward and backward as PyTorch operators. Return the forward's operator, and its short cut.

    The short cut is the operator's autograd without PyTorch's dispatcher, which would take longer than the rest of the call.

    Args:
        parts: how the operators' names end.
        tensors: the forward's first inputs are so many tensors: q, k and v, then starts. Then follow causal, scale, and others.
            The backward takes grad_out, q, k, v, out, lse, and the forward's inputs after v.
        check: raises an error for inputs of the forward that have no gradients.
        run_forward, fake_forward, run_backward, fake_backward, under_vmap: as in `_register`.
    """

    def setup_context(ctx, inputs, output):
        check(inputs)
        ctx.options = inputs[tensors:][:3]  # causal, scale, and of batches the diagonal
        ctx.save_for_backward(*inputs[:tensors], *output)
        ctx.set_materialize_grads(False)  # do not make zero gradients for outputs that the loss does not use

    def gradients(ctx, grad_out, grad_lse):
        q, k, v, *starts, out, lse = saved = ctx.saved_tensors  # only once, because checkpointing computes them again
        options = *starts, *ctx.options
        if grad_out is None:
            dq, dk, dv = (torch.zeros_like(tensor) for tensor in (q, k, v))
        else:
            short = not torch.is_grad_enabled() and _unwatched(grad_out, *saved)
            dq, dk, dv = (run_backward if short else backward_op)(grad_out, q, k, v, out, lse, *options)
        if grad_lse is not None:
            # d lse / d s = P. So the gradient of lse adds scale * grad_lse * (P K) to dq, and scale * Pᵀ (grad_lse * q) to dk.
            # P K is an attention output with K in the place of V. The addend of dk is the dV of a backward with
            # scale * grad_lse * q as dO.
            _, scale, *_ = ctx.options
            weight = (scale * grad_lse)[..., None]
            mean_key, _ = forward_op(q, k, k, *options)
            if starts:
                # Rows without keys may have any weight. Outside of sequences, q and mean_key may be anything, too.
                weight, of_rows = weight.transpose(0, 1), lse.transpose(0, 1)[..., None]
                unseen = (weight == 0) | (of_rows == -torch.inf) | _outside(starts[0], len(q))
                of_q, of_k = ((weight * each).masked_fill(unseen, 0) for each in (mean_key, q))
            else:
                of_q, of_k = weight * mean_key, weight * q
            dq, factors = dq + of_q.to(dq.dtype), None
            if q.dtype == torch.float16:
                of_k, factors = _into_range(of_k, k.shape[1], 0 if starts else 2)
            of_k = backward_op(of_k.to(q.dtype), q, k, k, mean_key, lse, *options)[2]
            dk = dk + (of_k if factors is None else (of_k / factors).to(dk.dtype))
        return dq, dk, dv, *[None] * 8

    def refuse(ctx, *grads):
        raise RuntimeError(f"the gradients of {name}'s attention cannot be differentiated again")

    class ShortCut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = run_forward(*inputs)
            setup_context(ctx, inputs, output)
            return output

        backward = staticmethod(gradients)

    of_forward, of_backward = (f"{name}_{part}" for part in parts)
    forward_op = _register(of_forward, run_forward, fake_forward, gradients, setup_context, under_vmap)
    backward_op = _register(of_backward, run_backward, fake_backward, refuse, lambda ctx, inputs, output: None, under_vmap)
    return forward_op, ShortCut.apply


def make_attention(package: str, forward: Callable, backward: Callable) -> Callable:
    """Register a stage's two functions as a differentiable PyTorch operator and return the function that users call.

    Also set the stage's `attention_varlen`, the function for packed sequences.

    Args:
        package: the stage's `__name__`. Its last part names the operators `kernel_evolution::{name}_forward` and
            `kernel_evolution::{name}_backward`.
        forward: `(q, k, v, *, causal, scale, diagonal=0) -> (out, lse)`, or with another argument `lengths=None`, a `Lengths`.
            With lengths, `diagonal` is 0, and a causal mask is aligned to each length: the last query sees all keys. A forward
            that takes packed sequences has another argument, `starts=None`, a `Starts`, and one that takes caches in 8 bits has
            `descales=None`, a `Descales` if k and v have 8 bits. One that rounds more than its inputs' dtype has
            `differentiable=False`; it is True if a backward may follow, which needs the usual `out` and `lse`.
        backward: `(grad_out, q, k, v, out, lse, *, causal, scale, diagonal=0) -> (dq, dk, dv)`, or with another argument
            `starts=None`, if packed sequences have gradients. Both functions take tensors as `common.entry` lays them out, and
            `causal` as a bool. If `causal` is True, query i sees key j only if j <= i + diagonal. The diagonal is 0 or Sk - Sq,
            and never negative.
    """
    name = package.rpartition(".")[2]
    takes_lengths = "lengths" in inspect.signature(forward).parameters
    takes_eight_bits = "descales" in inspect.signature(forward).parameters
    takes_differentiable = "differentiable" in inspect.signature(forward).parameters
    takes_pages = getattr(sys.modules[package], "PAGES", False)
    sys.modules[package].attention_varlen = _make_varlen(package, forward, backward)
    forward, backward = entry(forward), entry(backward)

    def run_forward(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, diagonal: int,
        cache_seqlens: Tensor | None = None, page_table: Tensor | None = None,
        k_descale: Tensor | None = None, v_descale: Tensor | None = None, differentiable: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        options = {"causal": causal, "scale": scale, "diagonal": diagonal}
        if takes_differentiable:
            options["differentiable"] = differentiable
        if page_table is not None:
            k, v, page_table = k.transpose(1, 2), v.transpose(1, 2), page_table.contiguous()
        if cache_seqlens is not None:
            options["lengths"] = Lengths(cache_seqlens.contiguous(), page_table)  # vmap may give any stride
        if k.dtype == EIGHT_BITS:
            descales = (each if each is None else each.contiguous() for each in (k_descale, v_descale))
            options["descales"] = Descales(*descales)
        return forward(q, k, v, **options)

    def fake_forward(q, k, v, *_):
        return empty_rows(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)

    def run_backward(
        grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float, diagonal: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return backward(grad_out, q, k, v, out, lse.contiguous(), causal=causal, scale=scale, diagonal=diagonal)

    def fake_backward(grad_out, q, k, v, out, lse, causal, scale, diagonal):
        return empty_rows(q), empty_rows(k), empty_rows(v)

    def check(inputs):
        if len(inputs) > 6 and inputs[6] is not None:  # PyTorch may leave out lengths that are None
            raise NotImplementedError(OF_CACHE)

    forward_op, short_cut = _differentiable(
        name, ("forward", "backward"), 3, run_forward, fake_forward, run_backward, fake_backward, check, _under_vmap
    )

    def attention(
        q, k, v, *, causal=False, scale=None, return_lse=False, cache_seqlens=None, page_table=None, k_descale=None,
        v_descale=None, **others,
    ):  # fmt: skip
        """Compute exact attention, softmax(scale · q kᵀ) v. The result is differentiable in q, k and v.

        The gradients cannot be differentiated again. `grad`, `vjp`, `jacrev` and `vmap` of `torch.func` work. Under
        `torch.autocast`, inputs other than float64 are first cast to the autocast dtype, as in PyTorch's SDPA.

        Args:
            q: [B, H, Sq, D] in float16, bfloat16 or float32, with any strides. D is one of 16, 32, 64, 128, 256.
            k: [B, Hkv, Sk, D], with the dtype and device of q. Sq and Sk may be any lengths >= 1. H is a multiple of Hkv.
                Query head h attends to head h // (H / Hkv) of k and v, as in PyTorch's SDPA with `enable_gqa` (arXiv
                2305.13245).
            v: [B, Hkv, Sk, Dv], with the dtype and device of q. Dv is one of the sizes that D may have.
            causal: a bool or "bottom-right". True hides key j from query i if j > i. The mask is aligned top left, as in
                PyTorch's SDPA with `is_causal`. "bottom-right" hides key j if j > i + Sk - Sq, like PyTorch's
                `causal_lower_right`. So the last query sees all keys.
            scale: the factor of the scores. None means 1 / sqrt(D). Any other scale must be 0 or have an absolute value from
                1e-30 to 1e6. Scaled scores are float32. If scores exceed 1e7, their rounding error can reach 1. If scores
                exceed 5e8, the result may be NaN.
            return_lse: whether to return the log-sum-exp of the scaled scores too. The log-sum-exp is differentiable, but its
                gradient costs one more forward and backward.
            cache_seqlens: None, or the lengths of the batch's sequences, [B], int32, on the device of q. Then k and v are a
                cache: sequence b has only the first cache_seqlens[b] keys, and the queries are its last Sq tokens. So the cache
                already has the queries' own keys, and the lengths count them. `causal=True` then means "bottom-right", and
                hides key j from query i if j > i + cache_seqlens[b] - Sq. A query that sees no key gets zeros, and -inf as its
                log-sum-exp. Later keys are never read. The host never reads the lengths. Lengths below 0 count as 0, and
                lengths above Sk as Sk.
            page_table: None, or where a cache in pages has each sequence's keys, [B, N], int32, on the device of q. Then k is
                [pages, page_size, Hkv, D] and v is [pages, page_size, Hkv, Dv]. The page_size is a power of two, at least 16,
                and Sk is N * page_size. Page number page_table[b, n] has the keys n * page_size to (n + 1) * page_size - 1 of
                sequence b. Sequences may share pages. The numbers of pages wholly behind a sequence may be anything. Any other
                number that no page has counts as a page of zeros. The host never reads the table.
            k_descale: the factors of a cache in 8 bits, [B, Hkv], float32, positive, on the device of q; None for 1. Then k and
                v are in float8_e4m3fn, q is in float16 or bfloat16, and a head's keys are k times its factor.
            v_descale: the factors of v, likewise. Where sequences share a page, each uses its own factors.

        Returns:
            out [B, H, Sq, Dv] with the dtype of q, or (out, lse). lse is [B, H, Sq] in float32, with the natural logarithm.

        Raises:
            TypeError: an argument has the wrong type or dtype, or a tensor is sparse or nested; or there are `others`, such as
                SDPA's `attn_mask`.
            ValueError: a shape, head dimension or device is wrong, a tensor is empty, or `scale` or `causal` is invalid; or
                `cache_seqlens` are missing beside a `page_table` or 8-bit k and v.
            NotImplementedError: an input has a forward-mode tangent (`torch.func.jvp`, `jacfwd`, `hessian`); or there are
                `cache_seqlens`, a `page_table` or 8-bit k and v, and the stage takes none, or an input requires gradients.
        """
        for other in others:
            raise TypeError(OF_SDPA.get(other, f"attention() got an unexpected keyword argument {other!r}"))
        q, k, v = autocast(q, k, v)
        eight = EIGHT_BITS in (getattr(k, "dtype", None), getattr(v, "dtype", None))
        if not takes_eight_bits and (eight or k_descale is not None or v_descale is not None):
            raise NotImplementedError(f"{name} takes no k and v in 8 bits; the last stage of the track `lengths` does")
        if eight and cache_seqlens is None:
            raise ValueError("k and v in 8 bits need cache_seqlens, the numbers of keys of each sequence in the cache")
        if page_table is None:
            check_inputs(q, k, v, eight)
        elif cache_seqlens is None:
            raise ValueError("page_table needs cache_seqlens, the numbers of keys in the pages of each sequence")
        elif not takes_pages:
            raise NotImplementedError(f"{name} takes no page_table; the last stage of the track `lengths` does")
        else:
            check_paged(q, k, v, page_table, eight)
        if k_descale is not None or v_descale is not None:
            check_descales(q, k, k_descale, v_descale, k.shape[1 if page_table is None else 2])
        differentiable = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if cache_seqlens is not None:
            if not takes_lengths:
                raise NotImplementedError(f"{name} takes no cache_seqlens; stages of the track `lengths` do")
            check_cache_seqlens(cache_seqlens, q)
            if differentiable:
                raise NotImplementedError(OF_CACHE)
            for argument, factors in (("k_descale", k_descale), ("v_descale", v_descale)):
                if factors is not None and factors.requires_grad and torch.is_grad_enabled():
                    raise NotImplementedError(OF_FACTORS.format(argument))
        # With lengths, a mask is aligned to each length, and more queries than keys are no error.
        causal, diagonal = checked_causal(causal, q.shape[2], k.shape[2] if cache_seqlens is None else q.shape[2])
        return_lse = checked_flag("return_lse", return_lse)
        function = forward_op
        cached = cache_seqlens, page_table, k_descale, v_descale
        if _unwatched(q, k, v, *(each for each in cached if each is not None)):
            function = short_cut if differentiable else run_forward
        out, lse = function(q, k, v, causal, checked_scale(scale, q.shape[-1]), diagonal, *cached, differentiable)
        return (out, lse) if return_lse else out

    attention.__module__, attention.__qualname__ = package, "attention"  # pickle finds the function by these names
    return attention


def _make_varlen(package: str, forward: Callable, backward: Callable) -> Callable:
    """Return a stage's `attention_varlen`. The arguments are those of `make_attention`. Register operators for the passes that
    take packed sequences."""
    name = package.rpartition(".")[2]
    takes_starts, has_gradients = ("starts" in inspect.signature(function).parameters for function in (forward, backward))
    has_wide_gradients = getattr(sys.modules[package], "WIDE_PACKED", False)
    forward, backward = entry(forward), entry(backward)

    def swapped(tensor):
        return tensor.transpose(0, 1)[None]

    def run(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        starts = Starts(cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous())
        out, lse = forward(*map(swapped, (q, k, v)), causal=causal, scale=scale, starts=starts)
        return out[0].transpose(0, 1), lse[0]

    def fake(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale):
        return empty_rows(swapped(q), v.shape[-1])[0].transpose(0, 1), q.new_empty(q.shape[1::-1], dtype=torch.float32)

    def run_backward(
        grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        starts = Starts(cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous())
        tensors = *map(swapped, (grad_out, q, k, v, out)), lse.contiguous()[None]
        dq, dk, dv = (each[0].transpose(0, 1) for each in backward(*tensors, causal=causal, scale=scale, starts=starts))
        return dq, dk, dv

    def fake_backward(grad_out, q, k, v, *_):
        return tuple(empty_rows(swapped(each))[0].transpose(0, 1) for each in (q, k, v))

    def check_gradients(q, v):
        if not has_gradients:
            raise NotImplementedError(OF_PACKED)
        if max(q.shape[-1], v.shape[-1]) > 128 and not has_wide_gradients:
            raise NotImplementedError(OF_WIDE)

    if takes_starts:
        operator, short_cut = _differentiable(
            name, ("varlen", "varlen_backward"), 5, run, fake, run_backward, fake_backward,
            lambda inputs: check_gradients(inputs[0], inputs[2]), _packed_under_vmap,
        )  # fmt: skip

    def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *, causal=False, scale=None, return_lse=False, **others):
        """Compute exact attention of packed sequences: the tokens of all sequences follow each other in each tensor.

        If the stage's backward takes packed sequences, the result is differentiable in q, k and v, as in `attention`.

        Each query attends to the keys of its own sequence. The arguments are those of FlashAttention's
        `flash_attn_varlen_func`, without the lengths of the longest sequences. The host never reads `cu_seqlens`, so a CUDA
        graph stays right when they change.

        Args:
            q: [tokens_q, H, D] in float16 or bfloat16. Otherwise q, k and v are as in `attention`.
            k: [tokens_k, Hkv, D].
            v: [tokens_k, Hkv, Dv].
            cu_seqlens_q: where sequences start in q, [B + 1], int32, on the device of q, for B sequences. Sequence b has the
                queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1. A sequence may be empty.
            cu_seqlens_k: where sequences start in k and v, [B + 1], likewise.
            causal: a bool or "bottom-right", which both mean "bottom-right": in a sequence with Sq queries and Sk keys, query i
                does not see key j if j > i + Sk - Sq. A query that sees no key gets zeros, and -inf as its log-sum-exp.
            scale, return_lse: as in `attention`.

        Returns:
            out [tokens_q, H, Dv] with the dtype of q, or (out, lse). lse is [H, tokens_q] in float32. The values of queries
            that belong to no sequence are undefined, and the gradients of tokens that belong to no sequence are zeros.

        The call reads and writes only inside its tensors, whatever `cu_seqlens` are: starts below 0 count as 0, and starts
        above the number of tokens as this number. Results are undefined if starts fall.

        Raises:
            TypeError, ValueError: as `attention`; also for float32, for wrong `cu_seqlens`, and for `others`, such as
                FlashAttention's `max_seqlen_q`.
            NotImplementedError: the stage takes no packed sequences; or an input has a tangent; or an input requires gradients,
                and the stage has no gradients of packed sequences, or none for D or Dv = 256, or, in the backward, none under
                `torch.use_deterministic_algorithms`.
        """
        for other in others:
            message = f"attention_varlen() got an unexpected keyword argument {other!r}"
            raise TypeError((OF_SDPA | OF_VARLEN).get(other, message))
        if not takes_starts:
            raise NotImplementedError(
                f"{name} takes no packed sequences; the newest stage does, and the track `lengths` from its second stage on"
            )
        q, k, v = autocast(q, k, v)
        check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k)
        differentiable = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if differentiable:
            check_gradients(q, v)
        causal, _ = checked_causal(causal, 1, 1)  # a sequence may have fewer keys than queries
        return_lse = checked_flag("return_lse", return_lse)
        function = operator
        if _unwatched(q, k, v, cu_seqlens_q, cu_seqlens_k):
            function = short_cut if differentiable else run
        out, lse = function(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, checked_scale(scale, q.shape[-1]))
        return (out, lse) if return_lse else out

    attention_varlen.__module__, attention_varlen.__qualname__ = package, "attention_varlen"
    return attention_varlen
