"""Triton's front end accepts every Gluon kernel. The interpreter accepts more programs than the compiler."""

import programs
import pytest
from cases import INTERPRETED, needs_hopper, once

import stages

NAMES = [name for name in stages.names() if needs_hopper(name)]
PROGRAM = """
import torch, triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

import stages
from common.measure import aot

accepted, seen = [], set()

def accept(self, key, signature, device, constexprs, options, attrs, warmup):
    accepted.append(self.fn.__name__)
    kind = self.cache_key, str(signature), str(constexprs), str(attrs)
    if kind in seen:  # another stage has the same kernel
        return
    seen.add(kind)
    # Run only the compiler's first step, `make_ir`, because the later steps take much longer.
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = self.ASTSource(self, signature, constexprs, attrs)
    source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)

target = GPUTarget("cuda", 90, 32)
backend = make_backend(target)
JITFunction._do_compile = accept
triton.runtime.driver.set_active(aot.StandInDriver(90, None, None))
q, k, v, out, grad_out = (torch.empty(1, 4, 512, 128, dtype=torch.float16, device="meta") for _ in range(5))
lse = torch.empty(1, 4, 512, device="meta")
for name in NAMES:
    stage = stages.load(name)
    accepted.clear()
    try:
        if PASS == "forward":
            stage.forward(q, k, v, causal=True, scale=0.125)
        else:
            stage.backward(grad_out, q, k, v, out, lse, causal=True, scale=0.125)
    except Exception as error:
        error.add_note(f"in {name}")
        raise
    assert f"_{PASS}_kernel" in accepted, (name, accepted)
"""


@pytest.mark.long
@pytest.mark.skipif(not INTERPRETED, reason="on a GPU, every test compiles the kernels")
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_the_front_end_accepts_a_pass(pass_):
    """The interpreter does not find some type errors of a pass, such as a literal 0 for a loop variable.

    The default run of tests/measure/test_aot.py compiles the newest stage.
    """
    program = f"NAMES, PASS = {once(NAMES, pass_)!r}, {pass_!r}\n{PROGRAM}"
    done = programs.python("-c", program, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
