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
assert dict(os.environ) == before[0]
after = things()
assert not [key for key, value in before[1].items() if after.get(key) is not value]
assert operators() == before[2]
assert not [name for name in set(sys.modules) - before[3] if "interpreter" in name]
assert not torch.cuda.is_initialized() and triton.runtime.driver._active is None
assert compiled() == ptx
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
    done = run(IMPORT + CHECK)
    assert done.returncode == 0, done.stderr


CHANGES = [
    "triton.compiler.CompiledKernel.run = 1", "torch.library.impl('aten::bmm.dtype', 'CPU')(print)",
    *(pytest.param(other, marks=pytest.mark.long)
      for other in ["os.environ['A'] = '1'", "torch.compile = print", "import common.interpreter.gluon", "tl.sum = tl.max"]),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_the_check_sees_a_change(run, change):
    assert "AssertionError" in run(f"{IMPORT}\n{change}\n{CHECK}").stderr


CALL = """
import stages, torch
q = torch.randn(1, 1, 20, 16)
print(stages.load({name!r}).attention(q, q, q).shape)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("name", ["v1", "v3", "v5", "v11", "v53"])
def test_a_call_without_a_gpu_says_what_is_missing(run, name):
    said = run(CALL.format(name=name)).stderr
    assert "Unavailable: kernels need a GPU, and none is here; TRITON_INTERPRET=1" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_stage_without_kernels_runs_on_the_cpu(run):
    done = run(CALL.format(name="v0"))
    assert done.stdout == "torch.Size([1, 1, 20, 16])\n", done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, tensors on the CPU are refused")
@pytest.mark.parametrize("imports", ["", "import triton.language"])
def test_the_variable_may_be_set_after_triton_is_imported(run, imports):
    done = run(f"{imports}\nimport os; os.environ['TRITON_INTERPRET'] = '1'\n" + CALL.format(name="v4"))
    assert done.stdout == "torch.Size([1, 1, 20, 16])\n", done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_autocast_of_the_cpu_counts_without_a_gpu(run):
    done = run("""
import stages, torch
attend, tensors = stages.load("v0").attention, torch.randn(3, 1, 2, 20, 16)
with torch.autocast("cpu", torch.bfloat16):
    out, lse = attend(*tensors, return_lse=True)
right = attend(*tensors.to(torch.bfloat16), return_lse=True)
assert out.dtype == torch.bfloat16 and torch.equal(out, right[0]) and torch.equal(lse, right[1])
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_another_error_keeps_its_message(run):
    said = run("""
import torch
from common.entry import entry

def forward(q, **options):
    raise RuntimeError("not enough memory")

entry(forward)(torch.randn(1, 1, 4, 16), causal=False, scale=1.0)
""").stderr
    assert "RuntimeError: not enough memory" in said and "Unavailable" not in said


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
