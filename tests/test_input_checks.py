"""The operator refuses wrong input before any kernel runs. The message names the argument and its fault."""

import math

import numpy
import pytest
import torch
from cases import make_inputs
from torch.utils._python_dispatch import TorchDispatchMode

import stages
from common.runtime import DEVICE

ELSEWHERE = "cpu" if DEVICE == "cuda" else "meta"  # a device on which no kernel runs
STAGE = stages.load("v3")  # all stages have one operator
GOOD = dict(zip("qkv", make_inputs(5, 7, 16), strict=False))


def each(change):
    """Return q, k and v, each changed by `change`."""
    return {name: change(tensor) for name, tensor in GOOD.items()}


def nested(layout):
    """Return a nested tensor with two sequences of different lengths."""
    return torch.nested.nested_tensor([torch.zeros(length, 16) for length in (3, 5)], layout=layout)


BAD = {
    "q is no tensor": ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
    "q is sparse": ({"q": GOOD["q"].to_sparse()}, TypeError, "q must be a dense tensor.* got torch.sparse_coo"),
    "k is sparse": ({"k": torch.eye(4).to_sparse_csr()}, TypeError, "k must be a dense tensor.* got torch.sparse_csr"),
    "k is nested": ({"k": nested(torch.strided)}, TypeError, "k must be a dense tensor.* got a nested tensor"),
    "v is nested": ({"v": nested(torch.jagged)}, TypeError, "v must be a dense tensor.* got a nested tensor"),
    "k is None": ({"k": None}, TypeError, "k must be a torch.Tensor, got NoneType"),
    "q without a batch": ({"q": GOOD["q"][0]}, ValueError, "q must have 4 dimensions .* got 3"),
    "k with a fifth dimension": ({"k": GOOD["k"][None]}, ValueError, "k must have 4 dimensions .* got 5"),
    "v without a batch": ({"v": GOOD["v"][0]}, ValueError, "v must have 4 dimensions .* got 3"),
    "float64": (each(torch.Tensor.double), TypeError, "q must be float16, bfloat16 or float32, got torch.float64"),
    "integers": (each(torch.Tensor.int), TypeError, "q must be float16, bfloat16 or float32, got torch.int32"),
    "k of another dtype": ({"k": GOOD["k"].float()}, TypeError, "k must have the dtype of q, torch.float16, got torch.float32"),
    "v of another dtype": ({"v": GOOD["v"].bfloat16()}, TypeError, "v must have the dtype of q, .* got torch.bfloat16"),
    "k on another device": ({"k": GOOD["k"].to(ELSEWHERE)}, ValueError, f"k must be on the device of q.* got {ELSEWHERE}"),
    "v on another device": ({"v": GOOD["v"].to(ELSEWHERE)}, ValueError, f"v must be on the device of q.* got {ELSEWHERE}"),
    "no kernel runs there": (each(lambda t: t.to(ELSEWHERE)), ValueError, f"q must be on a {DEVICE} device.* got {ELSEWHERE}"),
    "no queries": ({"q": GOOD["q"][:, :, :0]}, ValueError, r"q must not have a dimension of 0, got \(2, 3, 0, 16\)"),
    "no keys": ({"k": GOOD["k"][:, :, :0], "v": GOOD["v"][:, :, :0]}, ValueError, "k must not have a dimension of 0"),
    "no batch": (each(lambda t: t[:0]), ValueError, "q must not have a dimension of 0"),
    "head dimension of 8": (each(lambda t: t[..., :8]), ValueError, r"head_dim, .*, must be one of \(16, 32, .*\), got 8"),
    "head dimension of 48": (each(lambda t: t.repeat(1, 1, 1, 3)), ValueError, "head_dim, .*, must be one of .* got 48"),
    "k of another batch": ({"k": GOOD["k"][:1]}, ValueError, r"k must be .* k \(1, 3, 7, 16\)"),
    "fewer heads in k": ({"k": GOOD["k"][:, :1]}, ValueError, r"v must have k's .* \(2, 1, 7\), got \(2, 3, 7\)"),
    "heads that cannot be shared out": (
        {"k": GOOD["k"][:, :2], "v": GOOD["v"][:, :2]},
        ValueError,
        "a multiple .* got 3 and 2",
    ),
    "more heads in k": (
        {"k": GOOD["k"].repeat(1, 2, 1, 1), "v": GOOD["v"].repeat(1, 2, 1, 1)},
        ValueError,
        "a multiple .* got 3 and 6",
    ),
    "k of another head dimension": ({"k": GOOD["k"].repeat(1, 1, 1, 2)}, ValueError, r"k must be .* k \(2, 3, 7, 32\)"),
    "v shorter than k": ({"v": GOOD["v"][:, :, 1:]}, ValueError, r"v must have k's .* \(2, 3, 7\), got \(2, 3, 6\)"),
    "v of another batch": ({"v": GOOD["v"][:1]}, ValueError, r"v must have k's .* \(2, 3, 7\), got \(1, 3, 7\)"),
    "v of a strange head dimension": ({"v": GOOD["v"].repeat(1, 1, 1, 3)}, ValueError, "the last dimension of v .* got 48"),
    "causal is a number": ({"causal": 1}, TypeError, "causal must be a bool or 'bottom-right', got int"),
    "causal is None": ({"causal": None}, TypeError, "causal must be a bool or 'bottom-right', got NoneType"),
    "causal is another word": ({"causal": "lower-right"}, ValueError, "causal must be a bool or .*, got 'lower-right'"),
    "a query that sees no key": (
        {"causal": "bottom-right", "q": GOOD["q"].repeat(1, 1, 9, 1)},
        ValueError,
        "at least as many keys as queries, got .* queries and 7 keys",
    ),
    "scale is text": ({"scale": "0.1"}, TypeError, "scale must be a number or None, got str"),
    "scale is numpy's bool": ({"scale": numpy.True_}, TypeError, "scale must be a number or None, got bool"),
    "scale is a bool": ({"scale": True}, TypeError, "scale must be a number or None, got bool"),
    "scale is a tensor": ({"scale": torch.ones(())}, TypeError, "scale must be a number or None, got Tensor"),
    "scale is NaN": ({"scale": math.nan}, ValueError, "scale must be 0 or have an absolute value from 1e-30 to 1e.06, got nan"),
    "scale is infinite": ({"scale": -math.inf}, ValueError, "scale must be 0 or have an absolute value .* got -inf"),
    "scale is no float": ({"scale": 10**400}, ValueError, "scale must be 0 or have an absolute value .* got 1000"),
    "scale is too large": ({"scale": 1.1e6}, ValueError, "scale must be 0 or have an absolute value .* got 1100000.0"),
    "scale is too small": ({"scale": -0.9e-30}, ValueError, "scale must be 0 or have an absolute value .* got -9e-31"),
    "return_lse is text": ({"return_lse": "no"}, TypeError, "return_lse must be a bool, got str"),
    "return_lse is None": ({"return_lse": None}, TypeError, "return_lse must be a bool, got NoneType"),
}


