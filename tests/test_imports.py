"""Without TRITON_INTERPRET, importing the stages replaces nothing of PyTorch's or Triton's, and a call needs a GPU."""

import programs
import pytest
import torch

IMPORT = """
import os, sys, types
import torch, torch.library, triton, triton.language as tl
import triton.compiler, triton.runtime.interpreter, triton.runtime.autotuner, triton.experimental.gluon.language
import triton.experimental.gluon.language.nvidia.hopper, triton.experimental.gluon.nvidia.hopper, triton.tools.tensor_descriptor
from triton.backends.compiler import GPUTarget

@triton.jit
def double_kernel(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(out_ptr + tl.arange(0, N), x + tl.sum(x, 0))

def compiled():
    source = triton.compiler.ASTSource(double_kernel, {"x_ptr": "*fp32", "out_ptr": "*fp32", "N": "constexpr"}, {"N": 64})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

def things():
    \"\"\"Return the functions and classes of all modules of PyTorch and Triton, and the attributes of Triton's classes.\"\"\"
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("torch", "triton") and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                if callable(value):
                    found[name, key] = value
                if isinstance(value, type) and name.startswith("triton"):
                    for attribute, one in list(vars(value).items()):
                        if callable(one) or isinstance(one, property):
                            found[name, key, attribute] = one
    return found

def operators():
    return {
        key: {name for name in torch._C._dispatch_get_registrations_for_dispatch_key(key) if "kernel_evolution" not in name}
        for key in ("CPU", "CUDA", "Autograd", "CompositeExplicitAutograd", "FuncTorchBatched", "Meta")
    }

def refuse(*args, **kwargs):
    raise AssertionError("an import starts CUDA")

triton.knobs.compilation.always_compile = True  # a cached kernel names another file
ptx = compiled()
before = dict(os.environ), things(), operators(), set(sys.modules)
with_cuda = torch.cuda._lazy_init, torch.cuda.get_device_properties, torch.cuda.is_available
torch.cuda._lazy_init = torch.cuda.get_device_properties = torch.cuda.is_available = refuse

import stages
for name in stages.names():
    stages.load(name)

torch.cuda._lazy_init, torch.cuda.get_device_properties, torch.cuda.is_available = with_cuda
"""

CHECK = """
def changed():
    after = things()
    names = [key for key, value in before[1].items() if after.get(key) is not value]
    loaded = [name for name in set(sys.modules) - before[3] if "interpreter" in name]
    return dict(os.environ) == before[0], names, operators() == before[2], loaded

already = changed()
assert already == (True, [], True, []), already
assert not torch.cuda.is_initialized() and triton.runtime.driver._active is None
assert compiled() == ptx

# The check sees each of these changes.
for change in (
    "os.environ['A'] = '1'", "triton.compiler.CompiledKernel.run = 1", "torch.compile = print", "tl.sum = tl.max",
    "torch.library.impl('aten::bmm.dtype', 'CPU')(print)", "import common.interpreter.gluon",
):
    exec(change)
    assert (now := changed()) != already, change
    already = now
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A function that runs a program in a new process, without TRITON_INTERPRET."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def run(program):
        file = tmp_path / "program.py"  # Triton compiles only what is in a file
        file.write_text(program)
        return programs.python(file)

    return run


def test_an_import_changes_nothing(run):
    """Afterwards, deliberate changes show that the check sees them."""
    done = run(IMPORT + CHECK)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_call_without_a_gpu_says_what_is_missing_and_other_errors_keep_their_message(run):
    done = run("""
import stages, torch
from common.entry import entry

q = torch.randn(1, 1, 20, 16)

def forward(q, **options):
    raise RuntimeError("not enough memory")

def error(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

for name in ("v1", "v3", "v5", stages.line()[12], stages.newest()):
    said = error(lambda: stages.load(name).attention(q, q, q))
    assert said.startswith("Unavailable: kernels need a GPU, and none is here; TRITON_INTERPRET=1"), (name, said)
assert error(lambda: entry(forward)(q, causal=False, scale=1.0)) == "RuntimeError: not enough memory"
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_stage_without_kernels_runs_on_the_cpu_with_and_without_autocast(run):
    done = run("""
import stages, torch
attend, tensors = stages.load("v0").attention, torch.randn(3, 1, 2, 20, 16)
with torch.autocast("cpu", torch.bfloat16):
    out, lse = attend(*tensors, return_lse=True)
right = attend(*tensors.to(torch.bfloat16), return_lse=True)
assert out.dtype == torch.bfloat16 and torch.equal(out, right[0]) and torch.equal(lse, right[1])
assert attend(*tensors).dtype == torch.float32
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, tensors on the CPU are refused")
def test_the_variable_may_be_set_after_triton_is_imported(run):
    done = run("""
import os, triton.language
os.environ["TRITON_INTERPRET"] = "1"
import stages, torch
q = torch.randn(1, 1, 20, 16)
print(stages.load("v4").attention(q, q, q).shape)
""")
    assert done.stdout == "torch.Size([1, 1, 20, 16])\n", done.stderr


def test_threads_launch_first_at_once(run):
    """Each thread gets the repaired interpreter, however many launch before any has."""
    done = run("""
import os; os.environ["TRITON_INTERPRET"] = "1"
import sys, threading
import stages, torch
attend, tensors = stages.load("v3").attention, torch.randn(3, 1, 1, 20, 16).to(torch.bfloat16)
sys.setswitchinterval(1e-6)
found = []
threads = [threading.Thread(target=lambda: found.append(attend(*tensors))) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
right = torch.nn.functional.scaled_dot_product_attention(*tensors.float())
assert len(found) == 4 and all((out - right).abs().max() < 0.02 for out in found)
""")
    assert done.returncode == 0, done.stderr
