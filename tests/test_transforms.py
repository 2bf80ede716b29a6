"""Every stage works under torch.func with reverse mode and vmap. It refuses forward mode and second derivatives."""

import pickle

import pytest
import torch
from cases import make_inputs
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import stages
from common import entry

SCALE = 0.2


@pytest.fixture
def problem(stage):
    """Return a causal `attend(q, k, v)`, and small q, k and v for it."""
    tensors = make_inputs(2, 3, 16, torch.float32, heads=2, kv_heads=1)[:3]
    return (lambda q, k, v: stage.attention(q, k, v, causal=True, scale=SCALE)), tensors


def attend_all(attend):
    """Return `attend` for one batch element, mapped over the batch by vmap."""
    return vmap(lambda q, k, v: attend(q[None], k[None], v[None])[0])


def expected_gradients(attend, tensors, grad_out):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(attend(*leaves), leaves, grad_out)


def test_vjp_and_grad_agree_with_autograd(problem):
    attend, tensors = problem
    grad_out = torch.randn_like(tensors[0])
    expected = expected_gradients(attend, tensors, grad_out)
    out, pull_back = vjp(attend, *tensors)
    torch.testing.assert_close(out, attend(*tensors))
    torch.testing.assert_close(pull_back(grad_out), expected)
    by_grad = grad(lambda *leaves: (attend(*leaves) * grad_out).sum(), argnums=(0, 1, 2))(*tensors)
    torch.testing.assert_close(by_grad, expected)


def test_the_log_sum_exp_is_differentiable_under_grad(stage, problem):
    _, tensors = problem

    def both(*leaves):
        out, lse = stage.attention(*leaves, return_lse=True)
        return out.sum() + lse.square().sum()

    expected = expected_gradients(both, tensors, torch.ones((), device=tensors[0].device))
    torch.testing.assert_close(grad(both, argnums=(0, 1, 2))(*tensors), expected)


def test_jacrev_is_the_jacobian(problem):
    attend, tensors = problem

    def few(*leaves):
        return attend(*leaves)[0, 1, :, 3]

    expected = torch.autograd.functional.jacobian(few, tensors)
    torch.testing.assert_close(jacrev(few, argnums=(0, 1, 2))(*tensors), expected)


def test_autograd_takes_a_batch_of_gradients(stage, problem):
    """`is_grads_batched` uses an older vmap than torch.func. Its tensors look like plain tensors."""
    leaves = [tensor.half().requires_grad_() for tensor in problem[1]]
    results = stage.attention(*leaves, causal=True, scale=SCALE, return_lse=True)
    batches = [torch.randn(2, *result.shape, dtype=result.dtype, device=result.device) for result in results]
    got = torch.autograd.grad(results, leaves, batches, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(results, leaves, one, retain_graph=True) for one in zip(*batches, strict=True)]
    for batch, *ones in zip(got, *each, strict=True):
        torch.testing.assert_close(batch, torch.stack(ones))


def test_vmap_maps_any_dimension(problem):
    attend, (q, k, v) = problem
    torch.testing.assert_close(attend_all(attend)(q, k, v), attend(q, k, v))
    twice = vmap(attend_all(attend), in_dims=(1, None, 3), out_dims=2)(  # over dimension 1 of q and 3 of v; k is shared
        torch.stack([q, 2 * q], 1), k, torch.stack([v, -v], 3)
    )
    torch.testing.assert_close(twice, torch.stack([attend(q, k, v), attend(2 * q, k, -v)], 2))


def test_vmap_of_grad_gives_the_gradients_of_each_element(problem):
    attend, tensors = problem
    each = vmap(grad(lambda *one: attend(*(tensor[None] for tensor in one)).sum(), argnums=(0, 1, 2)))
    expected = expected_gradients(attend, tensors, torch.ones_like(tensors[0]))
    torch.testing.assert_close(each(*tensors), expected)


@pytest.mark.parametrize(
    "transform", [vmap, lambda f: grad(lambda *one: f(*one).sum()), jacrev], ids=["vmap", "grad", "jacrev"]
)
def test_transforms_can_be_compiled(transform):
    """All stages share this code, so the test runs one stage."""
    attention = stages.load(stages.names()[0]).attention
    tensors = make_inputs(2, 3, 16, torch.float32)[:3]

    def mapped(q, k, v):
        return attention(q[None], k[None], v[None], causal=True)[0] if q.dim() == 3 else attention(q, k, v, causal=True)

    compiled = torch.compile(transform(mapped), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), transform(mapped)(*tensors))
    torch._dynamo.reset()