class Calls(TorchDispatchMode):
    """Count the calls of the stages' operators, which run all kernels."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "kernel_evolution"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("changes, error, message", BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_before_a_kernel_runs(changes, error, message):
    with Calls() as calls, pytest.raises(error, match=message):
        STAGE.attention(**GOOD | changes)
    assert calls.count == 0


def test_good_input_runs_a_kernel():
    with Calls() as calls:
        STAGE.attention(**GOOD)
    assert calls.count == 1


def test_options_go_by_name():
    """SDPA's fourth positional argument is attn_mask. Here it would silently count as `causal`."""
    with pytest.raises(TypeError, match="positional"):
        STAGE.attention(*GOOD.values(), True)


@pytest.mark.parametrize(("name", "value", "said"), [
    ("is_causal", True, "is_causal: this function's name for it is causal"),
    ("enable_gqa", True, "enable_gqa: k and v may always have fewer heads"),
    ("attn_mask", None, "attn_mask: not supported"),
    ("dropout_p", 0.1, "dropout_p: not supported"),
    ("scael", 1.0, "unexpected keyword argument 'scael'"),
])  # fmt: skip
def test_sdpa_s_names_get_a_helpful_error(name, value, said):
    with pytest.raises(TypeError, match=said):
        STAGE.attention(**GOOD, **{name: value})


def test_flags_may_be_numpys():
    causal, full = (STAGE.attention(**GOOD, causal=flag) for flag in (True, False))
    assert torch.equal(STAGE.attention(**GOOD, causal=numpy.True_, return_lse=numpy.False_), causal)
    assert torch.equal(STAGE.attention(**GOOD, causal=numpy.False_, return_lse=numpy.True_)[0], full)


@pytest.mark.parametrize("scale", [1, 0, -2.5, numpy.float32(0.25), numpy.int64(3)])
def test_scale_may_be_any_number(scale):
    assert torch.equal(STAGE.attention(**GOOD, scale=scale), STAGE.attention(**GOOD, scale=float(scale)))


def test_scale_of_none_is_sdpa_s():
    assert torch.equal(STAGE.attention(**GOOD), STAGE.attention(**GOOD, scale=16**-0.5))
