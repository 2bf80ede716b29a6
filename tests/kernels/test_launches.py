"""Compiled kernels launch correctly from several threads, on several devices, and after a failed compilation.

A stand-in replaces the driver. Each test starts a new process, because pytest's process may interpret kernels.
"""

import re

import programs

import stages

PREPARE = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch, triton
import stages
from triton.compiler import compiler
from common.entry import entry
from common.measure.aot import StandInDriver

limits, device = {0: 227 * 1024, 1: 99 * 1024}, threading.local()
launched = []  # devices

class Driver(StandInDriver):
    def __init__(self):
        super().__init__(90, lambda metadata: None, lambda call, **_: call() or [1.0, 1.0, 1.0])
        self.get_current_device = lambda: getattr(device, "index", 0)
        self.utils.get_device_properties = lambda index: {"max_shared_mem": limits[index], "multiprocessor_count": 132}

    def launcher_cls(self, source, metadata):
        blocks = {name: kind for name, kind in source.signature.items() if str(kind).startswith("tensordesc")}
        order = [name for name in source.signature if name in blocks]

        def launch(grid_x, grid_y, grid_z, stream, function, packed, launch_metadata, enter, leave, *args):
            assert function is not None, "launched before its binary was loaded"
            given = [arg for arg in args if hasattr(arg, "block_shape")]
            for name, descriptor in zip(order, given, strict=True):
                assert str(list(descriptor.block_shape)) in blocks[name], (name, descriptor.block_shape, blocks[name])
            assert metadata.shared <= limits[self.get_current_device()], "tuned for another device"
            launched.append(self.get_current_device())

        return launch

triton.runtime.driver.set_active(Driver())

TUNER = stages.load("v4").forward.__globals__["_forward_kernel"]
TUNER.configs = [TUNER.configs[0], *TUNER.configs[5:7], TUNER.configs[-1]]  # with large tiles, with small tiles, for float32

def forward(name, head_dim=64, dtype=torch.float16, seq=256):
    q, k, v = (torch.empty(1, 2, seq, head_dim, dtype=dtype, device="meta") for _ in range(3))
    entry(stages.load(name).forward)(q, k, v, causal=True, scale=0.125)
"""


def run(program):
    """Run PREPARE and then `program` in a new process that compiles kernels."""
    done = programs.python("-c", PREPARE + program, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_failed_parallel_compilation_is_repeated():
    """`ast.parse` may fail if several threads compile. The kernel must then be compiled again."""
    run("""
compile_, failures = compiler.compile, []

def fails_at_first(*args, **options):
    if threading.current_thread() is not threading.main_thread() and not failures:
        failures.append(1)
        raise SystemError("AST constructor recursion depth mismatch")
    return compile_(*args, **options)

import triton.compiler
triton.compiler.compile = fails_at_first
forward("v4")
forward("v4")
assert failures and launched
""")


def test_devices_and_threads_do_not_mix_their_launches():
    """A tile that fits in 227 KiB of shared memory may not fit in 99 KiB, so each device is tuned for.

    A binary is loaded once, whichever threads launch. Then threads launch different problems with one autotuner. Each launch
    gets descriptors with its own block shapes.
    """
    run("""
load, loading, loaded = triton.runtime.driver.active.utils.load_binary, threading.Event(), []

def slow(*args):
    loaded.append(args)
    loading.set()
    time.sleep(0.3)
    return load(*args)

triton.runtime.driver.active.utils.load_binary = slow
thread = threading.Thread(target=forward, args=("v3",))
thread.start()
loading.wait()
forward("v3")
thread.join()
assert len(launched) == 2 and len(loaded) == 1
triton.runtime.driver.active.utils.load_binary = load

for index in (1, 0, 1):
    device.index = index
    forward("v4", head_dim=128, seq=1024)
assert set(launched) == {0, 1}

device.index = 0
problems = [(32, torch.float16), (64, torch.bfloat16), (64, torch.float32)]
for problem in problems:  # tuned and compiled
    forward("v4", *problem)
sys.setswitchinterval(1e-6)
before = len(launched)
with ThreadPoolExecutor() as pool:
    list(pool.map(lambda problem: [forward("v4", *problem) for _ in range(60)], problems))
assert len(launched) - before == 3 * 60
""")


KERNEL = re.compile(r"^@(?:triton|gluon)\.jit(.*)\ndef \w+_kernel\(([^)]*)\):", re.MULTILINE)


def test_no_length_of_1_becomes_a_constant():
    """Triton makes an argument of 1 a constant, unless it has a type or is in `do_not_specialize`.

    With a length as a constant, ptxas may compile v4's backward wrongly.
    """
    checked = set()
    for name in stages.names():
        for file in stages.directory(name).glob("*.py"):
            for options, parameters in KERNEL.findall(file.read_text()):
                for length, has_type in re.findall(r"\b(seq_q|seq_k|diagonal)\b(:)?", parameters):
                    assert has_type or f'"{length}"' in options, (file, length)
                    checked.add(name)
    assert checked == set(stages.names()) - {"v0_naive", stages.newest()}  # these have no kernels
