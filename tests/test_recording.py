"""A replayed call (`common.recording`) makes its function's launches. A recording keeps no tensor.

Stand-ins replace the driver and the compiler. Each test starts a new process, because pytest's process may interpret kernels.
"""

import cases
import programs
import pytest
from cases import taking_lengths, taking_pages

import stages

REPLAYED = [name for name in stages.names() if name not in stages.line()[:2]]  # v1 reuses the addresses that it frees

PREPARE = """
import gc, random, sys, threading, weakref
from types import SimpleNamespace
import torch, triton
import triton.compiler
from triton.compiler import CompiledKernel
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction
import stages
from common import recording
from common.entry import entry
from common.layout import addressable
from common.kernels.tuning import tuners
from common.measure.aot import StandInDriver, first_that_survives

device = threading.local()
launches = []  # of the last call

class Binary(CompiledKernel):
    def __init__(self, src, target, options):
        self.key = src.hash(), str(options), getattr(device, "index", 0)  # equal for two compilations of one source
        self.src, self.module, self.function, self.packed_metadata, self._run = src, object(), object(), object(), self.launch
        self.name, self.metadata = src.fn.__name__, SimpleNamespace(shared=0, global_scratch_size=0)

    def launch(self, x, y, z, stream, function, packed, metadata, enter_hook, exit_hook, *args):
        assert (function, packed) == (self.function, self.packed_metadata)
        launches.append(SimpleNamespace(
            binary=self, grid=(x, y, z), stream=stream, args=args, hooks=(enter_hook, exit_hook), metadata=metadata
        ))

class Driver(StandInDriver):
    def __init__(self):
        super().__init__(90, lambda metadata: None, lambda call, **_: [1.0, 1.0, 1.0])
        self.get_current_device = lambda: getattr(device, "index", 0)
        self.get_current_stream = lambda index: (index, threading.get_ident())

triton.runtime.driver.set_active(Driver())
triton.compiler.compile = Binary
Autotuner.prune_configs = first_that_survives
stages.load(stages.newest())

def address(value):
    return value.data_ptr() if isinstance(value, torch.Tensor) else value

def seen():
    \"\"\"The launches of the last call. Addresses become numbers in order of first use: PyTorch's CPU allocator aligns to
    64 bytes.\"\"\"
    numbers = {}

    def place(at):
        return at and (numbers.setdefault(at // 64, len(numbers)), at % 64)

    for launch in launches:
        shown = []
        for kind, arg in zip(launch.binary.src.signature.values(), launch.args, strict=True):
            if str(kind).startswith("*"):
                shown.append(place(address(arg)))
            elif hasattr(arg, "block_shape"):
                shown.append((place(arg.base.data_ptr()), {**vars(arg), "base": type(arg)}))
            else:
                shown.append((type(arg), arg))
        yield launch.binary.key, launch.grid, launch.stream, shown

def launched(function, *tensors, **options):
    launches.clear()
    results = function(*tensors, **options)
    assert launches
    return list(seen()), [(result.shape, result.stride(), result.dtype) for result in results]

def repeated():
    return not any(isinstance(arg, torch.Tensor) for launch in launches for arg in launch.args)

def tensor(*shape, dtype=torch.float16, layout="bhsd", skip=0):
    order = ["bhsd".index(letter) for letter in layout]
    memory = torch.zeros(skip + torch.Size(shape).numel(), dtype=dtype)[skip:]
    return memory.view([shape[at] for at in order]).permute([order.index(at) for at in range(4)])

def problem(batch=1, heads=2, kv_heads=2, seq_q=128, seq_k=128, head_dim=32, value_dim=32, **how):
    q, k, v = (
        tensor(batch, heads, seq_q, head_dim, **how), tensor(batch, kv_heads, seq_k, head_dim, **how),
        tensor(batch, kv_heads, seq_k, value_dim, **how),
    )
    return q, k, v

def for_backward(q, k, v):
    out = torch.zeros_like(q[..., :1].expand(*q.shape[:3], v.shape[3]))
    return torch.zeros_like(out), q, k, v, out, torch.zeros(q.shape[:3])

OPTIONS = {"causal": False, "scale": 0.5}
"""