def as_dual(attend, q, tangent, requires_grad=False):
    with forward_ad.dual_level():
        return attend(forward_ad.make_dual(q, tangent).requires_grad_(requires_grad))


FORWARD_MODE = {
    "jvp": lambda attend, q, t: jvp(attend, (q,), (t,)),
    "jacfwd": lambda attend, q, t: jacfwd(attend)(q),
    "hessian": lambda attend, q, t: hessian(lambda q: attend(q).sum())(q),
    "jvp of grad": lambda attend, q, t: jvp(grad(lambda q: attend(q).sum()), (q,), (t,)),
    "jvp of vmap": lambda attend, q, t: jvp(vmap(attend), (q[None],), (t[None],)),
    "vmap of jvp": lambda attend, q, t: vmap(lambda q, t: jvp(attend, (q,), (t,)))(q[None], t[None]),
    "grad of jvp": lambda attend, q, t: grad(lambda q: jvp(attend, (q,), (t,))[1].sum())(q),
    "dual tensor": as_dual,
    "dual tensor that requires grad": lambda attend, q, t: as_dual(attend, q, t, requires_grad=True),
}


@pytest.mark.parametrize("differentiate", FORWARD_MODE.values(), ids=FORWARD_MODE.keys())
@pytest.mark.parametrize("through", ["attention", "operator"])
def test_forward_mode_is_refused_before_a_kernel_runs(stage, problem, through, differentiate, monkeypatch):
    """Without this error, PyTorch would assume zero tangents."""
    attend, (q, k, v) = problem
    if through == "operator":
        name = stage.__name__.removeprefix("stages.")
        op = getattr(torch.ops.kernel_evolution, f"{name}_forward")
        attend = lambda q, k, v: op(q, k, v, True, SCALE, 0)[0]  # noqa: E731
    monkeypatch.setattr(entry, "plainly", lambda *_, **__: pytest.fail("a kernel would have run"))
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        differentiate(lambda q: attend(q, k, v), q, torch.ones_like(q))


@pytest.mark.parametrize("argument", range(3))
def test_a_tangent_of_any_argument_is_refused(stage, problem, argument):
    attend, tensors = problem
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        attend(*(forward_ad.make_dual(one, one) if i == argument else one for i, one in enumerate(tensors)))


def test_a_tangent_of_the_output_s_gradient_is_refused(problem):
    attend, (q, k, v) = problem
    _, pull_back = vjp(lambda q: attend(q, k, v), q)
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        jvp(pull_back, (q,), (q,))


def test_forward_mode_around_a_call_without_tangents(problem):
    """A tensor that does not depend on the differentiated input has a zero tangent, which is right."""
    attend, (q, k, v) = problem
    out, tangent = jvp(lambda x: x * attend(q, k, v), (q,), (q,))
    torch.testing.assert_close([out, tangent], [q * attend(q, k, v)] * 2)
    with forward_ad.dual_level():
        torch.testing.assert_close(attend(q, k, v), out / q)


SECOND_DERIVATIVES = {
    "grad of grad": lambda loss, q: grad(lambda q: grad(loss)(q).sum())(q),
    "jacrev of jacrev": lambda loss, q: jacrev(jacrev(loss))(q),
    "vjp of grad": lambda loss, q: vjp(grad(loss), q)[1](q),
    "autograd": lambda loss, q: torch.autograd.functional.hessian(loss, q),
}


@pytest.mark.parametrize("differentiate", SECOND_DERIVATIVES.values(), ids=SECOND_DERIVATIVES.keys())
def test_second_derivatives_are_refused(problem, differentiate):
    attend, (q, k, v) = problem
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        differentiate(lambda q: attend(q, k, v).sum(), q)


def test_a_tensor_that_a_transform_has_left_behind(problem):
    attend, (q, k, v) = problem
    left = []
    grad(lambda q: (left.append(q), q.sum())[1])(q)
    torch.testing.assert_close(attend(left[0], k, v), attend(q, k, v))


def test_attention_can_be_pickled(stage):
    assert pickle.loads(pickle.dumps(stage.attention)) is stage.attention