def run(program, *arguments):
    """Run PREPARE and then `program` in a new process that compiles kernels. `arguments` become its sys.argv[1:]."""
    done = programs.python("-c", program, *arguments, prepare=PREPARE, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr


def of_tested(names):
    """Return the stages of a list with which most tests run."""
    return [name for name in names if name in cases.tested()]


@pytest.mark.parametrize("stage", of_tested(REPLAYED))
def test_a_call_launches_what_its_function_does(stage):
    """A replayed call launches its function's binaries with the same arguments, in the same order and on the same stream.

    Each call differs from `USUAL` in at most two entries.
    """
    run(
        """
stage = stages.load(sys.argv[1])
draw = random.Random(0)
USUAL = {"causal": True, "scale": 0.5, "diagonal": 0, "index": 0, "deterministic": False, "same": False}
OTHERS = {
    "batch": [2], "heads": [4], "kv_heads": [1], "seq_q": [1, 100, 700], "seq_k": [1, 144, 700], "head_dim": [16, 256],
    "value_dim": [64], "layout": ["bshd", "bsdh"], "skip": [4, 8], "dtype": [torch.bfloat16, torch.float32],
    "causal": [False], "scale": [-0.5, 0.0, -0.0, 1.0, 1], "diagonal": [16, 5], "index": [1], "deterministic": [True],
}
calls = [{}, *({name: value} for name, values in OTHERS.items() for value in values), {"seq_k": 144, "diagonal": 16}]
calls = [call for call in calls for _ in range(3)]
draw.shuffle(calls)
calls = [{"same": True}] * 3 + calls  # the usual kind of call is first recorded with q = v = k
repeats = {"forward": 0, "backward": 0}
for call in calls:
    how = USUAL | call
    options = {option: how.pop(option) for option in ("causal", "scale", "diagonal")}
    device.index, deterministic, same = (how.pop(setting) for setting in ("index", "deterministic", "same"))
    torch.use_deterministic_algorithms(deterministic)
    q, k, v = problem(**how)
    if same:
        q = v = k
    for function, tensors in ((stage.forward, (q, k, v)), (stage.backward, for_backward(q, k, v))):
        got = launched(entry(function), *tensors, **options)
        repeats[function.__name__] += repeated()
        expected = launched(function, *map(addressable, tensors), **options)
        assert got == expected, (call, function.__name__, got, expected)
assert min(repeats.values()) > len(calls) / 6, repeats  # one of three equal calls; fewer if a stage calls another stage
""",
        stage,
    )


def test_the_driver_gets_the_arguments_that_triton_gives_it():
    """Each descriptor has the address of the call's own tensor, whether the call is replayed or its launches are in tables.

    A replay encodes an address's descriptor only once.
    """
    run("""
from triton.backends.nvidia import driver as nvidia
BASE = getattr(nvidia, "_BASE_ARGS_FORMAT_LEN", None)  # Triton 3.6: number of arguments before the kernel's own
sent, encoded = [], []

class Launcher:
    def __init__(self, binary):
        signature = binary.src.signature
        tiles = [
            {"swizzle": number, "elem_size": 2, "elem_type": 6, "block_size": [number], "fp4_padded": False}
            for number, kind in enumerate(signature.values()) if str(kind).startswith("tensordesc")
        ]
        self.launch = nvidia.wrap_handle_tensordesc(self.send, signature, tiles)

    def send(self, *args):
        sent.append(args[BASE:] if BASE else args[-1])

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter_hook, exit_hook, *args):
        self.launch(*[None] * BASE, *args) if BASE else self.launch(None, args)

class Launched(Binary):
    def __init__(self, src, target, options):
        super().__init__(src, target, options)
        self._run = Launcher(self)

through_triton, triton_run = [], JITFunction.run
JITFunction.run = lambda kernel, *args, **options: through_triton.append(kernel) or triton_run(kernel, *args, **options)
triton.compiler.compile = Launched
utils = triton.runtime.driver.active.utils
utils.fill_tma_descriptor = utils.fill_tma_descriptor_tiled = lambda *args: encoded.append(args) or args

def sent_by(function, tensors):
    sent.clear()
    results = function(*tensors, **OPTIONS)
    numbers = {each.data_ptr(): number for number, each in enumerate(tensors)}

    def shown(value):
        if isinstance(value, (list, tuple)):
            return [shown(each) for each in value]
        value = address(value)
        is_address = isinstance(value, int) and value > 2**24  # no size or stride here is as large
        return ("address", numbers.setdefault(value, len(numbers))) if is_address else value

    return [shown(args) for args in sent]

for name in (stages.newest(), stages.line()[-2], "v5"):
    stage = stages.load(name)
    problems = [problem() for _ in range(3)] * 2
    for function, calls in ((stage.forward, problems), (stage.backward, [for_backward(*each) for each in problems])):
        for tensors in calls:
            got, before = sent_by(entry(function), tensors), len(encoded)
            expected = sent_by(function, tensors)
            assert got and got == expected, (name, got, expected)
        every = len(encoded) - before
        sent_by(entry(function), calls[0])
        assert len(encoded) - before - every < every, "what is given is encoded once"
    for seq_k in (1008, 992):  # the first call compiles, and the second finds its launches in the tables
        tensors = problem(seq_q=1024, seq_k=seq_k)
        for function, given in ((stage.forward, tensors), (stage.backward, for_backward(*tensors))):
            through_triton.clear()
            got = sent_by(entry(function), given)
            assert seq_k == 1008 or not through_triton
            assert got == sent_by(function, given), (name, got)
""")


def test_a_pick_of_the_tuner_is_honoured():
    """A replayed call uses the tuner's last choice, even if the tuner chose after the recording."""
    run("""
stage = stages.load("v4")
tensors = problem()
for _ in range(3):
    launched(entry(stage.forward), *tensors, **OPTIONS)
assert repeated()
(tuner,) = (tuner for name, tuner in tuners(stage).items() if "forward" in name)
before = launched(entry(stage.forward), *tensors, **OPTIONS)
for key in tuner.cache:
    tuner.cache[key] = tuner.configs[-1]
for _ in range(3):
    after = launched(entry(stage.forward), *tensors, **OPTIONS)
    assert after == launched(stage.forward, *tensors, **OPTIONS) != before
launched(entry(stage.forward), *tensors, **OPTIONS)
assert repeated()
tuner.cache.clear()  # now the tuner tunes again during a recording
for _ in range(3):
    got = launched(entry(stage.forward), *tensors, **OPTIONS)
assert repeated() and got == launched(stage.forward, *tensors, **OPTIONS)
""")


def test_profiler_hooks_see_every_launch():
    """While a profiler's hook is set, calls are not replayed, and the hook gets each launch's metadata."""
    run("""
stage = stages.load(stages.line()[-2])
tensors = problem()
for _ in range(3):
    launched(entry(stage.forward), *tensors, **OPTIONS)
assert repeated()
for hooks in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
    hooks.add(print)
    for each in (tensors, problem(seq_q=127)):  # recorded, and of a new length
        launched(entry(stage.forward), *each, **OPTIONS)
        (launch,) = launches
        assert not repeated() and hooks in launch.hooks and launch.metadata is not None
    hooks.remove(print)
for knobs, name, value in (
    (triton.knobs.runtime, "debug", True), (triton.knobs.compilation, "instrumentation_mode", "any"),
    (triton.knobs.runtime, "add_stages_inspection_hook", lambda *_: ("", "")),
):
    before = getattr(knobs, name)
    setattr(knobs, name, value)
    launched(entry(stage.forward), *tensors, **OPTIONS)
    assert not repeated(), name
    setattr(knobs, name, before)
launched(entry(stage.forward), *tensors, **OPTIONS)
assert repeated()
""")


@pytest.mark.parametrize("mode", ["torch.no_grad", "torch.inference_mode", "torch._C._AutoDispatchBelowAutograd"])
def test_a_replay_copies_what_its_function_copies(mode):
    """v0 calls `reshape`, which copies if K/V heads are shared and heads are not outermost. Only in some modes, PyTorch calls
    `reshape` as one operator, which has the schema of a view."""
    run(
        """
stage = stages.load("v0")
forward = entry(stage.forward)
with eval(sys.argv[1])():
    for call in range(4):
        tensors = [torch.randn(2, 24, heads, 16).transpose(1, 2) for heads in (4, 2, 2)]
        torch.testing.assert_close(forward(*tensors, **OPTIONS), stage.forward(*tensors, **OPTIONS))
assert [*map(type, forward.recorded.replays.values())] == [recording._Replay]
""",
        mode,
    )


@pytest.mark.parametrize("stage", of_tested(REPLAYED))
def test_new_lengths_do_not_go_through_triton(stage):
    """After a call has compiled the kernels, other lengths find them in the tables, whichever module they are in."""
    run(
        """
stage = stages.load(sys.argv[1])
through_triton = []
triton_run = JITFunction.run
JITFunction.run = lambda kernel, *args, **options: through_triton.append(kernel) or triton_run(kernel, *args, **options)
for seq_k in (1008, 992, 976):
    tensors = problem(seq_q=1024, seq_k=seq_k)
    for function, given in ((stage.forward, tensors), (stage.backward, for_backward(*tensors))):
        launched(entry(function), *given, **OPTIONS)
        assert not repeated() and bool(through_triton) == (seq_k == 1008), (function, through_triton)
    through_triton.clear()
""",
        stage,
    )


KERNEL = """
import triton
import triton.language as tl
FACTOR = tl.constexpr(2)

@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["out"])
def kernel(x, out, first, second, length, annotated: tl.int32, scale, pair, SIZE: tl.constexpr, USUAL: tl.constexpr = 3):
    tl.store(out, FACTOR)
"""


def test_a_table_launches_what_triton_would(tmp_path):
    """Whatever a launch changes, the table finds the compiled kernel that Triton finds, and with the same arguments."""
    (tmp_path / "module_of_kernel.py").write_text(KERNEL)
    run(
        """
sys.path.append(sys.argv[1])
import module_of_kernel
from module_of_kernel import kernel
from common import launching
from common.kernels.descriptors import describe
from common.kernels.hopper import describe_tile
from triton.experimental.gluon import language as gl
from triton.tools.tensor_descriptor import TensorDescriptor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

layouts = {}

def described(dtype=torch.float16, block=(16, 64), swizzle=None, rows=64):
    x = torch.empty(rows, 64, dtype=dtype)
    place = x, list(x.shape), list(x.stride()), list(block)
    if swizzle is None:
        return TensorDescriptor(*place)
    return GluonDescriptor(*place, layouts.setdefault(swizzle, gl.NVMMASharedLayout(swizzle, 16, 2)))

memory = {dtype: torch.empty(64, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)}
pointers = [*memory.values(), memory[torch.float16][1:], memory[torch.float32][4:], None]
descriptors = [
    described(), described(rows=80), described(torch.bfloat16), described(block=(32, 64)), described(block=(16, 32)),
    described(swizzle=128), described(torch.bfloat16, swizzle=128), described(swizzle=64),
    described(block=(8, 64), swizzle=128),
]
for dtype in (torch.float16, torch.bfloat16):  # those of one kind share the list of their block shape
    heads = [torch.empty(1, 1, rows, 64, dtype=dtype) for rows in (64, 80)]
    descriptors += [describe(each, rows, 64) for each in heads for rows in (16, 32)]
    descriptors += [describe_tile(each, 16) for each in heads]
    descriptors.append(describe(heads[0], 16, 64))
    descriptors[-1].block_shape = [1, 1, 32, 64]  # as an autotuner's pre_hook does
integers = [0, 1, 2, 16, 17, -16, 2**31 - 1, 2**31, 2**40, 2**63, True, 1.0]
CHOICES = {
    "x": pointers, "out": pointers, "first": descriptors, "second": [*descriptors, *pointers[:4], 5], "length": integers,
    "annotated": integers[:5], "scale": [0.5, 1.0, 2], "pair": [(1, 2), (16, memory[torch.float16]), (described(), 3)],
    "SIZE": [1, 2, None, "a"], "USUAL": [3, 4], "num_warps": [4, 8], "maxnreg": [None, 96, 128], "extern_libs": [(), {}],
}
BY_POSITION = 8  # the kernel's variables; tables expect these by position, and constants by name

def arguments(given, by_position=BY_POSITION):
    return [given[name] for name in kernel.arg_names[:by_position]], {
        name: value for name, value in given.items() if name not in kernel.arg_names[:by_position]
    }
launching._thread.uses_tables = True
draw = random.Random(0)
through_triton, triton_run = [], JITFunction.run
JITFunction.run = lambda *args, **options: through_triton.append(args) or triton_run(*args, **options)
for usual_descriptor in (descriptors[0], descriptors[5]):  # a table expects the first launch's kinds of descriptors
    kernel.run, hits = launching._Launcher(kernel), 0
    usual = {name: values[0] for name, values in CHOICES.items()} | {"first": usual_descriptor}
    for _ in range(1500):
        given = usual | {name: draw.choice(CHOICES[name]) for name in draw.sample([*CHOICES], draw.choice([0, 1, 2, 2, 5]))}
        if draw.random() < 0.3:
            del given["USUAL"]
        args, options = arguments(given, draw.choice([0, 7, 9] + 12 * [BY_POSITION]))
        grid = draw.choice([(3,), (3, 2), (3, 2, 1), lambda args: (args["USUAL"], args["SIZE"] == 1)])
        launches.clear()
        before = len(through_triton)
        got = kernel[grid](*args, **options)
        hit = len(through_triton) == before
        assert not hit or len(args) == BY_POSITION and options["extern_libs"] == (), given
        hits += hit
        expected = triton_run(kernel, *args, grid=grid, warmup=False, **options)
        first, second = launches
        assert got is expected and first.binary is second.binary is got, given
        assert first.grid == second.grid and first.stream == second.stream
        assert all(one is other or one == other for one, other in zip(first.args, second.args, strict=True)), given
    assert 500 < hits < 1200, hits

def goes_through_triton():
    before = len(through_triton)
    args, options = arguments(usual)
    kernel[1,](*args, **options)
    return len(through_triton) > before

assert not goes_through_triton()
called = []
kernel.add_pre_run_hook(lambda *args, **options: called.append(options))
assert goes_through_triton() and called
kernel.pre_run_hooks.clear()
assert not goes_through_triton()
kernel.device_caches.clear()  # then Triton compiles again
assert goes_through_triton() and not goes_through_triton()
device.index = 1
assert goes_through_triton() and not goes_through_triton()
elsewhere = []
thread = threading.Thread(target=lambda: elsewhere.append(goes_through_triton()))
thread.start()
thread.join()
assert elsewhere == [True]  # only threads that use tables
module_of_kernel.FACTOR = triton.language.constexpr(3)
try:
    goes_through_triton()
    raise AssertionError("launched")
except RuntimeError as error:
    assert "FACTOR has changed" in str(error)
""",
        str(tmp_path),
    )


@pytest.mark.parametrize("stage", of_tested(taking_lengths("starts")))
def test_a_replay_takes_the_starts_of_its_call(stage):
    """A replay passes the addresses of the starts on, also where one tensor is both."""
    run(
        """
from common.entry import Starts
stage = stages.load(sys.argv[1])
forward, tensors, kept = entry(stage.forward), problem(batch=1), []
for call in range(8):
    kept += [torch.zeros(3, dtype=torch.int32) for _ in range(2)]
    starts = Starts(kept[-1], kept[-1 - call % 2])
    expected = launched(stage.forward, *tensors, **OPTIONS, starts=starts)
    assert launched(forward, *tensors, **OPTIONS, starts=starts) == expected
    assert repeated() == (call >= 2)
    given = [*map(address, launches[0].args)]
    assert [given.count(each.data_ptr()) for each in kept[-2:]] == [call % 2, 2 - call % 2]
    launched(forward, *tensors, **OPTIONS)  # a call of another kind
""",
        stage,
    )


@pytest.mark.parametrize("stage", of_tested(taking_lengths()))
def test_a_replay_takes_the_lengths_of_its_call(stage):
    """A replay passes the address of the lengths on, and not the lengths of the recorded call."""
    run(
        """
from common.entry import Lengths
stage = stages.load(sys.argv[1])
forward, tensors, kept = entry(stage.forward), problem(batch=2), []
for call in range(8):
    kept.append(torch.zeros(2, dtype=torch.int32))
    expected = launched(stage.forward, *tensors, **OPTIONS, lengths=Lengths(kept[-1]))
    assert launched(forward, *tensors, **OPTIONS, lengths=Lengths(kept[-1])) == expected
    assert repeated() == (call >= 2)
    assert [each.data_ptr() in map(address, launches[0].args) for each in kept] == [False] * call + [True]
    launched(forward, *tensors, **OPTIONS)  # a call of another kind
    assert repeated() == (call >= 2) and not any(each.data_ptr() in map(address, launches[0].args) for each in kept)
""",
        stage,
    )


@pytest.mark.parametrize("stage", of_tested(taking_pages()))
def test_a_replay_takes_the_table_of_its_call(stage):
    """A replay passes the address of the table on. Calls with a table and calls without one are of different kinds."""
    run(
        """
from common.entry import Lengths
stage = stages.load(sys.argv[1])
forward, kept, lengths = entry(stage.forward), [], torch.zeros(2, dtype=torch.int32)
q, k, v = problem(batch=2)
of_pages = q, k[..., :16, :].contiguous(), v[..., :16, :].contiguous()
for call in range(8):
    kept.append(torch.zeros(2, 3, dtype=torch.int32))
    expected = launched(stage.forward, *of_pages, **OPTIONS, lengths=Lengths(lengths, kept[-1]))
    assert launched(forward, *of_pages, **OPTIONS, lengths=Lengths(lengths, kept[-1])) == expected
    assert repeated() == (call >= 2)
    assert [each.data_ptr() in map(address, launches[0].args) for each in kept] == [False] * call + [True]
    launched(forward, *of_pages, **OPTIONS, lengths=Lengths(lengths))  # a call of another kind
    assert repeated() == (call >= 2) and not any(each.data_ptr() in map(address, launches[0].args) for each in kept)
""",
        stage,
    )


@pytest.mark.parametrize("stage", cases.usual(taking_lengths("descales")))
def test_a_replay_takes_the_factors_of_its_call(stage):
    """A replay passes the addresses of the factors on. Calls with one factor, two and none are of different kinds."""
    run(
        """
from common.eight_bits import quantized
from common.entry import Descales, Lengths
stage = stages.load(sys.argv[1])
forward, kept, lengths = entry(stage.forward), [], Lengths(torch.zeros(2, dtype=torch.int32))
q, k, v = problem(batch=2)
eight = q, quantized(k)[0], quantized(v)[0]
for call in range(8):
    kept += [torch.ones(2, k.shape[1]) for _ in range(2)]
    descales = Descales(*kept[-2:])
    expected = launched(stage.forward, *eight, **OPTIONS, lengths=lengths, descales=descales)
    assert launched(forward, *eight, **OPTIONS, lengths=lengths, descales=descales) == expected
    assert repeated() == (call >= 2)
    given = [*map(address, launches[0].args)]
    assert [given.count(each.data_ptr()) for each in kept] == [0] * 2 * call + [1, 1]
    names = launches[0].binary.src.fn.arg_names
    for factors in (Descales(kept[-1], None), Descales(None, kept[-1])):  # calls of two other kinds
        launched(forward, *eight, **OPTIONS, lengths=lengths, descales=factors)
        assert repeated() == (call >= 2) and not any(each.data_ptr() in map(address, launches[0].args) for each in kept[:-1])
        passed = dict(zip(names, map(address, launches[0].args)))
        for part, factor in factors._asdict().items():
            assert (passed[f"{part}_descale_ptr"] == kept[-1].data_ptr()) == (factor is not None)
""",
        stage,
    )


@pytest.mark.parametrize("stage", cases.usual([name for name in stages.names() if hasattr(stages.load(name), "eight_bits")]))
def test_calls_that_are_differentiable_are_of_another_kind(stage):
    """A forward in 8 bits rounds K and V, then launches its own kernel. If it is differentiable, it launches the parent's."""
    run(
        """
stage = stages.load(sys.argv[1])
forward = entry(stage.forward)
tensors = problem(seq_q=2048, seq_k=2100, head_dim=128, value_dim=128)
for call in range(6):
    for options in ({}, {"differentiable": False}, {"differentiable": True}):
        expected = launched(stage.forward, *tensors, **OPTIONS, **options)
        assert launched(forward, *tensors, **OPTIONS, **options) == expected
        assert repeated() == (call >= 2)
        names = [launch.binary.name for launch in launches]
        assert set(names) - {"_quantize_kernel"} == {"_forward_kernel"}
        assert names.count("_quantize_kernel") == (not options.get("differentiable"))
""",
        stage,
    )


def test_recordings_are_small():
    """Recordings keep no tensor, and a function keeps a limited number of recordings (here five)."""
    run("""
stage = stages.load("newest")
forward = entry(stage.forward)
forward(*problem(seq_q=30), **OPTIONS)
recording.MOST_KINDS = 5
compiler = "torch._dynamo" in sys.modules
gc.collect()
gc.disable()  # tensors must be freed without the garbage collector
for seq_q in range(1, 20):
    for _ in range(3):
        tensors = problem(seq_q=seq_q)
        results = forward(*tensors, **OPTIONS)
assert len(forward.recorded.replays) == 5
assert not any(isinstance(each, tuple) for kind in forward.recorded.replays for each in kind)  # they would delay the collector
watched = [weakref.ref(each) for each in (*tensors, *results)]
del tensors, results
launches.clear()
assert not any(each() is not None for each in watched)
assert not any(isinstance(each, torch.Tensor) and each.dim() == 4 for each in gc.get_objects())
assert ("torch._dynamo" in sys.modules) == compiler  # stages must not load it, which takes a second
""")


def test_an_unknown_triton_runs_without_recording_and_says_so_once():
    run("""
import warnings
triton.__version__ = "4.0.0"
stage = stages.load("v3")
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(4):
        launched(entry(stage.forward), *problem(), **OPTIONS)
        assert not repeated()
assert [str(each.message) for each in said] == [
    "Triton 4.0.0 is none of ('3.6.', '3.7.'): launches are not recorded, so calls take more CPU time"
]
""")


def test_triton_is_as_it_was_after_a_recording():
    run("""
stage = stages.load("newest")
run = CompiledKernel.run
for _ in range(3):
    launched(entry(stage.forward), *problem(), **OPTIONS)
assert repeated() and CompiledKernel.run is run

@entry
def fails(q, k, v, **options):
    assert CompiledKernel.run is run, "recorded"
    return q, k

for expected in (None, AssertionError):
    try:
        fails(*problem(), **OPTIONS)
    except AssertionError:
        assert expected and CompiledKernel.run is run
""")


def test_a_replay_takes_no_more_memory_than_the_call():
    """The first call is not recorded, the second is recorded, and the others are replayed."""
    run("""
from torch.utils._python_dispatch import TorchDispatchMode

class Silent(Binary):
    def launch(self, *args):
        pass

triton.compiler.compile = Silent

class Peak(TorchDispatchMode):
    \"\"\"Watches the bytes of all tensors that are alive.\"\"\"

    def __init__(self):
        super().__init__()
        self.most = self.alive = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and all(result is not each for each in args):
            storage = result.untyped_storage()
            self.alive += storage.nbytes()
            weakref.finalize(storage, self.free, storage.nbytes())
            self.most = max(self.most, self.alive)
        return result

    def free(self, nbytes):
        self.alive -= nbytes

def peak(function, tensors):
    with Peak() as watched:
        results = function(*tensors, **OPTIONS)
    assert watched.alive == sum(each.nbytes for each in results), watched.alive
    return watched.most

for name in ("v0", "v1", "v2", "v4", stages.newest()):
    stage = stages.load(name)
    tensors = problem()
    for function, given in ((stage.forward, tensors), (stage.backward, for_backward(*tensors))):
        plain = peak(function, given)
        peaks = [peak(entry(function), given) for _ in range(4)]
        assert max(peaks) <= plain, (name, plain, peaks)
        assert isinstance(*entry(function).recorded.replays.values(), recording._Replay)
""")


def test_a_function_that_cannot_be_repeated_is_called():
    """A call is not replayed if its function uses a tensor that is no argument. This tensor may change before the next call."""
    run("""
stage = stages.load("v3")
elsewhere = torch.ones(1)
calls = []

@entry
def forward(q, k, v, **options):
    calls.append(elsewhere * 2)
    return stage.forward(q, k, v, **options)

for _ in range(4):
    launched(forward, *problem(), **OPTIONS)
assert len(calls) == 4
""")
